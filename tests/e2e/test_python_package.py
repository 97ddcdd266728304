"""The Python package, installed by pip: what a trainer pushes is what engines serve, and what cannot be pushed is said
by name before anything changes."""

import concurrent.futures
import ctypes
import gc
import inspect
import json
import signal
import subprocess
import sys
import threading
import time
import typing
import weakref

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.e2e import trainer_package
from tests.e2e.trainer_model import Learner, assert_serves, assert_serves_base
from tools.engine import Engine, free_port

headrace = trainer_package.load()
LAYERS, MODULES = 2, 7
TENSORS = LAYERS * MODULES * 2
FLAGS = ["--enable-lora", "--max-lora-rank", 64, "--lora-target-modules", "all"]


@pytest.fixture(scope="module")
def engine(tiny_dir):
    with Engine(tiny_dir, *FLAGS, dtype="float32", skip_tokenizer=True) as engine:
        yield engine
        assert engine.process.poll() is None, engine.log()


@pytest.fixture(scope="module")
def second(tiny_dir):
    with Engine(tiny_dir, *FLAGS, dtype="float32", skip_tokenizer=True) as engine:
        yield engine
        assert engine.process.poll() is None, engine.log()


@pytest.fixture
def clean(engine):
    yield engine
    for card in engine.get("/v1/models").json()["data"][1:]:
        engine.unload(card["id"])


@pytest.fixture
def original(engine, tiny_dir):
    yield
    engine.call("/update_weights_from_disk", {"model_path": str(tiny_dir)})


@pytest.fixture
def publisher(engine):
    with headrace.Publisher(engine.url, timeout=20) as publisher:
        yield publisher


def names(engine):
    return {card["id"] for card in engine.get("/v1/models").json()["data"][1:]}


def bits(engine, learner, adapter):
    return engine.score(learner.prompts, adapter, new_tokens=12)


# ---- the package ----

def test_importing_it_imports_no_torch():
    code = "import headrace, sys; print(headrace.__version__, {'torch', 'peft', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], env=trainer_package.environment(), capture_output=True,
                          text=True)
    assert done.stdout.strip() == f"{headrace.__version__} set()", done.stderr


def test_it_is_typed_and_documented():
    assert (trainer_package.folder() / "headrace/py.typed").exists()
    for function in (headrace.Publisher.__init__, headrace.Publisher.push, headrace.Publisher.push_async,
                     headrace.Publisher.resume):
        parameters = [p for name, p in inspect.signature(function).parameters.items() if name != "self"]
        assert all(p.annotation is not inspect.Parameter.empty for p in parameters), function
    for item in (headrace.Publisher, headrace.Adapter, headrace.Receipt, headrace.EngineReceipt, headrace.HeadraceError,
                 headrace.Publisher.push, headrace.Publisher.push_async, headrace.Publisher.resume,
                 headrace.Publisher.close):
        assert item.__doc__
    assert typing.get_type_hints(headrace.Receipt)["engines"] == tuple[headrace.EngineReceipt, ...]


# ---- pushing ----

def test_a_peft_model(clean, publisher, tiny_dir):
    learner = Learner(tiny_dir)
    for step in range(3):
        receipt = publisher.push(learner.step().peft, adapter="policy", version=step)
        assert_serves(clean, learner, "policy")
        assert clean.get("/model_info").json()["weight_version"] == str(step)
    assert (receipt.tensors, receipt.weight_version, receipt.atomic, receipt.skipped) == (TENSORS, "2", True, False)
    assert receipt.bytes == sum(tensor.nbytes for tensor in learner.adapter().values())
    [one] = receipt.engines
    assert (one.url, one.state, one.tensors, one.bytes, one.error) == (
        clean.url, "published", receipt.tensors, receipt.bytes, "")
    assert one.xxh3 == receipt.xxh3 and len(receipt.xxh3) == 32
    assert json.loads(receipt.json)["session_id"] == receipt.session_id
    assert (receipt.published, one.serves) == ("all", "new")
    assert receipt.seconds["total"] > 0


def test_a_model_a_dict_and_a_directory_give_the_same_bits(clean, publisher, tiny_dir, tmp_path):
    learner = Learner(tiny_dir).step()
    digests = {
        publisher.push(learner.peft, adapter="model").xxh3,
        publisher.push(learner.adapter(), adapter="dict", config=learner.config()).xxh3,
        publisher.push(learner.save(tmp_path / "saved"), adapter="directory").xxh3,
    }
    assert len(digests) == 3  # names are part of the digest
    clean.load("loaded", tmp_path / "saved")
    assert bits(clean, learner, "model") == bits(clean, learner, "dict") == bits(clean, learner, "directory") == bits(
        clean, learner, "loaded")


