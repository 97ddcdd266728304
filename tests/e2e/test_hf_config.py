"""Configs as the pinned transformers writes them, and as version 4 wrote them, are understood as transformers does.

Runs tests/unit/format/config_tool.
"""

import json
import os
import pathlib
import subprocess

import pytest
from transformers import AutoConfig, GenerationConfig, LlamaConfig, Qwen2Config, Qwen3Config

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TOOL = pathlib.Path(os.environ.get("HEADRACE_BUILD", ROOT / "build")) / "tests/unit/format/config_tool"
SMALL = dict(vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=8,
             num_key_value_heads=4, max_position_embeddings=512)
CLASSES = {"LlamaForCausalLM": LlamaConfig, "Qwen2ForCausalLM": Qwen2Config, "Qwen3ForCausalLM": Qwen3Config}
ROPES = {
    "default": dict(rope_type="default", rope_theta=12345.0),
    "linear": dict(rope_type="linear", rope_theta=10000.0, factor=2.0),
    "llama3": dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=128),
    "yarn": dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=128),
    "yarn-all": dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=128, beta_fast=16.0,
                     beta_slow=2.0, attention_factor=1.5, mscale=0.7, mscale_all_dim=0.4, truncate=False),
}
SAME = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "model_type"]


def understand(path):
    done = subprocess.run([TOOL, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refusal(path):
    done = subprocess.run([TOOL, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout
    return done.stderr


def compare(path):
    ours, theirs = understand(path), AutoConfig.from_pretrained(path)
    for key in SAME:
        assert ours[key] == getattr(theirs, key), key
    assert ours["head_dim"] == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    for key in ("attention_bias", "mlp_bias"):
        assert ours[key] == getattr(theirs, key, False), key
    for key, value in theirs.rope_parameters.items():
        if key != "type":
            assert ours["rope"][key] == value, key
    return ours


def write(path, name, **more):
    config = CLASSES[name](**(SMALL | more))
    config.architectures = [name]
    config.save_pretrained(path)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("name", CLASSES)
def test_what_transformers_writes_is_read(tmp_path, name, rope):
    write(tmp_path, name, rope_parameters=dict(ROPES[rope]), dtype="bfloat16", eos_token_id=[2, 5], bos_token_id=1)
    ours = compare(tmp_path)
    assert ours["architecture"] == name
    assert ours["dtype"] == "bfloat16"
    assert ours["eos_token_id"] == [2, 5] and ours["bos_token_id"] == 1


@pytest.mark.parametrize("more", [dict(tie_word_embeddings=True), dict(attention_bias=True), dict(mlp_bias=True),
                                  dict(head_dim=24), dict(num_key_value_heads=None), dict(rms_norm_eps=1e-5)], ids=str)
def test_options_are_read(tmp_path, more):
    write(tmp_path, "LlamaForCausalLM", **more)
    compare(tmp_path)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_what_version_4_wrote_is_read(tmp_path, rope, type_key):
    scaling = dict(ROPES[rope])
    theta = scaling.pop("rope_theta")
    scaling[type_key] = scaling.pop("rope_type")
    config = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": theta,
                      "rope_scaling": None if rope == "default" else scaling, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert compare(tmp_path)["dtype"] == "float16"


def test_the_least_config_takes_the_defaults_of_each_class(tmp_path):
    for name, config_class in CLASSES.items():
        config = SMALL | {"architectures": [name], "model_type": config_class.model_type}
        (tmp_path / "config.json").write_text(json.dumps(config))
        compare(tmp_path)


def test_ends_of_the_generation_config_are_added(tmp_path):
    write(tmp_path, "LlamaForCausalLM", eos_token_id=2)
    GenerationConfig(eos_token_id=[2, 7, 9]).save_pretrained(tmp_path)
    assert understand(tmp_path)["eos_token_id"] == [2, 7, 9]


@pytest.mark.parametrize("more,name", [
    (dict(use_sliding_window=True, sliding_window=128, max_window_layers=1), "sliding"),
    (dict(hidden_act="gelu"), "hidden_act"),
    (dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)), "dynamic"),
    (dict(quantization_config={"quant_method": "awq", "bits": 4}), "awq"),
])
def test_what_cannot_be_computed_is_refused_by_name(tmp_path, more, name):
    write(tmp_path, "Qwen2ForCausalLM", **more)
    assert name in refusal(tmp_path)
