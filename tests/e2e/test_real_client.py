"""Trainers as they are, against this server: PEFT trains, torch pickles, requests sends. Two generations of SGLang's
API, and no line of this project's own client.

Truth is twofold: in float32 the logprobs are those of transformers and PEFT, and they equal in every bit those of a
server that never held anything but the final state.
"""

import concurrent.futures
import os
import pickle
import time

import pytest
import requests

from tests.e2e import trainer_forms as forms
from tests.e2e.trainer_model import Learner, assert_serves, assert_serves_base
from tools.engine import Engine

MILES = "miles_lora"
SLOTS = ["__miles_slot_0", "__miles_slot_1"]


@pytest.fixture(scope="module")
def engine(tiny_dir):
    with Engine(tiny_dir, "--enable-lora", "--max-lora-rank", 64, "--lora-target-modules", "all", "--max-loaded-loras",
                8, dtype="float32", skip_tokenizer=True) as engine:
        yield engine
        assert engine.process.poll() is None, engine.log()


@pytest.fixture
def clean(engine):
    """The engine without adapters; what a test loads is gone after it."""
    yield engine
    for card in engine.get("/v1/models").json()["data"][1:]:
        engine.unload(card["id"])


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def original(engine, tiny_dir):
    """Puts the base weights back."""
    yield
    engine.call("/update_weights_from_disk", {"model_path": str(tiny_dir)})
    assert_serves_base(engine, Learner(tiny_dir))


class Trainer:
    """What every generation has: a POST that reads the status and the body of each reply."""

    def __init__(self, engine):
        self.url = engine.url
        self.http = requests.Session()
        self.version = 0

    def post(self, route, **body):
        reply = self.http.post(f"{self.url}/{route}", json=body, timeout=60)
        answer = reply.json()
        # older trainers look at the status alone, newer ones at the body alone: both must say the same
        assert (reply.status_code == 200) == (answer.get("success", answer.get("status") == "ok")), answer
        return reply.status_code, answer

    def ask(self, route, **body):
        status, answer = self.post(route, **body)
        assert status == 200, answer
        return answer

    def stamp(self):
        self.version += 1
        self.ask("update_weight_version", new_version=str(self.version), abort_all_requests=False)
        assert self.http.get(f"{self.url}/model_info", timeout=60).json()["weight_version"] == str(self.version)

    def flush(self):
        """As trainers do: again and again until it is accepted."""
        for _ in range(60):
            if self.http.get(f"{self.url}/flush_cache", timeout=60).status_code == 200:
                return
            time.sleep(0.05)
        raise AssertionError("flush_cache was never accepted")


class LoadCalls(Trainer):
    """Generation A: one load call brings a whole adapter."""

    def load(self, name, learner, tensors, **more):
        return self.post("load_lora_adapter_from_tensors", lora_name=name, config_dict=learner.config(), pinned=False,
                         **tensors, **more)

    def unload(self, name):
        """Unload before load tolerates that there is nothing yet."""
        status, answer = self.post("unload_lora_adapter", lora_name=name)
        assert status == 200 or "does not exist" in answer["error_message"], answer


class Sessions(Trainer):
    """Generation B: adapters are entries of the weight stream, and `end_weight_update` is the commit."""

    def __init__(self, engine, bucket_bytes=20_000):
        super().__init__(engine)
        self.bucket_bytes = bucket_bytes
        self.registered = {}

    def register(self, name, learner, **more):
        answer = self.ask("register_lora_adapter", lora_name=name, config_dict=learner.config(), pinned=False, **more)
        self.registered[name] = learner.config()
        return answer

    def stream(self, named):
        for bucket in forms.buckets(named, self.bucket_bytes):
            self.ask("update_weights_from_tensor", load_format="flattened_bucket", flush_cache=False, selector="all",
                     serialized_named_tensors=[forms.plain(forms.flattened(bucket))])

    def round(self, adapters, base=None, mode="retract", check=True):
        """The frame of one training step: {name: learner}, and base tensors when they go too."""
        self.ask("pause_generation", mode=mode)
        if mode != "in_place":
            self.flush()
        for name, learner in adapters.items():
            if self.registered.get(name) != learner.config():
                self.register(name, learner)
        self.ask("begin_weight_update", selector="all", sync_base=base is not None)
        tensors = {name: learner.adapter(prefix="") for name, learner in adapters.items()}
        named = list((base or {}).items())
        for name, entries in tensors.items():
            named += [(f"{name}:{key}", tensor) for key, tensor in entries.items()]
        self.stream(named)
        self.ask("end_weight_update", expected_lora_checksums=forms.manifest(tensors) if check else None)
        self.stamp()
        self.ask("continue_generation")


