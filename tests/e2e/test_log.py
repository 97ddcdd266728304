"""The log of a server says what came to it and what became of it: one line for every publication, rollback, refusal, pause,
load and release of memory, and none for requests."""

import json
import time

import pytest
import requests
from safetensors.torch import load_file, save

from tools.engine import Engine

PROMPT = [5, 17, 40, 8]


@pytest.fixture
def engine(tiny_dir):
    with Engine(tiny_dir, dtype="float32", skip_tokenizer=True) as engine:
        yield engine


def new_lines(engine, seen, n):
    """The lines after the first `seen`, of which n are awaited; without their time."""
    deadline = time.monotonic() + 10
    while len(engine.log().splitlines()) < seen + n:
        assert time.monotonic() < deadline, engine.log()
        time.sleep(0.01)
    return [line.split("] ", 1)[1] for line in engine.log().splitlines()[seen:]]


def push(engine, directory, name, **query):
    config = json.dumps(json.loads((directory / "adapter_config.json").read_text()))
    return requests.post(
        f"{engine.url}/update_weights_from_safetensors", params={"lora_name": name, **query}, headers={"X-Lora-Config": config},
        data=(directory / "adapter_model.safetensors").read_bytes(), timeout=60).json()


def test_a_publication_is_a_line(engine, tiny_dir, adapter_dirs):
    seen = len(engine.log().splitlines())
    receipt = push(engine, adapter_dirs["seven-r8"], "mine", weight_version="step-3")["receipt"]
    bucket = save({"model.norm.weight": load_file(tiny_dir / "model.safetensors")["model.norm.weight"]})
    requests.post(f"{engine.url}/update_weights_from_safetensors", data=bucket, timeout=60).raise_for_status()
    engine.call("/update_weight_version", {"new_version": "step-4"})
    adapter, base, version = new_lines(engine, seen, 3)
    assert adapter.startswith(
        f"INFO published session {receipt['session_id']}: adapters mine (id {receipt['adapters'][0]['id']}), base no, "
        f"weight version step-3, {receipt['tensors']} tensors, {receipt['bytes']} bytes, ")
    assert adapter.endswith(" ms")
    assert ": no adapters, base yes, weight version unchanged, 1 tensors, " in base
    assert version == "INFO weight version is step-4"


def test_what_was_not_published_is_a_warning_with_the_reason(engine):
    seen = len(engine.log().splitlines())
    for session, end in (("one", "/abort_weight_update"), ("two", "/end_weight_update")):
        engine.call("/begin_weight_update", {"session_id": session})
        engine.post(end, {"session_id": session})
    engine.call("/begin_weight_update", {"session_id": "three", "lease_seconds": 0.1})
    aborted, empty, refused, expired = new_lines(engine, seen, 4)
    assert aborted == "WARN rolled back session one: it was aborted"
    assert empty.startswith("WARN rolled back session two: no tensor came in this session")
    assert refused.startswith("WARN refused /end_weight_update (") and "no tensor came" in refused
    assert expired.startswith("WARN rolled back session three: its lease ran out")


def test_a_route_that_is_not_served_is_a_warning_too(engine):
    seen = len(engine.log().splitlines())
    assert engine.post("/init_weights_update_group", {}).status_code == 400
    line, = new_lines(engine, seen, 1)
    assert line.startswith("WARN refused /init_weights_update_group (") and "torch.distributed" in line


def test_steering_is_a_line_and_requests_are_none(engine, adapter_dirs):
    seen = len(engine.log().splitlines())
    path = adapter_dirs["seven-r8"]
    engine.load("ad", path)
    engine.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 2}, lora_path="ad")
    engine.call("/pause_generation", {"mode": "retract"})
    engine.call("/release_memory_occupation", {"tags": ["kv_cache"]})
    engine.call("/resume_memory_occupation", {"tags": ["kv_cache"]})
    engine.call("/continue_generation", {})
    engine.unload("ad")
    engine.post("/unload_lora_adapter", {"lora_name": "ad"})
    loaded, paused, given, taken, continued, unloaded, refused = new_lines(engine, seen, 7)
    assert loaded.startswith(f"INFO loaded adapter ad from {path} (id ")
    assert paused == "INFO generation is paused (retract)" and continued == "INFO generation continues"
    assert given == "INFO memory is given back: KV cache" and taken == "INFO memory is taken again: KV cache"
    assert unloaded == "INFO unloaded adapter ad"
    assert refused.startswith("WARN refused /unload_lora_adapter (") and "does not exist" in refused


def test_weights_that_are_lost_and_come_again_are_told(engine, tiny_dir):
    seen = len(engine.log().splitlines())
    engine.call("/release_memory_occupation", {"tags": ["weights"]})
    engine.call("/resume_memory_occupation", {"tags": ["weights"]})
    engine.call("/update_weights_from_disk", {"model_path": str(tiny_dir)})
    given, lost, taken, whole, published = new_lines(engine, seen, 5)
    assert given == "INFO memory is given back: weights" and taken == "INFO memory is taken again: weights"
    assert lost.startswith("WARN requests are refused: the base weights are incomplete")
    assert whole == "INFO all base weights are there again; requests are served"
    assert ": no adapters, base yes, " in published
