"""Every field of the pinned PEFT's LoraConfig has a class, and what is not computed is refused by name.

Runs tests/unit/format/peft_tool on adapters that PEFT itself saved, and compares modules, ranks and scales with the
layers PEFT made.
"""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TOOL = pathlib.Path(os.environ.get("HEADRACE_BUILD", ROOT / "build")) / "tests/unit/format/peft_tool"
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# A value of each refused field that turns it on; a field added to the table needs a line here.
TURNED_ON = {
    "fan_in_fan_out": True,
    "bias": "all",
    "lora_bias": True,
    "use_dora": True,
    "use_qalora": True,
    "megatron_config": {"tensor_model_parallel_size": 1},
    "trainable_token_indices": [1, 2],
    "layer_replication": [[0, 1], [0, 1]],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "alora_invocation_tokens": [3],
    "loftq_config": {"loftq_bits": 4},
    "corda_config": {"corda_method": "kpm"},
    "lora_ga_config": {"direction": "ArB2r"},
    "kasa_config": {"beta": 1e-4},
    "velora_config": {"rank": 1},
    "monteclora_config": {"num_samples": 8},
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"arrow_top_k": 3},
    "ensure_weight_tying": True,
}


def model(tied=False):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied))


def module_list(base):
    modules = []
    for path, module in base.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None:
            continue
        kind = ("head" if path == "lm_head" else "linear" if isinstance(module, torch.nn.Linear)
                else "embedding" if isinstance(module, torch.nn.Embedding) else "other")
        rows, columns = weight.shape if weight.dim() == 2 else (weight.shape[0], weight.shape[0])
        inner, outer = (rows, columns) if kind == "embedding" else (columns, rows)
        modules.append({"path": path, "in": inner, "out": outer, "kind": kind})
    return {"modules": modules}


@functools.cache
def fields():
    return json.loads(subprocess.run([TOOL, "--fields"], capture_output=True, check=True, text=True).stdout)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request, tmp_path_factory):
    """A saved model: (make it anew, its directory, the file that lists its modules)."""
    path = tmp_path_factory.mktemp("base")
    made = model(request.param)
    made.save_pretrained(path)
    (path / "modules.json").write_text(json.dumps(module_list(made)))
    return functools.partial(model, request.param), path, path / "modules.json"


def save(base, path, change_config=None, **config):
    peft.get_peft_model(base[0](), peft.LoraConfig(task_type="CAUSAL_LM", **config)).save_pretrained(path)
    if change_config:
        edit_config(path, **change_config)