def bits(engine, learner, adapter):
    return engine.score(learner.prompts, adapter, new_tokens=12)


def assert_bits_of_a_fresh_server(engine, learner, adapter, tmp_path, base=None):
    """The logprobs are those of a server that only ever held this state, bit for bit."""
    directory = learner.save(tmp_path / "final") if adapter else None
    with Engine(base or learner.dir, dtype="float32", skip_tokenizer=True) as fresh:
        if adapter:
            fresh.load(adapter, directory)
        assert bits(engine, learner, adapter) == bits(fresh, learner, adapter)


# ---- generation A: the load calls ----

def test_unload_before_load_for_five_steps(clean, tiny_dir, tmp_path):
    trainer, learner = LoadCalls(clean), Learner(tiny_dir)
    for _ in range(5):
        learner.step()
        trainer.unload("relax_policy_lora")
        status, answer = trainer.load("relax_policy_lora", learner, {"serialized_tensors": forms.plain(learner.adapter())})
        assert status == 200 and set(answer["loaded_adapters"]) == {"relax_policy_lora"}
        trainer.stamp()
        assert_serves(clean, learner, "relax_policy_lora")
    assert_bits_of_a_fresh_server(clean, learner, "relax_policy_lora", tmp_path)


FORMS = {
    "plain 2": lambda tensors: forms.plain(tensors, 2),
    "plain 4": lambda tensors: forms.plain(tensors, 4),
    "plain 5": lambda tensors: forms.plain(tensors, 5),
    "pairs": lambda tensors: forms.plain(list(tensors.items())),
    "file_system": forms.forked,
    "torch.save": lambda tensors: forms.saved(tensors, legacy=False),
    "torch.save, legacy": lambda tensors: forms.saved(tensors, legacy=True),
}


