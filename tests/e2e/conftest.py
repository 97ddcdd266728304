"""Engines that the tests of this folder share: a tiny model by token ids, and SmolLM2 with its tokenizer."""

import pytest

from tools import make_tiny_adapters, make_tiny_models
from tools.engine import Engine

TINY = "llama-gqa-tied"
NAMES = ["seven-r8", "qv-r1", "rslora-r64", "embed-head-r16"]


@pytest.fixture(scope="session")
def tiny_dir():
    return make_tiny_models.write(TINY)


@pytest.fixture(scope="session")
def adapter_dirs(tiny_dir):
    return make_tiny_adapters.write_all(tiny_dir)


@pytest.fixture(scope="session")
def tiny(tiny_dir, adapter_dirs):
    """A tiny model in bf16 with four adapters loaded; tests leave its adapters as they found them."""
    with Engine(tiny_dir, dtype="bfloat16", skip_tokenizer=True) as engine:
        for name in NAMES:
            engine.load(name, adapter_dirs[name])
        yield engine
        assert engine.process.poll() is None, engine.log()


@pytest.fixture(scope="session")
def smollm2():
    with Engine(make_tiny_models.HOME / "smollm2") as engine:
        yield engine
        assert engine.process.poll() is None, engine.log()
