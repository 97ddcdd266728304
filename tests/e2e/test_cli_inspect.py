"""`headrace inspect`: of an adapter first what it is; of what is no weights, what would be."""

import json
import math
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file

from tools.engine import BINARY


def inspect(*words, code=0):
    done = subprocess.run([str(BINARY), "inspect", *map(str, words)], capture_output=True, text=True, timeout=30)
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout if code == 0 else done.stderr


def changed(folder, out, **config):
    shutil.copytree(folder, out)
    old = json.loads((folder / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps({**old, **config}))
    return out


def test_an_adapter_begins_with_what_it_is(adapter_dirs):
    lines = inspect(adapter_dirs["rslora-r64"]).splitlines()
    count = len(load_file(adapter_dirs["rslora-r64"] / "adapter_model.safetensors"))
    assert f"PEFT adapter, {count} tensors" in lines[0] and lines[0].endswith("F32")
    assert lines[1] == "adapter    rank 64, alpha 16, scaling 2 (rsLoRA: alpha / sqrt(rank))"
    label, *modules = lines[2].replace(",", "").split()
    assert label == "modules" and set(modules) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
                                                   "down_proj"}
    assert sum("lora_" in line for line in lines) == count


def test_patterns_and_a_regex_are_shown(adapter_dirs):
    text = inspect(adapter_dirs["patterns"])
    assert '"q_proj":20' in text and "alpha_pattern" in text and '"gate_proj":40' in text
    assert r"modules    .*\.(q|v|down)_proj" in inspect(adapter_dirs["regex-r4"])


@pytest.mark.parametrize("name", ["seven-r8", "rslora-r64", "qv-r1"])
def test_the_same_as_json(name, adapter_dirs):
    config = json.loads((adapter_dirs[name] / "adapter_config.json").read_text())
    told = json.loads(inspect(adapter_dirs[name], "--json"))["adapter"]
    root = math.sqrt(config["r"]) if config["use_rslora"] else config["r"]
    alpha = config["lora_alpha"]
    assert (told["rank"], told["alpha"], told["scaling"]) == (config["r"], alpha, alpha / root)
    assert told["target_modules"] == config["target_modules"] and told["refused"] is None


def test_what_engines_would_refuse_is_said(adapter_dirs, tmp_path):
    odd = changed(adapter_dirs["seven-r8"], tmp_path / "dora", use_dora=True)
    refused, = [line for line in inspect(odd).splitlines() if line.startswith("refused ")]
    assert "use_dora" in refused
    assert "use_dora" in json.loads(inspect(odd, "--json"))["adapter"]["refused"]


def test_half_a_directory_says_which_half(adapter_dirs, tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        folder = shutil.copytree(adapter_dirs["qv-r1"], tmp_path / name)
        (folder / name).unlink()
        text = inspect(folder, code=1)
        assert f"{name} is missing" in text and text.count(str(folder)) == 1
    (folder / "adapter_model.bin").write_bytes(b"PK")
    assert "safe_serialization=True" in inspect(folder, code=1)


@pytest.mark.parametrize("given", ["missing", "notes.md", "empty", "folder", "cut.safetensors", "pickle"])
def test_a_refusal_names_the_path_once_and_what_is_supported(given, tmp_path):
    (tmp_path / "notes.md").write_text("# no weights\n")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "cut.safetensors").write_bytes(b"\x08")
    (tmp_path / "pickle").write_bytes(b"\x80\x02cos\nsystem\nX\x04\0\0\0true\x85R.")
    text = inspect(tmp_path / given, code=1)
    assert text.count(str(tmp_path / given)) == 1
    if given in ("notes.md", "empty"):
        assert "wanted a safetensors file, a file of torch.save" in text
    if given == "folder":
        assert "adapter_config.json" in text and "model.safetensors" in text


def test_files_are_known_by_what_is_in_them(adapter_dirs, tmp_path):
    shutil.copy(adapter_dirs["qv-r1"] / "adapter_model.safetensors", tmp_path / "blob-a1b2")
    assert "blob-a1b2: safetensors" in inspect(tmp_path / "blob-a1b2")
    torch.save({"x": torch.ones(3)}, tmp_path / "saved.bin")
    assert inspect(tmp_path / "saved.bin").splitlines()[0].endswith("1 tensor, 12 B, F32")


def test_names_cannot_move_the_cursor(adapter_dirs, tmp_path):
    odd = changed(adapter_dirs["qv-r1"], tmp_path / "odd", target_modules=["q_proj", "\x1b[2J\x07"])
    assert not set(inspect(odd)) & set("\x1b\x07")
