"""Random models for the push benchmarks: many layers, so that adapters have many tensors, and little to compute."""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
HOME = ROOT / ".cache/models"
FOUR = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_llama(name, *, layers, hidden, intermediate, head_dim, vocab=512):
    """A Llama of random bf16 weights as one safetensors file; written once."""
    import torch
    from safetensors.torch import save_file

    out = HOME / name
    if (out / "config.json").exists():
        return out
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": hidden // head_dim,
        "num_key_value_heads": hidden // head_dim, "head_dim": head_dim, "vocab_size": vocab, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "attention_bias": False,
        "mlp_bias": False, "rope_theta": 10000.0, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    out.mkdir(parents=True, exist_ok=True)
    save_file(base_tensors(config, seed=1), out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))  # last: it says that the directory is whole
    return out


def base_tensors(config, seed) -> dict:
    """Base weights of such a model in bf16, under their checkpoint's names."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{module}.weight": (hidden, hidden) for module in FOUR}
        shapes |= {f"{at}mlp.gate_proj.weight": (wide, hidden), f"{at}mlp.up_proj.weight": (wide, hidden),
                   f"{at}mlp.down_proj.weight": (hidden, wide), f"{at}input_layernorm.weight": (hidden,),
                   f"{at}post_attention_layernorm.weight": (hidden,)}
    # random 16-bit patterns of small numbers: drawing normal ones would take longer than the benchmark
    return {name: torch.ones(shape, dtype=torch.bfloat16) if len(shape) == 1 else
            torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.05, 0.05, generator=generator)
            for name, shape in shapes.items()}


def adapter_tensors(layers, hidden, rank, seed) -> dict:
    """A LoRA over q, k, v and o of every layer in bf16, under PEFT's names: 8 tensors a layer."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for module in FOUR:
            at = f"base_model.model.model.layers.{layer}.self_attn.{module}."
            for factor, shape in (("lora_A", (rank, hidden)), ("lora_B", (hidden, rank))):
                tensors[f"{at}{factor}.weight"] = torch.empty(shape, dtype=torch.bfloat16).uniform_(
                    -0.05, 0.05, generator=generator)
    return tensors


def adapter_config(rank) -> dict:
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": list(FOUR),
            "bias": "none"}
