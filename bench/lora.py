"""What adapters cost: decode and prefill steps of SmolLM2 with adapters of rank 16 on every linear layer.

Runs `headrace bench model` twice: as it is, and with sixteen adapters loaded. Bars: one adapter >= 90 % of the base;
d adapters in a batch >= 90 % of base_bytes / (base_bytes + adapter_bytes) of the base in decode; no adapter in the
batch, though some are loaded: within 1 % of an engine without any (by construction it runs the same code on the same
bytes). Also decode against the stream bandwidth measured on a buffer of the model's size in the same run.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.decode import machine  # noqa: E402

RANK, ADAPTERS, ROUNDS = 16, 16, 2
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(directory, config, seed):
    import torch
    from safetensors.torch import save_file

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q),
              "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (out, in_) in shapes.items():
            block = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            key = f"base_model.model.model.layers.{layer}.{block}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, in_, generator=random).mul_(0.02).bfloat16()
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, RANK, generator=random).mul_(0.02).bfloat16()
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(MODULES), "bias": "none"}))


def measure(binary, model, threads, adapters, best):
    """Runs the bench once; keeps each scene's best time in `best`. Returns what it says of the machine."""
    command = [binary, "bench", "model", "--json", "--model", str(model), "--threads", str(threads)]
    for adapter in adapters:
        command += ["--adapter", str(adapter)]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for scene in report["scenes"]:
        key = (scene["step"], scene["seqs"], scene["rows"], scene["context"], scene["adapters"])
        if key not in best or scene["ms"] < best[key]["ms"]:
            best[key] = scene
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--threads", type=int, default=1, help="with 1, processor time counts: other work does not")
    parser.add_argument("--headrace", default="build/src/cli/headrace")
    arguments = parser.parse_args()
    config = json.loads((arguments.model / "config.json").read_text())
    missed, alone, loaded, reports = False, {}, {}, []
    with tempfile.TemporaryDirectory() as scratch:
        adapters = [pathlib.Path(scratch) / f"adapter{i}" for i in range(ADAPTERS)]
        for seed, adapter in enumerate(adapters):
            write_adapter(adapter, config, seed)
        for _ in range(ROUNDS):
            reports.append(measure(arguments.headrace, arguments.model, arguments.threads, [], alone))
            reports.append(measure(arguments.headrace, arguments.model, arguments.threads, adapters, loaded))
    model_bytes = reports[0]["model_bytes"]
    stream = max(report["stream_gbps"] for report in reports)
    print(f"{arguments.model.name}, {reports[0]['isa']}, {arguments.threads} threads, on {machine()}; "
          f"weights {model_bytes / 1e6:.0f} MB, stream {stream:.1f} GB/s")

    def bar(what, value, limit):
        nonlocal missed
        missed |= value < limit
        print(f"{what:<58} {value:7.1f} %, bar {limit:5.1f} %: {'met' if value >= limit else 'missed'}")

    for (step, seqs, rows, context, n), scene in loaded.items():
        name = f"{step} {seqs} x {rows} at {context}"
        base = loaded[(step, seqs, rows, context, 0)]["ms"] if (step, seqs, rows, context, 0) in loaded else None
        if n == 0 and step == "decode" and seqs <= 16 and context == 64:
            ms = min(scene["ms"], alone[(step, seqs, rows, context, 0)]["ms"])
            bar(f"{name}: of the stream bandwidth", 100 * model_bytes / ms / 1e6 / stream, 60)
        if n == 0:
            bar(f"{name}: adapters loaded, none used", 100 * alone[(step, seqs, rows, context, 0)]["ms"] / scene["ms"], 99)
        elif n == 1 and base is not None:
            bar(f"{name}: one adapter", 100 * base / scene["ms"], 90)
        elif step == "decode" and base is not None:
            share = model_bytes / (model_bytes + scene["adapter_bytes"])
            bar(f"{name}: {n} adapters", 100 * base / scene["ms"], 90 * share)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
