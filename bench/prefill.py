"""Prefill speed of the engine against transformers: SmolLM2, one prompt of 2048 tokens, the same threads, one run.

Both compute the whole prompt and the logits of its last token alone. transformers is timed in float32 and bfloat16
and its better one counts. Every round has a prompt of its own, so no prefix is reused; each side counts by its best
round, the two taking turns, since other work on a machine only ever takes away.
"""

import argparse
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.decode import machine  # noqa: E402
from tools.engine import Engine  # noqa: E402

LENGTH = 2048
ROUNDS = 4
BAR = 1.5


def prompt(round_, length):
    return [(131 * round_ + 13 * i) % 40000 + 100 for i in range(length)]


def transformers_runner(model_dir, dtype, threads):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()

    def run(tokens) -> float:
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            started = time.perf_counter()
            model(ids, use_cache=True, logits_to_keep=1)
            return time.perf_counter() - started

    return run


def engine_seconds(engine, tokens) -> float:
    started = time.perf_counter()
    engine.generate(input_ids=tokens, sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True})
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--length", type=int, default=LENGTH)
    arguments = parser.parse_args()
    print(f"prefill of {arguments.length} tokens, {arguments.model.name}, {arguments.threads} threads, on {machine()}")
    runners = {dtype: transformers_runner(arguments.model, dtype, arguments.threads) for dtype in ("float32", "bfloat16")}
    best = dict.fromkeys([*runners, "headrace"], float("inf"))
    with Engine(arguments.model, "--threads", arguments.threads, skip_tokenizer=True) as engine:
        for round_ in range(ROUNDS):
            tokens = prompt(round_, arguments.length)
            for dtype, run in runners.items():
                best[dtype] = min(best[dtype], run(tokens))
            best["headrace"] = min(best["headrace"], engine_seconds(engine, tokens))
    reference = min(runners, key=best.get)
    ratio = best[reference] / best["headrace"]
    for name, seconds in best.items():
        print(f"{name:>10}: {seconds * 1e3:8.1f} ms, {arguments.length / seconds:7.0f} tokens/s")
    print(f"{ratio:.2f} x {reference}, bar {BAR} x: {'met' if ratio >= BAR else 'missed'}")
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