def edit_config(path, **changes):
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def resolve(base, path):
    done = subprocess.run([TOOL, path, base[2], base[1]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refusal(base, path):
    done = subprocess.run([TOOL, path, base[2], base[1]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_every_field_of_lora_config_is_in_the_table():
    theirs = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert theirs == set(fields())


def test_every_refused_field_has_a_value_that_turns_it_on():
    assert set(TURNED_ON) == {name for name, kind in fields().items() if kind == "refused"}


@pytest.mark.parametrize("name", TURNED_ON)
def test_a_refused_field_is_refused_by_name_when_set(base, tmp_path, name):
    save(base, tmp_path, target_modules=["q_proj"])
    resolve(base, tmp_path)  # as PEFT writes it: accepted
    edit_config(tmp_path, **{name: TURNED_ON[name]})
    assert f"adapter_config.json: {name}:" in refusal(base, tmp_path)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga", "made_up"])
def test_a_start_that_changes_the_base_is_refused(base, tmp_path, start):
    save(base, tmp_path, change_config={"init_lora_weights": start}, target_modules=["q_proj"])
    assert f"init_lora_weights: {start}" in refusal(base, tmp_path)


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "mica"])
def test_a_start_that_leaves_the_base_is_accepted(base, tmp_path, start):
    save(base, tmp_path, target_modules=["q_proj"], init_lora_weights=start)
    resolve(base, tmp_path)


def test_an_unknown_field_is_refused_unless_it_is_off(base, tmp_path):
    save(base, tmp_path, target_modules=["q_proj"])
    edit_config(tmp_path, new_idea=None, other_idea=False)
    resolve(base, tmp_path)
    edit_config(tmp_path, new_idea={"strength": 1})
    assert "new_idea" in refusal(base, tmp_path)


ACCEPTED = {
    "list": dict(target_modules=SEVEN),
    "all-linear": dict(target_modules="all-linear", r=4, lora_alpha=7),
    "regex": dict(target_modules=r".*\.(q|down)_proj"),
    "regex-lookahead": dict(target_modules=r"(?!.*layers\.0).*self_attn.*_proj"),
    "one-exact-path": dict(target_modules=["model.layers.1.mlp.up_proj"]),
    "rslora": dict(target_modules=["q_proj"], r=64, lora_alpha=16, use_rslora=True),
    "layers-list": dict(target_modules=["q_proj", "up_proj"], layers_to_transform=[1]),
    "layers-int": dict(target_modules=["q_proj"], layers_to_transform=0, layers_pattern="layers"),
    "layers-patterns": dict(target_modules=["q_proj"], layers_to_transform=[0], layers_pattern=["blocks", "layers"]),
    "exclude-list": dict(target_modules=SEVEN, exclude_modules=["k_proj", "1.mlp.up_proj"]),
    "exclude-regex": dict(target_modules=SEVEN, exclude_modules=r".*\.0\..*"),
    "all-linear-exclude": dict(target_modules="all-linear", exclude_modules=["o_proj"]),
    "rank-pattern": dict(target_modules=SEVEN, rank_pattern={"q_proj": 16, r"layers\.1\.mlp\.down_proj": 4}),
    "alpha-pattern": dict(target_modules=SEVEN, alpha_pattern={r"^model.layers.0.*": 64, "q_proj": 3, "k_proj": 0.5}),
    "both-patterns": dict(target_modules=SEVEN, rank_pattern={r".*\.up_proj": 6, "mlp.*": 5, "proj": 3},
                          alpha_pattern={"(q|v)_proj": 11, "layers.1.self_attn.q_proj": 9}),
    "first-match-wins": dict(target_modules=["q_proj"], rank_pattern={".*q_proj": 3, "q_proj": 5}),
    "rslora-patterns": dict(target_modules=SEVEN, use_rslora=True, rank_pattern={"v_proj": 7}, alpha_pattern={"v_proj": 5}),
    "embedding": dict(target_modules=["embed_tokens", "q_proj"], r=4),
    "head": dict(target_modules=["lm_head"], r=4),
    "embedding-and-head": dict(target_modules=["embed_tokens", "lm_head", "o_proj"], rank_pattern={"lm_head": 5}),
    "saved-but-untrained": dict(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    "dropout": dict(target_modules=["q_proj"], lora_dropout=0.1),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_modules_ranks_and_scales_are_those_of_peft(base, tmp_path, name):
    """Patterns stand in sorted order here: PEFT sorts them when it saves, and of those that match the first counts, so in
    another order it could not load its own file."""
    save(base, tmp_path, **ACCEPTED[name])
    wrapped = peft.PeftModel.from_pretrained(base[0](), tmp_path)
    got = resolve(base, tmp_path)["modules"]
    layers = {path: layer for path, layer in wrapped.base_model.model.named_modules()
              if isinstance(layer, peft.tuners.lora.LoraLayer)}
    assert set(got) == set(layers)
    for path, layer in layers.items():
        assert got[path]["rank"] == layer.r["default"], path
        assert torch.tensor(got[path]["scale"]) == torch.tensor(layer.scaling["default"]), path


def test_unused_patterns_are_warned_of(base, tmp_path):
    save(base, tmp_path, target_modules=["q_proj"], rank_pattern={"nowhere": 4}, alpha_pattern={"q_proj": 4, "z": 1})
    warnings = resolve(base, tmp_path)["warnings"]
    assert len(warnings) == 2 and "nowhere" in warnings[0] and '"z"' in warnings[1]


@pytest.mark.parametrize("kind", ["modules_to_save", "target"])
@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_changed_whole_weight_is_refused(base, tmp_path, kind, module):
    config = (dict(target_modules=["q_proj"], modules_to_save=[module]) if kind == "modules_to_save"
              else dict(target_modules=["q_proj", module]))
    save(base, tmp_path, **config)
    resolve(base, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if f"{module}." in key and "lora" not in key)
    tensors[name][3, 3] += 1e-3
    save_file(tensors, file)
    assert name in refusal(base, tmp_path)


def test_trained_norms_are_refused(base, tmp_path):
    save(base, tmp_path, target_modules=["q_proj"], modules_to_save=["norm"])
    assert "modules_to_save: trained weights of model." in refusal(base, tmp_path)


@pytest.mark.parametrize("option", [dict(use_dora=True), dict(bias="lora_only"), dict(lora_bias=True),
                                    dict(trainable_token_indices=[1, 2])], ids=str)
def test_tensors_of_refused_options_are_refused_without_their_flag_too(base, tmp_path, option):
    """Bias tensors exist only where the base has biases, so one is added by hand."""
    save(base, tmp_path, target_modules=["q_proj"], **option)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    if option == dict(bias="lora_only"):
        tensors["base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias"] = torch.zeros(32)
        save_file(tensors, file)
    defaults = {field.name: field.default for field in dataclasses.fields(peft.LoraConfig)}
    edit_config(tmp_path, **{key: defaults[key] for key in option})
    message = refusal(base, tmp_path)
    assert any(word in message for word in ("lora_magnitude_vector", ".bias", "trainable_tokens_delta"))


@pytest.mark.parametrize("change", ["dropped", "misspelt", "foreign-prefix", "surplus"])
def test_tensors_that_do_not_fit_the_config_are_named(base, tmp_path, change):
    save(base, tmp_path, target_modules=SEVEN)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    tensor = tensors.pop(name)
    if change == "misspelt":
        tensors[name.replace("down_proj", "down_porj")] = tensor
    if change == "foreign-prefix":
        tensors = {f"language_model.{key}": value for key, value in (tensors | {name: tensor}).items()}
    if change == "surplus":
        tensors[name] = tensor
        edit_config(tmp_path, exclude_modules=["1.mlp.down_proj"])
    save_file(tensors, file)
    expected = {"dropped": "model.layers.1.mlp.down_proj.lora_B", "misspelt": "down_porj",
                "foreign-prefix": "language_model.", "surplus": name}
    assert expected[change] in refusal(base, tmp_path)


@pytest.mark.parametrize("prefix", ["base_model.model.", "base_model.", ""])
@pytest.mark.parametrize("default", ["", ".default"])
def test_known_names_resolve_alike(base, tmp_path, prefix, default):
    save(base, tmp_path, target_modules=["q_proj", "embed_tokens"])
    wanted = resolve(base, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    renamed = {}
    for key, value in load_file(file).items():
        key = prefix + key.removeprefix("base_model.model.")
        for part in (".lora_A", ".lora_B", ".lora_embedding_A", ".lora_embedding_B"):
            key = key.replace(part, part + default)
        renamed[key] = value
    save_file(renamed, file)
    assert resolve(base, tmp_path) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_weight_type_is_accepted(base, tmp_path, dtype):
    save(base, tmp_path, target_modules=["q_proj"])
    file = tmp_path / "adapter_model.safetensors"
    save_file({key: value.to(dtype) for key, value in load_file(file).items()}, file)
    resolve(base, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64])
def test_other_types_are_refused(base, tmp_path, dtype):
    save(base, tmp_path, target_modules=["q_proj"])
    file = tmp_path / "adapter_model.safetensors"
    save_file({key: value.to(dtype) for key, value in load_file(file).items()}, file)
    message = refusal(base, tmp_path)
    assert "wanted F32, F16 or BF16" in message and ".float()" in message
