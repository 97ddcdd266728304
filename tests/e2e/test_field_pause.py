"""Pausing and updating in every order: what waits is bounded, what runs goes on as the table in docs/http.md says, and nothing
that saw two states of the weights is anyone's prefix. On the reference kernels, slow enough to catch a request midway; the
cold engines that it is held against have the fast ones, since results are the same."""

import concurrent.futures
import json
import shutil
import time

import pytest
import requests
import torch
from safetensors.torch import load_file, save, save_file

from tests.e2e import trainer_forms as forms
from tests.e2e.observe import state, wait_for
from tools.engine import Engine

PROMPT = [(7 * i * i + 5) % 300 + 3 for i in range(70)]  # longer than a page of the cache
MODES = ["abort", "retract", "in_place"]
LONG = {"temperature": 0.0, "max_new_tokens": 120, "ignore_eos": True}
SHORT = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
UP = "model.layers.1.mlp.up_proj.weight"
BOUND = 8  # seconds that any call may take on a loaded machine


class Adapter:
    def __init__(self, path, factor=1.0):
        self.config = json.loads((path / "adapter_config.json").read_text())
        self.tensors = {key: tensor * factor if "lora_B" in key else tensor
                        for key, tensor in load_file(path / "adapter_model.safetensors").items()}

    def save(self, path):
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, path / "adapter_model.safetensors")
        return path


@pytest.fixture(scope="module")
def adapters(adapter_dirs, tmp_path_factory):
    """{name: (adapter, directory)} of the one that is served first and of the one that comes."""
    home = tmp_path_factory.mktemp("adapters")
    found = {"old": Adapter(adapter_dirs["seven-r8"]), "new": Adapter(adapter_dirs["seven-r8"], -1.0)}
    return {name: (adapter, adapter.save(home / name)) for name, adapter in found.items()}


@pytest.fixture(scope="module")
def bases(tiny_dir, tmp_path_factory):
    new = shutil.copytree(tiny_dir, tmp_path_factory.mktemp("base") / "new")
    tensors = load_file(new / "model.safetensors")
    save_file({name: tensor * 1.1 + 0.01 for name, tensor in tensors.items()}, new / "model.safetensors", {"format": "pt"})
    return {"old": tiny_dir, "new": new}


@pytest.fixture(scope="module")
def cold(bases, adapters):
    """cold[base][adapter]: an engine's name for what was there from the start."""
    with Engine(bases["old"], skip_tokenizer=True) as old, Engine(bases["new"], skip_tokenizer=True) as new:
        for engine in (old, new):
            for name, (_, path) in adapters.items():
                engine.load(name, path)
        yield {"old": old, "new": new}


@pytest.fixture(scope="module")
def server(tiny_dir):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_ISA", "ref")
        engine = Engine(tiny_dir, "--max-running-requests", 24, skip_tokenizer=True)
    with engine:
        yield engine
        assert engine.process.poll() is None, engine.log()


@pytest.fixture
def engine(server, adapters, bases):
    """The old base, and X holding the old adapter; after the test everything is back and it answers."""
    server.load("X", adapters["old"][1])
    call(server, "update_weight_version", new_version="old")
    yield server
    server.post("/end_weight_update", {"abort": True})
    server.call("/continue_generation", {})
    wait_for(server, lambda s: s["running"] == s["queued"] == s["leases"] == 0)
    now = state(server)
    assert now["leases_acquired"] == now["leases_released"]
    assert now["kv_pages_free"] + now["kv_pages_cached"] == now["kv_pages"], now
    for card in server.get("/v1/models").json()["data"][1:]:
        server.unload(card["id"])
    call(server, "update_weights_from_disk", model_path=str(bases["old"]), weight_version="old")


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        yield pool


def call(engine, route, status=200, **body):
    """The reply comes within the bound, whatever waits for a continue."""
    started = time.monotonic()
    reply = engine.http.post(f"{engine.url}/{route}", json=body, timeout=BOUND)
    assert time.monotonic() - started < BOUND
    assert reply.status_code == status, reply.text
    return reply.json() if reply.text.startswith("{") else reply


def frozen(engine, pool, n, **more):
    """The futures of n requests that have made a few tokens and stand still."""
    engine.call("/pause_generation", {"mode": "in_place"})
    futures = [pool.submit(engine.generate, input_ids=PROMPT, sampling_params=LONG, return_logprob=True, **more)
               for _ in range(n)]
    wait_for(engine, lambda s: s["queued"] == n)
    before = state(engine)["generated_tokens"]
    while state(engine)["running"] < n or state(engine)["generated_tokens"] < before + n:
        engine.call("/continue_generation", {})
        engine.call("/pause_generation", {"mode": "in_place"})
        assert not any(future.done() for future in futures)
    return futures