def test_views_that_are_not_contiguous(clean, publisher, tiny_dir):
    learner = Learner(tiny_dir).step()
    odd = {key: tensor.t().contiguous().t() if i % 2 else torch.cat([tensor, tensor])[: len(tensor)]
           for i, (key, tensor) in enumerate(learner.adapter().items())}
    assert not all(tensor.is_contiguous() for tensor in odd.values())
    publisher.push(odd, adapter="odd", config=LoraConfig(**{k: learner.config()[k] for k in (
        "r", "lora_alpha", "target_modules")}))
    assert_serves(clean, learner, "odd")


def test_several_adapters_and_the_base_in_one_push(clean, original, publisher, tiny_dir, tmp_path):
    first = Learner(tiny_dir, seed=1).step().step_base()
    other = Learner(tiny_dir, seed=2, r=4, target_modules=["q_proj", "down_proj"]).step()
    for name, tensor in first.base_parameters().items():
        other.base_parameters()[name].copy_(tensor)
    receipt = publisher.push(
        adapters={"__miles_slot_0": first.peft,
                  "__miles_slot_1": headrace.Adapter(other.adapter(), config=other.config(), pinned=True)},
        base=first.peft, complete_base=True, version="both")
    assert receipt.tensors == TENSORS + LAYERS * 4 + len(first.base_parameters())
    assert_serves_base(clean, first)
    assert_serves(clean, first, "__miles_slot_0")
    assert_serves(clean, other, "__miles_slot_1")
    with Engine(first.save_base(tmp_path / "base"), dtype="float32", skip_tokenizer=True) as fresh:
        fresh.load("a", other.save(tmp_path / "other"))
        assert bits(fresh, other, "a") == bits(clean, other, "__miles_slot_1")


def test_many_adapters_are_registered_together_and_the_first_refused_is_named(clean, publisher, tiny_dir):
    learner = Learner(tiny_dir).step()
    good = headrace.Adapter(learner.adapter(), config=learner.config())
    adapters = {f"a{i}": good for i in range(11)}
    for i in (6, 7):
        odd = {**learner.config(), "target_modules": [f"odd_{i}"]}
        adapters[f"a{i}"] = headrace.Adapter(learner.adapter(), config=odd)
    for _ in range(5):
        with pytest.raises(headrace.HeadraceError, match="register: .*'a6'"):
            publisher.push(adapters=adapters)
    adapters["a6"] = adapters["a7"] = good
    assert publisher.push(adapters=adapters, version="eleven").tensors == 11 * TENSORS
    for name in ("a0", "a4", "a10"):
        assert_serves(clean, learner, name)


def test_the_base_from_a_directory(clean, original, publisher, tiny_dir, tmp_path):
    learner = Learner(tiny_dir).step_base()
    receipt = publisher.push(base=learner.save_base(tmp_path / "base"), complete_base=True, version="disk")
    assert receipt.engines[0].base_mode in ("shadow", "in_place")
    assert_serves_base(clean, learner)


@pytest.mark.parametrize("damage, said", [(lambda file: file.write(b"x"), "written to while it was read"),
                                          (lambda file: file.truncate(4000), "cut short while it was read")])
def test_a_directory_that_is_saved_over_is_refused(clean, tiny_dir, tmp_path, damage, said):
    """Its pages would vanish under a mapping, and with them the trainer."""
    saved = Learner(tiny_dir).step().save(tmp_path / "saved")

    def meddle(done, total, stage):
        if stage == "register":
            with open(saved / "adapter_model.safetensors", "r+b") as file:
                damage(file)

    with headrace.Publisher(clean.url, timeout=20, progress=meddle) as publisher:
        with pytest.raises(ValueError, match=said):
            publisher.push(saved, adapter="torn")
    assert "torn" not in [card["id"] for card in clean.get("/v1/models").json()["data"]]


def test_a_whole_state_dict_is_refused_before_anything_is_sent(publisher, tiny_dir):
    learner = Learner(tiny_dir)
    with pytest.raises(ValueError, match="get_peft_model_state_dict"):
        publisher.push(learner.peft.state_dict(), adapter="whole", config=learner.config())


def test_a_receipt_prints_as_one_line(clean, publisher, tiny_dir):
    receipt = publisher.push(Learner(tiny_dir).peft, adapter="line", version="7")
    assert str(receipt).startswith(f"push {receipt.session_id}: 28 tensors, 71.7 kB, version 7, 1 engine, ")
    assert str(receipt).endswith(f" ms, XXH3-128 {receipt.xxh3}")
    assert headrace.callbacks.PublishCallback.__name__ == "PublishCallback"


def test_a_slot_gets_a_new_tenant_with_another_config(clean, publisher, tiny_dir):
    for name in ("miles_lora", "__miles_slot_0"):
        publisher.push(Learner(tiny_dir, seed=1).step().peft, adapter=name)
        tenant = Learner(tiny_dir, seed=2, r=20, lora_alpha=7, use_rslora=True, target_modules=["v_proj"]).step()
        publisher.push(tenant.peft, adapter=name)
        assert_serves(clean, tenant, name)


