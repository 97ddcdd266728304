"""Digests of a model's weights and of its adapters are those that torch and xxHash give for the tensors, converted to
the compute dtype, and the scalings of adapters those that PEFT has; after an update they are those of the new checkpoint.

Runs tests/unit/model/weights_tool.
"""

import ctypes
import os
import pathlib
import shutil
import subprocess

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tools import make_tiny_adapters, make_tiny_models

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TOOL = pathlib.Path(os.environ.get("HEADRACE_BUILD", ROOT / "build")) / "tests/unit/model/weights_tool"
NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}
COMPUTE = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


xxhash = ctypes.CDLL("libxxhash.so.0")
xxhash.XXH3_128bits.restype = Hash128
xxhash.XXH3_128bits.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def digest(tensor):
    tensor = tensor.contiguous()
    hash128 = xxhash.XXH3_128bits(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return f"{hash128.high:016x}{hash128.low:016x}"


def expected(tensors, dtype):
    """Vectors are held in float32."""
    held = {name: t.float() if t.ndim == 1 else t.to(COMPUTE[dtype]) for name, t in tensors.items()}
    return {name: (NAMES[t.dtype], str(list(t.shape)), digest(t)) for name, t in held.items()}


def weights(directory):
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def run(*arguments):
    done = subprocess.run([TOOL, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" ", 2) for line in done.stdout.splitlines()]
    return {name: (dtype, *rest.rsplit(" ", 1)) for name, dtype, rest in rows}


@pytest.mark.parametrize("dtype", COMPUTE)
@pytest.mark.parametrize("name", make_tiny_models.MODELS)
def test_weights_are_digested_as_torch_converts_them(name, dtype):
    model = make_tiny_models.write(name)
    assert run(dtype, model) == expected(weights(model), dtype)


@pytest.mark.parametrize("sent", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-mha-bias", "qwen2-gqa-tied", "qwen3-gqa"])
def test_an_update_holds_what_was_sent(tmp_path, name, sent):
    model = make_tiny_models.write(name)
    trained = {key: (t.float() * 1.25 + 0.01).to(sent) for key, t in weights(model).items()}
    shutil.copy(model / "config.json", tmp_path)
    save_file(trained, tmp_path / "model.safetensors")
    assert run("bfloat16", model, "update", tmp_path) == expected(trained, "bfloat16")


def scalings_of(model, directory):
    """As PEFT multiplies with them."""
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), directory)
    return {f"{name.removeprefix('base_model.model.')}.scaling": torch.tensor(module.scaling["default"], dtype=torch.float32)
            for name, module in loaded.named_modules() if isinstance(module, LoraLayer) and "default" in module.scaling}


@pytest.mark.parametrize("dtype", COMPUTE)
def test_adapters_are_digested_by_the_names_of_their_files(dtype):
    model = make_tiny_models.write("qwen3-gqa")
    for directory in make_tiny_adapters.write_all(model, ["patterns", "rslora-r64", "embed-head-r16"]).values():
        tensors = load_file(directory / "adapter_model.safetensors")
        pairs = {key.removeprefix("base_model.model."): t for key, t in tensors.items() if ".lora_" in key}
        scalings = {name: ("F32", "[]", digest(factor)) for name, factor in scalings_of(model, directory).items()}
        assert run(dtype, model, "adapter", directory) == expected(pairs, dtype) | scalings
