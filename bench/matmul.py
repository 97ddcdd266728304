"""One linear layer beside oneDNN: torch's bf16 linear (which calls oneDNN) and headrace's, 4096 x 1024, one thread, in processor time.

oneDNN may sum in any order; headrace's order is defined (docs/arithmetic.md). Weights come from memory on both sides:
each call takes another part of a buffer that no cache holds. Stated, no bar.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.decode import machine  # noqa: E402

N, K, PARTS, SECONDS = 4096, 1024, 32, 0.4


def torch_gflops(m) -> float:
    import torch

    torch.set_num_threads(1)
    weights = torch.randn(PARTS, N, K).bfloat16()
    x = torch.randn(m, K).bfloat16()
    best, turn, begin = float("inf"), 0, time.perf_counter()
    with torch.inference_mode():
        while time.perf_counter() - begin < SECONDS:
            started = time.process_time()
            torch.nn.functional.linear(x, weights[turn % PARTS])
            best = min(best, time.process_time() - started)
            turn += 1
    return 2 * m * N * K / best / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--headrace", default="build/src/cli/headrace")
    arguments = parser.parse_args()
    report = json.loads(subprocess.run([arguments.headrace, "bench", "kernels", "--json"], check=True,
                                       capture_output=True, text=True).stdout)
    tiers = [row["tier"] for row in report["speeds"] if row["op"].endswith("m=1") and row["op"].startswith("gemm bf16")]
    print(f"bf16 linear {N} x {K}, one thread, GFLOP/s, on {machine()}")
    print(f"{'rows':>6} {'oneDNN':>8} " + " ".join(f"{tier:>11}" for tier in tiers))
    for m in (1, 2, 4, 8, 16, 32, 64, 256):
        ours = {row["tier"]: row["gflops"] for row in report["speeds"] if row["op"] == f"gemm bf16 {N}x{K} m={m}"}
        print(f"{m:>6} {torch_gflops(m):>8.1f} " + " ".join(f"{ours[tier]:>11.1f}" for tier in tiers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