@pytest.mark.parametrize("transport", ["safetensors", "sglang", "sglang-load"])
@pytest.mark.parametrize("bucket_bytes", [1, 5000, 1 << 30])
def test_no_bucket_size_and_no_transport_changes_what_is_served(clean, tiny_dir, tmp_path, transport, bucket_bytes):
    learner = Learner(tiny_dir).step()
    clean.load("loaded", learner.save(tmp_path / "saved"))
    with headrace.Publisher([clean.url], transport=transport, bucket_bytes=bucket_bytes) as publisher:
        receipt = publisher.push(learner.peft, adapter="pushed")
    assert receipt.transport == transport
    assert bits(clean, learner, "pushed") == bits(clean, learner, "loaded")


def test_tensors_may_change_as_soon_as_push_returns(clean, publisher, tiny_dir):
    learner = Learner(tiny_dir).step()
    tensors = {key: tensor.clone() for key, tensor in learner.adapter().items()}
    publisher.push(tensors, adapter="kept", config=learner.config())
    for tensor in tensors.values():
        tensor.zero_()
    assert_serves(clean, learner, "kept")


def test_contiguous_tensors_are_sent_from_where_they_lie(tiny_dir):
    from headrace import _library, sources

    tensors = Learner(tiny_dir).adapter()
    part = sources.adapter_part("a", headrace.Adapter(tensors, config={}))
    at = []
    for unit in sources.pack(part, 10_000):
        array = ctypes.string_at(unit.address, unit.count * _library.TENSOR_BYTES)
        for name, *_, address, nbytes in _library.TENSOR.iter_unpack(array):
            at.append((ctypes.string_at(name).decode(), address, nbytes))
    assert at == [(key, tensor.data_ptr(), tensor.nbytes) for key, tensor in tensors.items()]


@pytest.mark.parametrize("most_bytes", [1, 100, 1 << 30])
def test_tensors_of_any_form_reach_the_library_as_they_are(most_bytes):
    from headrace import _library, sources

    tensors = {
        "plain": torch.arange(6, dtype=torch.float32).reshape(2, 3), "scalar": torch.tensor(7, dtype=torch.int64),
        "turned": torch.arange(6, dtype=torch.int16).reshape(2, 3).t(), "nothing": torch.empty(0, 4),
        "of many dimensions": torch.arange(16, dtype=torch.uint8).reshape(1, 2, 1, 4, 1, 2),
        "negated": torch.tensor([3 - 4j]).conj().imag, "parameter": torch.nn.Parameter(torch.ones(3)),
        "größer": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "last": torch.tensor([True, False])}
    came = {}
    units = list(sources.pack(sources.base_part(tensors), most_bytes))
    for unit in units:
        for name, *form, address, nbytes in _library.TENSOR.iter_unpack(
                ctypes.string_at(unit.address, unit.count * _library.TENSOR_BYTES)):
            came[ctypes.string_at(name).decode()] = (*form, ctypes.string_at(address, nbytes))
    assert most_bytes > 1 or len(units) == len(tensors)
    assert list(came) == list(tensors)
    for name, tensor in tensors.items():
        plain = tensor.detach().clone(memory_format=torch.contiguous_format)
        dtype, ndim, *shape, data = came[name]
        assert dtype == _library.DTYPES[str(tensor.dtype).removeprefix("torch.")]
        assert (ndim, shape) == (tensor.dim(), [*tensor.shape, *[0] * (8 - tensor.dim())])
        assert data == bytes(plain.reshape(-1).view(torch.uint8).numpy())


def test_unchanged_weights_are_not_sent(clean, publisher, tiny_dir):
    learner = Learner(tiny_dir).step()
    publisher.push(learner.peft, adapter="policy", version="first")
    receipt = publisher.push(learner.peft, adapter="policy", version="second", unchanged=True)
    assert receipt.skipped and receipt.sent_bytes == 0
    assert (receipt.published, receipt.engines[0].serves, receipt.tensors, receipt.xxh3) == ("none", "old", None, None)


def test_a_resume_does_not_claim_to_know_what_was_sent(clean, publisher, tiny_dir):
    pushed = publisher.push(Learner(tiny_dir).step().peft, adapter="policy", version="v")
    receipt = publisher.resume(pushed.session_id, "v")
    assert (receipt.tensors, receipt.bytes, receipt.xxh3, receipt.published) == (None, None, None, "all")
    assert str(receipt).startswith(f"push {pushed.session_id}: resumed, version v, 1 engine, ")
    assert "tensors" not in str(receipt) and "XXH3" not in str(receipt)