def reason(item):
    return item["meta_info"]["finish_reason"]["type"]


def logprobs(item):
    return [triple[0] for triple in item["meta_info"]["output_token_logprobs"]]


# ---- case 6 ----

def upsert_by_call(engine, adapter, path):
    call(engine, "load_lora_adapter_from_tensors", lora_name="X", config_dict=adapter.config, upsert=True,
         serialized_tensors=forms.plain(adapter.tensors))


def upsert_by_session(engine, adapter, path):
    call(engine, "register_lora_adapter", lora_name="X", config_dict=adapter.config)
    call(engine, "begin_weight_update", sync_base=False)
    call(engine, "update_weights_from_tensor", flush_cache=False, serialized_named_tensors=[
        forms.plain([(f"X:{key}", tensor) for key, tensor in adapter.tensors.items()])])
    call(engine, "end_weight_update")


def upsert_by_image(engine, adapter, path):
    reply = requests.post(engine.url + "/update_weights_from_safetensors?lora_name=X", data=save(adapter.tensors),
                          headers={"X-Lora-Config": json.dumps(adapter.config)}, timeout=BOUND)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("upsert", [upsert_by_call, upsert_by_session, upsert_by_image])
@pytest.mark.parametrize("mode", MODES)
def test_case_6_an_upsert_while_its_requests_are_paused(engine, cold, pool, adapters, mode, upsert):
    """It answers before the continue; then: abort, the new one with a recomputed KV, or the new one on the KV there is."""
    futures = frozen(engine, pool, 8, lora_path="X")
    engine.call("/pause_generation", {"mode": mode})
    call(engine, "update_weight_version", new_version="new", abort_all_requests=False)
    upsert(engine, *adapters["new"])
    assert state(engine)["paused"]
    engine.call("/continue_generation", {})
    items = [future.result(60) for future in futures]
    assert {reason(item) for item in items} == {"abort" if mode == "abort" else "length"}
    for item in items if mode == "retract" else ():
        split = item["meta_info"]["weight_versions"][0]["end"]
        assert 0 < split < LONG["max_new_tokens"]
        [scores] = cold["old"].score([PROMPT + item["output_ids"]], "new")
        assert logprobs(item)[split:] == scores.prompt[len(PROMPT) + split:]
    [scores] = cold["old"].score([PROMPT], "new", 8)
    again = engine.generate(input_ids=PROMPT, lora_path="X", sampling_params=SHORT, return_logprob=True)
    assert again["output_ids"] == scores.ids and logprobs(again) == scores.output


@pytest.mark.parametrize("again", [None, "path", "tensors"])
@pytest.mark.parametrize("mode", MODES)
def test_case_6_an_unload_while_its_requests_are_paused(engine, cold, pool, adapters, mode, again):
    """Alone, or with a load of the same name behind it (Cases 1 and 5): the reply does not wait for the continue, the paused
    end with what they began with or as aborted, and no lease is left."""
    futures = frozen(engine, pool, 4, lora_path="X") + frozen(engine, pool, 4, lora_path="X", rid=None)
    engine.call("/pause_generation", {"mode": mode})
    call(engine, "unload_lora_adapter", lora_name="X")
    adapter, path = adapters["new"]
    if again == "path":
        call(engine, "load_lora_adapter", lora_name="X", lora_path=str(path))
    elif again == "tensors":
        call(engine, "load_lora_adapter_from_tensors", lora_name="X", config_dict=adapter.config,
             serialized_tensors=forms.plain(adapter.tensors))
    queued = pool.submit(engine.post, "/generate", {"input_ids": PROMPT, "lora_path": "X", "sampling_params": SHORT})
    if again:
        wait_for(engine, lambda s: s["queued"] >= 1)
    else:
        assert queued.result(BOUND).status_code == 400
    engine.call("/continue_generation", {})
    items = [future.result(60) for future in futures]
    [scores] = cold["old"].score([PROMPT], "old", LONG["max_new_tokens"])
    for item in items:
        if mode == "in_place":
            assert reason(item) == "length" and item["output_ids"] == scores.ids and logprobs(item) == scores.output
        else:
            assert reason(item) == "abort" and item["output_ids"] == scores.ids[: len(item["output_ids"])]
    if again:
        assert queued.result(60).json()["output_ids"] == cold["old"].score([PROMPT], "new", 8)[0].ids


