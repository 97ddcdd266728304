"""Field case 23: small, early updates. A LoRA that is merged into bfloat16 weights is mostly rounded away; served beside them it
is not. Truth is PEFT in float32 over the same bfloat16 base; what counts is the difference that the adapter makes."""

import json
import shutil

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e import trainer_forms as forms
from tests.e2e.trainer_model import PEFT_PREFIX, Learner
from tools import make_tiny_models
from tools.engine import Engine
from tools.prompts import random_tokens

EMBED = "model.embed_tokens.weight"
SMALL = 2e-4  # mean |delta| over mean |weight|: less than a tenth of the last bit of bfloat16


class World:
    """Engines over a base that bfloat16 holds exactly, and float32 truth about adapters on it."""

    def __init__(self, name, home):
        self.name = name
        self.directory = self.write(home / "base", self.learner().base_parameters())
        self.prompts = random_tokens(self.learner().vocab, (96,) * 10, seed=5)
        self.truth = self.truth_of(self.learner(), base=True)
        self.home = home

    def learner(self, **lora):
        learner = Learner(make_tiny_models.write(self.name), **lora)
        with torch.no_grad():
            for parameter in learner.base_parameters().values():
                parameter.copy_(parameter.bfloat16().float())
        return learner

    def write(self, path, parameters):
        shutil.copytree(make_tiny_models.write(self.name), path)
        for file in path.glob("*.safetensors"):
            save_file({name: parameters[name].bfloat16().contiguous() for name in load_file(file)}, file, {"format": "pt"})
        return path

    def truth_of(self, learner, base=False):
        score = learner.base_logprobs if base else learner.logprobs
        return numpy.array([score(prompt) for prompt in self.prompts]).ravel()

    def served(self, engine, adapter=None):
        return numpy.array([score.prompt[1:] for score in engine.score(self.prompts, adapter)]).ravel()

    def merged(self, learner):
        """What an engine makes of the adapter that merges it into its weights and has these in bfloat16."""
        parameters = dict(learner.base_parameters())
        for name, delta in deltas(learner):
            parameters[name] = parameters[name] + delta
        path = self.write(self.home / "merged", parameters)
        with Engine(path, dtype="bfloat16", skip_tokenizer=True) as engine:
            found = self.served(engine)
        shutil.rmtree(path)
        return found


def deltas(learner):
    """(name of the weight, s * B A) of every adapted module."""
    for name, module in learner.peft.named_modules():
        if hasattr(module, "get_delta_weight"):
            yield name.removeprefix(PEFT_PREFIX) + ".weight", module.get_delta_weight("default").detach()


def made_small(learner, size=SMALL):
    """Steps of a trainer, scaled until the weights change by `size` of themselves."""
    for _ in range(3):
        learner.step()
    weights = learner.base_parameters()
    reached = numpy.mean([(delta.abs().mean() / weights.get(name, weights[EMBED]).abs().mean()).item()
                          for name, delta in deltas(learner)])  # a tied head is the embedding
    with torch.no_grad():
        for name, parameter in learner.peft.named_parameters():
            if "lora_B" in name:
                parameter.mul_(size / reached)
    return learner


def load(engine, name, learner):
    """In float32, as trainers send it."""
    engine.call("/load_lora_adapter_from_tensors", {"lora_name": name, "config_dict": learner.config(), "upsert": True,
                                                    "serialized_tensors": forms.plain(learner.adapter())})


def correlation(a, b):
    return numpy.corrcoef(a, b)[0, 1]


def error(served, truth):
    return numpy.sqrt(numpy.mean((served - truth) ** 2))


@pytest.fixture(scope="module", params=["llama-gqa-tied", "qwen2-gqa-tied", "llama-linear"])
def world(request, tmp_path_factory):
    return World(request.param, tmp_path_factory.mktemp("precision"))


@pytest.fixture(scope="module")
def engine(world):
    with Engine(world.directory, dtype="bfloat16", skip_tokenizer=True) as engine:
        yield engine


def test_case_23_a_delta_below_the_last_bit_of_the_weights_is_served(world, engine):
    """On the head, where the activations are the same with and without it: all that is seen is the adapter."""
    learner = made_small(world.learner(target_modules=["lm_head"]))
    wanted = world.truth_of(learner) - world.truth
    load(engine, "small", learner)
    base = world.served(engine)
    assert correlation(world.served(engine, "small") - base, wanted) > 0.999
    slope = numpy.polyfit(wanted, world.served(engine, "small") - base, 1)[0]
    assert abs(slope - 1) < 0.02
    if "lm_head.weight" in learner.base_parameters():  # merged it is lost, so the delta is as small as that
        assert correlation(world.merged(learner) - base, wanted) < 0.9


@pytest.mark.parametrize("size", [SMALL, 2e-3, 2e-2])
def test_case_23_an_adapter_of_all_modules_brings_no_error_of_its_own(world, engine, size):
    """The error with the adapter is that of bfloat16 activations without it."""
    learner = made_small(world.learner(), size)
    load(engine, "all", learner)
    base = error(world.served(engine), world.truth)
    assert error(world.served(engine, "all"), world.truth_of(learner)) < 1.2 * base


def test_case_23_large_enough_to_be_seen_through_the_activations(world, engine):
    learner = made_small(world.learner(), 3e-2)
    load(engine, "seen", learner)
    assert correlation(world.served(engine, "seen") - world.served(engine), world.truth_of(learner) - world.truth) > 0.99


def test_case_23_in_float32_nothing_is_too_small(world):
    """With float32 activations the smallest update of all modules is there."""
    learner = made_small(world.learner(), 1e-4)
    with Engine(world.directory, dtype="float32", skip_tokenizer=True) as engine:
        load(engine, "small", learner)
        found = world.served(engine, "small") - world.served(engine)
    assert correlation(found, world.truth_of(learner) - world.truth) > 0.999


def test_case_51_float32_factors_are_the_same_by_every_route(world, engine, tmp_path):
    """A file, a pickle and an image in float32 give the same bits; so does their rounding to bfloat16 by torch, where the
    engine rounds to nearest too."""
    learner = made_small(world.learner(), 1e-2)
    load(engine, "pickle", learner)
    engine.load("file", learner.save(tmp_path / "file"))
    rounded = {key: tensor.bfloat16() for key, tensor in learner.adapter().items()}
    engine.call("/load_lora_adapter_from_tensors", {"lora_name": "rounded", "config_dict": json.loads(json.dumps(learner.config())),
                                                    "serialized_tensors": forms.plain(rounded)})
    expected = world.served(engine, "pickle")
    assert (world.served(engine, "file") == expected).all() and (world.served(engine, "rounded") == expected).all()
    for name in ("pickle", "file", "rounded"):
        engine.unload(name)