def test_the_async_form_holds_the_tensors(clean, tiny_dir):
    go, started = threading.Event(), threading.Event()

    def wait(sent, total, stage):
        started.set()
        go.wait(20)

    learner = Learner(tiny_dir).step()
    tensors = {key: tensor.clone() for key, tensor in learner.adapter().items()}
    held = [weakref.ref(tensor) for tensor in tensors.values()]
    with headrace.Publisher(clean.url, progress=wait) as publisher:
        future = publisher.push_async(tensors, adapter="later", config=learner.config(), version="later")
        assert started.wait(20)
        del tensors
        gc.collect()
        assert not future.done() and all(reference() is not None for reference in held)
        go.set()
        assert future.result(20).weight_version == "later"
        assert_serves(clean, learner, "later")
        del future
        gc.collect()
        assert all(reference() is None for reference in held)


def test_async_pushes_come_in_order(clean, publisher, tiny_dir):
    learners = [Learner(tiny_dir, seed=seed).step() for seed in range(5)]
    futures = [publisher.push_async(learner.peft, adapter="policy", version=i) for i, learner in enumerate(learners)]
    assert [future.result(30).weight_version for future in futures] == ["0", "1", "2", "3", "4"]
    assert_serves(clean, learners[-1], "policy")


# ---- the order of calls ----

@pytest.fixture
def held(clean):
    """A publisher whose pushes wait in their first stage until `go` is set."""
    go, begun = threading.Event(), threading.Event()

    def wait(sent, total, stage):
        begun.set()
        assert go.wait(30)

    with headrace.Publisher(clean.url, timeout=20, progress=wait) as publisher:
        publisher.go, publisher.begun = go, begun
        yield publisher
        go.set()


def test_calls_of_every_kind_come_in_their_order(clean, held, tiny_dir):
    """A push waits for the background ones before it, and so does a resume; nobody is told to come back later."""
    learners, order = [Learner(tiny_dir, seed=seed).step() for seed in range(4)], []

    def note(what):
        return lambda future: order.append(what)

    held.push_async(learners[0].peft, adapter="policy", version="0", session_id="first").add_done_callback(note("0"))
    assert held.begun.wait(20)
    held.push_async(learners[1].peft, adapter="policy", version="1").add_done_callback(note("1"))
    with concurrent.futures.ThreadPoolExecutor(1) as others:
        blocking = others.submit(held.push, learners[2].peft, adapter="policy", version="2")
        blocking.add_done_callback(note("2"))
        time.sleep(0.1)
        assert order == []
        held.go.set()
        assert blocking.result(30).weight_version == "2"
    assert order == ["0", "1", "2"]
    last = held.push_async(learners[3].peft, adapter="policy", version="3", session_id="last")
    assert held.resume("last", "3").session_id == "last"
    assert last.done() or last.result(5)
    assert_serves(clean, learners[3], "policy")


def test_a_callback_of_a_future_may_push_and_wait_and_close(clean, tiny_dir):
    learner, publisher = Learner(tiny_dir).step(), headrace.Publisher(clean.url, timeout=20)
    versions, closed = [], threading.Event()

    def then(future):
        versions.append(future.result().weight_version)
        versions.append(queued[0].result(20).weight_version)
        versions.append(publisher.push(learner.peft, adapter="policy", version="callback").weight_version)
        publisher.close()
        closed.set()

    queued, started = [], publisher.push_async(learner.peft, adapter="policy", version="first")
    queued.append(publisher.push_async(learner.peft, adapter="policy", version="queued"))
    started.add_done_callback(then)
    assert closed.wait(20) or pytest.fail("the callback never came to its end")
    assert versions == ["first", "queued", "callback"]
    with pytest.raises(ValueError, match="closed"):
        publisher.push(learner.peft, adapter="policy")


def test_a_call_inside_a_push_is_refused_not_hung(clean, tiny_dir):
    """And its error has nothing of the push before it."""
    learner, caught = Learner(tiny_dir).step(), []

    def meddle(sent, total, stage):
        for call in (lambda: publisher.push(learner.peft, adapter="inner"), lambda: publisher.resume("x"),
                     publisher.close):
            with pytest.raises(RuntimeError, match="inside a call of the same publisher") as refused:
                call()
            caught.append(getattr(refused.value, "report", None))

    with headrace.Publisher(clean.url, timeout=20, progress=meddle) as publisher:
        assert publisher.push(learner.peft, adapter="outer").published == "all"
    assert caught and not any(caught)
    assert names(clean) == {"outer"}


def test_a_push_that_waits_for_its_turn_can_be_interrupted(clean, tmp_path, tiny_dir):
    """Ctrl-C ends the wait; the push before it and the publisher go on."""
    code = """if True:
        import sys, threading
        import headrace
        from tests.e2e.trainer_model import Learner
        go = threading.Event()
        learner = Learner(sys.argv[2]).step()
        with headrace.Publisher(sys.argv[1], progress=lambda *now: go.wait(30) or None) as publisher:
            future = publisher.push_async(learner.peft, adapter="policy", version="background")
            print("waits", flush=True)
            try:
                publisher.push(learner.peft, adapter="policy", version="interrupted")
            except KeyboardInterrupt:
                go.set()
            print(future.result(20).weight_version)
            print(publisher.push(learner.peft, adapter="policy", version="after").weight_version)
    """
    program = subprocess.Popen([sys.executable, "-c", code, clean.url, str(tiny_dir)], text=True,
                               env=trainer_package.environment(), stdout=subprocess.PIPE)
    assert program.stdout.readline() == "waits\n"
    time.sleep(0.3)
    program.send_signal(signal.SIGINT)
    assert program.communicate(timeout=60)[0].split() == ["background", "after"] and program.returncode == 0


