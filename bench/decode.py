"""Decode speed of the engine against transformers: SmolLM2, batch 1 and 32, KV cache on, the same threads, one run.

transformers is timed in float32 and bfloat16 and its better one counts. Both sides are timed per step in the same
window of context: the time of a long run less that of a short one, so that prefill, HTTP and start-up drop out.
"""

import argparse
import os
import pathlib
import platform
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from tools.engine import Engine  # noqa: E402

PROMPT = 32
SHORT, LONG = 8, 72
ROUNDS = 3
BAR = 3.0


def machine() -> str:
    model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    flags = next((line for line in open("/proc/cpuinfo") if line.startswith("flags")), "")
    best = next((flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if f" {flag}" in flags), "no avx2")
    return f"{model} ({best}), {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}"


def prompts(batch):
    return [[(7 * row + 13 * column) % 40000 + 100 for column in range(PROMPT)] for row in range(batch)]


def transformers_ms(model_dir, dtype, batch, threads) -> float:
    """Best of ROUNDS: milliseconds per decode step of a plain greedy loop over the KV cache."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()
    best = float("inf")
    with torch.inference_mode():
        for _ in range(ROUNDS):
            out = model(torch.tensor(prompts(batch)), use_cache=True)
            for step in range(LONG):
                if step == SHORT:
                    started = time.perf_counter()
                token = out.logits[:, -1].argmax(-1, keepdim=True)
                out = model(token, cache=out.cache, use_cache=True)
            best = min(best, (time.perf_counter() - started) * 1e3 / (LONG - SHORT))
    return best


def engine_seconds(engine, batch, new_tokens) -> float:
    started = time.perf_counter()
    items = engine.generate(
        input_ids=prompts(batch), sampling_params={"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True})
    elapsed = time.perf_counter() - started
    if any(len(item["output_ids"]) != new_tokens for item in items):
        raise SystemExit("bench: the engine stopped before the wanted number of tokens")
    return elapsed


def engine_ms(engine, batch) -> float:
    runs = [(engine_seconds(engine, batch, LONG) - engine_seconds(engine, batch, SHORT)) for _ in range(ROUNDS)]
    return min(runs) * 1e3 / (LONG - SHORT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--reference-only", action="store_true", help="time transformers alone")
    arguments = parser.parse_args()
    print(f"decode, {arguments.model.name}, {arguments.threads} threads, on {machine()}")
    missed = False
    for batch in (1, 32):
        theirs = {dtype: transformers_ms(arguments.model, dtype, batch, arguments.threads)
                  for dtype in ("float32", "bfloat16")}
        best = min(theirs, key=theirs.get)
        line = f"batch {batch:>2}: transformers " + ", ".join(f"{k} {v:.2f} ms/step" for k, v in theirs.items())
        if not arguments.reference_only:
            with Engine(arguments.model, "--threads", arguments.threads, skip_tokenizer=True) as engine:
                ours = engine_ms(engine, batch)
            ratio = theirs[best] / ours
            missed |= ratio < BAR
            line += f"; headrace {ours:.2f} ms/step ({batch / ours * 1e3:.0f} tokens/s): {ratio:.2f} x {best}, bar {BAR:.0f} x"
        print(line, flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
