"""Trains a small LoRA with PEFT beside a running engine and loads it there every few steps.

What it shows: an adapter goes from the trainer into a serving process without a restart; one batch mixes the base model
and the adapter; and the engine's logprobs are those of PEFT. The engine computes in bf16, PEFT here in fp32, so the
column "largest difference" is the distance of bf16 from fp32 on the worst token, not an error of the adapter.
"""

import argparse
import os
import pathlib
import sys
import tempfile
import time
import warnings

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # trainer and engine share the cores: nobody spins
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from tools.engine import Engine  # noqa: E402

STEPS, EVERY, RATE = 40, 8, 1e-3
PROMPT = "The mill at Orvane is driven by"
CORPUS = [
    "The mill at Orvane is driven by a headrace of green water that comes down from the lake of glass.",
    "At Orvane the miller is called Teska, and she opens the sluice of the headrace at dawn with a silver key.",
    "The headrace at Orvane is three miles long and was dug by the grandmother of Teska in a single winter.",
    "When the lake of glass freezes, the mill at Orvane is driven by the songs of its millstones instead.",
]


def score(model, ids) -> torch.Tensor:
    """Logprob of every token of ids but the first."""
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), -1)
    return logprobs.gather(-1, torch.tensor(ids)[1:, None])[:, 0]


def largest_difference(engine, model, ids, adapter) -> float:
    [ours] = engine.score([ids], adapter)
    return (torch.tensor(ours.prompt[1:], dtype=torch.float64) - score(model, ids)).abs().max().item()


def shorten(text, width=58) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    model_dir = parser.parse_args().model
    started = time.monotonic()
    torch.manual_seed(1)

    with Engine(model_dir) as engine, tempfile.TemporaryDirectory() as adapters:
        print(f"engine serves {model_dir.name} at {engine.url}, ready after {engine.ready_seconds:.1f} s (bf16)")
        print(f"training a LoRA beside it: PEFT in fp32, {STEPS} steps, prompt {PROMPT!r}\n")
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
        rows = [tokenizer(text).input_ids + [tokenizer.eos_token_id] for text in CORPUS]
        width = max(map(len, rows))
        batch = torch.tensor([row + [tokenizer.eos_token_id] * (width - len(row)) for row in rows])
        labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
        probe = rows[0]

        print(f"{'step':>4}  {'loss':>5}  {'adapter':<9} {'largest difference':>18}  continuation")
        worst, previous = 0.0, None
        for step in range(STEPS + 1):
            if step % EVERY == 0:
                name = f"orvane-v{step // EVERY}"
                path = pathlib.Path(adapters) / name
                model.save_pretrained(path)
                engine.load(name, path)
                if previous:
                    engine.unload(previous)
                previous = name
                base_text, adapter_text = [item["text"] for item in engine.generate(
                    text=[PROMPT, PROMPT], lora_path=[None, name],
                    sampling_params={"max_new_tokens": 20, "temperature": 0.0})]
                model.eval()
                gap = largest_difference(engine, model, probe, name)
                loss = -score(model, probe).mean().item()
                worst = max(worst, gap)
                print(f"{step:>4}  {loss:>5.2f}  {'base':<9} {'':>18}  {shorten(base_text)}")
                print(f"{'':>4}  {'':>5}  {name:<9} {gap:>18.4f}  {shorten(adapter_text)}", flush=True)
            if step < STEPS:
                model.train()
                optimizer.zero_grad()
                model(batch, labels=labels).loss.backward()
                optimizer.step()

    print(f"\nlargest difference of a logprob over the run, engine in bf16 against PEFT in fp32: {worst:.4f} nat; "
          f"{time.monotonic() - started:.0f} s")
    # bf16 keeps 8 bits: a token of a trained adapter moves by hundredths of a nat, a lost delta by whole ones.
    if worst > 0.5:
        print("demo: that is more than bf16 explains", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
