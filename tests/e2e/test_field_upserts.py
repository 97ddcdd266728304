"""Field case 3: an upsert of a live adapter goes over whole or leaves no trace. Every way in which it can fail, by every
route that carries adapters; and what it may change when it succeeds: rank, scale, target modules."""

import base64
import json
import os
import pickle
import subprocess
import threading

import pytest
import requests
import torch
from safetensors.torch import load_file, save

from tests.e2e import trainer_forms as forms
from tests.e2e.observe import descriptors, resident
from tools.engine import BINARY, Engine

PROMPT = [5, 17, 40, 8, 99, 3, 250]
SIBLINGS = ["qv-r1", "all-linear-r16", "rslora-r64", "embed-head-r16", "fused-r8", "patterns"]


class Adapter:
    """Config and tensors, and an image of them that a fault may have damaged."""

    def __init__(self, config, tensors, cut=None):
        self.config, self.tensors, self.cut = config, tensors, cut

    @classmethod
    def read(cls, path):
        return cls(json.loads((path / "adapter_config.json").read_text()), load_file(path / "adapter_model.safetensors"))

    def cut_off(self, data):
        return data if self.cut is None else data[: int(len(data) * self.cut)]

    def pickled(self, payload):
        return base64.b64encode(self.cut_off(pickle.dumps(payload))).decode()

    def image(self):
        return self.cut_off(save(self.tensors))


# ---- the routes: each says whether the engine took everything ----

def call(engine, route, **body):
    reply = engine.post("/" + route, body)
    assert reply.json()["success"] is (reply.status_code == 200), reply.text
    assert reply.status_code in (200, 400), reply.text
    return reply.status_code == 200


def by_load_call(engine, name, adapter, tmp_path):
    return call(engine, "load_lora_adapter_from_tensors", lora_name=name, config_dict=adapter.config, upsert=True,
                serialized_tensors=adapter.pickled(adapter.tensors))


def bucket_of(named):
    return forms.flattened(named) if named else {"flattened_tensor": torch.empty(0, dtype=torch.uint8), "metadata": []}


def by_load_call_of_a_bucket(engine, name, adapter, tmp_path):
    return call(engine, "load_lora_adapter_from_tensors", lora_name=name, config_dict=adapter.config, upsert=True,
                serialized_named_tensors=[adapter.pickled(bucket_of(adapter.tensors.items()))],
                load_format="flattened_bucket")


def session(engine, name, adapter, send):
    """The rest of the stream comes even if a bucket was refused: a trainer that reads the last reply only."""
    if not call(engine, "register_lora_adapter", lora_name=name, config_dict=adapter.config):
        return False
    assert call(engine, "begin_weight_update", sync_base=False, adapters=[name])
    named = [(f"{name}:{key}", tensor) for key, tensor in adapter.tensors.items()]
    for bucket in [named[i: i + 5] for i in range(0, len(named), 5)]:
        send(bucket)
    return call(engine, "end_weight_update", weight_version="new")


def by_session(engine, name, adapter, tmp_path):
    return session(engine, name, adapter, lambda bucket: call(
        engine, "update_weights_from_tensor", serialized_named_tensors=[adapter.pickled(bucket)], flush_cache=False))


def by_session_of_buckets(engine, name, adapter, tmp_path):
    return session(engine, name, adapter, lambda bucket: call(
        engine, "update_weights_from_tensor", serialized_named_tensors=[adapter.pickled(bucket_of(bucket))],
        flush_cache=False, load_format="flattened_bucket"))


def post_image(engine, image, config=None, **query):
    headers = {} if config is None else {"X-Lora-Config": json.dumps(config)}
    reply = requests.post(engine.url + "/update_weights_from_safetensors", params=query, data=image, headers=headers, timeout=60)
    assert reply.status_code in (200, 400), reply.text
    return reply.status_code == 200


def by_safetensors(engine, name, adapter, tmp_path):
    return post_image(engine, adapter.image(), adapter.config, lora_name=name, weight_version="new")


def by_session_of_safetensors(engine, name, adapter, tmp_path):
    return session(engine, name, adapter, lambda bucket: post_image(engine, adapter.cut_off(save(dict(bucket)))))


def push(engine, name, adapter, tmp_path, transport):
    path = tmp_path / transport
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(adapter.config))
    (path / "adapter_model.safetensors").write_bytes(adapter.image())
    done = subprocess.run([BINARY, "push", "--engine", engine.url, "--adapter", f"{name}={path}", "--version", "new",
                           "--transport", transport, "--json"], capture_output=True, text=True, timeout=60)
    codes = (0, 1, 3) if transport == "sglang-load" else (0, 1)  # 3: it takes nothing back
    assert done.returncode in codes, done.stderr
    if done.stdout:  # empty when the files themselves cannot be read
        assert json.loads(done.stdout)["success"] is (done.returncode == 0)
    return done.returncode == 0