# ---- case 20 ----

@pytest.mark.parametrize("body", [{}, {"abort_all_requests": True}, {"abort_all_requests": False}, {"abort_all_requests": "false"}])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_case_20_a_version_of_its_own_between_pause_and_continue(engine, pool, bases, mode, body):
    """Without the flag what the pause kept is aborted, as in SGLang; with false it goes on, whatever the pause was."""
    futures = frozen(engine, pool, 3)
    engine.call("/pause_generation", {"mode": mode})
    call(engine, "update_weights_from_disk", model_path=str(bases["new"]), flush_cache=False)
    call(engine, "update_weight_version", new_version="new", **body)
    kept = str(body.get("abort_all_requests", True)).lower() == "false"
    if not kept:
        assert [reason(future.result(BOUND)) for future in futures] == ["abort"] * 3
    engine.call("/continue_generation", {})
    for future in futures:
        item = future.result(60)
        assert reason(item) == ("length" if kept else "abort")
        assert item["meta_info"]["weight_version"] == ("new" if kept else "old")
        assert len(item["output_ids"]) == item["meta_info"]["completion_tokens"] > 0


# ---- case 21 ----

def table(adapters, bases):
    """{route: (status when nothing runs, status with frozen requests, body)} of every route of the server; for a session the
    calls stand in their order."""
    old, path = adapters["old"]
    tensors = load_file(bases["old"] / "model.safetensors")
    bucket = [forms.plain([(UP, tensors[UP])])]
    refused = {route: (400, 400, {}) for route in (
        "/init_weights_update_group", "/destroy_weights_update_group", "/update_weights_from_distributed",
        "/load_lora_adapter_from_distributed", "/update_weights_from_ipc", "/pull_weights")}
    return {
        "/load_lora_adapter": (200, 200, {"lora_name": "Y", "lora_path": str(path)}),
        "/load_lora_adapter_from_tensors": (200, 200, {"lora_name": "Y", "config_dict": old.config, "upsert": True,
                                                       "serialized_tensors": forms.plain(old.tensors)}),
        "/register_lora_adapter": (200, 200, {"lora_name": "Y", "config_dict": old.config}),
        "/unload_lora_adapter": (200, 200, {"lora_name": "Y"}),
        "/begin_weight_update": (200, 200, {"session_id": None}),
        "/update_weights_from_tensor": (200, 200, {"serialized_named_tensors": bucket, "flush_cache": False}),
        "/prepare_weight_update": (200, 200, {"session_id": None}),
        "/commit_weight_update": (200, 200, {"session_id": None}),
        "/end_weight_update": (400, 400, {}),
        "/abort_weight_update": (400, 400, {"session_id": "ghost"}),
        "/update_weights_from_safetensors": (200, 200, save({UP: tensors[UP]})),
        "/update_weights_from_disk": (200, 200, {"model_path": str(bases["old"]), "flush_cache": False}),
        "/update_weight_version": (200, 200, {"new_version": "old", "abort_all_requests": False}),
        "/get_weights_by_name": (200, 200, {"name": UP}),
        "/weights_checker": (200, 200, {}),
        "/weight_digests": (200, 200, None),
        "/weight_update_status": (200, 200, None),
        "/abort_request": (200, 200, {"rid": "nobody"}),
        "/flush_cache": (200, 400, {}),
        "/v1/models": (200, 200, None), "/v1/models/": (200, 200, None),
        "/model_info": (200, 200, None), "/get_model_info": (200, 200, None),
        "/server_info": (200, 200, None), "/get_server_info": (200, 200, None),
        "/health": (200, 200, None), "/health_generate": (200, 200, None),
        "/get_weight_version": (404, 404, None), "/weight_version": (404, 404, None),
        **refused,
    }


WAITING = {"/generate", "/v1/completions"}  # these wait for the continue
ELSEWHERE = {"/pause_generation", "/continue_generation", "/release_memory_occupation", "/resume_memory_occupation"}


