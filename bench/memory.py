"""Resident memory of a serving engine against the weights in its compute dtype plus the KV cache it was given."""

import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.decode import machine, prompts  # noqa: E402
from tools.engine import Engine  # noqa: E402

TOKENS = 32768
BAR = 1.15


def weight_bytes(model, element) -> int:
    count = 0
    for file in model.glob("*.safetensors"):
        with open(file, "rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                size = 1
                for length in tensor["shape"]:
                    size *= length
                count += size
    return count * element


def kv_bytes(model, element) -> int:
    config = json.loads((model / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return TOKENS * config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head * element


def resident_bytes(pid) -> int:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    model = parser.parse_args().model
    missed = False
    for dtype, element in (("bfloat16", 2), ("float32", 4)):
        want = weight_bytes(model, element) + kv_bytes(model, element)
        with Engine(model, "--max-total-tokens", TOKENS, dtype=dtype) as engine:
            # Work through the whole cache once, so that every page of it has been touched.
            engine.generate(input_ids=prompts(32), sampling_params={"max_new_tokens": 16, "ignore_eos": True})
            long = [(row * 128)[:4000] for row in prompts(8)]  # no two share a prefix
            engine.generate(input_ids=long, sampling_params={"max_new_tokens": 1, "ignore_eos": True})
            have = resident_bytes(engine.process.pid)
        missed |= have > BAR * want
        print(f"{dtype}: resident {have / 1e6:.0f} MB, weights + KV of {TOKENS} tokens {want / 1e6:.0f} MB: "
              f"{have / want:.3f} (bar {BAR}), on {machine()}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
