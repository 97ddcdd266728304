"""Loading and unloading adapters while the engine runs, and every adapter that must be refused."""

import concurrent.futures
import json
import os
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools.engine import Engine

PROMPT = [5, 17, 40, 8, 99, 3, 250]


@pytest.fixture(scope="module")
def engine(tiny_dir):
    with Engine(tiny_dir, dtype="float32", skip_tokenizer=True) as engine:
        yield engine
        assert engine.process.poll() is None, engine.log()


@pytest.fixture
def copy(adapter_dirs, tmp_path):
    """A copy of an adapter, to be damaged."""
    def make(name="seven-r8"):
        return shutil.copytree(adapter_dirs[name], tmp_path / name)
    return make


def edit_config(path, **changes):
    file = path / "adapter_config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps(config))


def edit_tensors(path, change):
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def refusal(engine, path, name="bad", **more):
    """The load is refused with 400, the adapter is not listed, and the base answers as before."""
    before = engine.score([PROMPT])
    reply = engine.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more})
    body = reply.json()
    if reply.status_code == 200:
        engine.unload(name)  # so that the tests after this one see what they expect
    assert reply.status_code == 400, body
    assert body["success"] is False
    assert name not in body["loaded_adapters"]
    assert engine.post("/generate", {"input_ids": PROMPT, "lora_path": name}).status_code == 400
    assert engine.score([PROMPT]) == before
    return body["error_message"]


def test_load_and_unload_list_what_is_loaded(engine, adapter_dirs):
    body = engine.load("one", adapter_dirs["seven-r8"])
    assert body["success"] is True and body["loaded_adapters"] == {"one": str(adapter_dirs["seven-r8"])}
    assert set(engine.load("two", adapter_dirs["qv-r1"])["loaded_adapters"]) == {"one", "two"}
    assert set(engine.unload("one")["loaded_adapters"]) == {"two"}
    assert engine.unload("two")["loaded_adapters"] == {}
    assert len(engine.get("/v1/models").json()["data"]) == 1


def test_a_name_that_is_taken(engine, adapter_dirs):
    engine.load("one", adapter_dirs["seven-r8"])
    reply = engine.post("/load_lora_adapter", {"lora_name": "one", "lora_path": str(adapter_dirs["qv-r1"])})
    assert reply.status_code == 400
    assert "already loaded" in reply.json()["error_message"]
    assert set(reply.json()["loaded_adapters"]) == {"one"}
    engine.unload("one")


def test_unloading_an_unknown_name(engine):
    reply = engine.post("/unload_lora_adapter", {"lora_name": "ghost"})
    assert reply.status_code == 400
    assert "LoRA with name ghost does not exist" in reply.json()["error_message"]


@pytest.mark.parametrize("body", [{}, {"lora_name": "x"}, {"lora_path": "x"}, {"lora_name": 5, "lora_path": "x"},
                                  {"lora_name": "", "lora_path": "x"}, {"lora_name": "x", "lora_path": "y", "typo": 1}])
def test_a_load_call_that_is_not_whole(engine, body):
    assert engine.post("/load_lora_adapter", body).status_code == 400


def test_a_path_that_is_not_here_says_where_it_was_looked_up(engine, tmp_path):
    message = refusal(engine, tmp_path / "of-the-trainer")
    assert "of-the-trainer" in message and "this engine's machine" in message
    assert "/update_weights_from_safetensors" in message and "/load_lora_adapter_from_tensors" in message


def test_a_name_with_a_colon(engine, adapter_dirs):
    assert "must not contain ':'" in refusal(engine, adapter_dirs["seven-r8"], name="a:b")


def test_an_unloaded_adapter_is_gone(engine, adapter_dirs):
    engine.load("one", adapter_dirs["seven-r8"])
    assert engine.score([PROMPT], "one") != engine.score([PROMPT])
    engine.unload("one")
    reply = engine.post("/generate", {"input_ids": PROMPT, "lora_path": "one"})
    assert reply.status_code == 400 and "not loaded" in reply.json()["error"]["message"]