@pytest.mark.parametrize("running", [0, 3])
@pytest.mark.parametrize("mode", MODES)
def test_case_21_every_route_answers_while_paused(engine, cold, pool, adapters, bases, mode, running):
    """Twice paused, with nothing running and with something; the pause holds through all of it, and what waited goes on."""
    calls = table(adapters, bases)
    engine.load("kept", adapters["old"][1])
    listed = {route["path"] for route in engine.get("/server_info").json()["routes"]}
    assert listed == set(calls) | WAITING | ELSEWHERE
    futures = frozen(engine, pool, running) if running else []
    engine.call("/pause_generation", {"mode": mode})
    engine.call("/pause_generation", {"mode": mode})
    queued = pool.submit(engine.generate, input_ids=PROMPT, lora_path="kept", sampling_params=SHORT)
    wait_for(engine, lambda s: s["queued"] >= 1)
    session = f"paused-{mode}-{running}"
    for route, (idle, busy, body) in calls.items():
        status = idle if mode == "retract" or not state(engine)["running"] else busy
        url, started = engine.url + route.replace("models/", "models/kept"), time.monotonic()
        if body is None:
            reply = engine.http.get(url, timeout=BOUND)
        elif isinstance(body, bytes):
            reply = engine.http.post(url, data=body, timeout=BOUND)
        else:
            reply = engine.http.post(url, json={key: session if key == "session_id" and value is None else value
                                                for key, value in body.items()}, timeout=BOUND)
        assert reply.status_code == status, (route, reply.text)
        assert time.monotonic() - started < BOUND and state(engine)["paused"], route
    assert not queued.done()
    engine.call("/continue_generation", {})
    engine.call("/continue_generation", {})
    assert queued.result(60)["output_ids"] == cold["old"].score([PROMPT], "old", 8)[0].ids
    expected = cold["old"].score([PROMPT], None, LONG["max_new_tokens"])[0].ids
    for future in futures:
        item = future.result(60)
        assert reason(item) == ("abort" if mode == "abort" else "length")
        assert item["output_ids"] == expected[: len(item["output_ids"])]


# ---- cases 7 and 32, with requests in the middle ----

