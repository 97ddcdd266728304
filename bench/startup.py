"""Time from starting the process to the first 200 of /health, the model's pages in memory: best and worst of five."""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.decode import machine  # noqa: E402
from tools.engine import Engine  # noqa: E402

BAR_SECONDS = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    model = parser.parse_args().model
    for file in model.glob("*.safetensors"):
        file.read_bytes()
    times = []
    for _ in range(5):
        with Engine(model) as engine:
            times.append(engine.ready_seconds)
    print(f"ready to serve {model.name}: {min(times):.2f} to {max(times):.2f} s (bar {BAR_SECONDS} s), on {machine()}")
    return 1 if max(times) > BAR_SECONDS else 0


if __name__ == "__main__":
    sys.exit(main())