def test_close_waits_for_what_was_called_and_a_cancelled_future_is_left_out(clean, held, tiny_dir):
    learner = Learner(tiny_dir).step()
    first = held.push_async(learner.peft, adapter="policy", version="first")
    cancelled = held.push_async(learner.peft, adapter="policy", version="cancelled")
    last = held.push_async(learner.peft, adapter="policy", version="last")
    assert held.begun.wait(20) and cancelled.cancel() and not first.cancel()
    threading.Timer(0.1, held.go.set).start()
    held.close()
    assert [first.done(), cancelled.cancelled(), last.done()] == [True] * 3
    assert [first.result().weight_version, last.result().weight_version] == ["first", "last"]


def test_in_a_group_nothing_that_is_queued_can_be_cancelled():
    """The other processes would wait for it."""
    from headrace._turns import Turns

    turns, go = Turns(), threading.Event()
    running = turns.later(lambda: go.wait(20), may_cancel=True)
    kept, other = turns.later(lambda: "kept", may_cancel=False), turns.later(lambda: "other", may_cancel=True)
    assert not kept.cancel() and other.cancel()
    go.set()
    assert running.result(20) and kept.result(20) == "kept"


def test_pushes_of_many_threads_all_succeed(clean, publisher, tiny_dir):
    learner = Learner(tiny_dir).step()
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        receipts = list(threads.map(
            lambda i: publisher.push(learner.peft, adapter="policy", version=i), range(40), timeout=60))
    assert [receipt.weight_version for receipt in receipts] == [str(i) for i in range(40)]
    assert len({receipt.session_id for receipt in receipts}) == 40


def test_two_engines_get_the_same(clean, second, tiny_dir):
    learner = Learner(tiny_dir).step()
    with headrace.Publisher([clean.url, second.url]) as publisher:
        receipt = publisher.push(learner.peft, adapter="fleet", version="fleet-1")
    assert [engine.state for engine in receipt.engines] == ["published"] * 2
    assert {engine.xxh3 for engine in receipt.engines} == {receipt.xxh3}
    assert bits(clean, learner, "fleet") == bits(second, learner, "fleet")
    second.unload("fleet")


def test_an_audit_brings_sha256_of_every_tensor(clean, tiny_dir):
    from tests.e2e import trainer_forms as forms

    learner = Learner(tiny_dir).step()
    with headrace.Publisher(clean.url, audit=True) as publisher:
        [engine] = publisher.push(learner.peft, adapter="audited").engines
    for tensor in learner.adapter().values():
        assert forms.sha256(tensor) in json.dumps(engine.received)


def test_a_key(tiny_dir):
    learner = Learner(tiny_dir).step()
    with Engine(tiny_dir, "--api-key", "sesame", dtype="float32", skip_tokenizer=True) as engine:
        with headrace.Publisher(engine.url) as publisher, pytest.raises(headrace.HeadraceError, match="401|[Uu]nauth"):
            publisher.push(learner.peft, adapter="a")
        with headrace.Publisher(engine.url, api_key="sesame") as publisher:
            assert publisher.push(learner.peft, adapter="a").engines[0].state == "published"


def test_the_key_of_the_environment(tiny_dir, monkeypatch):
    learner = Learner(tiny_dir).step()
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    with Engine(tiny_dir, "--api-key", "sesame", dtype="float32", skip_tokenizer=True) as engine:
        with headrace.Publisher(engine.url) as publisher, pytest.raises(headrace.HeadraceError) as caught:
            publisher.push(learner.peft, adapter="a")
        for said in (str(caught.value), caught.value.report["error"]):
            assert "(api_key;" in said and "HEADRACE_API_KEY" in said
        monkeypatch.setenv("HEADRACE_API_KEY", "sesame")
        with headrace.Publisher(engine.url) as publisher:
            assert publisher.push(learner.peft, adapter="a").published == "all"
        for wrong in ("", "other"):
            with headrace.Publisher(engine.url, api_key=wrong) as publisher, pytest.raises(headrace.HeadraceError):
                publisher.push(learner.peft, adapter="a")


