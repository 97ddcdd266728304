"""Base weights as the field changes them, on models with biases, in shards, with a tied and an untied head: whole or not at
all, and never with KV of the weights before. Truth is an engine that was started on the final weights."""

import json
import os
import pickle
import shutil
import subprocess
import types

import pytest
import requests
import torch
from safetensors.torch import load_file, save, save_file

from tests.e2e import trainer_forms as forms
from tools import make_tiny_adapters, make_tiny_models
from tools.engine import BINARY, Engine

PROMPT = [(7 * i * i + 5) % 250 + 3 for i in range(150)]  # longer than two pages of the cache
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
ADAPTERS = [None, "zero", "real"]
Q_BIAS = "model.layers.1.self_attn.q_proj.bias"
UP = "model.layers.1.mlp.up_proj.weight"


def files(path):
    return sorted(path.glob("*.safetensors"))


def read(path):
    return {name: tensor for file in files(path) for name, tensor in load_file(file).items()}


def rewrite(path, change):
    """change(name, tensor) gives each tensor anew, or None where there shall be none."""
    for file in files(path):
        tensors = {name: change(name, tensor) for name, tensor in load_file(file).items()}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file, {"format": "pt"})


def trained(name, tensor):
    """Every weight and every bias becomes another."""
    generator = torch.Generator().manual_seed(make_tiny_adapters.seed_of(name))
    return (tensor * (1 + 0.2 * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)


def ask(engine, adapter=None, prompt=PROMPT, sampling=GREEDY):
    """(tokens and logprobs, prompt tokens that came from the cache)."""
    item = engine.generate(input_ids=prompt, lora_path=adapter, sampling_params=sampling, return_logprob=True)
    return item["meta_info"]["output_token_logprobs"], item["meta_info"]["cached_tokens"]


def answers(engine):
    return {adapter: ask(engine, adapter)[0] for adapter in ADAPTERS}


def call(engine, route, status=200, **body):
    reply = engine.post("/" + route, body)
    answer = reply.json()
    assert reply.status_code == status and answer["success"] is (status == 200), (reply.status_code, answer)
    return answer


def state(engine):
    return call(engine, "weights_checker")["per_engine_checksum"], engine.get("/model_info").json()["weight_version"]


@pytest.fixture(scope="module", params=["llama-mha-bias", "qwen2-gqa-tied"])
def world(request, tmp_path_factory):
    """A model before and after a training step, and what engines answer that were started on either."""
    old = make_tiny_models.write(request.param)
    new = shutil.copytree(old, tmp_path_factory.mktemp("base") / "new")
    rewrite(new, trained)
    adapters = make_tiny_adapters.write_all(old)
    paths = {"zero": adapters["zero"], "real": adapters["seven-r8"]}
    expected = {}
    for path in (old, new):
        with Engine(path, dtype="bfloat16", skip_tokenizer=True) as cold:
            off = ask(cold)[0]
            for name in paths:
                cold.load(name, paths[name])
            expected[path] = answers(cold)
            assert expected[path][None] == expected[path]["zero"] == off != expected[path]["real"]
    assert expected[old] != expected[new]
    with Engine(old, dtype="bfloat16", skip_tokenizer=True) as engine:
        for name in paths:
            engine.load(name, paths[name])
        yield types.SimpleNamespace(engine=engine, old=old, new=new, expected=expected, paths=paths)
        assert engine.process.poll() is None, engine.log()


@pytest.fixture
def engine(world):
    """Holding the old weights, with an empty cache; whatever the test did is over after it."""
    call(world.engine, "update_weights_from_disk", model_path=str(world.old), weight_version="old")
    yield world.engine
    world.engine.call("/continue_generation", {})
    assert world.engine.get("/weight_update_status").json()["session"]["state"] == "idle"
    now = world.engine.get("/server_info").json()["internal_states"][0]
    assert now["leases"] == now["running"] == now["queued"] == 0


# ---- routes ----

def chunks(path, n=50):
    named = list(read(path).items())
    return [named[i: i + n] for i in range(0, len(named), n)]


def by_disk(engine, path, flush):
    call(engine, "update_weights_from_disk", model_path=str(path), flush_cache=flush)


def by_tensors(engine, path, flush):
    for chunk in chunks(path):
        call(engine, "update_weights_from_tensor", serialized_named_tensors=[forms.plain(chunk)], flush_cache=flush)


def by_buckets(engine, path, flush):
    for chunk in chunks(path):
        call(engine, "update_weights_from_tensor", serialized_named_tensors=[forms.plain(forms.flattened(chunk))],
             flush_cache=flush, load_format="flattened_bucket")


def by_session(engine, path, flush):
    call(engine, "begin_weight_update")
    for chunk in chunks(path, 3):
        call(engine, "update_weights_from_tensor", serialized_named_tensors=[forms.plain(chunk)], flush_cache=flush)
    call(engine, "end_weight_update", complete_base=True, flush_cache=flush)


def post_image(engine, image, status=200, **query):
    reply = requests.post(engine.url + "/update_weights_from_safetensors", params=query, data=image, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


def by_safetensors(engine, path, flush):
    post_image(engine, save(read(path)), complete_base="true", flush_cache=str(flush).lower())


def by_push(engine, path, flush):
    words = ["--transport", "safetensors", "--pause", "retract"] if flush else ["--transport", "sglang"]
    done = subprocess.run([BINARY, "push", "--engine", engine.url, "--base", path, "--json", *words], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0 and json.loads(done.stdout)["success"], done.stderr


ROUTES = [by_disk, by_tensors, by_buckets, by_session, by_safetensors, by_push]


@pytest.mark.parametrize("flush", [True, False], ids=["flush", "no flush"])
@pytest.mark.parametrize("route", ROUTES)
def test_cases_7_and_15_an_update_is_a_cold_start_on_the_new_weights(engine, world, route, flush):
    """With and without the flag no page of the old weights is used, of no adapter; biases change with the weights under the
    wrapper of an adapter too, and an adapter of zeros stays the base to the bit. And back again."""
    for path in (world.new, world.old):
        for adapter in ADAPTERS:
            ask(engine, adapter)
            assert ask(engine, adapter)[1] > 0
        route(engine, path, flush)
        for adapter in ADAPTERS:
            answer, cached = ask(engine, adapter)
            assert cached == 0, adapter
            assert answer == world.expected[path][adapter], adapter
            answer, cached = ask(engine, adapter)
            assert cached > 0 and answer == world.expected[path][adapter], adapter


@pytest.mark.parametrize("route", ROUTES)
def test_case_15_memory_given_back_and_everything_sent_again(engine, world, route):
    """Release, resume, all tensors by their plain names, then the adapter."""
    engine.post("/release_memory_occupation", {"tags": None})
    engine.post("/resume_memory_occupation", {"tags": None})
    assert engine.post("/generate", {"input_ids": PROMPT}).status_code == 503
    route(engine, world.new, False)
    tensors = load_file(world.paths["real"] / "adapter_model.safetensors")
    config = json.loads((world.paths["real"] / "adapter_config.json").read_text())
    call(engine, "load_lora_adapter_from_tensors", lora_name="real", config_dict=config, upsert=True,
         serialized_tensors=forms.plain(tensors))
    assert answers(engine) == world.expected[world.new]


def test_case_15_one_bias_alone(engine, world):
    """A single vector is an update too: it changes what is computed, and nothing but itself."""
    before = call(engine, "weights_checker")["ranks"][0]["checksums"]
    bias = read(world.new)[Q_BIAS]
    call(engine, "update_weights_from_tensor", serialized_named_tensors=[forms.plain([(Q_BIAS, bias)])])
    after = call(engine, "weights_checker")["ranks"][0]["checksums"]
    assert {name for name in before if before[name] != after[name]} == {Q_BIAS}
    assert answers(engine) != world.expected[world.old]
    call(engine, "update_weights_from_tensor", 400, serialized_named_tensors=[
        forms.plain([(Q_BIAS.replace(".bias", ".base_layer.bias2"), bias)])])


# ---- failures ----

def edit_json(path, **fields):
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **fields}))


