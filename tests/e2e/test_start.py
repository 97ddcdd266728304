"""Starting and stopping: what cannot be served is refused in one clear line, and SIGTERM lets requests finish."""

import concurrent.futures
import json
import os
import shutil
import socket
import subprocess
import time

import pytest
from safetensors.torch import load_file, save_file

from tools import make_tiny_models
from tools.engine import BINARY, Engine, free_port


def serve(*arguments, **environment):
    """Runs `headrace serve` to its end; returns the exit status and the last line it wrote."""
    command = [str(BINARY), "serve", "--host", "127.0.0.1", *map(str, arguments)]
    if "--port" not in command:
        command += ["--port", str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def refused(*arguments, **environment):
    status, line = serve(*arguments, **environment)
    assert 0 < status < 126, f"exit status {status}, last line: {line}"
    return line


@pytest.fixture
def copy(tiny_dir, tmp_path):
    return pathlib_copy(tiny_dir, tmp_path / "model")


def pathlib_copy(source, target):
    shutil.copytree(source, target)
    return target


def edit_config(model, **changes):
    path = model / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))
    return model


def test_help_names_the_flags_and_exits_zero():
    done = subprocess.run([str(BINARY), "serve", "--help"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0
    for flag in ("--model-path", "--port", "--dtype", "--lora-paths", "--max-running-requests", "--threads"):
        assert flag in done.stdout


@pytest.mark.parametrize("arguments, words", [
    (["--no-such-flag"], ["--no-such-flag"]),
    (["--port", "70000"], ["port"]),
    (["--dtype", "int4"], ["int4"]),
    (["--threads", "0"], ["threads"]),
    (["--context-length", "many"], ["context-length"]),
])
def test_a_wrong_flag_is_named(tiny_dir, arguments, words):
    line = refused("--model-path", tiny_dir, *arguments)
    assert all(word in line for word in words), line


def test_a_model_is_needed():
    assert "--model-path" in refused()


def test_port_taken(tiny_dir):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        line = refused("--model-path", tiny_dir, "--skip-tokenizer-init", "--port", port)
    assert str(port) in line, line


def test_directory_missing(tmp_path):
    assert "nowhere" in refused("--model-path", tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_file_missing(copy, name):
    (copy / name).unlink()
    assert name.split(".")[1] in refused("--model-path", copy, "--skip-tokenizer-init")


def test_tokenizer_missing(tiny_dir):
    line = refused("--model-path", tiny_dir)
    assert "tokenizer.json" in line and "--skip-tokenizer-init" in line, line


def test_config_is_not_json(copy):
    (copy / "config.json").write_text('{"architectures": [')
    assert "config.json" in refused("--model-path", copy, "--skip-tokenizer-init")


@pytest.mark.parametrize("changes, word", [
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"hidden_size": None}, "hidden_size"),
    ({"hidden_size": "large"}, "hidden_size"),
    ({"hidden_size": -64}, "hidden_size"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
    ({"head_dim": 17}, "head_dim"),
    ({"hidden_act": "relu"}, "relu"),
    ({"architectures": None}, "architectures"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, "factor"),
])
def test_config_wrong(copy, changes, word):
    line = refused("--model-path", edit_config(copy, **changes), "--skip-tokenizer-init")
    assert word in line, line


def test_config_disagrees_with_the_tensors(copy):
    line = refused("--model-path", edit_config(copy, intermediate_size=192), "--skip-tokenizer-init")
    assert "192" in line and "160" in line, line


def test_architecture_unknown(copy):
    line = refused("--model-path", edit_config(copy, architectures=["MambaForCausalLM"]), "--skip-tokenizer-init")
    assert "MambaForCausalLM" in line and "LlamaForCausalLM" in line, line


def test_quantised_checkpoint_is_refused_by_name(copy):
    line = refused("--model-path", edit_config(copy, quantization_config={"quant_method": "gptq", "bits": 4}),
                   "--skip-tokenizer-init")
    assert "gptq" in line, line


def test_file_truncated(copy):
    path = copy / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)
    assert "model.safetensors" in refused("--model-path", copy, "--skip-tokenizer-init")


@pytest.mark.parametrize("name, value, words", [
    ("model.layers.1.mlp.down_proj.weight", float("nan"), "1 of"), ("model.norm.weight", float("-inf"), "1 of"),
    ("model.layers.0.self_attn.v_proj.weight", 3.4e38, "too large for BF16")])
def test_weights_that_are_no_numbers_are_refused_by_name(copy, name, value, words):
    path = copy / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = tensors[name].float()
    tensors[name].view(-1)[-1] = value
    save_file(tensors, path, {"format": "pt"})
    line = refused("--model-path", copy, "--skip-tokenizer-init")
    assert name in line and words in line and str(copy) in line, line


def test_shard_truncated_or_missing(tmp_path):
    model = pathlib_copy(make_tiny_models.write("qwen2-yarn"), tmp_path / "model")
    shard = model / "model-00003-of-00012.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)
    assert shard.name in refused("--model-path", model, "--skip-tokenizer-init")
    shard.unlink()
    assert shard.name in refused("--model-path", model, "--skip-tokenizer-init")


def test_hub_id_that_is_not_in_the_cache(tmp_path):
    line = refused("--model-path", "some-org/some-model", HF_HOME=str(tmp_path))
    assert "some-org/some-model" in line and "download" in line, line


def test_hub_id_resolves_to_the_local_cache(tiny_dir, tmp_path, monkeypatch):
    repository = tmp_path / "hub/models--some-org--some-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("0123abcd")
    pathlib_copy(tiny_dir, repository / "snapshots/0123abcd")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    with Engine("some-org/some-model", skip_tokenizer=True) as engine:
        assert engine.get("/v1/models").json()["data"][0]["id"] == "some-org/some-model"


def test_sigterm_lets_running_requests_finish_and_exits_zero(tiny_dir):
    with Engine(tiny_dir, skip_tokenizer=True) as engine, concurrent.futures.ThreadPoolExecutor(1) as pool:
        request = pool.submit(engine.generate, input_ids=[5, 6, 7],
                              sampling_params={"max_new_tokens": 400, "ignore_eos": True})
        time.sleep(0.05)
        assert engine.stop() == 0
        assert len(request.result()["output_ids"]) == 400


def test_sigterm_of_an_idle_engine_is_prompt(tiny_dir):
    with Engine(tiny_dir, skip_tokenizer=True) as engine:
        started = time.monotonic()
        assert engine.stop() == 0
        assert time.monotonic() - started < 3


def test_start_says_how_much_memory_the_cache_takes(tiny_dir):
    with Engine(tiny_dir, skip_tokenizer=True) as engine:
        assert "KV" in engine.log()


def test_lora_paths_in_its_three_forms(tiny_dir, adapter_dirs):
    first, second, third = (adapter_dirs[name] for name in ("seven-r8", "qv-r1", "patterns"))
    item = json.dumps({"lora_name": "third", "lora_path": str(third), "pinned": True})
    with Engine(tiny_dir, "--lora-paths", first, f"second={second}", item, skip_tokenizer=True) as engine:
        names = {card["id"] for card in engine.get("/v1/models").json()["data"][1:]}
        assert names == {str(first), "second", "third"}


def test_an_initial_adapter_that_cannot_be_loaded_stops_the_start(tiny_dir, tmp_path):
    line = refused("--model-path", tiny_dir, "--skip-tokenizer-init", "--lora-paths", f"x={tmp_path}")
    assert "adapter_config.json" in line, line
