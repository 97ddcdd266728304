"""Streams: cumulative, incremental and in steps; whole characters, no text that is taken back, the same end as without a
stream."""

import json
import random
import re

import pytest

from tools import make_tiny_models
from tools.engine import Engine

SMOLLM2 = make_tiny_models.HOME / "smollm2"
SEEDED = {"temperature": 1.3, "sampling_seed": 5, "max_new_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def incremental():
    with Engine(SMOLLM2, "--incremental-streaming-output") as engine:
        yield engine


def events(engine, route="/generate", **body):
    reply = engine.post(route, {"stream": True, **body})
    assert reply.status_code == 200 and reply.headers["Content-Type"].startswith("text/event-stream")
    blocks = reply.content.decode("utf-8").split("\n\n")  # strict: a split character would not decode
    assert blocks[-1] == "" and blocks[-2] == "data: [DONE]"
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block[6:]) for block in blocks[:-2]]


def test_events_grow_to_the_whole_answer(smollm2):
    body = {"text": "The sea is", "sampling_params": SEEDED, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    whole = smollm2.generate(**body)
    seen = events(smollm2, **body)
    for before, after in zip(seen, seen[1:]):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert len(after["output_ids"]) > len(before["output_ids"]) or after is seen[-1]
    assert [event["meta_info"]["finish_reason"] for event in seen[:-1]] == [None] * (len(seen) - 1)
    assert seen[-1]["text"] == whole["text"] and seen[-1]["output_ids"] == whole["output_ids"]
    for key in ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs", "finish_reason", "completion_tokens"):
        assert seen[-1]["meta_info"][key] == whole["meta_info"][key]
    for event in seen:
        assert event["meta_info"]["completion_tokens"] == len(event["output_ids"]) == len(event["meta_info"]["output_token_logprobs"])


def test_deltas_add_up_to_the_whole_answer(smollm2, incremental):
    body = {"text": "The sea is", "sampling_params": SEEDED, "return_logprob": True, "logprob_start_len": 0,
            "top_logprobs_num": 2, "token_ids_logprob": [5, 6]}
    whole = smollm2.generate(**body)
    seen = events(incremental, **body)
    assert len(seen) > 5
    assert "".join(event["text"] for event in seen) == whole["text"]
    assert sum((event["output_ids"] for event in seen), []) == whole["output_ids"]
    for key in ("input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs",
                "input_token_ids_logprobs", "output_token_ids_logprobs"):
        assert sum((event["meta_info"][key] for event in seen), []) == whole["meta_info"][key], key
    done = 0
    for event in seen:
        done += len(event["output_ids"])
        assert event["meta_info"]["completion_tokens"] == done
    assert incremental.generate(**body)["text"] == whole["text"]  # without a stream nothing changes


@pytest.mark.parametrize("interval", [4, 7, 1000])
def test_events_come_in_steps(incremental, interval):
    seen = events(incremental, text="The sea is", sampling_params={**SEEDED, "stream_interval": interval})
    sizes = [len(event["output_ids"]) for event in seen]
    assert sum(sizes) == 40 and sizes[0] == 1
    assert all(size >= interval for size in sizes[1:-1])


def test_a_batch_is_interleaved_and_indexed(smollm2):
    seen = events(smollm2, text=["The sea is", "Once upon a time"], sampling_params={**SEEDED, "n": 2})
    last = {event["index"]: event for event in seen}
    assert sorted(last) == [0, 1, 2, 3]
    whole = smollm2.generate(text=["The sea is", "Once upon a time"], sampling_params={**SEEDED, "n": 2})
    assert [last[i]["text"] for i in range(4)] == [item["text"] for item in whole]
    assert len({event["meta_info"]["id"] for event in seen}) == 4


def test_characters_are_never_split(smollm2, incremental):
    """Random bytes of all kinds: byte tokens that only together, or never, make a character."""
    generator = random.Random(3)
    for seed in range(2):
        bias = {str(generator.randrange(100, 400)): 30.0 for _ in range(60)}
        sampling = {"temperature": 1.0, "sampling_seed": seed, "max_new_tokens": 40, "ignore_eos": True, "logit_bias": bias}
        text = smollm2.generate(input_ids=[40, 50], sampling_params=sampling)["text"]
        seen = events(incremental, input_ids=[40, 50], sampling_params=sampling)
        assert "".join(event["text"] for event in seen) == text
        for event in events(smollm2, input_ids=[40, 50], sampling_params=sampling):
            assert text.startswith(event["text"])


def cut(text, stops, regexes, keep):
    """The oracle on the whole text: where the earliest end of a match lies."""
    ends = []
    for stop in stops:
        at = text.find(stop)
        if at >= 0:
            ends.append((at + len(stop), at, stop))
    for regex in regexes:
        match = re.search(regex, text)
        if match:
            ends.append((match.end(), match.start(), regex))
    if not ends:
        return text, None
    end, start, which = min(ends)
    return text[: end if keep else start], which


@pytest.mark.parametrize("keep", [False, True])
def test_stops_across_tokens_are_cut_and_never_shown(smollm2, incremental, keep):
    free = smollm2.generate(text="Once upon a time", sampling_params=SEEDED)["text"]
    generator = random.Random(7)
    for _ in range(5):
        at = generator.randrange(2, len(free) // 2)
        stops = [free[at: at + generator.randrange(2, 10)], free[at + 1: at + 3], "never-there"]
        wanted, matched = cut(free, stops, [], keep)
        body = {"text": "Once upon a time", "sampling_params": {**SEEDED, "stop": stops, "no_stop_trim": keep}}
        item = smollm2.generate(**body)
        assert item["text"] == wanted
        assert item["meta_info"]["finish_reason"]["type"] == "stop"
        assert item["meta_info"]["finish_reason"]["matched"] in stops
        assert matched in stops
        shown = ""
        for event in events(incremental, **body):
            shown += event["text"]
            assert wanted.startswith(shown)
        assert shown == wanted


@pytest.mark.parametrize("regex", [r" [a-z]{3} [a-z]{2} ", r"[A-Z]\w+", r"\bof\b", r"[.,;] \w", r"no(?= such)x"])
def test_stop_regex(smollm2, incremental, regex):
    free = smollm2.generate(text="Once upon a time", sampling_params=SEEDED)["text"]
    body = {"text": "Once upon a time", "sampling_params": {**SEEDED, "stop_regex": [regex]}}
    item = smollm2.generate(**body)
    reason = item["meta_info"]["finish_reason"]
    match = re.search(regex, free)
    if match is None:
        assert reason["type"] == "length" and item["text"] == free
    else:
        assert reason == {"type": "stop", "matched": regex}
        assert item["text"] == free[: match.start()]
    shown = ""
    for event in events(incremental, **body):
        shown += event["text"]
        assert item["text"].startswith(shown)
    assert shown == item["text"]


@pytest.mark.parametrize("regex", ["(", "a*", "[z-a]", "x" * 2000, ["a"] * 17, [""], 5])
def test_a_wrong_stop_regex_is_named(smollm2, regex):
    reply = smollm2.post("/generate", {"text": "a", "sampling_params": {"stop_regex": regex}})
    assert reply.status_code == 400 and "stop_regex" in reply.json()["error"]["message"]


def test_an_expression_that_takes_for_ever_ends_only_its_request(smollm2):
    body = {"text": "Once upon a time", "sampling_params": {**SEEDED, "max_new_tokens": 60, "stop_regex": r"(?:.|..|\w+)+\d{9}"}}
    reply = smollm2.post("/generate", body)
    assert reply.status_code == 200 or "stop_regex" in reply.json()["error"]["message"]
    assert smollm2.generate(text="a", sampling_params={"max_new_tokens": 2})["output_ids"]


def test_a_refusal_before_the_stream_is_a_status(smollm2):
    reply = smollm2.post("/generate", {"text": "a", "stream": True, "lora_path": "ghost"})
    assert reply.status_code == 400 and "ghost" in reply.json()["error"]["message"]


def test_an_abort_ends_a_stream_as_an_abort(smollm2):
    import threading
    import time

    def abort():
        time.sleep(0.3)
        smollm2.http.post(smollm2.url + "/abort_request", json={"rid": "me"}, timeout=20)

    thread = threading.Thread(target=abort)
    thread.start()
    seen = events(smollm2, text="a", rid="me", sampling_params={**SEEDED, "max_new_tokens": 2000})
    thread.join()
    assert seen[-1]["meta_info"]["finish_reason"]["type"] == "abort"


def test_spans_cover_the_output(smollm2):
    meta = smollm2.generate(text="The sea is", sampling_params=SEEDED)["meta_info"]
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 40}]
    assert smollm2.generate(text="a", sampling_params={"max_new_tokens": 0})["meta_info"]["weight_versions"] == []


def test_scoring_as_a_stream(smollm2):
    [event] = events(smollm2, text="The sea is", sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    assert event["output_ids"] == [] and len(event["meta_info"]["input_token_logprobs"]) == 3
