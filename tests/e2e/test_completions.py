"""/v1/completions and /v1/models as OpenAI clients use them, and the choice of an adapter."""

import json

import pytest

from tools import make_tiny_adapters, make_tiny_models
from tools.engine import Engine

PROMPT = "Once upon a time"
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def engine():
    adapters = make_tiny_adapters.write_all(make_tiny_models.HOME / "smollm2", ["seven-r8"])
    with Engine(make_tiny_models.HOME / "smollm2", "--served-model-name", "sea", "--weight-version", "v7") as engine:
        engine.load("ad", adapters["seven-r8"])
        yield engine
        assert engine.process.poll() is None, engine.log()


def complete(engine, **body):
    return engine.call("/v1/completions", {**GREEDY, **body})


@pytest.fixture(scope="module")
def texts(engine):
    """What base and adapter say, by /generate."""
    sampling = {"temperature": 0, "max_new_tokens": 8}
    base, ad = (engine.generate(text=PROMPT, lora_path=name, sampling_params=sampling)["text"] for name in (None, "ad"))
    assert base != ad
    return {None: base, "ad": ad}


def test_the_shape_is_openais(engine, texts):
    reply = complete(engine, model="sea", prompt=PROMPT, rid="me")
    assert reply["id"] == "me" and reply["object"] == "text_completion" and reply["model"] == "sea"
    assert isinstance(reply["created"], int)
    assert reply["choices"] == [{"index": 0, "text": texts[None], "logprobs": None, "finish_reason": "length", "matched_stop": None}]
    assert reply["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12,
                              "prompt_tokens_details": reply["usage"]["prompt_tokens_details"]}
    assert reply["metadata"] == {"weight_version": "v7", "weight_versions": [{"version": "v7", "start": 0, "end": 8}],
                                 "lora_path": None}


@pytest.mark.parametrize("body, adapter", [
    ({"model": "sea"}, None), ({}, None), ({"model": "default"}, None), ({"model": "sea:"}, None),
    ({"model": "sea", "lora_path": None}, None), ({"model": "sea:", "lora_path": "ad"}, None),
    ({"model": "sea:ad"}, "ad"), ({"model": "sea: ad "}, "ad"), ({"model": "ad"}, "ad"), ({"lora_path": "ad"}, "ad"),
    ({"model": "sea", "lora_path": ["ad"]}, "ad"), ({"model": "sea:ad", "lora_path": "ghost"}, "ad"),
])
def test_how_an_adapter_is_chosen(engine, texts, body, adapter):
    prompt = [PROMPT] if isinstance(body.get("lora_path"), list) else PROMPT
    reply = complete(engine, prompt=prompt, **body)
    assert reply["choices"][0]["text"] == texts[adapter]
    assert reply["metadata"]["lora_path"] == adapter


@pytest.mark.parametrize("body, status, word", [
    ({"model": "ghost"}, 404, "ghost"), ({"model": "AD"}, 404, "AD"),
    ({"model": "sea:ghost"}, 400, "never been loaded"), ({"lora_path": "ghost"}, 400, "not loaded"),
    ({"lora_path": "sea:ad"}, 400, "not loaded"),
])
def test_an_unknown_adapter_or_model_is_never_the_base(engine, body, status, word):
    for stream in (False, True):
        reply = engine.post("/v1/completions", {"prompt": PROMPT, "stream": stream, **body})
        assert reply.status_code == status and word in reply.text


def test_a_missing_model_has_openais_error(engine):
    error = engine.post("/v1/completions", {"prompt": PROMPT, "model": "ghost"}).json()["error"]
    assert error["type"] == "invalid_request_error" and error["code"] == "model_not_found" and error["param"] == "model"


@pytest.mark.parametrize("body", [
    {}, {"prompt": None}, {"prompt": []}, {"prompt": 5}, {"prompt": PROMPT, "max_tokens": -1}, {"prompt": PROMPT, "n": 0},
    {"prompt": PROMPT, "temperature": "hot"}, {"prompt": PROMPT, "logprobs": 1000}, {"prompt": PROMPT, "suffix": "x"},
    {"prompt": [[10**6]]}, {"prompt": PROMPT, "response_format": {"type": "json_schema"}}, {"prompt": PROMPT, "regex": "a"},
    {"prompt": "x " * 9000}, {"prompt": PROMPT, "stop_regex": "("},
    {"prompt": PROMPT, "stream": True, "stream_options": 5},
])
def test_errors_are_flat(engine, body):
    reply = engine.post("/v1/completions", body)
    assert reply.status_code == 400
    error = reply.json()
    assert error["object"] == "error" and error["code"] == 400 and error["message"] and error["param"] is None
    assert error["type"] == "BadRequestError"
    assert complete(engine, prompt=PROMPT)["choices"]


@pytest.mark.parametrize("content_type, status", [
    ("application/json", 200), ("application/json; charset=utf-8", 200), ("Application/JSON", 200), ("text/plain", 400),
    ("application/jsonp", 400), (None, 400)])