def test_an_engine_that_has_restarted_is_told_by_its_instance(tiny_dir, monkeypatch):
    """It has lost its adapters: the next push brings those that it pushes, by itself; the others must be pushed too."""
    learner, port = Learner(tiny_dir).step(), free_port()
    monkeypatch.setattr("tools.engine.free_port", lambda: port)
    with Engine(tiny_dir, *FLAGS, dtype="float32", skip_tokenizer=True) as engine:
        publisher = headrace.Publisher(engine.url, timeout=5)
        before = publisher.push(adapters={"a": learner.peft, "b": learner.peft}, version="1")
    with pytest.raises(headrace.HeadraceError) as caught:
        publisher.push(learner.peft, adapter="a")
    assert (caught.value.status, caught.value.stage) == ("ERR_PEER", "register")
    assert caught.value.report["published"] == "none"
    with Engine(tiny_dir, *FLAGS, dtype="float32", skip_tokenizer=True) as engine:
        with pytest.raises(headrace.HeadraceError) as lost:
            publisher.resume(before.session_id)
        assert lost.value.status == "ERR_SESSION" and engine.url == lost.value.engine
        after = publisher.push(learner.peft, adapter="a", version="2")
        assert after.engines[0].instance != before.engines[0].instance
        assert names(engine) == {"a"}
        assert_serves(engine, learner, "a")
        publisher.close()


# ---- which adapter of a model, and what is around it ----

def test_one_of_two_active_adapters_must_be_named(clean, publisher, tiny_dir):
    learner = Learner(tiny_dir).step()
    learner.peft.add_adapter("two", LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False))
    learner.peft.base_model.set_adapter(["default", "two"])
    with pytest.raises(ValueError, match=r"2 adapters .*'default', 'two'.*peft_adapter="):
        publisher.push(learner.peft, adapter="policy")
    assert names(clean) == set()
    pushed = publisher.push(headrace.Adapter(learner.peft, peft_adapter="two"), adapter="policy")
    assert pushed.tensors == LAYERS * 2
    learner.peft.base_model.set_adapter("two")  # of which the model around it is not told
    assert publisher.push(learner.peft, adapter="policy").xxh3 == pushed.xxh3
    assert_serves(clean, learner, "policy")


class Distributed(torch.nn.Module):
    """A wrapper in the manner of DistributedDataParallel."""

    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize("wrap", [
    torch.compile, Distributed, lambda model: torch.compile(Distributed(model)),
    lambda model: Distributed(torch.compile(model))],
    ids=["compiled", "distributed", "compiled outside", "compiled inside"])
def test_wrappers_of_a_model(clean, original, publisher, tiny_dir, wrap):
    learner = Learner(tiny_dir).step().step_base()
    wrapped = wrap(learner.peft)
    assert publisher.push(wrapped, adapter="policy").xxh3 == publisher.push(learner.peft, adapter="policy").xxh3
    publisher.push(base=wrapped, complete_base=True)
    assert_serves_base(clean, learner)
    assert_serves(clean, learner, "policy")


def test_wrappers_of_parts_of_a_model(clean, original, publisher, tiny_dir):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    base = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    base.model.layers[0] = torch.compile(base.model.layers[0])
    model = get_peft_model(torch.compile(base), LoraConfig(r=4, target_modules=["v_proj"]))
    assert any("layers.0._orig_mod." in name for name, _ in model.named_parameters())
    assert publisher.push(model, adapter="policy", base=model, complete_base=True).published == "all"
    base.model.layers[1] = torch.compile(checkpoint_wrapper(base.model.layers[1]))
    assert publisher.push(base=model, complete_base=True).published == "all"


# ---- what cannot be pushed ----

def test_what_an_engine_refuses(clean, publisher, tiny_dir):
    good = Learner(tiny_dir).step()
    publisher.push(good.peft, adapter="kept", version="good")
    before = bits(clean, good, "kept")
    with pytest.raises(headrace.HeadraceError, match="incompatible") as caught:
        publisher.push(adapters={"kept": good.step().peft, "wide": Learner(tiny_dir, r=65).step().peft}, version="bad")
    assert (caught.value.status, caught.value.engine) == ("ERR_ADAPTER_INCOMPATIBLE", clean.url)
    assert caught.value.stage == "register"
    assert names(clean) == {"kept"} and bits(clean, good, "kept") == before
    assert clean.get("/model_info").json()["weight_version"] == "good"


def test_an_engine_that_is_gone(clean, tiny_dir):
    good, gone = Learner(tiny_dir).step(), f"http://127.0.0.1:{free_port()}"
    with headrace.Publisher([clean.url, gone], timeout=2) as publisher:
        with pytest.raises(headrace.HeadraceError, match=gone) as caught:
            publisher.push(good.peft, adapter="policy")
    assert caught.value.status in ("ERR_PEER", "ERR_TIMEOUT") and caught.value.engine == gone
    assert caught.value.stage == "connect"
    assert names(clean) == set()


@pytest.mark.parametrize("name, message", [("a:b", ":"), ("", "name")])
def test_names_that_are_refused(clean, publisher, tiny_dir, name, message):
    with pytest.raises(headrace.HeadraceError, match=message):
        publisher.push(Learner(tiny_dir).step().peft, adapter=name)


