"""The model without an engine around it, against transformers and PEFT in float32, and against itself bit for bit.

Runs tests/unit/model/model_tool, which gives the logits of every token.
"""

import functools
import os
import pathlib
import subprocess

import numpy
import pytest
import torch

from tests.parity.reference import Reference
from tools.prompts import random_tokens
from tools import make_tiny_adapters, make_tiny_models

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TOOL = pathlib.Path(os.environ.get("HEADRACE_BUILD", ROOT / "build")) / "tests/unit/model/model_tool"
BAR = 1e-4
LENGTHS = (1, 2, 33, 70)
ADAPTERS = ["seven-r8", "patterns", "rslora-r64", "embed-r4", "head-r8", "embed-head-r16", "fused-r8"]
MODELS = list(make_tiny_models.MODELS)


def run(tmp_path, model, sequences, adapters=(), fails=False, **options):
    """sequences: (index into adapters or None, tokens). Returns the logits of each, or the error line."""
    lines = [f"model {model}"] + [f"{key} {value}" for key, value in options.items()]
    lines += [f"adapter {path}" for path in adapters]
    lines += [f"seq {0 if a is None else a + 1} " + " ".join(map(str, ids)) for a, ids in sequences]
    (tmp_path / "spec").write_text("\n".join(lines) + "\n")
    done = subprocess.run([TOOL, tmp_path / "spec", tmp_path / "out"], capture_output=True, text=True, timeout=120)
    if fails:
        assert done.returncode == 1, done.stderr
        return done.stderr.splitlines()[-1]
    assert done.returncode == 0, done.stderr
    flat = numpy.fromfile(tmp_path / "out", dtype=numpy.float32)
    total = sum(len(ids) for _, ids in sequences)
    logits = flat.reshape(total, len(flat) // total)
    return numpy.split(logits, numpy.cumsum([len(ids) for _, ids in sequences])[:-1])


@functools.cache
def case(name):
    """Model directory, adapter directories and prompts."""
    model = make_tiny_models.write(name)
    return model, make_tiny_adapters.write_all(model, ADAPTERS), random_tokens(
        make_tiny_models.MODELS[name].vocab, LENGTHS, seed=7)


def bits(logits):
    return [array.view(numpy.uint32) for array in logits]


def assert_same_bits(a, b):
    for x, y in zip(bits(a), bits(b), strict=True):
        numpy.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", MODELS)
def test_float32_agrees_with_transformers_and_peft(name, tmp_path):
    model, adapters, prompts = case(name)
    readable = {key: path.with_name(path.name + make_tiny_adapters.SPLIT) if key.startswith("fused") else path
                for key, path in adapters.items()}
    reference = Reference(model, readable)
    names = [None, *adapters]
    sequences = [(None if a is None else ADAPTERS.index(a), ids) for ids in prompts for a in names]
    got = run(tmp_path, model, sequences, adapters.values(), dtype="float32", threads=2, chunk=17)
    expected = [reference.logprobs(ids, a) for ids in prompts for a in names]
    for logits, logprobs, (adapter, ids) in zip(got, expected, sequences, strict=True):
        ours = torch.log_softmax(torch.from_numpy(logits).double(), -1)
        difference = (ours - logprobs).abs().max().item()
        assert difference <= BAR, f"adapter {adapter}, {len(ids)} tokens: {difference}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["llama-mha-bias", "qwen2-gqa-tied", "qwen3-gqa"])
def test_bits_do_not_depend_on_batch_chunks_threads_or_tier(name, dtype, tmp_path):
    model, adapters, prompts = case(name)
    mixed = [(None if a == len(ADAPTERS) else a, ids) for ids in prompts for a in range(len(ADAPTERS) + 1)]
    paths = list(adapters.values())
    first = run(tmp_path, model, mixed, paths, dtype=dtype, isa="ref", threads=1, chunk=64)
    for options in [{"threads": 2, "chunk": 1}, {"threads": 3, "chunk": 5}, {"threads": 1, "chunk": 70, "isa": "avx2"}]:
        assert_same_bits(first, run(tmp_path, model, mixed, paths, dtype=dtype, **options))
    for index in (0, 5, len(mixed) - 1):  # alone
        [alone] = run(tmp_path, model, [mixed[index]], paths, dtype=dtype, threads=2, chunk=9)
        assert_same_bits([first[index]], [alone])


def test_adapter_with_zero_b_equals_the_base_bit_for_bit(tmp_path):
    model, _, prompts = case("qwen2-gqa-tied")
    zero = make_tiny_adapters.write_all(model, ["zero"])["zero"]
    base, adapted = run(tmp_path, model, [(None, prompts[2]), (0, prompts[2])], [zero])
    assert_same_bits([base], [adapted])


def test_high_rank_is_shrunk_in_turns_without_changing_bits(tmp_path):
    """Ranks beyond what the step's buffers hold for all rows at once."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model, _, prompts = case("llama-gqa-tied")
    torch.manual_seed(0)
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
                          LoraConfig(r=1000, lora_alpha=100, target_modules=["q_proj", "v_proj", "down_proj"],
                                     init_lora_weights=False))
    peft.save_pretrained(tmp_path / "adapter")
    with torch.inference_mode():
        expected = torch.log_softmax(peft.eval()(torch.tensor([prompts[3]])).logits[0].double(), -1)
    sequences = [(0, prompts[3]), (None, prompts[2]), (0, prompts[3])]
    together = run(tmp_path, model, sequences, [tmp_path / "adapter"], dtype="float32", threads=2, chunk=70)
    [alone] = run(tmp_path, model, sequences[:1], [tmp_path / "adapter"], dtype="float32", chunk=1)
    assert_same_bits([together[0], together[2]], [alone, alone])
    difference = (torch.log_softmax(torch.from_numpy(alone).double(), -1) - expected).abs().max().item()
    assert difference <= BAR


@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen3-gqa"])  # tied: held packed; untied: a dense table
def test_a_base_weight_beside_an_adapter_must_be_the_base(name, tmp_path):
    from safetensors.torch import load_file, save_file

    model, adapters, _ = case(name)
    copy = copy_of(adapters["embed-r4"], tmp_path)
    weights = copy / "adapter_model.safetensors"
    tensors = load_file(weights)
    key = next(k for k in tensors if k.endswith("embed_tokens.base_layer.weight"))
    run(tmp_path, model, [(0, [5])], [copy])
    tensors[key][-1, -1] += 0.25
    save_file(tensors, weights)
    assert "embed_tokens" in run(tmp_path, model, [], [copy], fails=True)


def copy_of(model, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def test_an_unknown_architecture_is_refused_by_name(tmp_path):
    copy = copy_of(case("llama-gqa-tied")[0], tmp_path)
    config = copy / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "GPT2LMHeadModel"))
    error = run(tmp_path, copy, [], fails=True)
    assert "GPT2LMHeadModel" in error and "LlamaForCausalLM" in error


def test_a_truncated_shard_is_refused_by_name(tmp_path):
    copy = copy_of(case("llama-mha-bias")[0], tmp_path)
    shard = sorted(copy.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-100])
    assert shard.name in run(tmp_path, copy, [], fails=True)


def test_missing_unknown_and_misshapen_tensors_are_refused_by_name(tmp_path):
    from safetensors.torch import load_file, save_file

    copy = copy_of(case("llama-gqa-tied")[0], tmp_path)
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    key = "model.layers.1.mlp.up_proj.weight"

    def error_with(changed):
        save_file(changed, weights)
        return run(tmp_path, copy, [], fails=True)

    assert key in error_with({k: v for k, v in tensors.items() if k != key})
    assert "model.layers.1.mlp.extra.weight" in error_with(
        {**tensors, "model.layers.1.mlp.extra.weight": tensors[key].clone()})
    assert "[160, 64]" in error_with({**tensors, key: tensors[key][:-1].contiguous()})
    assert "I8" in error_with({**tensors, key: tensors[key].to(torch.int8)})
    assert "lm_head.weight" in error_with({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
               "model.rotary_emb.inv_freq": torch.ones(8)}, weights)
    run(tmp_path, copy, [(None, [5, 6])])
