"""Writes small random models that cover the architectures and options of the engine.

Weights are scaled so that logits spread (standard deviation >= 1): with the tiny logits of a default initialisation
every wrong answer would look right. Norm weights and biases are random too, so that leaving one out shows.
"""

import argparse
import dataclasses
import hashlib
import inspect
import json
import os
import pathlib
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOME = ROOT / ".cache/models"

ROPE = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
}


@dataclasses.dataclass(frozen=True)
class Tiny:
    family: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    rope: str = "default"
    dtype: str = "float32"
    layers: int = 2
    shard_bytes: int | None = None
    options: tuple = ()  # further config fields, as pairs
    old_config: bool = False  # config.json as transformers 4 wrote it: rope_theta and rope_scaling


# Sizes are odd on purpose: hidden and intermediate sizes that no vector width divides, vocabularies that no tile does.
MODELS = {
    "llama-gqa-tied": Tiny("llama", 64, 4, 2, 16, 160, 320, tied=True),
    "llama-mha-bias": Tiny("llama", 100, 5, 5, 20, 172, 331, tied=False, dtype="bfloat16", shard_bytes=60_000,
                           options=(("attention_bias", True), ("mlp_bias", True))),
    "llama-linear": Tiny("llama", 96, 3, 1, 32, 200, 277, tied=False, rope="linear", dtype="float16", old_config=True),
    "llama-llama3": Tiny("llama", 128, 4, 2, 64, 224, 384, tied=True, rope="llama3", dtype="bfloat16", layers=3),
    "llama-yarn": Tiny("llama", 72, 2, 1, 128, 144, 301, tied=False, rope="yarn"),
    "qwen2-gqa-tied": Tiny("qwen2", 96, 6, 2, 16, 152, 299, tied=True, dtype="bfloat16"),
    "qwen2-yarn": Tiny("qwen2", 132, 3, 3, 44, 260, 353, tied=False, rope="yarn", shard_bytes=150_000,
                       old_config=True),
    "qwen3-gqa": Tiny("qwen3", 80, 4, 2, 32, 136, 310, tied=False, dtype="float16", layers=3),
    "qwen3-tied": Tiny("qwen3", 64, 2, 2, 64, 96, 257, tied=True, rope="linear", dtype="bfloat16"),
    "qwen3-bias": Tiny("qwen3", 70, 4, 1, 16, 110, 401, tied=False, rope="llama3",
                       options=(("attention_bias", True),)),
}


def build(name: str):
    """The model itself, in float32, before it is rounded to the file's dtype."""
    import torch
    from transformers import (LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
                              Qwen3ForCausalLM)

    spec = MODELS[name]
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[spec.family]
    config = config_class(
        vocab_size=spec.vocab, hidden_size=spec.hidden, intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers, num_attention_heads=spec.heads, num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim, max_position_embeddings=512, rope_parameters=dict(ROPE[spec.rope]),
        tie_word_embeddings=spec.tied, bos_token_id=1, eos_token_id=2, pad_token_id=2, **dict(spec.options))
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in key:
                tensor.copy_(1.0 + 0.3 * noise)
            elif key.endswith(".bias"):
                tensor.copy_(0.5 * noise)
            elif "embed_tokens" in key or "lm_head" in key:
                tensor.copy_(noise * 2.0 / spec.hidden ** 0.5)
            else:
                tensor.copy_(noise * 1.3 / tensor.shape[1] ** 0.5)
    return model.eval()


def to_old_config(path: pathlib.Path) -> None:
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2) + "\n")


def logit_std(model) -> float:
    import torch

    ids = torch.randint(3, model.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits.std(-1).mean().item()


def write(name: str, home: pathlib.Path = HOME) -> pathlib.Path:
    """Writes the model unless this very recipe was written before; returns its directory."""
    spec = MODELS[name]
    out = home / name
    stamp = out / "recipe.sha256"
    recipe = hashlib.sha256((repr(spec) + json.dumps(ROPE[spec.rope]) + inspect.getsource(build)).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == recipe:
        return out

    import torch

    model = build(name).to(getattr(torch, spec.dtype))
    spread = logit_std(model.float())
    if spread < 1.0:
        raise SystemExit(f"{name}: logits spread by {spread:.2f} only")
    model = model.to(getattr(torch, spec.dtype))
    model.config.dtype = getattr(torch, spec.dtype)
    partial = out.with_name(f"{out.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial, **({"max_shard_size": spec.shard_bytes} if spec.shard_bytes else {}))
    shards = len(list(partial.glob("*.safetensors")))
    if (shards > 1) != bool(spec.shard_bytes):
        raise SystemExit(f"{name}: {shards} safetensors files were written")
    if spec.old_config:
        to_old_config(partial / "config.json")
    (partial / "recipe.sha256").write_text(recipe)
    shutil.rmtree(out, ignore_errors=True)
    os.replace(partial, out)
    print(f"{name}: logit std {spread:.2f}, {shards} file(s)", file=sys.stderr)
    return out


def main() -> None:
    os.environ["TQDM_DISABLE"] = "1"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models to write (default: all)")
    parser.add_argument("--out", type=pathlib.Path, default=HOME)
    arguments = parser.parse_args()
    for name in arguments.names or MODELS:
        write(name, arguments.out)


if __name__ == "__main__":
    main()