def test_a_reloaded_name_answers_with_the_new_weights(engine, copy, adapter_dirs):
    prompt = PROMPT * 20  # long enough for any prefix cache to hold a piece of it
    turned = copy()
    edit_tensors(turned, lambda tensors: [tensor.neg_() for key, tensor in tensors.items() if "lora_B" in key])
    engine.load("cold", turned)
    expected = engine.score([prompt], "cold", 8)
    engine.load("one", adapter_dirs["seven-r8"])
    assert engine.score([prompt], "one", 8) != expected
    engine.unload("one")
    engine.load("one", turned)
    assert engine.score([prompt], "one", 8) == expected
    engine.unload("one")
    engine.unload("cold")


def test_zero_b_equals_the_base_bit_for_bit(engine, adapter_dirs):
    engine.load("zero", adapter_dirs["zero"])
    assert engine.score([PROMPT], "zero", 16) == engine.score([PROMPT], None, 16)
    engine.unload("zero")


@pytest.mark.parametrize("name", ["head-r8", "embed-r4", "embed-head-r16"])
def test_adapters_of_a_tied_head_leave_the_base_alone(engine, adapter_dirs, name):
    before = engine.score([PROMPT], None, 8)
    engine.load(name, adapter_dirs[name])
    assert engine.score([PROMPT], name, 8) != before
    assert engine.score([PROMPT], None, 8) == before
    engine.unload(name)
    assert engine.score([PROMPT], None, 8) == before


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file(engine, copy, file):
    path = copy()
    (path / file).unlink()
    assert "adapter" in refusal(engine, path)


def test_a_missing_directory(engine, tmp_path):
    assert "nowhere" in refusal(engine, tmp_path / "nowhere")


def test_truncated_weights(engine, copy):
    path = copy()
    file = path / "adapter_model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    refusal(engine, path)


def test_a_config_that_is_not_json(engine, copy):
    path = copy()
    (path / "adapter_config.json").write_text("{")
    assert "adapter_config.json" in refusal(engine, path)


def test_an_adapter_of_another_base(engine, tmp_path):
    from tools import make_tiny_adapters, make_tiny_models

    other = make_tiny_adapters.write_all(make_tiny_models.write("llama-yarn"), ["seven-r8"])["seven-r8"]
    message = refusal(engine, other)
    assert "64" in message and "72" in message


def test_a_misspelt_tensor_is_named(engine, copy):
    path = copy()
    edit_tensors(path, lambda tensors: tensors.update(
        {"base_model.model.model.layers.0.self_attn.q_porj.lora_A.weight": torch.zeros(8, 64)}))
    assert "q_porj" in refusal(engine, path)


def test_an_adapter_of_which_nothing_matches(engine, copy):
    path = copy()

    def rename(tensors):
        for key in list(tensors):
            tensors[key.replace("_proj", "_other")] = tensors.pop(key)
    edit_tensors(path, rename)
    edit_config(path, target_modules=["q_other"])
    assert "other" in refusal(engine, path)


def test_a_layer_that_the_model_has_not(engine, copy):
    path = copy()
    edit_tensors(path, lambda tensors: tensors.update(
        {key.replace("layers.1.", "layers.7."): tensors.pop(key).clone() for key in list(tensors) if "layers.1." in key}))
    assert "layers.7" in refusal(engine, path)


def test_a_without_its_b(engine, copy):
    path = copy()
    edit_tensors(path, lambda tensors: tensors.pop("base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"))
    assert "up_proj" in refusal(engine, path)


def test_a_rank_that_is_not_the_one_of_the_config(engine, copy):
    path = copy()
    edit_config(path, r=16)
    message = refusal(engine, path)
    assert "16" in message and "8" in message


def test_an_empty_file(engine, copy):
    path = copy()
    save_file({}, path / "adapter_model.safetensors")
    refusal(engine, path)


@pytest.mark.parametrize("field, value", [
    ("use_dora", True), ("bias", "all"), ("lora_bias", True), ("modules_to_save", ["lm_head"]), ("peft_type", "LOHA"),
    ("fan_in_fan_out", True), ("layer_replication", [[0, 2]]), ("trainable_token_indices", [5]),
    ("target_parameters", ["mlp.experts.down_proj"]), ("a_field_of_tomorrow", 1),
])
def test_a_config_field_that_is_not_handled_is_named(engine, copy, field, value):
    path = copy()
    edit_config(path, **{field: value})
    assert field in refusal(engine, path)