def by_push(engine, name, adapter, tmp_path):
    return push(engine, name, adapter, tmp_path, "safetensors")


def by_push_of_a_session(engine, name, adapter, tmp_path):
    return push(engine, name, adapter, tmp_path, "sglang")


def by_push_of_a_load_call(engine, name, adapter, tmp_path):
    return push(engine, name, adapter, tmp_path, "sglang-load")


ROUTES = [by_load_call, by_load_call_of_a_bucket, by_session, by_session_of_buckets, by_safetensors, by_session_of_safetensors,
          by_push, by_push_of_a_session, by_push_of_a_load_call]


# ---- the faults ----

def last(adapter):
    return max(key for key in adapter.tensors if "up_proj.lora_B" in key)


def with_tensor(adapter, key, tensor):
    return Adapter(adapter.config, {**adapter.tensors, key: tensor})


def without(adapter, word):
    return Adapter(adapter.config, {key: tensor for key, tensor in adapter.tensors.items() if word not in key})


def with_config(adapter, **fields):
    return Adapter({**adapter.config, **fields}, adapter.tensors)


def renamed(adapter, old, new):
    return Adapter(adapter.config, {key.replace(old, new): tensor for key, tensor in adapter.tensors.items()})


def poisoned(adapter, value):
    tensor = adapter.tensors[last(adapter)].float().clone()
    tensor[-1, -1] = value
    return with_tensor(adapter, last(adapter), tensor)


def of_rank(adapter, rank):
    """Whole in itself, padded with zeros: only the engine's maximum speaks against it."""
    def pad(key, tensor):
        shape = (rank, tensor.shape[1]) if "lora_A" in key else (tensor.shape[0], rank)
        wide = torch.zeros(shape, dtype=tensor.dtype)
        wide[: tensor.shape[0], : tensor.shape[1]] = tensor
        return wide
    return Adapter({**adapter.config, "r": rank}, {key: pad(key, tensor) for key, tensor in adapter.tensors.items()})


FAULTS = {
    "a wrong shape in the last layer": lambda a: with_tensor(a, last(a), a.tensors[last(a)][:-1]),
    "a transposed tensor": lambda a: with_tensor(a, last(a), a.tensors[last(a)].T.contiguous()),
    "one dimension": lambda a: with_tensor(a, last(a), a.tensors[last(a)].flatten()),
    "a rank over the maximum": lambda a: of_rank(a, 128),
    "a rank that only the config has": lambda a: with_config(a, r=16),
    "a rank that only the tensors have": lambda a: Adapter(a.config, of_rank(a, 16).tensors),
    "a misspelt name": lambda a: renamed(a, "layers.1.mlp.up_proj.lora_B", "layers.1.mlp.up_proj.lora_b"),
    "a misspelt module": lambda a: renamed(a, "layers.1.mlp.up_proj", "layers.1.mlp.upp_proj"),
    "a layer too many": lambda a: renamed(a, "layers.1.", "layers.2."),
    "only the names of another model": lambda a: renamed(a, "model.layers", "decoder.blocks"),
    "a factor missing": lambda a: without(a, "layers.1.mlp.up_proj.lora_B"),
    "a module missing": lambda a: without(a, "layers.1.mlp.up_proj"),
    "modules that the config has not": lambda a: with_config(a, target_modules=["q_proj"]),
    "no tensors": lambda a: Adapter(a.config, {}),
    "half of the payload": lambda a: Adapter(a.config, a.tensors, 0.5),
    "all but the end of the payload": lambda a: Adapter(a.config, a.tensors, 0.999),
    "a byte type": lambda a: with_tensor(a, last(a), a.tensors[last(a)].to(torch.uint8)),
    "an integer type": lambda a: with_tensor(a, last(a), a.tensors[last(a)].to(torch.int64)),
    "a float of 64 bits": lambda a: with_tensor(a, last(a), a.tensors[last(a)].double()),
    "a float of 8 bits": lambda a: with_tensor(a, last(a), a.tensors[last(a)].to(torch.float8_e4m3fn)),
    "NaN": lambda a: poisoned(a, float("nan")),
    "infinity": lambda a: poisoned(a, float("-inf")),
    "a number that is none in bfloat16": lambda a: poisoned(a, 3.4e38),
    "DoRA": lambda a: with_config(a, use_dora=True),
    "a rank of no size": lambda a: with_config(a, r=0),
    "a magnitude vector": lambda a: with_tensor(a, last(a).replace("lora_B", "lora_magnitude_vector"), torch.ones(160)),
    "a saved head": lambda a: with_tensor(a, "base_model.model.lm_head.weight", torch.ones(320, 64)),
}


# ---- the engine ----

@pytest.fixture(scope="module")
def old(adapter_dirs):
    return Adapter.read(adapter_dirs["seven-r8"])


@pytest.fixture(scope="module")
def new(old):
    return Adapter(old.config, {key: -tensor if "lora_B" in key else tensor for key, tensor in old.tensors.items()})