@pytest.mark.parametrize("argument", ["serialized_tensors", "serialized_named_tensors"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_adapter_gives_the_same_bits(clean, tiny_dir, tmp_path, form, argument):
    trainer, learner = LoadCalls(clean), Learner(tiny_dir).step()
    tensors = {key: tensor.contiguous() for key, tensor in learner.adapter().items()}
    payload = FORMS[form](tensors)
    status, answer = trainer.load("a", learner, {argument: payload if argument == "serialized_tensors" else [payload]},
                                  expected_checksums={key: forms.sha256(tensor) for key, tensor in tensors.items()})
    assert status == 200, answer
    assert_serves(clean, learner, "a")
    clean.load("from-disk", learner.save(tmp_path / "disk"))
    assert bits(clean, learner, "a") == bits(clean, learner, "from-disk")


@pytest.mark.parametrize("old", [False, True], ids=["bytes", "elements"])
def test_an_adapter_in_a_flattened_bucket(clean, tiny_dir, tmp_path, old):
    trainer, learner = LoadCalls(clean), Learner(tiny_dir).step()
    payload = forms.plain(forms.flattened(learner.adapter().items(), old))
    status, answer = trainer.load("a", learner, {"serialized_named_tensors": [payload]}, load_format="flattened_bucket")
    assert status == 200, answer
    assert_serves(clean, learner, "a")
    clean.load("from-disk", learner.save(tmp_path / "disk"))
    assert bits(clean, learner, "a") == bits(clean, learner, "from-disk")


def test_upsert_replaces_without_a_gap(clean, tiny_dir, pool):
    trainer, learner = LoadCalls(clean), Learner(tiny_dir).step()
    trainer.load("a", learner, {"serialized_tensors": forms.plain(learner.adapter())})
    stop = []

    def ask():
        seen = set()
        while not stop:
            [score] = clean.score([learner.prompts[1]], "a")  # raises when the name is missing for a moment
            seen.add(tuple(score.prompt))
        return seen

    asking = pool.submit(ask)
    versions = set()
    for _ in range(6):
        learner.step()
        status, answer = trainer.load("a", learner, {"serialized_tensors": forms.plain(learner.adapter())}, upsert=True)
        assert status == 200, answer
        [score] = clean.score([learner.prompts[1]], "a")
        versions.add(tuple(score.prompt))
    stop.append(True)
    assert len(versions) == 6
    assert len(asking.result(60) - versions) <= 1  # the one before the first upsert
    assert_serves(clean, learner, "a")


def test_what_goes_wrong_leaves_the_adapter_as_it_was(clean, tiny_dir):
    trainer, learner = LoadCalls(clean), Learner(tiny_dir).step()
    trainer.load("a", learner, {"serialized_tensors": forms.plain(learner.adapter())})
    before = bits(clean, learner, "a")
    good = learner.step().adapter()
    sums = {key: forms.sha256(tensor) for key, tensor in good.items()}
    first = next(iter(good))

    def refused(tensors, **more):
        status, answer = trainer.load("a", learner, tensors, **more)
        assert status == 400 and answer["success"] is False and set(answer["loaded_adapters"]) == {"a"}
        assert bits(clean, learner, "a") == before
        return answer["error_message"]

    one = {"serialized_tensors": forms.plain(good)}
    assert "already loaded" in refused(one)
    assert first in refused(one, upsert=True, expected_checksums={**sums, first: "0" * 64})
    assert first in refused(one, upsert=True, expected_checksums={k: v for k, v in sums.items() if k != first})
    part = {"serialized_tensors": forms.plain({k: v for k, v in good.items() if k != first})}
    refused(part, upsert=True)
    refused({"serialized_named_tensors": [forms.plain(good)] * 2}, upsert=True)  # one payload per rank, and there is one
    refused({**one, "serialized_named_tensors": [forms.plain(good)]}, upsert=True)  # exactly one of the two
    refused({}, upsert=True)
    refused({"serialized_tensors": "###"}, upsert=True)
    refused({"serialized_tensors": forms.text(pickle.dumps(os.system))}, upsert=True)
    status, answer = trainer.load("a", learner, one, upsert=True, expected_checksums=sums)
    assert status == 200, answer
    assert_serves(clean, learner, "a")


# ---- generation A: base weights outside a session ----

BASE_FORMS = {
    "pairs": (None, lambda bucket: [forms.plain(bucket)]),
    "file_system": (None, lambda bucket: [forms.forked(bucket)]),
    "bucket of bytes": ("flattened_bucket", lambda bucket: [forms.plain(forms.flattened(bucket))]),
    "bucket of elements": ("flattened_bucket", lambda bucket: [forms.forked(forms.flattened(bucket, old=True))]),
}


@pytest.mark.parametrize("form", BASE_FORMS)
def test_base_buckets_outside_a_session(clean, original, tiny_dir, tmp_path, form):
    trainer, learner = LoadCalls(clean), Learner(tiny_dir)
    load_format, pack = BASE_FORMS[form]
    for _ in range(2):
        learner.step_base()
        for bucket in forms.buckets(learner.base_parameters().items(), 100_000):
            trainer.ask("update_weights_from_tensor", serialized_named_tensors=pack(bucket), load_format=load_format,
                        flush_cache=False)
        trainer.flush()
        trainer.stamp()
    assert_serves_base(clean, learner)
    assert_bits_of_a_fresh_server(clean, learner, None, tmp_path, base=learner.save_base(tmp_path / "base"))


def test_the_version_of_a_bucket_is_the_version_of_the_weights(clean, original, tiny_dir):
    trainer, learner = LoadCalls(clean), Learner(tiny_dir).step_base()
    answer = trainer.ask("update_weights_from_tensor", weight_version="step-7",
                         serialized_named_tensors=[forms.plain(list(learner.base_parameters().items()))])
    assert "step-7" in answer["message"]
    reply = clean.generate(input_ids=[5, 6], sampling_params={"max_new_tokens": 3, "ignore_eos": True})
    assert reply["meta_info"]["weight_version"] == "step-7"
    assert reply["meta_info"]["weight_versions"] == [{"version": "step-7", "start": 0, "end": 3}]


# ---- generation B: sessions ----

def test_rounds_of_one_adapter(clean, tiny_dir, tmp_path):
    trainer, learner = Sessions(clean), Learner(tiny_dir)
    for _ in range(4):
        trainer.round({MILES: learner.step()})
        assert_serves(clean, learner, MILES)
    assert_bits_of_a_fresh_server(clean, learner, MILES, tmp_path)


def test_adapter_rounds_leave_the_base_as_it_is(clean, tiny_dir):
    trainer, learner = Sessions(clean), Learner(tiny_dir).step()

    def digest():
        reply = requests.post(f"{clean.url}/weights_checker", json={"action": "checksum"}, timeout=60).json()
        assert reply["success"], reply
        return reply["per_engine_checksum"]

    before, base = digest(), bits(clean, learner, None)
    trainer.round({MILES: learner})
    assert digest() == before and bits(clean, learner, None) == base


def test_base_and_two_adapters_in_one_session(clean, original, tiny_dir, tmp_path):
    trainer, first = Sessions(clean), Learner(tiny_dir, seed=1)
    second = Learner(tiny_dir, seed=2, r=4, lora_alpha=4, target_modules=["q_proj", "down_proj"])
    first.step().step_base()
    for name, tensor in first.base_parameters().items():  # both train on the same base
        second.base_parameters()[name].copy_(tensor)
    second.step()
    trainer.round({SLOTS[0]: first, SLOTS[1]: second}, base=first.base_parameters())
    assert_serves_base(clean, first)
    assert_serves(clean, first, SLOTS[0])
    assert_serves(clean, second, SLOTS[1])
    base = first.save_base(tmp_path / "base")
    assert_bits_of_a_fresh_server(clean, second, SLOTS[1], tmp_path, base=base)


def test_a_slot_gets_a_new_tenant_with_another_config(clean, tiny_dir, tmp_path):
    trainer, old = Sessions(clean), Learner(tiny_dir, seed=1).step()
    other = Learner(tiny_dir, seed=3).step()
    trainer.round({SLOTS[0]: old, SLOTS[1]: other})
    kept = bits(clean, other, SLOTS[1])
    tenant = Learner(tiny_dir, seed=2, r=20, lora_alpha=7, use_rslora=True, target_modules=["v_proj", "up_proj"]).step()
    trainer.register(SLOTS[0], tenant)
    assert_serves(clean, old, SLOTS[0])  # until the new one is published
    trainer.round({SLOTS[0]: tenant})
    assert_serves(clean, tenant, SLOTS[0])
    assert bits(clean, other, SLOTS[1]) == kept
    assert_bits_of_a_fresh_server(clean, tenant, SLOTS[0], tmp_path)


@pytest.fixture(scope="module")
def slow(tiny_dir):
    """On the reference kernels: a request lasts long enough to be caught in the middle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_ISA", "ref")
        engine = Engine(tiny_dir, "--enable-lora", "--max-lora-rank", 64, "--lora-target-modules", "all",
                        dtype="float32", skip_tokenizer=True)
    with engine:
        yield engine
        assert engine.process.poll() is None, engine.log()


MANY = 12
LONG = {"input_ids": [[5, 17, 40]] * MANY,
        "sampling_params": {"max_new_tokens": 450, "ignore_eos": True, "temperature": 0.0}}


def start(engine, pool, **more):
    """Long requests, once they run."""
    running = pool.submit(engine.generate, **LONG, **more)
    while not engine.get("/server_info").json()["internal_states"][0]["running"]:
        assert not running.done(), "the request ended before it could be seen"
    return running


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_that_are_paused_during_a_round(slow, tiny_dir, pool, mode):
    trainer, learner = Sessions(slow), Learner(tiny_dir).step()
    trainer.round({MILES: learner})
    running = start(slow, pool, lora_path=MILES)
    trainer.round({MILES: learner.step()}, mode=mode)
    for item in running.result(60):
        meta = item["meta_info"]
        assert meta["finish_reason"]["type"] == "length" and meta["weight_version"] == "2"
        first, last = meta["weight_versions"]
        assert (first["version"], first["start"], last["version"], last["end"]) == ("1", 0, "2", 450)
        assert 0 < first["end"] == last["start"] < 450
    assert_serves(slow, learner, MILES)


def test_a_staged_push_pauses_nobody(slow, tiny_dir, pool):
    """Every publication has a name of its own; the older one goes on undisturbed."""
    trainer, learner = Sessions(slow), Learner(tiny_dir).step()

    def publish(name):
        assert trainer.register(name, learner, defer_publish=True)["pending"] is True
        refusal = slow.post("/generate", {"input_ids": [5], "lora_path": name})
        assert refusal.status_code == 400 and "awaiting publication" in refusal.text
        trainer.ask("begin_weight_update", selector="all", sync_base=False)
        tensors = learner.adapter(prefix="")
        trainer.stream([(f"{name}:{key}", tensor) for key, tensor in tensors.items()])
        trainer.ask("end_weight_update", expected_lora_checksums=forms.manifest({name: tensors}))

    publish("model@1")
    alone = [item["output_ids"] for item in slow.generate(**LONG, lora_path="model@1")]
    running = start(slow, pool, lora_path="model@1")
    learner.step()
    publish("model@2")
    assert not running.done()
    assert_serves(slow, learner, "model@2")
    assert [item["output_ids"] for item in running.result(60)] == alone


def test_a_staged_push_needs_its_manifest(clean, tiny_dir):
    trainer, learner = Sessions(clean), Learner(tiny_dir).step()
    trainer.register("model@1", learner, defer_publish=True)
    trainer.ask("begin_weight_update", sync_base=False)
    trainer.stream([(f"model@1:{key}", tensor) for key, tensor in learner.adapter().items()])
    status, answer = trainer.post("end_weight_update")
    assert status == 400 and "model@1" in answer["message"]
    assert clean.post("/generate", {"input_ids": [5], "lora_path": "model@1"}).status_code == 400


def test_what_goes_wrong_in_a_session_leaves_all_as_it_was(clean, tiny_dir):
    trainer, learner, other = Sessions(clean), Learner(tiny_dir).step(), Learner(tiny_dir, seed=2).step()
    trainer.round({SLOTS[0]: learner, SLOTS[1]: other})
    before = [bits(clean, learner, name) for name in (None, *SLOTS)]
    tensors = {SLOTS[0]: learner.step().adapter(""), SLOTS[1]: other.step().adapter("")}
    good = forms.manifest(tensors)
    key = next(iter(tensors[SLOTS[1]]))

    def attempt(end, leave_out=(), sync_base=False, extra=()):
        trainer.ask("begin_weight_update", sync_base=sync_base)
        named = [(f"{name}:{k}", t) for name, entries in tensors.items() for k, t in entries.items()
                 if (name, k) not in leave_out]
        trainer.stream(named)
        for pair in extra:
            status, _ = trainer.post("update_weights_from_tensor", flush_cache=False,
                                     serialized_named_tensors=[forms.plain([pair])])
            assert status == 400, pair[0]
        status, answer = trainer.post("end_weight_update", **end)
        assert [bits(clean, learner, name) for name in (None, *SLOTS)] == before
        assert clean.get("/model_info").json()["weight_version"] == str(trainer.version)
        return status, answer

    assert attempt({"abort": True})[0] == 200
    wrong = {**good, SLOTS[1]: {**good[SLOTS[1]], key: "0" * 64}}
    status, answer = attempt({"expected_lora_checksums": wrong})
    assert status == 400 and answer["message"].startswith("[LORA-CHECK]") and key in answer["message"]
    assert attempt({"expected_lora_checksums": {SLOTS[0]: good[SLOTS[0]]}})[0] == 400
    assert attempt({"expected_lora_checksums": good}, leave_out=[(SLOTS[1], key)])[0] == 400
    status, answer = attempt({}, leave_out=[(SLOTS[1], key)])
    assert status == 400 and SLOTS[1] in answer["message"]
    name, tensor = next(iter(learner.base_parameters().items()))
    lora, factor = next(iter(tensors[SLOTS[0]].items()))
    attempt({"abort": True}, extra=[(name, tensor), (lora, factor), (f"never-registered:{lora}", factor)])
    trainer.round({SLOTS[0]: learner, SLOTS[1]: other})  # the names are as usable as before
    assert_serves(clean, learner, SLOTS[0])
    assert_serves(clean, other, SLOTS[1])


def test_frames_out_of_order_are_refused(clean, tiny_dir):
    trainer, learner = Sessions(clean), Learner(tiny_dir).step()
    assert trainer.post("end_weight_update")[0] == 400
    status, answer = trainer.post("register_lora_adapter", lora_name="a:b", config_dict=learner.config())
    assert status == 400 and "must not contain ':'" in answer["error_message"]
    status, answer = trainer.post("register_lora_adapter", lora_name="wide", config_dict={**learner.config(), "r": 65})
    assert status == 400 and "incompatible" in answer["error_message"]
    trainer.ask("begin_weight_update", sync_base=False)
    status, answer = trainer.post("begin_weight_update", sync_base=False)
    assert status == 400 and "already open" in answer["message"]
    trainer.ask("end_weight_update", abort=True)


def test_a_new_name_over_the_cap_is_refused_and_evicts_nobody(clean, tiny_dir):
    trainer, learner = Sessions(clean), Learner(tiny_dir, r=1, target_modules=["q_proj"]).step()
    names = [f"slot-{i}" for i in range(8)]
    trainer.round({name: learner for name in names})
    status, answer = trainer.post("register_lora_adapter", lora_name="ninth", config_dict=learner.config())
    assert status == 400 and "max-loaded-loras" in answer["error_message"]
    trainer.round({names[0]: learner.step()})  # an upsert stays allowed
    assert_serves(clean, learner, names[0])
    assert [card["id"] for card in clean.get("/v1/models").json()["data"][1:]] == names
