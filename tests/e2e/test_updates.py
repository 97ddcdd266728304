"""The update routes of SGLang's two generations, as specifications: every default, every refusal with the words that
clients look for, and after each refusal the bits of all weights as before."""

import concurrent.futures
import json
import os
import pathlib
import shutil
import threading
import time

import pytest
import requests
import torch
from safetensors.torch import load_file

from tests.e2e import trainer_forms as forms
from tools.engine import Engine

PROMPT = [5, 17, 40, 8, 99, 3, 250]
UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def engine(tiny_dir):
    with Engine(tiny_dir, "--max-lora-rank", 64, "--max-loaded-loras", 4, dtype="float32", skip_tokenizer=True) as engine:
        yield engine
        assert engine.process.poll() is None, engine.log()


@pytest.fixture(autouse=True)
def clean(engine):
    """Every test begins and ends without adapters, sessions and pauses."""
    yield
    engine.post("/end_weight_update", {"abort": True})
    engine.call("/continue_generation", {})
    for card in engine.get("/v1/models").json()["data"][1:]:
        engine.unload(card["id"])
    status = engine.get("/weight_update_status").json()["session"]
    assert status["state"] == "idle" and status["pending"] == 0
    assert engine.get("/server_info").json()["internal_states"][0]["leases"] == 0


@pytest.fixture
def restored(engine, tiny_dir):
    """Base weights that the test changes come back."""
    before = checksums(engine)
    yield before
    ask(engine, "update_weights_from_disk", model_path=str(tiny_dir), weight_version="default")
    assert checksums(engine) == before


class Adapter:
    def __init__(self, directory):
        self.config = json.loads((directory / "adapter_config.json").read_text())
        self.tensors = load_file(directory / "adapter_model.safetensors")

    def scaled(self, factor):
        """Another version: its B is factor times as large."""
        new = Adapter.__new__(Adapter)
        new.config = self.config
        new.tensors = {key: tensor * factor if "lora_B" in key else tensor for key, tensor in self.tensors.items()}
        return new

    def named(self, name):
        return [(f"{name}:{key}", tensor) for key, tensor in self.tensors.items()]

    def sums(self):
        return {key: forms.sha256(tensor) for key, tensor in self.tensors.items()}


@pytest.fixture(scope="module")
def adapter(adapter_dirs):
    return Adapter(adapter_dirs["seven-r8"])


@pytest.fixture(scope="module")
def other(adapter_dirs):
    return Adapter(adapter_dirs["qv-r1"])


def post(engine, route, **body):
    """Status and body of a reply; both say the same about success."""
    reply = engine.post("/" + route, body)
    answer = reply.json()
    assert answer["success"] is (reply.status_code == 200), (reply.status_code, answer)
    return reply.status_code, answer


def ask(engine, route, **body):
    status, answer = post(engine, route, **body)
    assert status == 200, answer
    return answer


def refuse(engine, route, *words, **body):
    """The call is a 400 that says the words, and no weight, adapter or version has changed."""
    before = state(engine)
    status, answer = post(engine, route, **body)
    assert status == 400, answer
    message = answer.get("message", answer.get("error_message"))
    for word in words:
        assert word in message, message
    assert state(engine) == before
    return message


def checksums(engine):
    return ask(engine, "weights_checker")["ranks"][0]["checksums"]


def state(engine):
    info = engine.get("/server_info").json()
    return checksums(engine), info["adapters"], engine.get("/model_info").json()["weight_version"]


def send(engine, named, **more):
    """One bucket of a session; nothing is flushed."""
    return ask(engine, "update_weights_from_tensor", **{"flush_cache": False, **more},
               serialized_named_tensors=[forms.plain(list(named))])


def load(engine, name, adapter, **more):
    return ask(engine, "load_lora_adapter_from_tensors", lora_name=name, config_dict=adapter.config,
               serialized_tensors=forms.plain(adapter.tensors), **more)


def register(engine, name, adapter, **more):
    return ask(engine, "register_lora_adapter", lora_name=name, config_dict=adapter.config, **more)


def bits(engine, name=None):
    return engine.score([PROMPT], name, new_tokens=8)