def test_a_merged_model(clean, publisher, tiny_dir):
    learner = Learner(tiny_dir).step()
    learner.peft.merge_adapter()
    for push in ({"source": learner.peft, "adapter": "a"}, {"base": learner.peft}):
        with pytest.raises(ValueError, match="merged"):
            publisher.push(**push)
    learner.peft.unmerge_adapter()
    publisher.push(learner.peft, adapter="a")


def test_a_model_whose_adapter_is_merged_away(clean, original, publisher, tiny_dir):
    learner = Learner(tiny_dir).step()
    merged = learner.peft.merge_and_unload()
    for source, error in ((merged, TypeError), (learner.peft, ValueError)):
        with pytest.raises(error, match="push before merging, or push it with base="):
            publisher.push(source, adapter="a")
    publisher.push(base=merged, complete_base=True)


@pytest.mark.parametrize("config, message", [
    (dict(use_dora=True), "DoRA"), (dict(modules_to_save=["lm_head"]), "modules_to_save.*lm_head")])
def test_adapters_that_engines_do_not_compute(publisher, tiny_dir, config, message):
    with pytest.raises(ValueError, match=message):
        publisher.push(Learner(tiny_dir, **config).peft, adapter="a")


def test_sources_that_are_none(clean, publisher, tiny_dir, tmp_path):
    learner = Learner(tiny_dir).step()
    base = AutoModelForCausalLM.from_pretrained(tiny_dir)
    prompt = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    key, tensor = next(iter(learner.adapter().items()))
    for push, error, message in [
            ({"source": prompt, "adapter": "a"}, ValueError, "PROMPT_TUNING"),
            ({"source": base.model, "adapter": "a"}, TypeError, "not a PEFT model"),
            ({"source": learner.adapter(), "adapter": "a"}, TypeError, "config="),
            ({"source": learner.peft}, TypeError, "adapter='name'"),
            ({}, TypeError, "nothing to push"),
            ({"source": tmp_path, "adapter": "a"}, FileNotFoundError, "adapter_model"),
            ({"source": headrace.Adapter(learner.peft, peft_adapter="none"), "adapter": "a"}, ValueError, "'none'"),
            ({"source": {key: tensor.to(torch.complex64)}, "adapter": "a", "config": learner.config()}, TypeError,
             f"{key}.*complex64"),
            ({"source": {key: tensor.to_sparse()}, "adapter": "a", "config": learner.config()}, TypeError,
             f"^{key}: a tensor of the layout torch.sparse_coo cannot be pushed: push tensor.to_dense\\(\\)$"),
            ({"source": {key: tensor.to_sparse_csr()}, "adapter": "a", "config": learner.config()}, TypeError,
             f"{key}.*sparse_csr.*to_dense"),
            ({"source": {key: tensor.to("meta")}, "adapter": "a", "config": learner.config()}, ValueError,
             f"{key}: a meta tensor.*load the weights"),
            ({"source": {key + "\0": tensor}, "adapter": "a", "config": learner.config()}, ValueError, "NUL"),
            ({"source": {key: [1.0]}, "adapter": "a", "config": learner.config()}, TypeError, f"{key}.*list"),
            ({"base": 7}, TypeError, "int")]:
        with pytest.raises(error, match=message):
            publisher.push(**push)
    assert names(clean) == set()
    publisher.push(learner.peft, adapter="a")  # the publisher is as good as before
    assert_serves(clean, learner, "a")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_dtypes_that_engines_do_not_take(clean, publisher, tiny_dir, dtype):
    learner = Learner(tiny_dir)
    for push in ({"source": {key: tensor.to(dtype) for key, tensor in learner.adapter().items()}, "adapter": "a",
                  "config": learner.config()},
                 {"base": {key: tensor.to(dtype) for key, tensor in learner.base_parameters().items()}}):
        with pytest.raises(headrace.HeadraceError, match=r"\.float\(\) or \.to\(torch\.bfloat16\)") as caught:
            publisher.push(**push)
        assert (caught.value.status, caught.value.report["published"]) == ("ERR_DTYPE", "none")


def test_a_source_that_fails_half_way_leaves_nothing(clean, publisher, tiny_dir):
    learner = Learner(tiny_dir).step()
    publisher.push(learner.peft, adapter="a", version="whole")
    before = bits(clean, learner, "a")
    tensors = learner.step().adapter()
    last = list(tensors)[-1]
    with headrace.Publisher(clean.url, bucket_bytes=2000) as small:
        with pytest.raises(TypeError, match=last):
            small.push({**tensors, last: tensors[last].to(torch.complex64)}, adapter="a", config=learner.config(),
                       version="half")
        assert bits(clean, learner, "a") == before
        small.push(tensors, adapter="a", config=learner.config(), version="again")
    assert_serves(clean, learner, "a")


