"""Pausing, continuing, flushing and aborting, in every state; adapters coming and going meanwhile. After each test the
engine is idle and every lease is back."""

import concurrent.futures
import json
import socket
import threading
import time

import pytest
import requests
from safetensors.torch import load_file, save

from tests.e2e import trainer_forms as forms
from tests.e2e.observe import state, wait_for
from tools.engine import Engine

PROMPT = [5, 17, 40, 8, 99, 3, 250]
MODES = ["abort", "retract", "in_place"]
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
LONG = {"temperature": 0.0, "max_new_tokens": 480, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_dir, adapter_dirs):
    """On the reference kernels, slow enough for a request to be caught in the middle; the results are the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_ISA", "ref")
        engine = Engine(tiny_dir, "--max-running-requests", 8, dtype="bfloat16", skip_tokenizer=True)
    with engine:
        engine.load("ad", adapter_dirs["seven-r8"])
        yield engine
        assert engine.process.poll() is None, engine.log()


def is_idle(s):
    return s["running"] == s["queued"] == s["leases"] == 0 and s["leases_acquired"] == s["leases_released"]


@pytest.fixture
def engine(server):
    yield server
    server.call("/continue_generation", {})
    wait_for(server, is_idle)
    now = state(server)
    assert now["kv_pages_free"] + now["kv_pages_cached"] == now["kv_pages"], now
    assert now["requests_started"] == now["requests_finished"] + now["requests_aborted"], now
    assert len(server.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"]) == 8


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        yield pool


def reason(item):
    return item["meta_info"]["finish_reason"]["type"]


def freeze(engine, n):
    """From n queued requests to as many running ones as fit, stopped in place after a few tokens."""
    for _ in range(100):
        resume(engine)
        pause(engine, "in_place")
        if state(engine)["running"] == min(n, 8):
            return
    raise AssertionError(state(engine))


def start_long(engine, pool, n=3, **more):
    """The futures of n requests that are running, frozen in place after a few tokens."""
    pause(engine, "in_place")
    futures = [pool.submit(engine.generate, input_ids=PROMPT + [i + 3], sampling_params=LONG, **more) for i in range(n)]
    wait_for(engine, lambda s: s["queued"] == n)
    freeze(engine, n)
    return futures


def pause(engine, mode):
    reply = engine.call("/pause_generation", {"mode": mode})
    assert reply == {"message": "Generation paused successfully.", "status": "ok"}
    assert state(engine)["paused"]


def resume(engine):
    reply = engine.call("/continue_generation", {})
    assert reply == {"message": "Generation continued successfully.", "status": "ok"}
    assert not state(engine)["paused"]


@pytest.mark.parametrize("mode", MODES)
def test_pausing_an_idle_engine(engine, mode):
    pause(engine, mode)
    pause(engine, mode)
    for other in MODES:
        pause(engine, other)
    resume(engine)
    resume(engine)


def test_continue_without_a_pause(engine):
    resume(engine)


def test_the_default_mode_is_abort(engine, pool):
    futures = start_long(engine, pool)
    resume(engine)
    assert engine.http.post(engine.url + "/pause_generation", timeout=60).status_code == 200
    assert [reason(future.result(20)) for future in futures] == ["abort"] * 3


@pytest.mark.parametrize("body", [{"mode": "gently"}, {"mode": 3}, [], "abort"])
def test_a_wrong_pause_is_refused_and_pauses_nothing(engine, body):
    assert engine.post("/pause_generation", body).status_code == 400
    assert not state(engine)["paused"]


def test_pause_abort_ends_everything_with_what_there_is(engine, pool):
    futures = start_long(engine, pool, 12, lora_path="ad")
    resume(engine)
    pause(engine, "abort")
    now = state(engine)
    assert now["running"] == now["queued"] == 0
    items = [future.result(20) for future in futures]
    assert all(reason(item) == "abort" for item in items)
    assert all(len(item["output_ids"]) == item["meta_info"]["completion_tokens"] < 480 for item in items)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_request_goes_on_where_it_was(engine, pool, mode):
    expected = engine.generate(input_ids=PROMPT + [3], sampling_params=LONG, return_logprob=True)
    futures = start_long(engine, pool, 1, return_logprob=True)
    pause(engine, mode)
    steps = state(engine)["steps"]
    time.sleep(0.1)
    assert state(engine)["steps"] == steps
    assert not futures[0].done()
    resume(engine)
    item = futures[0].result(60)
    assert item["output_ids"] == expected["output_ids"]
    assert item["meta_info"]["output_token_logprobs"] == expected["meta_info"]["output_token_logprobs"]
    assert reason(item) == "length"


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_comes_while_paused_waits_for_continue(engine, pool, mode):
    expected = engine.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"]
    pause(engine, mode)
    future = pool.submit(engine.generate, input_ids=PROMPT, sampling_params=GREEDY)
    wait_for(engine, lambda s: s["queued"] == 1)
    time.sleep(0.05)
    assert not future.done()
    resume(engine)
    assert future.result(20)["output_ids"] == expected


@pytest.mark.parametrize("mode", MODES)
def test_small_routes_answer_while_paused(engine, mode):
    pause(engine, mode)
    for route in ("/health", "/health_generate", "/model_info", "/server_info", "/v1/models"):
        assert engine.get(route).status_code == 200
    assert engine.post("/abort_request", {"rid": "nobody"}).status_code == 200


def test_flushing_an_idle_engine(engine):
    engine.generate(input_ids=PROMPT * 20, sampling_params=GREEDY)
    for reply in (engine.get("/flush_cache"), engine.post("/flush_cache", {}), engine.get("/flush_cache?timeout=0.5")):
        assert reply.status_code == 200 and "flushed" in reply.text
    assert state(engine)["kv_pages_cached"] == 0


def test_flushing_is_refused_while_requests_run(engine, pool):
    futures = start_long(engine, pool)
    assert engine.post("/flush_cache", {}).status_code == 400
    assert engine.get("/flush_cache?timeout=0.02").status_code == 400
    resume(engine)
    assert engine.get("/flush_cache?timeout=60").status_code == 200  # they are done by then
    assert all(reason(future.result(1)) == "length" for future in futures)


def test_flushing_while_paused(engine, pool):
    futures = start_long(engine, pool)
    pause(engine, "in_place")
    assert engine.post("/flush_cache", {}).status_code == 400
    pause(engine, "retract")
    assert engine.post("/flush_cache", {}).status_code == 200
    assert state(engine)["kv_pages_free"] == state(engine)["kv_pages"]
    resume(engine)
    assert [reason(future.result(60)) for future in futures] == ["length"] * 3


@pytest.mark.parametrize("timeout", ["x", "-1", "1e9", "nan", "0x10", " 1", ""])
def test_a_wrong_timeout(engine, timeout):
    assert engine.get(f"/flush_cache?timeout={timeout}").status_code == 400


# ---- aborting ----


def survivors(engine, pool, aborts, rids=("a1", "a10", "b")):
    """Which of three running requests live through the abort calls."""
    pause(engine, "in_place")
    futures = {rid: pool.submit(engine.generate, input_ids=PROMPT, rid=rid, sampling_params=LONG) for rid in rids}
    wait_for(engine, lambda s: s["queued"] == len(rids))
    freeze(engine, len(rids))
    for body in aborts:
        reply = engine.post("/abort_request", body)
        assert reply.status_code == 200 and reply.text == ""
    resume(engine)
    items = {rid: future.result(60) for rid, future in futures.items()}
    return {rid for rid, item in items.items() if reason(item) != "abort"}


def test_an_abort_hits_exactly_its_rid(engine, pool):
    assert survivors(engine, pool, [{"rid": "a1"}]) == {"a10", "b"}
    assert survivors(engine, pool, [{"rid": "a1"}, {"rid": "a1"}]) == {"a10", "b"}


def test_an_abort_of_nobody_hits_nobody(engine, pool):
    everybody = {"a1", "a10", "b"}
    aborts = [{"rid": ""}, {}, {"rid": "a"}, {"rid": "unknown"}, {"rid": None}, {"abort_all": False}]
    assert survivors(engine, pool, aborts) == everybody


def test_abort_all(engine, pool):
    assert survivors(engine, pool, [{"abort_all": True}]) == set()
    assert survivors(engine, pool, [{"abort_all": True, "rid": "a1"}]) == set()


def test_the_rid_of_a_batch_aborts_the_whole_batch(engine, pool):
    pause(engine, "in_place")
    batch = pool.submit(engine.generate, input_ids=[PROMPT] * 3, rid="X", sampling_params=LONG)
    other = pool.submit(engine.generate, input_ids=PROMPT, rid="X2", sampling_params=LONG)
    wait_for(engine, lambda s: s["queued"] == 4)
    resume(engine)
    engine.post("/abort_request", {"rid": "X"})
    assert [reason(item) for item in batch.result(20)] == ["abort"] * 3
    assert reason(other.result(60)) == "length"


def test_one_item_of_a_batch_can_be_aborted(engine, pool):
    pause(engine, "in_place")
    batch = pool.submit(engine.generate, input_ids=[PROMPT] * 3, rid="X", sampling_params=LONG)
    wait_for(engine, lambda s: s["queued"] == 3)
    resume(engine)
    engine.post("/abort_request", {"rid": "X_1"})
    assert [reason(item) for item in batch.result(60)] == ["length", "abort", "length"]


def test_an_abort_says_why(engine, pool):
    [future] = start_long(engine, pool, 1, rid="me")
    resume(engine)
    engine.post("/abort_request", {"rid": "me", "abort_message": "enough"})
    assert future.result(20)["meta_info"]["finish_reason"]["message"] == "enough"


@pytest.mark.parametrize("mode", [None, *MODES])
def test_a_queued_request_can_be_aborted(engine, pool, mode):
    futures = [] if mode else start_long(engine, pool, 8)
    if mode:
        pause(engine, mode)
    waiting = pool.submit(engine.generate, input_ids=PROMPT, rid="waits", lora_path="ad", sampling_params=LONG)
    wait_for(engine, lambda s: s["queued"] == 1)
    if not mode:
        resume(engine)
    engine.post("/abort_request", {"rid": "waits"})
    item = waiting.result(20)
    assert reason(item) == "abort" and item["output_ids"] == []
    engine.post("/abort_request", {"abort_all": True})
    assert all(reason(future.result(20)) == "abort" for future in futures)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_request_can_be_aborted(engine, pool, mode):
    futures = start_long(engine, pool, 3, lora_path="ad")
    pause(engine, mode)
    engine.post("/abort_request", {"abort_all": True})
    assert [reason(future.result(20)) for future in futures] == ["abort"] * 3


@pytest.mark.parametrize("body", [{"rid": 5}, {"abort_all": "yes"}, [], {"abort_message": 1, "rid": "x"}])
def test_a_wrong_abort_is_refused(engine, body):
    assert engine.post("/abort_request", body).status_code == 400


# ---- adapters meanwhile ----


@pytest.mark.parametrize("mode", MODES)
def test_adapters_load_and_unload_while_paused(engine, pool, adapter_dirs, mode):
    futures = start_long(engine, pool, 4, lora_path="ad")
    pause(engine, mode)
    started = time.monotonic()
    engine.load("new", adapter_dirs["qv-r1"])
    assert set(engine.unload("ad")["loaded_adapters"]) == {"new"}
    assert time.monotonic() - started < 10
    resume(engine)
    engine.generate(input_ids=PROMPT, lora_path="new", sampling_params=GREEDY)
    allowed = {"abort": {"abort"}, "retract": {"abort", "length"}, "in_place": {"length"}}[mode]
    assert {reason(future.result(60)) for future in futures} <= allowed
    engine.unload("new")
    engine.load("ad", adapter_dirs["seven-r8"])


def test_unload_returns_after_parallel_samples(engine, pool, adapter_dirs):
    for _ in range(3):
        engine.generate(input_ids=PROMPT, lora_path="ad", sampling_params={"n": 16, "max_new_tokens": 20})
    started = time.monotonic()
    engine.unload("ad")
    assert time.monotonic() - started < 5
    engine.load("ad", adapter_dirs["seven-r8"])


def test_a_refused_batch_gives_its_leases_back(engine):
    reply = engine.post("/generate", {"input_ids": [PROMPT, PROMPT], "lora_path": ["ad", "ghost"]})
    assert reply.status_code == 400


def open_request(engine, **body):
    """A request whose client does nothing but wait: its socket."""
    data = json.dumps({"input_ids": PROMPT, "sampling_params": LONG, **body}).encode()
    sock = socket.create_connection(("127.0.0.1", engine.port))
    sock.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
    return sock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["running", "queued", "paused", "retracted"])
def test_a_client_that_vanishes_takes_its_request_along(engine, stream, when):
    pause(engine, "in_place")
    socks = [open_request(engine, stream=stream, lora_path="ad") for _ in range(4)]
    wait_for(engine, lambda s: s["queued"] == 4)
    if when != "queued":
        freeze(engine, 4)
    if when == "running":
        resume(engine)
    if when == "retracted":
        pause(engine, "retract")
    before = state(engine)["requests_aborted"]
    for sock in socks:
        sock.close()
    wait_for(engine, is_idle, 2)
    assert state(engine)["requests_aborted"] == before + 4


def test_loads_of_one_name_at_once_give_one_winner(engine, pool, adapter_dirs):
    futures = [pool.submit(engine.post, "/load_lora_adapter", {"lora_name": "one", "lora_path": str(adapter_dirs["seven-r8"])})
               for _ in range(6)]
    replies = [future.result(60) for future in futures]
    assert sorted(reply.status_code for reply in replies) == [200] + [400] * 5
    assert all("already loaded" in reply.json()["error_message"] for reply in replies if reply.status_code == 400)
    engine.unload("one")


def test_loads_of_different_names_at_once(engine, pool, adapter_dirs):
    names = [f"n{i}" for i in range(8)]
    list(pool.map(lambda name: engine.load(name, adapter_dirs["qv-r1"]), names))
    assert {card["id"] for card in engine.get("/v1/models").json()["data"][1:]} == {"ad", *names}
    list(pool.map(engine.unload, names))
    assert {card["id"] for card in engine.get("/v1/models").json()["data"][1:]} == {"ad"}


def test_load_and_unload_under_fire(engine, pool, adapter_dirs):
    """Every answer is right for the adapter or a clean refusal, while the name comes and goes."""
    expected = engine.generate(input_ids=PROMPT, lora_path="ad", sampling_params=GREEDY)["output_ids"]
    over = threading.Event()

    def hammer():
        outcomes = set()
        while not over.is_set():
            reply = engine.post("/generate", {"input_ids": [PROMPT] * 2, "lora_path": "x", "sampling_params": GREEDY})
            if reply.status_code == 200:
                assert all(item["output_ids"] == expected for item in reply.json())
            else:
                assert reply.status_code == 400 and "not loaded" in reply.text
            outcomes.add(reply.status_code)
        return outcomes

    hammers = [pool.submit(hammer) for _ in range(4)]
    for _ in range(60):
        engine.load("x", adapter_dirs["seven-r8"])
        time.sleep(0.005)
        engine.unload("x")
    over.set()
    assert set().union(*(future.result(20) for future in hammers)) == {200, 400}


def test_no_adapter_has_the_name_of_the_base_model(tiny_dir, adapter_dirs):
    """By whatever route it comes: a request for that model could mean either. Prompts are not split either, at -1."""
    path = adapter_dirs["seven-r8"]
    config = json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    named = {"lora_name": "sea", "config_dict": config}
    with Engine(tiny_dir, "--served-model-name", "sea", "--chunked-prefill-size", -1, skip_tokenizer=True) as engine:
        replies = [engine.post("/load_lora_adapter", {"lora_name": "sea", "lora_path": str(path)}),
                   engine.post("/register_lora_adapter", named),
                   engine.post("/load_lora_adapter_from_tensors",
                               {**named, "serialized_tensors": forms.plain(tensors)}),
                   requests.post(engine.url + "/update_weights_from_safetensors?lora_name=sea", data=save(tensors),
                                 headers={"X-Lora-Config": json.dumps(config)}, timeout=60)]
        for reply in replies:
            assert reply.status_code == 400 and "name of the base model" in reply.text, reply.text
        assert [card["id"] for card in engine.get("/v1/models").json()["data"]] == ["sea"]
        info = engine.get("/server_info").json()
        assert info["chunked_prefill_size"] == info["context_length"] == 512


# ---- more adapters than places ----


@pytest.fixture(scope="module")
def small(tiny_dir):
    with Engine(tiny_dir, "--max-loaded-loras", 2, "--max-loras-per-batch", 2, skip_tokenizer=True) as engine:
        yield engine
        assert is_idle(state(engine)), state(engine)


def loaded(engine):
    return {card["id"] for card in engine.get("/v1/models").json()["data"][1:]}


def test_an_evicted_adapter_comes_back_when_it_is_asked_for(small, adapter_dirs, pool):
    first = {}
    for name in ("seven-r8", "qv-r1", "rslora-r64"):
        small.load(name, adapter_dirs[name])
        first[name] = small.generate(input_ids=PROMPT, lora_path=name, sampling_params=GREEDY)["output_ids"]
    assert loaded(small) == {"qv-r1", "rslora-r64"}
    for name in ("seven-r8", "qv-r1", "rslora-r64", "seven-r8"):
        assert small.generate(input_ids=PROMPT, lora_path=name, sampling_params=GREEDY)["output_ids"] == first[name]
        assert name in loaded(small) and len(loaded(small)) <= 2
    lines = small.http.post(small.url + "/generate", timeout=60, json={
        "input_ids": PROMPT, "lora_path": "rslora-r64" if "rslora-r64" not in loaded(small) else "qv-r1",
        "sampling_params": GREEDY, "stream": True}).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    assert json.loads(lines[-3][6:])["output_ids"] in first.values()
    names = list(first) * 8
    outputs = pool.map(lambda name: small.generate(input_ids=PROMPT, lora_path=name, sampling_params=GREEDY), names)
    assert [item["output_ids"] for item in outputs] == [first[name] for name in names]


def test_more_distinct_adapters_than_fit_are_refused(small, adapter_dirs):
    reply = small.post("/generate", {"input_ids": [PROMPT] * 3, "lora_path": ["seven-r8", "qv-r1", "rslora-r64"]})
    assert reply.status_code == 400
    assert "3 unique loras requested but max loaded loras is 2" in reply.json()["error"]["message"]
    names = ["seven-r8", "qv-r1", None, "seven-r8", ""]
    assert len(small.generate(input_ids=[PROMPT] * 5, lora_path=names, sampling_params=GREEDY)) == 5


def test_an_unloaded_adapter_does_not_come_back(small):
    small.generate(input_ids=PROMPT, lora_path="qv-r1", sampling_params=GREEDY)
    small.unload("qv-r1")
    message = small.post("/generate", {"input_ids": PROMPT, "lora_path": "qv-r1"}).json()["error"]["message"]
    assert "never been loaded" in message


def test_an_evicted_adapter_whose_files_are_gone(small, adapter_dirs, tmp_path):
    import shutil
    path = shutil.copytree(adapter_dirs["qv-r1"], tmp_path / "short-lived")
    small.load("short-lived", path)
    for name in ("seven-r8", "rslora-r64"):
        small.generate(input_ids=PROMPT, lora_path=name, sampling_params=GREEDY)
    assert "short-lived" not in loaded(small)
    shutil.rmtree(path)
    reply = small.post("/generate", {"input_ids": PROMPT, "lora_path": "short-lived"})
    assert reply.status_code == 400
    assert "Failed to implicitly load LoRA adapter short-lived" in reply.json()["error"]["message"]
