"""`make parity`: the whole comparison, as a table; fails when one row misses its bar."""

import argparse
import platform
import sys
import time

from tests.parity import checks
from tools.make_tiny_models import MODELS
from tools.prompts import english_tokens, random_tokens

SETTINGS = [
    [],
    ["--threads", 1, "--chunked-prefill-size", 16],
    ["--threads", 3, "--chunked-prefill-size", 7],
    ["--chunked-prefill-size", 64, "--max-running-requests", 4],
]
# On SmolLM2 a forward of the reference takes seconds; these cover every kind of module and scale.
SMOLLM2_ADAPTERS = ["seven-r8", "qv-r1", "patterns", "rslora-r64", "embed-head-r16", "fused-r8", "zero"]
SMOLLM2_LENGTHS = (1, 9, 65, 200)
BF16_ADAPTERS = ["seven-r8", "rslora-r64", "embed-head-r16"]


def tables(models):
    for name in models:
        tiny = name in MODELS
        case = checks.Case(name) if tiny else checks.Case(name, SMOLLM2_ADAPTERS, SMOLLM2_LENGTHS)
        yield checks.fp32(case)
        if tiny:
            prompts = random_tokens(MODELS[name].vocab, [480] * 21, seed=12)
        else:
            prompts = english_tokens(case.dir, 21, 480)
        yield checks.bf16(case, BF16_ADAPTERS if tiny else BF16_ADAPTERS[:2], prompts)
        for dtype in ("bfloat16", "float32"):
            yield checks.bits(case, dtype, SETTINGS if tiny else SETTINGS[:2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="default: all tiny models and SmolLM2")
    started = time.monotonic()
    failed = total = 0
    print(f"engine against transformers and PEFT, on {platform.machine()} ({platform.node()})")
    for rows in tables(parser.parse_args().models or [*MODELS, "smollm2"]):
        for row in rows:
            print(row, flush=True)
            total += 1
            failed += not row.ok
    print(f"parity: {total - failed} of {total} rows kept their bar, {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
