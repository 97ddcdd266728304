"""Writes LoRA adapters with PEFT for a model directory: every form of target and scale that the engine accepts.

A and B are random, and B is scaled until the adapter moves logprobs by a good part of a nat on average: an adapter that
hardly matters would hide a lost or wrongly scaled delta.
"""

import argparse
import hashlib
import inspect
import json
import os
import pathlib
import shutil
import sys
import warnings

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tools.prompts import english_tokens, random_tokens  # noqa: E402

HOME = ROOT / ".cache/adapters"
EFFECT = 0.9  # mean |change of a logprob| in nats that B is scaled to
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# Keyword arguments of LoraConfig.
ADAPTERS = {
    "seven-r8": dict(r=8, lora_alpha=16, target_modules=SEVEN),
    "qv-r1": dict(r=1, lora_alpha=2, target_modules=["q_proj", "v_proj"]),
    "regex-r4": dict(r=4, lora_alpha=4, target_modules=r".*\.(q|v|down)_proj"),
    "all-linear-r16": dict(r=16, lora_alpha=8, target_modules="all-linear"),
    "layers-r20": dict(r=20, lora_alpha=30, target_modules=SEVEN, layers_to_transform=[1], layers_pattern="layers"),
    "rslora-r64": dict(r=64, lora_alpha=16, target_modules=SEVEN, use_rslora=True),
    "patterns": dict(r=8, lora_alpha=16, target_modules=SEVEN,
                     rank_pattern={"q_proj": 20, r"layers\.1\.mlp\.down_proj": 4, "v_proj": 1},
                     alpha_pattern={r".*\.0\.self_attn\..*": 64, "down_proj": 3, "gate_proj": 40}),
    "exclude-r8": dict(r=8, lora_alpha=16, target_modules=SEVEN, exclude_modules=r".*\.(k_proj|up_proj)"),
    "embed-r4": dict(r=4, lora_alpha=8, target_modules=["embed_tokens", "q_proj"]),
    "head-r8": dict(r=8, lora_alpha=8, target_modules=["lm_head", "o_proj"]),
    "embed-head-r16": dict(r=16, lora_alpha=16, target_modules=["embed_tokens", "lm_head", "down_proj"],
                           use_rslora=True),
    "zero": dict(r=8, lora_alpha=16, target_modules=SEVEN),  # B stays zero, as PEFT starts
    "fused-r8": dict(r=8, lora_alpha=16, target_modules=SEVEN),  # saved as qkv_proj and gate_up_proj
}
SPLIT = "-split"  # the directory PEFT itself can read, beside a fused one


def seed_of(*parts: str) -> int:
    return int.from_bytes(hashlib.sha256("/".join(parts).encode()).digest()[:4], "little")


def lora_parameters(model):
    """(name, tensor) of every A and B, in a fixed order."""
    return [(key, tensor) for key, tensor in model.named_parameters() if ".lora_" in key]


def is_b(key: str) -> bool:
    return ".lora_B." in key or ".lora_embedding_B" in key


def share_inputs(model) -> None:
    """Gives q, k and v one A, and gate and up one: what a fused adapter has."""
    tensors = dict(lora_parameters(model))
    for key, tensor in tensors.items():
        for first, others in (("q_proj", ("k_proj", "v_proj")), ("gate_proj", ("up_proj",))):
            if f".{first}.lora_A." in key:
                for other in others:
                    tensors[key.replace(first, other)].copy_(tensor)


def randomise(model, seed: int, fused: bool) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in lora_parameters(model):
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(noise / tensor.shape[1] ** 0.5)
        if fused:
            share_inputs(model)


def calibrate(model, prompts) -> float:
    """Scales every B by one factor until the mean effect is near EFFECT; returns the effect reached."""
    import torch

    ids = torch.tensor(prompts)

    def chosen():
        logprobs = torch.log_softmax(model(ids).logits.double()[:, :-1], -1)
        return logprobs.gather(-1, ids[:, 1:, None])

    with torch.no_grad():
        with model.disable_adapter():
            base = chosen()
        for _ in range(30):
            effect = (chosen() - base).abs().mean().item()
            if abs(effect - EFFECT) < 0.15:
                break
            factor = min(4.0, max(0.25, (EFFECT / effect) ** 0.7))
            for key, tensor in lora_parameters(model):
                if is_b(key):
                    tensor.mul_(factor)
    return effect


def fuse(split: pathlib.Path, out: pathlib.Path) -> None:
    """The same adapter under fused names: one A for the group, the B's one under another."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(split / "adapter_model.safetensors")
    fused = {}
    for key, tensor in tensors.items():
        for group, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            if f".{parts[0]}." in key:
                whole = [tensors[key.replace(parts[0], part)] for part in parts]
                fused[key.replace(parts[0], group)] = whole[0] if "lora_A" in key else torch.cat(whole)
                break
            if any(f".{part}." in key for part in parts):
                break
        else:
            fused[key] = tensor
    config = json.loads((split / "adapter_config.json").read_text())
    config["target_modules"] = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    out.mkdir(parents=True, exist_ok=True)
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(fused, out / "adapter_model.safetensors")


def write_all(model_dir: pathlib.Path, names=None, home: pathlib.Path = HOME) -> dict[str, pathlib.Path]:
    """Writes the adapters for one model unless this very recipe was written before; returns their directories."""
    model_dir = pathlib.Path(model_dir)
    names = list(names or ADAPTERS)
    home = home / model_dir.name
    source = inspect.getsource(sys.modules[__name__])
    model_stamp = model_dir / "recipe.sha256"
    model_recipe = model_stamp.read_text() if model_stamp.exists() else ""
    recipe = {name: hashlib.sha256((source + model_recipe + name).encode()).hexdigest() for name in names}
    stale = [name for name in names
             if not (home / name / "recipe.sha256").exists()
             or (home / name / "recipe.sha256").read_text() != recipe[name]]
    if stale:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        if (model_dir / "tokenizer.json").exists():
            prompts = english_tokens(model_dir, 4, 96)
        else:
            prompts = random_tokens(base.config.vocab_size, [64, 64], seed=5)
        for name in stale:
            fused = name.startswith("fused")
            out = home / (name + SPLIT if fused else name)
            shutil.rmtree(home / name, ignore_errors=True)
            shutil.rmtree(out, ignore_errors=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[name])).eval()
                effect = 0.0
                if name != "zero":
                    randomise(model, seed_of(model_dir.name, name), fused)
                    effect = calibrate(model, prompts)
                    if effect < 0.5:
                        raise SystemExit(f"{model_dir.name}/{name}: effect of {effect:.2f} nat only")
                model.save_pretrained(out)
                base = model.unload()
            if fused:
                fuse(out, home / name)
            (home / name / "recipe.sha256").write_text(recipe[name])
            print(f"{model_dir.name}/{name}: mean effect {effect:.2f} nat", file=sys.stderr)
    return {name: home / name for name in names}


def main() -> None:
    os.environ["TQDM_DISABLE"] = "1"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=pathlib.Path, help="model directories")
    for model in parser.parse_args().models:
        write_all(model)


if __name__ == "__main__":
    main()