@pytest.mark.parametrize("targets", [[], None, 5, ["(("], "(("])
def test_target_modules_that_say_nothing(engine, copy, targets):
    path = copy()
    edit_config(path, target_modules=targets)
    assert "target_modules" in refusal(engine, path)


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|k|v|o|gate|up|down)_proj"])
def test_targets_as_a_string_mean_the_same_as_the_list(engine, copy, adapter_dirs, targets):
    engine.load("list", adapter_dirs["seven-r8"])
    path = copy()
    edit_config(path, target_modules=targets)
    engine.load("string", path)
    assert engine.score([PROMPT], "string", 8) == engine.score([PROMPT], "list", 8)
    engine.unload("list")
    engine.unload("string")


@pytest.mark.parametrize("field, value", [("r", 0), ("r", -8), ("r", 10**9), ("r", "8"), ("lora_alpha", "16"),
                                          ("rank_pattern", {"((": 4}), ("rank_pattern", {"q_proj": -1})])
def test_numbers_out_of_range(engine, copy, field, value):
    path = copy()
    edit_config(path, **{field: value})
    assert field in refusal(engine, path)


def test_saved_head_weights_are_refused_by_name(engine, copy):
    path = copy()
    edit_tensors(path, lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.zeros(320, 64)}))
    assert "lm_head.weight" in refusal(engine, path)


def test_a_full_base_weight_must_equal_the_base(engine, copy):
    path = copy("head-r8")

    def touch(tensors):
        tensors["base_model.model.lm_head.base_layer.weight"][7, 3] += 1e-3
    edit_tensors(path, touch)
    assert "lm_head.base_layer.weight" in refusal(engine, path)


def test_a_rank_above_the_maximum(tiny_dir, adapter_dirs):
    with Engine(tiny_dir, "--enable-lora", "--max-lora-rank", 16, skip_tokenizer=True) as engine:
        engine.load("small", adapter_dirs["seven-r8"])
        reply = engine.post("/load_lora_adapter", {"lora_name": "large", "lora_path": str(adapter_dirs["rslora-r64"])})
        assert reply.status_code == 400
        assert "incompatible" in reply.json()["error_message"] and "--max-lora-rank" in reply.json()["error_message"]


def test_more_adapters_than_a_batch_may_hold_wait_their_turn(tiny_dir, adapter_dirs):
    names = ["seven-r8", "qv-r1", "patterns", "embed-r4"]
    with Engine(tiny_dir, "--max-loras-per-batch", 2, skip_tokenizer=True) as engine:
        for name in names:
            engine.load(name, adapter_dirs[name])
        adapters = [None, *names] * 3
        alone = {name: engine.score([PROMPT], name, 12)[0] for name in [None, *names]}
        assert engine.score([PROMPT] * len(adapters), adapters, 12) == [alone[name] for name in adapters]


def test_more_names_than_may_be_loaded(tiny_dir, adapter_dirs):
    with Engine(tiny_dir, "--max-loras-per-batch", 1, "--max-loaded-loras", 1, skip_tokenizer=True) as engine:
        engine.load("one", adapter_dirs["seven-r8"])
        body = engine.load("two", adapter_dirs["qv-r1"])
        assert set(body["loaded_adapters"]) == {"two"}


def test_loading_and_failing_to_load_leave_running_requests_alone(engine, adapter_dirs, tmp_path):
    expected = engine.score([PROMPT], None, 300)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = [pool.submit(engine.score, [PROMPT], None, 300) for _ in range(4)]
        for round_ in range(5):
            engine.load(f"good{round_}", adapter_dirs["rslora-r64"])
            engine.post("/load_lora_adapter", {"lora_name": "bad", "lora_path": str(tmp_path)})
            engine.unload(f"good{round_}")
        assert all(request.result() == expected for request in running)


def test_unload_returns_while_its_requests_run_and_they_finish(engine, adapter_dirs):
    engine.load("one", adapter_dirs["seven-r8"])
    expected = engine.score([PROMPT], "one", 400)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        request = pool.submit(engine.score, [PROMPT], "one", 400)
        time.sleep(0.03)
        started = time.monotonic()
        engine.unload("one")
        assert time.monotonic() - started < 5
        assert engine.post("/generate", {"input_ids": PROMPT, "lora_path": "one"}).status_code == 400
        assert request.result() == expected