@pytest.mark.parametrize("what", ["base", "adapter"])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_case_32_a_request_that_saw_two_states_is_no_ones_prefix(engine, cold, pool, adapters, bases, mode, what):
    """Updated without a flush. The request goes on and says which version made which tokens; one that comes later gets no page
    of the old state, nor one that the paused request went on to fill, unless it was computed anew."""
    [first] = frozen(engine, pool, 1, lora_path="X")
    engine.call("/pause_generation", {"mode": mode})
    if what == "base":
        call(engine, "update_weights_from_disk", model_path=str(bases["new"]), flush_cache=False, weight_version="new")
    else:
        upsert_by_call(engine, *adapters["new"])
        call(engine, "update_weight_version", new_version="new", abort_all_requests=False)
    fresh = cold["new"] if what == "base" else cold["old"]
    adapter = "old" if what == "base" else "new"
    second = pool.submit(engine.generate, input_ids=PROMPT, lora_path="X", sampling_params=SHORT, return_logprob=True)
    wait_for(engine, lambda s: s["queued"] >= (2 if mode == "retract" else 1))
    engine.call("/continue_generation", {})
    meta = first.result(60)["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == ["old", "new"] and reason(first.result()) == "length"
    later = second.result(60)
    [scores] = fresh.score([PROMPT], adapter, 8)
    assert later["output_ids"] == scores.ids and logprobs(later) == scores.output
    assert [span["version"] for span in later["meta_info"]["weight_versions"]] == ["new"]
    whole = PROMPT + first.result()["output_ids"]
    third = engine.generate(input_ids=whole, lora_path="X", sampling_params=SHORT, return_logprob=True)
    [scores] = fresh.score([whole], adapter, 8)
    assert third["output_ids"] == scores.ids and logprobs(third) == scores.output
    if mode == "in_place":
        assert later["meta_info"]["cached_tokens"] == 0 and third["meta_info"]["cached_tokens"] <= len(PROMPT) + 8


@pytest.mark.parametrize("what", ["base", "adapter", "both"])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_case_32_a_prompt_that_was_half_computed(tiny_dir, cold, pool, adapters, bases, mode, what):
    """Caught between two chunks of its prompt: what comes later with the same prompt is a cold start all the same."""
    prompt = [(11 * i * i + 7 * i + 5) % 300 + 3 for i in range(400)]
    body = {"input_ids": prompt, "lora_path": "X", "sampling_params": SHORT, "return_logprob": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_ISA", "ref")
        engine = Engine(tiny_dir, "--chunked-prefill-size", 8, skip_tokenizer=True)
    with engine:
        engine.load("X", adapters["old"][1])
        engine.call("/pause_generation", {"mode": "in_place"})
        first = pool.submit(engine.generate, **body)
        wait_for(engine, lambda s: s["queued"] == 1)
        while state(engine)["running"] == 0:
            engine.call("/continue_generation", {})
            engine.call("/pause_generation", {"mode": "in_place"})
            assert not first.done()
        engine.call("/pause_generation", {"mode": mode})
        if what != "adapter":
            call(engine, "update_weights_from_disk", model_path=str(bases["new"]), flush_cache=False)
        if what != "base":
            upsert_by_call(engine, *adapters["new"])
        fresh = cold["old"] if what == "adapter" else cold["new"]
        [scores] = fresh.score([prompt], "old" if what == "base" else "new", 8)
        second = pool.submit(engine.generate, **body)
        engine.call("/continue_generation", {})
        for item in ([first.result(60)] if mode == "retract" else []) + [second.result(60), engine.generate(**body)]:
            assert item["output_ids"] == scores.ids and logprobs(item) == scores.output
        assert reason(first.result(60)) == "length"


# ---- case 47 ----

def test_case_47_a_hundred_updates_that_abort_and_flush(engine, pool, bases):
    """Whoever is aborted has left when the cache is emptied: each call succeeds, by every route, and empties all of it."""
    tensors = load_file(bases["old"] / "model.safetensors")
    bucket = [forms.plain([(UP, tensors[UP])])]
    flags = {"abort_all_requests": True, "flush_cache": True}

    def by_session():
        call(engine, "begin_weight_update")
        call(engine, "update_weights_from_tensor", serialized_named_tensors=bucket, flush_cache=False)
        call(engine, "end_weight_update", **flags)

    def by_image():
        reply = requests.post(engine.url + "/update_weights_from_safetensors", data=save({UP: tensors[UP]}), timeout=BOUND,
                              params={key: "true" for key in flags})
        assert reply.status_code == 200, reply.text

    updates = [
        lambda: call(engine, "update_weights_from_tensor", serialized_named_tensors=bucket, **flags),
        lambda: call(engine, "update_weights_from_disk", model_path=str(bases["old"]), **flags),
        by_session, by_image,
    ]
    aborted = 0
    for i in range(100):
        streams = [pool.submit(engine.generate, input_ids=[[5, 17, 40 + j], [8, j]] * 2, sampling_params=LONG) for j in range(5)]
        while not any(stream.done() for stream in streams) and state(engine)["running"] == 0:
            pass
        updates[i % len(updates)]()
        now = state(engine)
        if now["running"] == now["queued"] == 0:  # else some of the twenty came after the update
            assert now["kv_pages_free"] == now["kv_pages"], now
        engine.post("/abort_request", {"abort_all": True})
        for item in [item for stream in streams for item in stream.result(20)]:
            assert reason(item) in ("abort", "length")
            assert len(item["output_ids"]) == item["meta_info"]["completion_tokens"]
            aborted += reason(item) == "abort" and item["meta_info"]["completion_tokens"] > 0
    assert aborted > 100


# ---- waiting is bounded (family 5) ----

def test_an_update_that_waits_gives_up_in_its_time_and_leaves_no_trace(engine, cold, pool, bases):
    """A base update waits for what runs, and with a deadline: then it is 504, the requests end as they would have, the version
    stays, and the next update works. While it waits new requests are held back, not lost."""
    expected = cold["old"].score([PROMPT], None, LONG["max_new_tokens"])[0].ids
    futures = [pool.submit(engine.generate, input_ids=PROMPT, sampling_params=LONG) for _ in range(24)]
    wait_for(engine, lambda s: s["running"] == 24)
    started = time.monotonic()
    body = call(engine, "update_weights_from_disk", 504, model_path=str(bases["new"]), timeout_seconds=0.05, weight_version="never")
    assert body["success"] is False and time.monotonic() - started < 2
    assert all(future.result(60)["output_ids"] == expected for future in futures)
    assert engine.get("/model_info").json()["weight_version"] == "old"
    assert engine.generate(input_ids=PROMPT, sampling_params=LONG)["output_ids"] == expected
    call(engine, "update_weights_from_disk", model_path=str(bases["new"]), weight_version="new")
    assert engine.generate(input_ids=PROMPT, sampling_params=SHORT)["output_ids"] == cold["new"].score([PROMPT], None, 8)[0].ids
