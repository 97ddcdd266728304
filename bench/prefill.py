"""Prefill speed against transformers: SmolLM2, one prompt of 2048 tokens, the same threads, one run.

With one thread both sides are timed in processor time (`headrace bench model`; torch in this process), so other work
on the machine does not count; with more, on the wall, the engine through its HTTP API. Both compute the whole prompt and the logits of its last token alone. transformers is timed in float32 and bfloat16
and its better one counts. Every round has a prompt of its own, so no prefix is reused; each side counts by its best
round, the two taking turns, since other work on a machine only ever takes away.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.decode import machine  # noqa: E402
from tools.engine import BINARY, Engine  # noqa: E402

LENGTH = 2048
ROUNDS = 3
BAR = 1.5


def prompt(round_, length):
    return [(131 * round_ + 13 * i) % 40000 + 100 for i in range(length)]


def transformers_runner(model_dir, dtype, threads):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()

    def run(tokens) -> float:
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            started = clock()
            model(ids, use_cache=True, logits_to_keep=1)
            return clock() - started

    return run


def steps_runner(model_dir):
    """Processor seconds of the same step without an engine, on one thread."""

    def run(tokens) -> float:
        report = json.loads(subprocess.run(
            [BINARY, "bench", "model", "--json", "--threads", "1", "--model", str(model_dir)],
            check=True, capture_output=True, text=True).stdout)
        scenes = [scene for scene in report["scenes"] if scene["step"] == "prefill" and scene["rows"] == len(tokens)]
        if not scenes:
            raise SystemExit(f"prefill.py: `headrace bench model` has no step of {len(tokens)} rows: use 512 or 2048")
        return min(scene["ms"] for scene in scenes) / 1e3

    return run


def engine_runner(engine):
    def run(tokens) -> float:
        started = time.perf_counter()
        engine.generate(input_ids=tokens, sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True})
        return time.perf_counter() - started

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--length", type=int, default=LENGTH)
    arguments = parser.parse_args()
    print(f"prefill of {arguments.length} tokens, {arguments.model.name}, {arguments.threads} threads, on {machine()}")
    runners = {dtype: transformers_runner(arguments.model, dtype, arguments.threads) for dtype in ("float32", "bfloat16")}
    with contextlib.ExitStack() as stack:
        if arguments.threads == 1:
            runners["headrace"] = steps_runner(arguments.model)
        else:
            engine = Engine(arguments.model, "--threads", arguments.threads, skip_tokenizer=True)
            runners["headrace"] = engine_runner(stack.enter_context(engine))
        best = dict.fromkeys(runners, float("inf"))
        for round_ in range(ROUNDS):
            for name, run in runners.items():
                best[name] = min(best[name], run(prompt(round_, arguments.length)))
    reference = min(("float32", "bfloat16"), key=best.get)
    ratio = best[reference] / best["headrace"]
    for name, seconds in best.items():
        print(f"{name:>10}: {seconds * 1e3:8.1f} ms, {arguments.length / seconds:7.0f} tokens/s")
    print(f"{ratio:.2f} x {reference}, bar {BAR} x: {'met' if ratio >= BAR else 'missed'}")
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