def last_tensor(path):
    return sorted(load_file(files(path)[-1]))[-1]


def replace_last(path, change):
    name = last_tensor(path)
    rewrite(path, lambda key, tensor: change(tensor) if key == name else tensor)


def cut(path, n):
    file = files(path)[-1]
    os.truncate(file, file.stat().st_size - n if n < 0 else n)


def to_fifo(path):
    path.unlink()
    os.mkfifo(path)


def escape(path):
    """A shard outside of the directory, by way of the index."""
    file = files(path)[-1]
    outside = path.parent / "outside.safetensors"
    shutil.move(file, outside)
    names = {name: f.name for f in files(path) for name in load_file(f)}
    index = {"metadata": {}, "weight_map": {**names, **{name: "../outside.safetensors" for name in load_file(outside)}}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


DIRECTORIES = {
    "another hidden size": lambda p: (shutil.rmtree(p), shutil.copytree(make_tiny_models.write("llama-llama3"), p)),
    "another family": lambda p: (shutil.rmtree(p), shutil.copytree(make_tiny_models.write("qwen3-gqa"), p)),
    "another head dimension": lambda p: edit_json(p / "config.json", head_dim=10),
    "another rotation": lambda p: edit_json(p / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 77.0}),
    "another epsilon": lambda p: edit_json(p / "config.json", rms_norm_eps=0.1),
    "another head count": lambda p: edit_json(p / "config.json", num_key_value_heads=1),
    "a quantised checkpoint": lambda p: edit_json(p / "config.json", quantization_config={"quant_method": "fp8"}),
    "no config": lambda p: (p / "config.json").unlink(),
    "a config that is cut": lambda p: os.truncate(p / "config.json", 100),
    "a shard missing": lambda p: files(p)[-1].unlink(),
    "the last byte missing": lambda p: cut(p, -1),
    "a shard cut in its middle": lambda p: cut(p, files(p)[-1].stat().st_size // 2),
    "a shard of its length only": lambda p: cut(p, 8),
    "an empty shard": lambda p: cut(p, 0),
    "a shard that is no file": lambda p: (files(p)[-1].unlink(), (p / "x").mkdir(), (p / "x").rename(p / "model.safetensors")),
    "a fifo": lambda p: to_fifo(files(p)[-1]),
    "a shard elsewhere": escape,
    "NaN at the end": lambda p: replace_last(p, lambda t: t.index_fill(0, torch.tensor([t.shape[0] - 1]), float("nan"))),
    "infinity at the end": lambda p: replace_last(p, lambda t: t.index_fill(0, torch.tensor([0]), float("inf"))),
    "a row less": lambda p: replace_last(p, lambda t: t[:-1]),
    "a dimension more": lambda p: replace_last(p, lambda t: t[None]),
    "bytes": lambda p: replace_last(p, lambda t: t.to(torch.uint8)),
    "8-bit floats": lambda p: replace_last(p, lambda t: t.to(torch.float8_e4m3fn)),
    "a tensor missing": lambda p: rewrite(p, lambda name, t: None if name == last_tensor(p) else t),
    "a bias missing": lambda p: rewrite(p, lambda name, t: None if name == Q_BIAS else t),
}


def test_case_9_a_directory_that_fails_changes_nothing(engine, world, tmp_path):
    """However late the fault is found: bits, checksums, version and cache as before; the good directory goes through after it."""
    before = state(engine)
    ask(engine, "real"), ask(engine)
    for fault, damage in DIRECTORIES.items():
        path = shutil.copytree(world.new, tmp_path / fault.replace(" ", "-") / "model")
        damage(path)
        message = call(engine, "update_weights_from_disk", 400, model_path=str(path), weight_version="never")["message"]
        assert message, fault
        assert state(engine) == before, fault
        assert answers(engine) == world.expected[world.old], fault
    assert ask(engine, "real")[1] > 0
    by_disk(engine, world.new, True)
    assert answers(engine) == world.expected[world.new]


def streams(engine, bad):
    """The last of several buckets is bad; every route answers 400 and what it began is over."""
    good = [(UP, bad[UP][1])] if UP in bad else []
    yield lambda named: call(engine, "update_weights_from_tensor", 400, weight_version="never",
                             serialized_named_tensors=[forms.plain(good + named)])
    yield lambda named: call(engine, "update_weights_from_tensor", 400, weight_version="never", load_format="flattened_bucket",
                             serialized_named_tensors=[forms.plain(forms.flattened(good + named))])
    yield lambda named: post_image(engine, save(dict(good + named)), 400, weight_version="never")


def test_cases_9_18_and_70_tensors_that_are_none_of_this_model(engine, world):
    """Behind a good tensor in the same call: names of nothing, packed and scaled weights of quantised trainers, values that are
    no numbers. The message names the tensor."""
    base = read(world.new)
    weight = base[UP]
    bad = {
        "packed": (UP.replace("up", "gate"), torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8)),
        "packed, of the right shape": (UP.replace("up", "gate"), weight.to(torch.uint8)),
        "int8": (UP.replace("up", "gate"), weight.to(torch.int8)),
        "float8": (UP.replace("up", "gate"), weight.to(torch.float8_e5m2)),
        "float64": (UP.replace("up", "gate"), weight.double()),
        "bool": (UP.replace("up", "gate"), weight > 0),
        "a scale": (UP + "_scale", torch.ones(1)),
        "absmax": (UP + ".absmax", torch.ones(8)),
        "NaN": (Q_BIAS, base[Q_BIAS] * float("nan")),
        "no number in bfloat16": (UP.replace("up", "gate"), torch.full_like(weight, 3.4e38, dtype=torch.float32)),
        "transposed": (UP.replace("up", "gate"), weight.T.contiguous()),
        "a layer too many": (UP.replace("layers.1", "layers.2"), weight.clone()),
        "a layer below zero": (UP.replace("layers.1", "layers.-1"), weight.clone()),
        "another model's": ("transformer.h.0.attn.c_attn.weight", weight.clone()),
        "a path": ("../../" + UP, weight.clone()),
        "empty": (Q_BIAS, torch.zeros(0)),
        "an adapter's, of no name": (f"base_model.model.{UP[:-7]}.lora_A.weight", torch.zeros(8, weight.shape[1])),
        "an adapter's, unknown": (f"ghost:{UP[:-7]}.lora_A.weight", torch.zeros(8, weight.shape[1])),
    }
    before = state(engine)
    for send in streams(engine, {UP: (UP, weight)}):
        for fault, (name, tensor) in bad.items():
            message = send([(name, tensor)])["message"]
            assert name.split(":")[0][:60] in message, (fault, message)
            if tensor.dtype == torch.uint8:
                assert "U8" in message, message
            assert state(engine) == before, fault
    assert answers(engine) == world.expected[world.old]


