"""Trains a small LoRA with PEFT beside a running engine and pushes it there every few steps.

What it shows: an adapter goes from the trainer's memory into a serving process, verified by digest and replaced whole
under one name, without a restart or a file; one batch mixes the base model and the adapter; every reply says which
weight version made it; and the engine's logprobs are those of PEFT. The engine computes in bf16, PEFT here in fp32, so
the column "largest difference" is the distance of bf16 from fp32 on the worst token, not an error of the adapter.
"""

import argparse
import os
import pathlib
import sys
import time
import warnings

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # trainer and engine share the cores: nobody spins
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import headrace  # noqa: E402
from tools.engine import Engine  # noqa: E402

STEPS, EVERY, RATE = 40, 8, 1e-3
ADAPTER = "orvane"
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

    with Engine(model_dir) as engine, headrace.Publisher(engine.url) as publisher:
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

        print(f"{'step':>4}  {'loss':>5}  {'served by':<9} {'push':>7}  {'largest difference':>18}  continuation")
        worst = 0.0
        for step in range(STEPS + 1):
            if step % EVERY == 0:
                pushed = time.monotonic()
                receipt = publisher.push(model, adapter=ADAPTER, version=f"step-{step}")
                pushed = time.monotonic() - pushed
                base_reply, reply = engine.generate(
                    text=[PROMPT, PROMPT], lora_path=[None, ADAPTER],
                    sampling_params={"max_new_tokens": 20, "temperature": 0.0})
                assert reply["meta_info"]["weight_version"] == f"step-{step}", reply["meta_info"]
                model.eval()
                gap = largest_difference(engine, model, probe, ADAPTER)
                loss = -score(model, probe).mean().item()
                worst = max(worst, gap)
                print(f"{step:>4}  {loss:>5.2f}  {'base':<9} {'':>7}  {'':>18}  {shorten(base_reply['text'])}")
                print(f"{'':>4}  {'':>5}  {ADAPTER:<9} {pushed * 1e3:>4.0f} ms  {gap:>18.4f}  {shorten(reply['text'])}",
                      flush=True)
            if step < STEPS:
                model.train()
                optimizer.zero_grad()
                model(batch, labels=labels).loss.backward()
                optimizer.step()

    print(f"\nlast push: {receipt.tensors} tensors, {receipt.bytes / 1e6:.1f} MB, XXH3-128 {receipt.xxh3}")
    print(f"largest difference of a logprob over the run, engine in bf16 against PEFT in fp32: {worst:.4f} nat; "
          f"{time.monotonic() - started:.0f} s")
    # bf16 keeps 8 bits: a token of a trained adapter moves by hundredths of a nat, a lost delta by whole ones.
    if worst > 0.5:
        print("demo: that is more than bf16 explains", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