@pytest.mark.parametrize("how", ["false", "interrupt"])
def test_a_push_that_is_cancelled(clean, tiny_dir, how):
    def stop(sent, total, stage):
        if sent > 0:
            if how == "interrupt":
                raise KeyboardInterrupt
            return False
        return True

    learner = Learner(tiny_dir).step()
    with headrace.Publisher(clean.url, bucket_bytes=2000, progress=stop) as publisher:
        with pytest.raises(KeyboardInterrupt if how == "interrupt" else headrace.HeadraceError) as caught:
            publisher.push(learner.peft, adapter="a")
    if how == "false":
        assert caught.value.status == "ERR_CANCELLED"
    assert names(clean) == set()


def test_options_that_are_refused():
    for arguments, error in [({"engines": []}, headrace.HeadraceError),
                             ({"engines": "not a url"}, headrace.HeadraceError),
                             ({"engines": ["http://a:1", "http://a:1"]}, headrace.HeadraceError),
                             ({"engines": "http://a:1", "transport": "pigeon"}, headrace.HeadraceError),
                             ({"engines": "http://a:1", "bucket_bytes": 0}, ValueError),
                             ({"engines": "http://a:1", "pause": "gently"}, ValueError)]:
        with pytest.raises(error) as caught:
            headrace.Publisher(**arguments)
        if error is headrace.HeadraceError:  # no engine was asked
            assert (caught.value.engine, caught.value.stage, caught.value.report) == (None, None, {})
    for timeout in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="seconds above 0"):
            headrace.Publisher("http://a:1", timeout=timeout)
    publisher = headrace.Publisher("http://a:1")
    publisher.close()
    with pytest.raises(ValueError, match="closed"):
        publisher.push({}, adapter="a", config={})


# ---- several trainer processes ----

@pytest.fixture(scope="module")
def ranks(tiny_dir):
    """Two trainer processes; called with a case and engines it gives the outcome of each."""
    port = str(free_port())
    programs = [subprocess.Popen(
        [sys.executable, str(trainer_package.ROOT / "tests/e2e/trainer_ranks.py"), str(tiny_dir)], text=True,
        env=trainer_package.environment(RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=port),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE) for rank in range(2)]

    def push(case, *engines):
        for program in programs:
            program.stdin.write(" ".join([case, *(engine.url for engine in engines)]) + "\n")
            program.stdin.flush()
        return [json.loads(next(line for line in program.stdout if line.startswith("{"))) for program in programs]
    yield push
    for program in programs:
        program.stdin.close()
        assert program.wait(60) == 0


@pytest.mark.parametrize("case", ["stages", "replicas", "sharded", "nothing", "one-unchanged"])
def test_processes_publish_as_one(clean, second, tiny_dir, ranks, case):
    outcomes = ranks(case, clean, second)
    assert [(outcome.get("tensors"), outcome.get("rank"), outcome.get("ranks")) for outcome in outcomes] == [
        (TENSORS, 0, 2), (TENSORS, 1, 2)], outcomes
    assert sum(outcome["sent"] for outcome in outcomes) == TENSORS
    assert len({outcome["xxh3"] for outcome in outcomes}) == 1
    assert [outcome["published"] for outcome in outcomes] == ["all", None]
    assert "rank 0 of 2: 28 tensors" in outcomes[0]["text"] and ", 2 engines," in outcomes[0]["text"]
    assert "rank 1 of 2: 28 tensors" in outcomes[1]["text"] and "engine" not in outcomes[1]["text"]
    learner = Learner(tiny_dir).step()
    assert_serves(clean, learner, "shared")
    assert bits(clean, learner, "shared") == bits(second, learner, "shared")
    assert clean.get("/model_info").json()["weight_version"] == case
    second.unload("shared")


def test_replicas_that_differ_are_refused_on_every_rank(clean, ranks):
    outcomes = ranks("diverged", clean)
    assert [outcome.get("status") for outcome in outcomes] == ["ERR_DIGEST"] * 2, outcomes
    for outcome in outcomes:
        assert "lora_" in outcome["message"] and "rank" in outcome["message"], outcome
    assert names(clean) == set()


@pytest.mark.parametrize("case", ["no-tensor", "fails-late"])
def test_a_failure_of_one_rank_reaches_all(clean, ranks, case):
    """With its cause, in bounded time, and the next push works."""
    outcomes = ranks(case, clean)
    assert [outcome.get("error") for outcome in outcomes] == ["HeadraceError", "TypeError"], outcomes
    assert all("broken" in outcome["message"] and outcome["seconds"] < 30 for outcome in outcomes), outcomes
    assert names(clean) == set()
    assert [outcome.get("tensors") for outcome in ranks("stages", clean)] == [TENSORS] * 2


def test_nothing_is_sent_when_all_ranks_say_unchanged(clean, ranks):
    assert [outcome.get("skipped") for outcome in ranks("unchanged", clean)] == [True, True]
    assert names(clean) == set()