def test_case_18_an_update_of_nothing_is_a_failure(engine):
    before = state(engine)
    route = "update_weights_from_tensor"
    call(engine, route, 400, serialized_named_tensors=[forms.plain([])])
    call(engine, route, 400, serialized_named_tensors=[forms.plain({})])
    call(engine, route, 400, load_format="flattened_bucket", serialized_named_tensors=[
        forms.plain({"flattened_tensor": torch.empty(0, dtype=torch.uint8), "metadata": []})])
    call(engine, route, 400, load_format="dtensor", serialized_named_tensors=[forms.plain([])])
    call(engine, route, 400)
    post_image(engine, save({}), 400)
    call(engine, "begin_weight_update")
    call(engine, "end_weight_update", 400)
    assert state(engine) == before


@pytest.mark.parametrize("count", [0, 2, 3])
def test_case_64_one_payload_for_each_rank(engine, world, count):
    """There is one rank here: another count is refused, whichever of the payloads is good."""
    before = state(engine)
    payload = forms.plain(list(read(world.new).items()))
    message = call(engine, "update_weights_from_tensor", 400, serialized_named_tensors=[payload] * count)["message"]
    assert "rank" in message and str(count) in message
    assert state(engine) == before


def test_case_46_the_frozen_base_in_place_of_the_declared_adapter(engine, world):
    """Names as they lie under PEFT's wrapper, and not one tensor of the adapter."""
    before = state(engine), answers(engine)
    call(engine, "begin_weight_update", adapters=["real"])
    named = [(name.replace("_proj.", "_proj.base_layer."), tensor) for name, tensor in read(world.old).items()]
    reply = engine.post("/update_weights_from_tensor", {"serialized_named_tensors": [forms.plain(named)], "flush_cache": False})
    assert reply.status_code in (200, 400)
    assert "real" in call(engine, "end_weight_update", 400)["message"]
    assert (state(engine), answers(engine)) == before