@pytest.fixture(scope="module")
def engine(tiny_dir, adapter_dirs, old, new):
    with pytest.MonkeyPatch.context() as patch:
        # In a build with the sanitizer, else of no effect: what was freed counts as free soon.
        patch.setenv("ASAN_OPTIONS", os.environ.get("ASAN_OPTIONS", "") + ":quarantine_size_mb=1")
        engine = Engine(tiny_dir, "--max-lora-rank", 64, "--max-loaded-loras", 12, dtype="bfloat16", skip_tokenizer=True)
    with engine:
        for name in SIBLINGS:
            engine.load(name, adapter_dirs[name])
        assert by_load_call(engine, "new", new, None)
        assert by_load_call(engine, "old", old, None)
        yield engine
        assert engine.process.poll() is None, engine.log()


def bits(engine, name):
    return engine.score([PROMPT], name, new_tokens=4)


@pytest.fixture(scope="module")
def expected(engine):
    """The bits of every adapter, from one that was loaded by itself."""
    found = {name: bits(engine, name) for name in [*SIBLINGS, "old", "new", None]}
    assert len({str(score) for score in found.values()}) == len(found)
    return found


@pytest.fixture
def live(engine, expected, old):
    """The name that is upserted, holding the old adapter."""
    assert by_load_call(engine, "live", old, None)
    assert call(engine, "update_weight_version", new_version="old")
    yield "live"
    assert engine.get("/weight_update_status").json()["session"]["state"] == "idle"
    engine.unload("live")


def identity(engine):
    """Which versions of which adapters are served, and the name of the weights."""
    return engine.get("/server_info").json()["adapters"], engine.get("/model_info").json()["weight_version"]


class Witness:
    """Asks for the adapter for as long as the block lasts and keeps what it was answered."""

    def __init__(self, engine, name):
        self.engine, self.name, self.over, self.seen, self.error = engine, name, False, [], None
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        body = {"input_ids": PROMPT, "lora_path": self.name, "return_logprob": True, "logprob_start_len": 0,
                "sampling_params": {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0.0}}
        with requests.Session() as http:
            while not self.over or not self.seen:
                reply = http.post(self.engine.url + "/generate", json=body, timeout=60)
                if reply.status_code != 200:
                    self.error = reply.text
                    return
                meta = reply.json()["meta_info"]
                self.seen.append([item[0] for item in meta["input_token_logprobs"] + meta["output_token_logprobs"]])

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.over = True
        self.thread.join()
        assert self.error is None, self.error


def flat(scores):
    return scores[0].prompt + scores[0].output


@pytest.mark.parametrize("route", ROUTES)
def test_case_3_an_upsert_that_fails_leaves_the_adapter_bit_identical(engine, live, expected, new, tmp_path, route):
    """Before, during and after each fault the answers are the old ones; the good upsert after all of them goes through."""
    before = identity(engine)
    with Witness(engine, live) as witness:
        for fault, damage in FAULTS.items():
            assert not route(engine, live, damage(new), tmp_path), fault
            assert identity(engine) == before, fault
            assert bits(engine, live) == expected["old"], fault
    assert all(answer == flat(expected["old"]) for answer in witness.seen)
    assert route(engine, live, new, tmp_path)
    assert bits(engine, live) == expected["new"] and identity(engine) != before


@pytest.mark.parametrize("route", ROUTES)
def test_case_3_an_upsert_switches_the_whole_adapter(engine, live, expected, adapter_dirs, tmp_path, route):
    """Other ranks, scales, target modules, fused names, per-module ranks: one after another in one name, answers of the old
    or the new one only, never of a mix. Cases 1 and 14 too: nothing of the last tenant is left, in no cache or buffer."""
    held = "old"
    for name in [*SIBLINGS, *SIBLINGS[::-2]]:
        with Witness(engine, live) as witness:
            assert route(engine, live, Adapter.read(adapter_dirs[name]), tmp_path), name
        assert all(answer in (flat(expected[held]), flat(expected[name])) for answer in witness.seen)
        assert bits(engine, live) == expected[name], name
        held = name
    assert bits(engine, None) == expected[None]


@pytest.mark.parametrize("route", ROUTES[:6])
def test_case_39_upserts_leave_no_descriptor_and_no_memory_behind(engine, live, expected, old, new, tmp_path, route):
    """Neither those that succeed nor those that are refused."""
    def rounds(n):
        for i in range(n):
            assert route(engine, live, (new, old)[i % 2], tmp_path)
            assert not route(engine, live, FAULTS["NaN"](new), tmp_path)
            assert not route(engine, live, FAULTS["all but the end of the payload"](new), tmp_path)

    rounds(30)
    files, memory = descriptors(engine), resident(engine)
    rounds(60)
    assert descriptors(engine) <= files and resident(engine) - memory < 6 << 20
    assert bits(engine, live) == expected["old"]
