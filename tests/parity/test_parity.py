"""The part of `make parity` that is quick enough for every test run."""

import pytest

from tests.parity import checks
from tools.make_tiny_models import MODELS
from tools.prompts import random_tokens


def keep(rows):
    broken = [str(row) for row in rows if not row.ok]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("name", MODELS)
def test_fp32_equals_transformers_and_peft(name):
    keep(checks.fp32(checks.Case(name, lengths=(1, 7, 70))))


@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen3-tied"])
def test_bf16_is_no_worse_than_torch(name):
    case = checks.Case(name, ["seven-r8", "embed-head-r16"])
    keep(checks.bf16(case, case.adapters, random_tokens(MODELS[name].vocab, [480] * 21, seed=12)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_do_not_depend_on_batch_chunk_threads_or_generation(dtype):
    case = checks.Case("llama-llama3", ["seven-r8", "embed-head-r16", "qv-r1", "zero"])
    keep(checks.bits(case, dtype, [[], ["--threads", 1, "--chunked-prefill-size", 7]]))


def test_smollm2_equals_transformers_and_peft_in_fp32():
    keep(checks.fp32(checks.Case("smollm2", ["seven-r8", "embed-head-r16"], lengths=(9, 65))))