def test_case_60_a_base_with_the_adapter_merged_in_is_seen(engine, world):
    """`sync_base` false refuses it; where it is allowed the receipt counts base tensors, and digests tell which they are."""
    def digests():
        return {name: item["xxh3"] for name, item in engine.get("/weight_digests").json()["tensors"].items()}

    before, merged = digests(), (UP, trained(UP, read(world.old)[UP]))
    call(engine, "begin_weight_update", sync_base=False)
    message = call(engine, "update_weights_from_tensor", 400, serialized_named_tensors=[forms.plain([merged])])["message"]
    assert "sync_base" in message and UP in message
    call(engine, "end_weight_update", abort=True)
    assert digests() == before
    receipt = call(engine, "update_weights_from_tensor", serialized_named_tensors=[forms.plain([merged])])["receipt"]
    assert receipt["base_tensors"] == 1
    after = digests()
    assert {name for name in before if before[name] != after[name]} == {UP}


def test_case_25_a_pickle_that_wants_to_run_something(engine, world, tmp_path):
    """By every route that takes pickles: refused by the name of what it calls, and not run."""
    class Call:
        def __init__(self, function, *arguments):
            self.what = function, arguments

        def __reduce__(self):
            return self.what

    witness = tmp_path / "it-ran"
    config = json.loads((world.paths["real"] / "adapter_config.json").read_text())
    before = state(engine)
    for hostile in (Call(os.system, f"touch {witness}"), Call(eval, f"open({str(witness)!r}, 'w')"), Call(os.mkdir, str(witness)),
                    Call(torch.load, str(witness)), Call(getattr, "text", "upper")):
        for payload in (hostile, [(UP, hostile)], {UP: hostile}, [(UP, read(world.old)[UP]), hostile]):
            body = {"serialized_named_tensors": [forms.text(pickle.dumps(payload))]}
            message = call(engine, "update_weights_from_tensor", 400, **body)["message"]
            assert "payload names" in message and "nothing of it was run" in message, message
            call(engine, "update_weights_from_tensor", 400, load_format="flattened_bucket", **body)
            call(engine, "load_lora_adapter_from_tensors", 400, lora_name="real", config_dict=config, upsert=True, **body)
    assert not witness.exists() and state(engine) == before
    assert answers(engine) == world.expected[world.old]