def test_the_media_type_counts(engine, content_type, status):
    headers = {"Content-Type": content_type} if content_type else {}
    data = json.dumps({"prompt": PROMPT, "max_tokens": 1})
    assert engine.http.post(engine.url + "/v1/completions", data=data, headers=headers, timeout=60).status_code == status


def test_prompts_in_their_four_forms(engine, texts):
    ids = [token for _, token, _ in engine.generate(text=PROMPT, sampling_params={"max_new_tokens": 0}, return_logprob=True,
                                                    logprob_start_len=0)["meta_info"]["input_token_logprobs"]]
    for prompt, count in ((PROMPT, 1), ([PROMPT, PROMPT], 2), (ids, 1), ([ids, ids, ids], 3)):
        choices = complete(engine, prompt=prompt)["choices"]
        assert [choice["text"] for choice in choices] == [texts[None]] * count
        assert [choice["index"] for choice in choices] == list(range(count))


def test_samples_and_usage(engine):
    reply = complete(engine, prompt=[PROMPT, "The sea"], n=3, temperature=1.5, seed=1)
    assert len(reply["choices"]) == 6
    assert reply["usage"]["prompt_tokens"] == 6 and reply["usage"]["completion_tokens"] == 48


def test_echo(engine, texts):
    assert complete(engine, prompt=PROMPT, echo=True)["choices"][0]["text"] == PROMPT + texts[None]
    assert complete(engine, prompt=[6403, 1980], echo=True, max_tokens=0)["choices"][0]["text"] == "Once upon"


def test_logprobs(engine):
    ours = engine.generate(text=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 8}, return_logprob=True,
                           logprob_start_len=0, top_logprobs_num=2, return_text_in_logprobs=True)["meta_info"]
    got = complete(engine, prompt=PROMPT, logprobs=2)["choices"][0]["logprobs"]
    assert got["tokens"] == [text for _, _, text in ours["output_token_logprobs"]]
    assert got["token_logprobs"] == [logprob for logprob, _, _ in ours["output_token_logprobs"]]
    assert got["text_offset"] == [-1] * 8
    assert got["top_logprobs"] == [{text: logprob for logprob, _, text in top} for top in ours["output_top_logprobs"]]

    got = complete(engine, prompt=PROMPT, logprobs=1, echo=True)["choices"][0]["logprobs"]
    assert got["tokens"][:4] == ["Once", " upon", " a", " time"] and len(got["tokens"]) == 12
    assert got["token_logprobs"][0] is None and got["top_logprobs"][0] is None
    assert got["token_logprobs"][1:4] == [logprob for logprob, _, _ in ours["input_token_logprobs"][1:]]

    got = complete(engine, prompt=PROMPT, logprobs=0)["choices"][0]["logprobs"]
    assert len(got["token_logprobs"]) == 8 and got["top_logprobs"] is None


def test_stops_are_named(engine):
    choice = complete(engine, prompt=PROMPT, stop=[" city"])["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["matched_stop"] == " city" and " city" not in choice["text"]
    choice = complete(engine, prompt=PROMPT, stop_regex=r"c\w{2}y")["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["matched_stop"] == r"c\w{2}y"
    ids = engine.generate(text=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 8})["output_ids"]
    choice = complete(engine, prompt=PROMPT, stop_token_ids=[ids[3]])["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["matched_stop"] == ids[3]


def stream(engine, **body):
    reply = engine.post("/v1/completions", {**GREEDY, "stream": True, **body})
    blocks = reply.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block[6:]) for block in blocks[:-2]]


def test_a_stream_gives_deltas(engine, texts):
    chunks = stream(engine, prompt=[PROMPT, PROMPT], model="sea:ad", echo=True, logprobs=1)
    whole = complete(engine, prompt=PROMPT, model="sea:ad", echo=True, logprobs=1)["choices"][0]
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == whole["text"] == PROMPT + texts["ad"]
        assert sum((choice["logprobs"]["tokens"] for choice in mine), []) == whole["logprobs"]["tokens"]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    finals = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert all(chunk["metadata"]["lora_path"] == "ad" and chunk["metadata"]["weight_version"] == "v7" for chunk in finals)


def test_a_stream_can_end_with_the_usage(engine):
    chunks = stream(engine, prompt=PROMPT, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == 12
    assert "usage" not in chunks[0]


def test_one_model_card(engine):
    assert engine.get("/v1/models/sea").json()["id"] == "sea"
    card = engine.get("/v1/models/ad").json()
    assert card["parent"] == "sea" and card["max_model_len"] is None
    reply = engine.get("/v1/models/ghost")
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"
    assert engine.get("/v1/models/").status_code == 404


def test_without_a_tokenizer_the_route_says_so(tiny):
    reply = tiny.post("/v1/completions", {"prompt": [5, 6]})
    assert reply.status_code == 400 and "tokenizer" in reply.json()["message"]