def cached(engine, prompt, **more):
    """Prompt tokens that were not computed again; asking puts the prompt into the cache."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "ignore_eos": True, "temperature": 0}, **more}
    return engine.generate(**body)["meta_info"]["cached_tokens"]


# ---- keys ----

ROUTES = ["register_lora_adapter", "begin_weight_update", "update_weights_from_tensor", "end_weight_update",
          "load_lora_adapter_from_tensors", "update_weights_from_disk", "update_weight_version", "prepare_weight_update",
          "commit_weight_update", "abort_weight_update", "weights_checker"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_key_that_is_not_known_is_refused_by_name(engine, route):
    refuse(engine, route, "flush_cahce", flush_cahce=False)


@pytest.mark.parametrize("route", ROUTES)
def test_a_body_that_is_no_object_is_refused(engine, route):
    for body in (b"[]", b"{", b"5", b'{"a": 1, "a": 2}', b'"x"'):
        reply = engine.http.post(f"{engine.url}/{route}", data=body, timeout=60)
        assert reply.status_code == 400 and reply.json()["success"] is False


def test_keys_of_sglangs_clients_that_mean_nothing_here_are_taken(engine):
    ask(engine, "begin_weight_update", rid=None, http_worker_ipc=None, selector="target")
    ask(engine, "end_weight_update", abort=True, rid="x")
    ask(engine, "weights_checker", allow_quant_error=False, selector="all", skip_tensor_list=None)


# ---- registration ----

def test_a_registration_answers_as_a_load_does(engine, adapter):
    answer = register(engine, "a", adapter, pinned=True)
    assert answer["error_message"] == "" and answer["pending"] is False and answer["pinned"] is True
    assert answer["loaded_adapters"] == {}  # its weights are still to come
    message = engine.post("/generate", {"input_ids": PROMPT, "lora_path": "a"}).json()["error"]["message"]
    assert "not loaded" in message and "awaiting publication" in message
    assert engine.unload("a")["loaded_adapters"] == {}


def test_a_name_that_is_registered_again_pins_no_more_than_one_that_is_new(tiny_dir, adapter):
    with Engine(tiny_dir, "--max-loras-per-batch", 2, skip_tokenizer=True) as engine:
        for _ in range(2):
            register(engine, "a", adapter)
            assert register(engine, "a", adapter, pinned=True)["pinned"] is True
        register(engine, "b", adapter)
        refuse(engine, "register_lora_adapter", "starvation", lora_name="b", config_dict=adapter.config, pinned=True)
        register(engine, "a", adapter)
        register(engine, "b", adapter, pinned=True)


def test_a_registration_is_checked_before_any_byte_moves(engine, adapter):
    config = adapter.config
    refuse(engine, "register_lora_adapter", "must not contain ':'", lora_name="a:b", config_dict=config)
    refuse(engine, "register_lora_adapter", "lora_name", config_dict=config)
    refuse(engine, "register_lora_adapter", "config_dict", lora_name="a")
    refuse(engine, "register_lora_adapter", "incompatible", "--max-lora-rank", lora_name="a", config_dict={**config, "r": 128})
    refuse(engine, "register_lora_adapter", "use_dora", lora_name="a", config_dict={**config, "use_dora": True})
    refuse(engine, "register_lora_adapter", "target_modules", lora_name="a", config_dict={**config, "target_modules": []})
    refuse(engine, "register_lora_adapter", "doesn't support adapters that add tokens", lora_name="a", config_dict=config,
           added_tokens_config={"<new>": 320})
    register(engine, "a", adapter, added_tokens_config={"<old>": 319})
    engine.unload("a")


def test_a_new_name_over_the_cap_is_not_registered_and_none_gives_way(engine, adapter, other):
    for name in "abcd":
        load(engine, name, other)
    before = {name: bits(engine, name) for name in "abcd"}
    refuse(engine, "register_lora_adapter", "max-loaded-loras", lora_name="e", config_dict=adapter.config)
    load(engine, "d", adapter, upsert=True)  # a name that is there may always come again
    assert bits(engine, "d") != before.pop("d")
    assert {name: bits(engine, name) for name in before} == before


# ---- load_lora_adapter_from_tensors ----

def test_a_load_over_the_cap_takes_the_place_of_the_name_used_longest_ago(engine, adapter, other):
    """A load that fails takes none; a name that gave way is refused, never served by another, until it is pushed
    again."""
    for name in "abcd":
        load(engine, name, other, pinned=name == "c")
    before = bits(engine, "a")
    broken = {**adapter.tensors, max(adapter.tensors): torch.zeros(1)}
    refuse(engine, "load_lora_adapter_from_tensors", "e", lora_name="e", config_dict=adapter.config,
           serialized_tensors=forms.plain(broken))
    assert set(load(engine, "e", adapter)["loaded_adapters"]) == set("acde")
    assert set(load(engine, "f", adapter)["loaded_adapters"]) == set("acef")
    for name in "bd":
        message = engine.post("/generate", {"input_ids": PROMPT, "lora_path": name}).json()["error"]["message"]
        assert "not loaded" in message and "gave way" in message and "push it again" in message
    load(engine, "b", other)
    assert bits(engine, "b") == before


def test_a_load_from_tensors_is_the_load_from_disk(engine, adapter, adapter_dirs):
    engine.load("disk", adapter_dirs["seven-r8"])
    answer = load(engine, "wire", adapter)
    assert set(answer["loaded_adapters"]) == {"disk", "wire"} and answer["error_message"] == ""
    assert answer["upsert"] is False and answer["checksums_verified"] is False
    assert answer["receipt"]["adapters"][0]["name"] == "wire"
    assert bits(engine, "wire") == bits(engine, "disk")


def test_upsert_is_off_by_default_and_replaces_when_asked(engine, adapter):
    load(engine, "a", adapter)
    before = bits(engine, "a")
    refuse(engine, "load_lora_adapter_from_tensors", "already loaded", lora_name="a", config_dict=adapter.config,
           serialized_tensors=forms.plain(adapter.scaled(2).tensors))
    assert bits(engine, "a") == before
    assert load(engine, "a", adapter.scaled(2), upsert=True)["upsert"] is True
    assert bits(engine, "a") != before


def test_checksums_guard_a_load(engine, adapter):
    sums = adapter.sums()
    first = next(iter(sums))
    call = {"lora_name": "a", "config_dict": adapter.config, "serialized_tensors": forms.plain(adapter.tensors)}
    route = "load_lora_adapter_from_tensors"
    refuse(engine, route, "[LORA-CHECK]", first, **call, expected_checksums={**sums, first: "0" * 64})
    refuse(engine, route, first, **call, expected_checksums={key: value for key, value in sums.items() if key != first})
    refuse(engine, route, "ghost", **call, expected_checksums={**sums, "ghost": "0" * 64})
    refuse(engine, route, "64 hex digits", **call, expected_checksums={**sums, first: "0" * 63})
    assert load(engine, "a", adapter, expected_checksums=sums)["checksums_verified"] is True


@pytest.mark.parametrize("payload, words", [
    ({}, ["neither"]),
    ({"serialized_tensors": "AAAA", "serialized_named_tensors": ["AAAA"]}, ["both"]),
    ({"serialized_tensors": ["AAAA"]}, ["serialized_tensors", "base64"]),
    ({"serialized_tensors": "####"}, ["serialized_tensors"]),
    ({"serialized_tensors": "AAAA"}, ["pickle"]),
    ({"serialized_tensors": ""}, ["serialized_tensors"]),
    ({"serialized_named_tensors": "AAAA"}, ["list"]),
    ({"serialized_named_tensors": []}, ["tensor-parallel rank", "came 0"]),
    ({"serialized_named_tensors": ["AAAA", "AAAA"]}, ["tensor-parallel rank", "came 2"]),
    ({"serialized_named_tensors": [5]}, ["serialized_named_tensors[0]"]),
    ({"serialized_tensors": "AAAA", "load_format": "my.loader"}, ["my.loader"]),
    ({"serialized_tensors": "AAAA", "load_format": "nccl_m2n"}, ["nccl_m2n"]),
    ({"serialized_tensors": "AAAA", "upsert": "perhaps"}, ["upsert"]),
])
def test_a_payload_that_is_none(engine, adapter, payload, words):
    refuse(engine, "load_lora_adapter_from_tensors", *words, lora_name="a", config_dict=adapter.config, **payload)


def test_a_load_without_tensors_or_of_which_nothing_matches(engine, adapter):
    route, config = "load_lora_adapter_from_tensors", adapter.config
    refuse(engine, route, lora_name="a", config_dict=config, serialized_tensors=forms.plain({}))
    renamed = {key.replace("_proj", "_other"): tensor for key, tensor in adapter.tensors.items()}
    refuse(engine, route, "_other", lora_name="a", config_dict=config, serialized_tensors=forms.plain(renamed))


def test_what_names_memory_of_the_sender_is_refused_at_once(engine, adapter):
    payload = forms.forked(adapter.tensors, "file_descriptor")
    refuse(engine, "load_lora_adapter_from_tensors", "file_descriptor", lora_name="a", config_dict=adapter.config,
           serialized_tensors=payload)


def shared_memory():
    """Objects of this process."""
    return set(pathlib.Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))


def counts(paths):
    """What torch counts in each."""
    return [int.from_bytes(path.read_bytes()[:4], "little") for path in paths]


@pytest.mark.parametrize("route, more", [
    ("load_lora_adapter_from_tensors", lambda text: {"serialized_tensors": text, "unknown_key": 1}),
    ("load_lora_adapter_from_tensors", lambda text: {"serialized_tensors": text, "upsert": "perhaps"}),
    ("load_lora_adapter_from_tensors", lambda text: {"serialized_tensors": text, "config_dict": 5}),
    ("load_lora_adapter_from_tensors", lambda text: {"serialized_named_tensors": [text, text]}),
    ("load_lora_adapter_from_tensors", lambda text: {"serialized_named_tensors": [text, "AAA"]}),
    ("update_weights_from_tensor", lambda text: {"serialized_named_tensors": [text], "load_format": "other"}),
    ("update_weights_from_tensor", lambda text: {"serialized_named_tensors": [text], "session_id": "not-open"}),
])
def test_a_refused_call_gives_shared_memory_back(engine, adapter, route, more):
    tensors = {name: tensor.clone() for name, tensor in adapter.tensors.items()}
    others = shared_memory()
    text = forms.forked(tensors)
    mine = shared_memory() - others
    assert counts(mine) == [2] * len(tensors)
    names = {"lora_name": "a", "config_dict": adapter.config} if route.startswith("load") else {}
    refuse(engine, route, **{**names, **more(text)})
    assert counts(mine) == [1] * len(tensors)


# ---- sessions ----

def test_one_session_at_a_time(engine):
    answer = ask(engine, "begin_weight_update")
    assert answer["sync_base"] is True and answer["base_mode"] in ("shadow", "in_place") and answer["session_id"]
    refuse(engine, "begin_weight_update", "already open", answer["session_id"])
    assert engine.get("/weight_update_status").json()["session"]["state"] == "open"
    ask(engine, "end_weight_update", abort=True)


@pytest.mark.parametrize("body, word", [
    ({"selector": "draft"}, "draft"), ({"selector": "all of them"}, "all of them"), ({"sync_base": "perhaps"}, "sync_base"),
    ({"adapters": "a"}, "adapters"), ({"lease_seconds": 0}, "lease_seconds"), ({"session_id": "x" * 65}, "session")])
def test_what_cannot_be_begun(engine, body, word):
    refuse(engine, "begin_weight_update", word, **body)
    assert engine.get("/weight_update_status").json()["session"]["state"] == "idle"


def test_an_end_without_a_session(engine):
    assert "session" in refuse(engine, "end_weight_update")


def test_several_adapters_and_base_tensors_in_one_session(engine, adapter, other, restored, tiny_dir):
    load(engine, "expected-a", adapter.scaled(2))
    base = load_file(tiny_dir / "model.safetensors")
    before = bits(engine)
    register(engine, "a", adapter)
    register(engine, "b", other)
    ask(engine, "begin_weight_update")
    named = [(UP, base[UP] * 1.5)] + adapter.scaled(2).named("a") + other.named("b")
    send(engine, named[: len(named) // 2], weight_version="7")
    assert bits(engine) == before and engine.get("/model_info").json()["weight_version"] != "7"
    send(engine, named[len(named) // 2:])
    answer = ask(engine, "end_weight_update", expected_lora_checksums={"a": adapter.scaled(2).sums(), "b": other.sums()})
    assert answer["checksums_verified"] is True
    receipt = answer["receipt"]
    assert receipt["weight_version"] == "7" and receipt["base_tensors"] == 1 and receipt["state"] == "published"
    assert [item["name"] for item in receipt["adapters"]] == ["a", "b"] and receipt["tensors"] == len(named)
    assert engine.get("/model_info").json()["weight_version"] == "7"
    assert bits(engine) != before
    assert bits(engine, "a") == bits(engine, "expected-a")  # both on the new base
    changed = {name for name, value in checksums(engine).items() if value != restored[name]}
    assert changed == {UP}


def test_an_adapter_session_leaves_the_base_alone_and_takes_none_of_it(engine, adapter, tiny_dir):
    base = load_file(tiny_dir / "model.safetensors")
    before = checksums(engine)
    register(engine, "a", adapter)
    ask(engine, "begin_weight_update", sync_base=False)
    refuse(engine, "update_weights_from_tensor", "sync_base", UP, serialized_named_tensors=[forms.plain([(UP, base[UP])])])
    send(engine, adapter.named("a"))
    refuse(engine, "end_weight_update", "did not come again", "sync_base")  # whoever does not look at replies
    ask(engine, "begin_weight_update", sync_base=False)
    send(engine, adapter.named("a"))
    ask(engine, "end_weight_update")
    assert checksums(engine) == before


def test_what_a_bucket_may_not_hold(engine, adapter, tiny_dir):
    base = load_file(tiny_dir / "model.safetensors")
    key, tensor = next(iter(adapter.tensors.items()))
    register(engine, "a", adapter)
    ask(engine, "begin_weight_update")

    def bucket(*words, named, **more):
        refuse(engine, "update_weights_from_tensor", *words, serialized_named_tensors=[forms.plain(named)], **more)

    bucket(key, named=[(key, tensor)])                                    # whose adapter is it?
    bucket("ghost", named=[(f"ghost:{key}", tensor)])                     # not registered
    bucket("without tensors", named=[])
    bucket("ghost.weight", named=[("ghost.weight", base[UP])])
    bucket("[160, 64]", "[64, 160]", named=[(UP, base[UP].T.contiguous())])
    packed = torch.zeros(32, 1, dtype=torch.uint8)
    bucket(UP, "U8", "[32, 1]", named=[(UP, packed)])                     # a quantised trainer
    bucket("inf", named=[(UP, base[UP] / 0)])
    bucket("session", named=[(UP, base[UP])], session_id="another")
    bucket("flattened", named=[(UP, base[UP])], load_format="flattened_bucket")
    send(engine, [(UP, base[UP])])
    bucket(UP, named=[(UP, base[UP])])                                    # twice in one session
    status = engine.get("/weight_update_status").json()["session"]
    assert status["state"] == "open" and status["tensors"] == 1           # all of these left the session as it was
    ask(engine, "end_weight_update", abort=True)


def test_an_abort_leaves_no_trace(engine, adapter, tiny_dir):
    base = load_file(tiny_dir / "model.safetensors")
    load(engine, "a", adapter)
    before = state(engine), bits(engine), bits(engine, "a")
    ask(engine, "begin_weight_update")
    send(engine, [(UP, base[UP] * 3)] + adapter.scaled(3).named("a"), weight_version="never")
    assert ask(engine, "end_weight_update", abort=True)["aborted"] is True
    assert (state(engine), bits(engine), bits(engine, "a")) == before


@pytest.mark.parametrize("wrong", ["digest", "missing tensor", "missing adapter", "tensor too many", "partial stream", "part of a pair"])
def test_an_end_that_fails_closes_the_session_and_leaves_no_trace(engine, adapter, wrong):
    load(engine, "a", adapter)
    before = state(engine), bits(engine, "a")
    new = adapter.scaled(2)
    named, sums = new.named("a"), {"a": new.sums()}
    first = next(iter(new.tensors))
    if wrong == "digest":
        sums["a"][first] = "0" * 64
    elif wrong == "missing tensor":
        named = named[1:]
    elif wrong == "missing adapter":
        sums["b"] = {"x": "0" * 64}
    elif wrong == "tensor too many":
        del sums["a"][first]
    elif wrong == "partial stream":
        named, sums = [item for item in named if "layers.0." in item[0]], None
    else:
        named, sums = named[1:], None
    ask(engine, "begin_weight_update", sync_base=False)
    send(engine, named, weight_version="never")
    message = refuse(engine, "end_weight_update", expected_lora_checksums=sums)
    if sums is not None:
        assert message.startswith("[LORA-CHECK]") and (first in message or "'b'" in message or "b" in message)
    if wrong == "partial stream":
        assert "partial stream" in message
    assert (state(engine), bits(engine, "a")) == before
    assert engine.get("/weight_update_status").json()["session"]["state"] == "idle"
    refuse(engine, "end_weight_update", "session")


def test_a_declared_adapter_without_tensors_is_a_failure(engine, adapter, tiny_dir):
    base = load_file(tiny_dir / "model.safetensors")
    load(engine, "a", adapter)
    ask(engine, "begin_weight_update", adapters=["a"])
    send(engine, [("model.layers.0.self_attn.q_proj.weight", base["model.layers.0.self_attn.q_proj.weight"])])
    refuse(engine, "end_weight_update", "'a'")


def test_only_declared_adapters_may_come(engine, adapter, other):
    register(engine, "a", adapter)
    register(engine, "b", other)
    ask(engine, "begin_weight_update", sync_base=False, new_lora_names=["a"])
    refuse(engine, "update_weights_from_tensor", "b", serialized_named_tensors=[forms.plain(other.named("b"))])
    send(engine, adapter.named("a"))
    ask(engine, "end_weight_update", expected_lora_checksums={"a": adapter.sums()})  # which shows that a is whole
    engine.unload("b")


def test_a_name_that_is_registered_again_serves_its_old_version_until_the_new_one_is_whole(engine, adapter, other):
    load(engine, "a", adapter)
    load(engine, "expected", other)
    before = bits(engine, "a")
    register(engine, "a", other)
    assert bits(engine, "a") == before
    ask(engine, "begin_weight_update", sync_base=False)
    send(engine, other.named("a"))
    assert bits(engine, "a") == before
    ask(engine, "end_weight_update")
    assert bits(engine, "a") == bits(engine, "expected")


def test_an_adapter_may_have_the_bare_names_that_peft_saves_without_its_prefix(engine, adapter):
    load(engine, "expected", adapter)
    register(engine, "a", adapter)
    ask(engine, "begin_weight_update", sync_base=False)
    send(engine, [(name.replace("base_model.model.", ""), tensor) for name, tensor in adapter.named("a")])
    ask(engine, "end_weight_update")
    assert bits(engine, "a") == bits(engine, "expected")


def test_two_threads_may_post_buckets_at_once(engine, adapter, other):
    load(engine, "expected", adapter)
    register(engine, "a", adapter)
    named = adapter.named("a")
    ask(engine, "begin_weight_update", sync_base=False)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: requests.post(engine.url + "/update_weights_from_tensor", json={
            "serialized_named_tensors": [forms.plain([item])], "flush_cache": False}, timeout=60).raise_for_status(), named))
    ask(engine, "end_weight_update", expected_lora_checksums={"a": adapter.sums()})
    assert bits(engine, "a") == bits(engine, "expected")


# ---- staged publication ----

def staged(engine, name, adapter):
    assert register(engine, name, adapter, defer_publish=True)["pending"] is True
    ask(engine, "begin_weight_update", sync_base=False)


def test_a_staged_name_is_unknown_until_the_session_commits(engine, adapter):
    staged(engine, "a@1", adapter)
    send(engine, adapter.named("a@1"))
    message = engine.post("/generate", {"input_ids": PROMPT, "lora_path": "a@1"}).json()["error"]["message"]
    assert "awaiting publication" in message
    refuse(engine, "register_lora_adapter", "a@1", lora_name="a@1", config_dict=adapter.config)
    refuse(engine, "unload_lora_adapter", "a@1", lora_name="a@1")
    ask(engine, "end_weight_update", expected_lora_checksums={"a@1": adapter.sums()})
    load(engine, "expected", adapter)
    assert bits(engine, "a@1") == bits(engine, "expected")


@pytest.mark.parametrize("option", [{"flush_cache": True}, {"abort_all_requests": True, "flush_cache": False},
                                    {"weight_version": "2", "flush_cache": False}, {}])
def test_a_staged_bucket_may_not_ask_for_what_touches_running_requests(engine, adapter, option):
    staged(engine, "a@1", adapter)
    refuse(engine, "update_weights_from_tensor", "staged", next(iter(option), "flush_cache"),
           serialized_named_tensors=[forms.plain(adapter.named("a@1"))], **option)


@pytest.mark.parametrize("how", ["no manifest", "wrong digest", "abort"])
def test_a_staged_session_that_fails_forgets_its_names(engine, adapter, how):
    staged(engine, "a@1", adapter)
    send(engine, adapter.named("a@1"))
    if how == "abort":
        ask(engine, "end_weight_update", abort=True)
    else:
        sums = None if how == "no manifest" else {"a@1": {**adapter.sums(), next(iter(adapter.tensors)): "0" * 64}}
        assert "a@1" in refuse(engine, "end_weight_update", expected_lora_checksums=sums)
    message = engine.post("/generate", {"input_ids": PROMPT, "lora_path": "a@1"}).json()["error"]["message"]
    assert "never been loaded" in message
    staged(engine, "a@1", adapter)  # the name is free again


def test_a_staged_name_must_be_fresh(engine, adapter):
    load(engine, "a", adapter)
    refuse(engine, "register_lora_adapter", "a", lora_name="a", config_dict=adapter.config, defer_publish=True)


def test_a_staged_name_of_a_dead_trainer_is_free_for_the_next(engine, adapter, other):
    """As long as no session holds it: registered again, also with another config, or unloaded."""
    register(engine, "a@1", other, defer_publish=True)  # and is never heard of again
    staged(engine, "a@1", adapter)
    refuse(engine, "register_lora_adapter", "waits for publication by the session", lora_name="a@1",
           config_dict=other.config, defer_publish=True)
    send(engine, adapter.named("a@1"), flush_cache=False)
    ask(engine, "end_weight_update", expected_lora_checksums={"a@1": adapter.sums()})
    load(engine, "same", adapter)
    assert bits(engine, "a@1") == bits(engine, "same")
    register(engine, "a@2", other, defer_publish=True)
    engine.unload("a@2")
    assert engine.get("/weight_update_status").json()["session"]["pending"] == 0


def test_a_staged_push_beside_running_requests(engine, adapter):
    load(engine, "a@1", adapter)
    expected = engine.score([PROMPT], "a@1", 300)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = [pool.submit(engine.score, [PROMPT], "a@1", 300) for _ in range(4)]
        staged(engine, "a@2", adapter.scaled(2))
        for item in adapter.scaled(2).named("a@2"):
            send(engine, [item])
        ask(engine, "end_weight_update", expected_lora_checksums={"a@2": adapter.scaled(2).sums()})
        new = engine.score([PROMPT], "a@2", 300)
        assert all(request.result() == expected for request in running)
    assert new != expected


# ---- outside a session ----

def test_a_bucket_outside_a_session_is_one_of_its_own(engine, restored, tiny_dir):
    base = load_file(tiny_dir / "model.safetensors")
    answer = ask(engine, "update_weights_from_tensor", serialized_named_tensors=[forms.plain([(UP, base[UP] * 0 + 1.5)])])
    assert answer["message"] == "Success" and answer["flush_cache"] is True and answer["abort_all_requests"] is False
    assert answer["receipt"]["base_tensors"] == 1
    assert engine.call("/get_weights_by_name", {"name": UP})[0][:5] == [1.5] * 5
    answer = ask(engine, "update_weights_from_tensor", weight_version="8", load_format="direct",
                 serialized_named_tensors=[forms.plain([(UP, base[UP])])])
    assert answer["message"] == "Success Weight version updated to 8."
    assert engine.get("/model_info").json()["weight_version"] == "8"


def test_a_bucket_that_fails_outside_a_session_leaves_no_trace(engine, tiny_dir):
    base = load_file(tiny_dir / "model.safetensors")
    named = [(UP, base[UP] * 2), ("ghost.weight", base[UP])]
    refuse(engine, "update_weights_from_tensor", "ghost.weight", weight_version="never",
           serialized_named_tensors=[forms.plain(named)])
    assert engine.get("/weight_update_status").json()["session"]["state"] == "idle"


def test_an_update_empties_the_prefix_cache_unless_told_not_to(engine, adapter):
    prompt = PROMPT * 20
    load(engine, "a", adapter)

    def update(**more):
        named = adapter.named("a")
        return ask(engine, "update_weights_from_tensor", serialized_named_tensors=[forms.plain(named)], **more)

    cached(engine, prompt)
    assert cached(engine, prompt) > 0
    assert update(flush_cache=False)["flush_cache"] is False
    assert cached(engine, prompt) > 0   # of the base, which no adapter touches
    update()
    assert cached(engine, prompt) == 0


def test_kv_of_an_old_version_is_never_used_for_a_new_one(engine, adapter):
    prompt = PROMPT * 20
    load(engine, "a", adapter)
    cached(engine, prompt, lora_path="a")
    assert cached(engine, prompt, lora_path="a") > 0
    ask(engine, "update_weights_from_tensor", flush_cache=False,
        serialized_named_tensors=[forms.plain(adapter.scaled(2).named("a"))])
    assert cached(engine, prompt, lora_path="a") == 0


# ---- versions and pauses ----

def long_request(engine, pool):
    """The meta_info of a request that runs to the end of the context, slowed down by others beside it and their
    logprobs."""
    body = {"input_ids": [PROMPT] * 48, "return_logprob": True, "top_logprobs_num": 20,
            "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True, "temperature": 0}}
    request = pool.submit(lambda: engine.generate(**body)[0]["meta_info"])
    deadline = time.monotonic() + 20
    while engine.get("/server_info").json()["internal_states"][0]["running"] == 0:
        assert time.monotonic() < deadline and not request.done()
        time.sleep(0.002)
    return request


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def version(engine):
    yield
    ask(engine, "update_weight_version", new_version="default")


def test_a_new_version_aborts_what_runs_unless_told_not_to(engine, pool, version):
    for body, reason in (({}, "abort"), ({"abort_all_requests": False}, "length")):
        request = long_request(engine, pool)
        engine.call("/pause_generation", {"mode": "in_place"})
        answer = ask(engine, "update_weight_version", new_version="9", **body)
        assert answer["new_version"] == "9" and answer["message"] == "Weight version updated to 9"
        assert answer["abort_all_requests"] is (reason == "abort")
        engine.call("/continue_generation", {})
        assert request.result(60)["finish_reason"]["type"] == reason
    ask(engine, "update_weight_version", new_version="9", abort_all_requests=False)  # the same again is fine


def test_what_is_no_version(engine):
    refuse(engine, "update_weight_version", "new_version")
    refuse(engine, "update_weight_version", "version", new_version="x" * 400)
    ask(engine, "begin_weight_update")
    refuse(engine, "update_weight_version", "session", new_version="9")


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_base_update_while_paused_goes_on_with_the_new_weights(engine, pool, restored, tiny_dir, mode):
    base = load_file(tiny_dir / "model.safetensors")
    request = long_request(engine, pool)
    engine.call("/pause_generation", {"mode": mode})
    ask(engine, "update_weights_from_tensor", flush_cache=mode == "retract", weight_version="new",
        serialized_named_tensors=[forms.plain([(UP, base[UP] * 1.5)])])
    engine.call("/continue_generation", {})
    meta = request.result(60)
    assert meta["finish_reason"]["type"] == "length"
    spans = meta["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "new"] and meta["weight_version"] == "new"
    assert spans[0]["start"] == 0 and spans[0]["end"] == spans[1]["start"] and spans[1]["end"] == meta["completion_tokens"]


def test_abort_all_requests_makes_way_for_a_base_update(engine, pool, restored, tiny_dir):
    base = load_file(tiny_dir / "model.safetensors")
    request = long_request(engine, pool)
    started = time.monotonic()
    ask(engine, "update_weights_from_tensor", abort_all_requests=True, serialized_named_tensors=[forms.plain([(UP, base[UP])])])
    assert time.monotonic() - started < 20
    assert request.result(60)["finish_reason"]["type"] == "abort"


def test_a_reply_names_the_adapter_and_its_version(engine, adapter):
    load(engine, "a", adapter)
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}, "lora_path": "a"}
    first = engine.generate(**body)["meta_info"]
    listed = engine.get("/server_info").json()["adapters"][0]
    assert first["lora_name"] == first["lora_path"] == "a" and first["lora_id"] == listed["lora_id"]
    load(engine, "a", adapter.scaled(2), upsert=True)
    assert engine.generate(**body)["meta_info"]["lora_id"] != first["lora_id"]
    meta = engine.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 2})["meta_info"]
    assert meta["lora_name"] is None and meta["lora_id"] is None


# ---- update_weights_from_disk ----

def test_an_update_from_disk(engine, restored, tiny_dir):
    base = load_file(tiny_dir / "model.safetensors")
    ask(engine, "update_weights_from_tensor", serialized_named_tensors=[forms.plain([(UP, base[UP] * 2)])])
    answer = ask(engine, "update_weights_from_disk", model_path=str(tiny_dir), weight_version="disk-1")
    assert answer["message"].startswith("Succeeded to update model weights.") and answer["num_paused_requests"] == 0
    assert answer["flush_cache"] is True and answer["receipt"]["weight_version"] == "disk-1"
    assert checksums(engine) == restored


def test_a_directory_that_cannot_be_read_changes_nothing(engine, tmp_path):
    refuse(engine, "update_weights_from_disk", "nowhere", model_path=str(tmp_path / "nowhere"))
    refuse(engine, "update_weights_from_disk", "model_path")
    refuse(engine, "update_weights_from_disk", "load_format", model_path=str(tmp_path), load_format="gguf")
    refuse(engine, "update_weights_from_disk", "manifest", model_path=str(tmp_path), manifest={"a": 1})


def test_an_update_from_disk_while_paused_counts_the_paused(engine, pool, tiny_dir):
    request = long_request(engine, pool)
    engine.call("/pause_generation", {"mode": "in_place"})
    answer = ask(engine, "update_weights_from_disk", model_path=str(tiny_dir), flush_cache=False)
    assert answer["num_paused_requests"] == 48
    engine.call("/continue_generation", {})
    assert request.result(60)["finish_reason"]["type"] == "length"


# ---- looking at weights ----

def test_weights_by_name(engine, tiny_dir):
    base = load_file(tiny_dir / "model.safetensors")
    url = engine.url + "/get_weights_by_name"
    rows = requests.get(url, json={"name": UP, "truncate_size": "3"}, timeout=20).json()
    assert torch.equal(torch.tensor(rows), base[UP][:3])
    assert requests.get(url, params={"name": UP, "truncate_size": 3}, timeout=20).json() == rows
    assert requests.post(url, json={"name": UP, "truncate_size": 3}, timeout=20).json() == rows
    assert len(requests.post(url, json={"name": UP}, timeout=20).json()) == 100
    vector = requests.post(url, json={"name": NORM, "truncate_size": 5}, timeout=20).json()
    assert torch.equal(torch.tensor(vector), base[NORM][:5])


@pytest.mark.parametrize("body", [{}, {"name": "ghost"}, {"name": UP, "truncate_size": 0}, {"name": UP, "truncate_size": -1},
                                  {"name": UP, "truncate_size": 10**9}, {"name": UP, "typo": 1}])
def test_weights_that_cannot_be_shown(engine, body):
    for reply in (engine.post("/get_weights_by_name", body), requests.get(engine.url + "/get_weights_by_name", json=body, timeout=20)):
        assert reply.status_code == 400 and reply.json()["error"]["message"]


def test_the_checksums_of_the_weights(engine):
    answer = requests.get(engine.url + "/weights_checker", timeout=20).json()
    assert answer["success"] is True
    [rank] = answer["ranks"]
    assert all(len(value) == 16 and int(value, 16) >= 0 for value in rank["checksums"].values())
    assert UP in rank["checksums"] and len(rank["per_gpu_checksum"]) == 64 and len(answer["per_engine_checksum"]) == 64
    assert rank["parallelism_info"] == {"tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1,
                                        "rank": 0, "size": 1}
    assert ask(engine, "weights_checker", action="checksum") == answer


def test_the_weights_checker_beside_an_open_session(engine, restored, tiny_dir):
    """It sees what is served, and writes nothing while a session does."""
    base = load_file(tiny_dir / "model.safetensors")
    ask(engine, "begin_weight_update")
    send(engine, [(UP, base[UP] * 2)])
    ask(engine, "weights_checker", action="snapshot")
    refuse(engine, "weights_checker", "an update of them is under way", action="reset_tensors")
    send(engine, [(NORM, base[NORM] * 2)])
    ask(engine, "weights_checker", action="compare")
    ask(engine, "end_weight_update")
    assert "max_abs_err" in post(engine, "weights_checker", action="compare")[1]["message"]
    ask(engine, "weights_checker", action="reset_tensors")
    assert "WARN the weights checker wrote random base weights" in engine.log()


def test_snapshot_reset_and_compare(engine, restored, tiny_dir):
    before = state(engine)
    ask(engine, "weights_checker", action="snapshot")
    ask(engine, "weights_checker", action="compare")
    ask(engine, "weights_checker", action="reset_tensors")
    status, answer = post(engine, "weights_checker", action="compare")
    assert status == 400 and "max_abs_err" in answer["message"]
    ask(engine, "update_weights_from_disk", model_path=str(tiny_dir))
    ask(engine, "weights_checker", action="compare")
    base = load_file(tiny_dir / "model.safetensors")
    ask(engine, "update_weights_from_tensor", serialized_named_tensors=[forms.plain([(UP, base[UP] * 2)])])
    message = post(engine, "weights_checker", action="compare")[1]["message"]
    assert "model.layers.1.mlp.gate_up_proj.weight" in message and "max_abs_err" in message
    refuse(engine, "weights_checker", "Unsupported", action="repair")
    refuse(engine, "weights_checker", "skip_tensor_list", skip_tensor_list=["x"])
    assert before[0] == restored


# ---- memory ----

@pytest.mark.parametrize("method", ["get", "post"])
def test_memory_is_given_back_and_taken_again(engine, restored, tiny_dir, method):
    call = getattr(requests, method)

    def occupy(what, tags):
        reply = call(f"{engine.url}/{what}_memory_occupation", json={"tags": tags} if tags != "absent" else None, timeout=60)
        assert reply.status_code == 200 and reply.json() is None, reply.text

    expected = bits(engine)
    occupy("release", ["kv_cache", "cuda_graph"])
    occupy("release", ["kv_cache"])  # twice is fine
    occupy("resume", ["kv_cache", "cuda_graph"])
    assert bits(engine) == expected
    occupy("release", "absent")
    occupy("resume", None)
    reply = engine.post("/generate", {"input_ids": PROMPT})
    assert reply.status_code == 503 and "weights" in reply.json()["error"]["message"]
    assert engine.get("/health").status_code == 200 and engine.get("/health_generate").status_code == 503
    base = load_file(tiny_dir / "model.safetensors")
    ask(engine, "update_weights_from_tensor", serialized_named_tensors=[forms.plain([(UP, base[UP])])])
    assert engine.get("/health_generate").status_code == 503  # a part is not enough
    ask(engine, "update_weights_from_disk", model_path=str(tiny_dir))
    assert engine.get("/health_generate").status_code == 200
    assert bits(engine) == expected


def test_memory_that_is_in_use_is_not_given_back(engine, pool):
    request = long_request(engine, pool)
    reply = engine.post("/release_memory_occupation", {"tags": ["kv_cache"]})
    assert reply.status_code == 400 and reply.json()["error"]["message"]
    assert request.result(60)["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("body", [{"tags": ["disk"]}, {"tags": "weights"}, {"tags": [1]}, {"tag": ["weights"]}])
def test_tags_that_are_none(engine, body):
    for route in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert engine.post(route, body).status_code == 400
    assert engine.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}).status_code == 200


# ---- what is not served ----

@pytest.mark.parametrize("route, body, word", [
    ("init_weights_update_group", {"master_address": "127.0.0.1", "master_port": "29500", "rank_offset": 1, "world_size": 2,
                                   "group_name": "g", "backend": "nccl"}, "update_weights_from_tensor"),
    ("destroy_weights_update_group", {"group_name": "g"}, "The group to be destroyed does not exist."),
    ("update_weights_from_distributed", {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2]]}, "update_weights_from_tensor"),
    ("load_lora_adapter_from_distributed", {"lora_name": "a"}, "load_lora_adapter_from_tensors"),
    ("update_weights_from_ipc", {"zmq_handles": {}}, "update_weights_from_tensor"),
    ("pull_weights", {"target_version": 1}, "update_weights_from_disk"),
])
def test_what_is_not_served_says_so_at_once_and_what_to_do_instead(engine, route, body, word):
    started = time.monotonic()
    refuse(engine, route, word, **body)
    assert time.monotonic() - started < 5


# ---- bodies ----

def test_a_body_larger_than_any_memory_is_refused_before_it_is_sent(engine):
    import http.client
    for route, size in (("/update_weights_from_tensor", (1 << 30) + 1), ("/update_weights_from_safetensors", 1 << 50)):
        client = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=20)
        client.putrequest("POST", route)
        client.putheader("Content-Length", str(size))
        client.putheader("Expect", "100-continue")
        client.endheaders()
        reply = client.getresponse()
        assert reply.status == 413 and "limit" in json.loads(reply.read())["error"]["message"]
        client.close()


def test_the_state_of_the_weights_stands_in_every_info(engine, adapter):
    register(engine, "a", adapter, defer_publish=True)
    ask(engine, "begin_weight_update", sync_base=False, session_id="s-1")
    info = engine.get("/server_info").json()
    for status in (info["internal_states"][0]["weight_update"], engine.get("/model_info").json()["weight_update"],
                   engine.get("/weight_update_status").json()["session"]):
        assert status["state"] == "open" and status["session_id"] == "s-1" and status["pending"] == 1
    assert info["base_mode"] in ("shadow", "in_place")


def test_a_reply_names_the_version_that_its_adapter_was_published_under(engine, adapter):
    """The engine has one weight version, of the last update of anything; each adapter has its own."""
    register(engine, "a", adapter)
    register(engine, "b", adapter)
    send(engine, adapter.named("a"), weight_version="a-1")
    send(engine, adapter.named("b"), weight_version="b-1")
    load(engine, "c", adapter)
    body = {"input_ids": [PROMPT] * 4, "sampling_params": {"max_new_tokens": 2}, "lora_path": ["a", "b", "c", None]}
    replies = [item["meta_info"] for item in engine.generate(**body)]
    assert [meta["lora_version"] for meta in replies] == ["a-1", "b-1", None, None]
    assert {meta["weight_version"] for meta in replies} == {"b-1"}
    stream = engine.post("/generate", body | {"input_ids": PROMPT, "lora_path": "a", "stream": True}).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert [event["meta_info"]["lora_version"] for event in events] == [None] * (len(events) - 1) + ["a-1"]
    versions = {"a": "a-1", "b": "b-1", "c": None}
    assert {a["lora_name"]: a["lora_version"] for a in engine.get("/server_info").json()["adapters"]} == versions
    cards = engine.get("/v1/models").json()["data"][1:]
    assert {card["id"]: card["lora_version"] for card in cards} == versions


def test_cards_of_models_tell_which_weights_they_are(engine, adapter):
    load(engine, "a", adapter)
    base, card = engine.get("/v1/models").json()["data"]
    assert base["weight_version"] == engine.get("/model_info").json()["weight_version"]
    load(engine, "a", adapter.scaled(2), upsert=True)
    again = engine.get("/v1/models/a").json()
    assert card["root"] == again["root"] == "__stream__" and again["lora_id"] > card["lora_id"] > 0


def test_a_stop_while_an_update_waits_for_running_requests(tiny_dir, pool):
    base = load_file(tiny_dir / "model.safetensors")
    with Engine(tiny_dir, "--drain-timeout", 1, "--context-length", 400, dtype="float32", skip_tokenizer=True) as engine:
        running = pool.submit(engine.post, "/generate", {
            "input_ids": [PROMPT] * 64, "sampling_params": {"max_new_tokens": 390, "ignore_eos": True}, "return_logprob": True,
            "top_logprobs_num": 300})
        while engine.get("/server_info").json()["internal_states"][0]["running"] == 0:
            time.sleep(0.002)
        update = pool.submit(requests.post, engine.url + "/update_weights_from_tensor", json={
            "serialized_named_tensors": [forms.plain([(UP, base[UP])])]}, timeout=60)
        time.sleep(0.05)
        started = time.monotonic()
        assert engine.stop() == 0
        assert time.monotonic() - started < 15
        running.result(20)
        reply = update.result(20)
        assert reply.json()["success"] is (reply.status_code == 200)  # published or refused, but answered


def test_weights_can_be_looked_at_while_updates_wait(engine, pool, tiny_dir):
    """More base updates than there are threads for them wait for a running request."""
    base = load_file(tiny_dir / "model.safetensors")
    request = long_request(engine, pool)
    body = {"serialized_named_tensors": [forms.plain([(NORM, base[NORM])])]}
    with concurrent.futures.ThreadPoolExecutor(8) as updates:
        waiting = [updates.submit(requests.post, engine.url + "/update_weights_from_tensor", json=body, timeout=60) for _ in range(8)]
        time.sleep(0.05)
        assert torch.equal(torch.tensor(engine.call("/get_weights_by_name", {"name": NORM})), base[NORM])
        assert checksums(engine)
        assert engine.get("/weight_update_status").status_code == 200
        assert not request.done()
        assert request.result(60)["finish_reason"]["type"] == "length"
        assert [update.result().status_code for update in waiting] == [200] * 8


def test_a_checkpoint_that_is_written_again_while_it_is_read(engine, restored, tiny_dir, tmp_path):
    """A trainer that saves over its checkpoint in place: each update brings all of it or is refused, and the engine
    lives."""
    directory = shutil.copytree(tiny_dir, tmp_path / "model")
    weights = next(directory.glob("*.safetensors"))
    content = weights.read_bytes()
    over = threading.Event()

    def write_again():
        while not over.is_set():
            with open(weights, "r+b") as file:
                file.truncate(len(content) // 3)
                file.flush()
                file.write(content)
            time.sleep(0.001)

    writer = threading.Thread(target=write_again)
    writer.start()
    try:
        answers = [post(engine, "update_weights_from_disk", model_path=str(directory)) for _ in range(150)]
    finally:
        over.set()
        writer.join()
    refusals = [answer["message"] for status, answer in answers if status != 200]
    assert refusals, "no update met the writer"
    for message in refusals:
        assert "cut short" in message or "written to while it was read" in message
    assert checksums(engine) == restored
    ask(engine, "update_weights_from_disk", model_path=str(directory))
    assert checksums(engine) == restored
