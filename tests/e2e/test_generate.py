"""/generate and the small routes: shapes, sampling, logprobs, and every request that must be refused."""

import concurrent.futures
import math
import random

import pytest

from tests.e2e.conftest import NAMES

PROMPT = [5, 17, 40, 8, 99, 3, 250]
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


def test_health_answers(tiny):
    assert tiny.get("/health").status_code == 200


def test_models_lists_the_base_and_every_adapter(tiny):
    body = tiny.get("/v1/models").json()
    base, *adapters = body["data"]
    assert body["object"] == "list"
    assert base["object"] == "model" and base["parent"] is None and base["max_model_len"] > 0
    assert {card["id"] for card in adapters} == set(NAMES)
    assert all(card["parent"] == base["id"] for card in adapters)


def test_model_info_says_what_is_served(tiny, tiny_dir):
    info = tiny.get("/model_info").json()
    assert info["model_path"] == str(tiny_dir)
    assert info["is_generation"] is True
    assert info["weight_version"] == "default"
    assert tiny.get("/get_model_info").json() == info


def test_an_unknown_route_and_a_wrong_method(tiny):
    assert tiny.get("/no_such_route").status_code == 404
    assert tiny.get("/generate").status_code == 405


def test_a_single_prompt_gives_an_object(tiny):
    item = tiny.generate(input_ids=PROMPT, sampling_params=GREEDY)
    meta = item["meta_info"]
    assert len(item["output_ids"]) == meta["completion_tokens"] == 8
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert meta["weight_version"] == "default"
    assert isinstance(meta["id"], str) and isinstance(meta["e2e_latency"], float)
    assert meta["cached_tokens"] == 0
    assert "text" not in item  # no tokenizer here


def test_a_batch_gives_an_array_in_order(tiny):
    prompts = [PROMPT, PROMPT[:3], PROMPT[:1]]
    items = tiny.generate(input_ids=prompts, sampling_params=GREEDY)
    assert [item["meta_info"]["prompt_tokens"] for item in items] == [7, 3, 1]
    assert items[0]["output_ids"] == tiny.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"]
    assert isinstance(tiny.generate(input_ids=[PROMPT], sampling_params=GREEDY), list)


def test_put_is_accepted_too(tiny):
    reply = tiny.http.put(tiny.url + "/generate", json={"input_ids": PROMPT, "sampling_params": GREEDY}, timeout=60)
    assert reply.status_code == 200


def test_request_ids_are_kept(tiny):
    assert tiny.generate(input_ids=PROMPT, sampling_params=GREEDY, rid="mine")["meta_info"]["id"] == "mine"
    items = tiny.generate(input_ids=[PROMPT, PROMPT], sampling_params=GREEDY, rid="pair")
    assert [item["meta_info"]["id"] for item in items] == ["pair_0", "pair_1"]


def test_sampling_parameters_per_item(tiny):
    items = tiny.generate(input_ids=[PROMPT, PROMPT], sampling_params=[GREEDY, {**GREEDY, "max_new_tokens": 3}])
    assert [len(item["output_ids"]) for item in items] == [8, 3]


def test_greedy_is_the_argmax(tiny):
    item = tiny.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True, top_logprobs_num=1)
    meta = item["meta_info"]
    assert [top[0][:2] for top in meta["output_top_logprobs"]] == [x[:2] for x in meta["output_token_logprobs"]]


def test_a_seed_repeats_and_another_seed_differs(tiny):
    def draw(seed):
        sampling = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True, "sampling_seed": seed}
        return tiny.generate(input_ids=PROMPT, sampling_params=sampling)["output_ids"]

    assert draw(7) == draw(7)
    assert len({tuple(draw(seed)) for seed in range(5)}) == 5


def test_without_a_seed_draws_differ(tiny):
    sampling = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
    items = tiny.generate(input_ids=[PROMPT] * 4, sampling_params=sampling)
    assert len({tuple(item["output_ids"]) for item in items}) == 4


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}])
def test_truncated_sampling_stays_among_the_likely_tokens(tiny, limits):
    sampling = {"temperature": 1.5, "max_new_tokens": 1, "ignore_eos": True, **limits}
    top = tiny.generate(input_ids=PROMPT, sampling_params=GREEDY | {"max_new_tokens": 1}, return_logprob=True,
                        top_logprobs_num=320)["meta_info"]["output_top_logprobs"][0]
    scaled = [math.exp(logprob / 1.5) for logprob, _, _ in top]
    mass = [value / sum(scaled) for value in scaled]
    allowed, total = set(), 0.0
    for (_, token, _), share in zip(top, mass):
        if "top_k" in limits and len(allowed) == 3:
            break
        if "top_p" in limits and total >= 0.4:
            break
        if "min_p" in limits and share < 0.3 * mass[0]:
            break
        allowed.add(token)
        total += share
    drawn = {tiny.generate(input_ids=PROMPT, sampling_params={**sampling, "sampling_seed": seed})["output_ids"][0]
             for seed in range(60)}
    assert drawn <= allowed
    assert len(allowed) == 1 or len(drawn) > 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_reported_logprob_is_that_of_the_scaled_distribution_before_truncation(tiny, temperature):
    item = tiny.generate(
        input_ids=PROMPT, return_logprob=True,
        sampling_params={"temperature": temperature, "top_p": 0.9, "top_k": 5, "max_new_tokens": 1, "sampling_seed": 3})
    [[logprob, token, _]] = item["meta_info"]["output_token_logprobs"]
    top = tiny.generate(input_ids=PROMPT, sampling_params=GREEDY | {"max_new_tokens": 1}, return_logprob=True,
                        top_logprobs_num=320)["meta_info"]["output_top_logprobs"][0]
    logs = {entry[1]: entry[0] / temperature for entry in top}
    assert len(logs) == 320
    norm = math.log(sum(math.exp(value) for value in logs.values()))
    assert logprob == pytest.approx(logs[token] - norm, abs=1e-5)


def test_greedy_logprobs_are_not_scaled(tiny):
    [generated] = tiny.score([PROMPT], None, 8)
    [scored] = tiny.score([PROMPT + generated.ids])
    assert generated.prompt + generated.output == scored.prompt


@pytest.mark.parametrize("start", [0, 3, len(PROMPT) - 1])
def test_input_logprobs_begin_where_asked(tiny, start):
    meta = tiny.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True, logprob_start_len=start,
                         top_logprobs_num=2)["meta_info"]
    triples = meta["input_token_logprobs"]
    assert [token for _, token, _ in triples] == PROMPT[start:]
    assert (triples[0][0] is None) == (start == 0)
    assert len(meta["input_top_logprobs"]) == len(triples)
    assert (meta["input_top_logprobs"][0] is None) == (start == 0)
    assert all(len(top) == 2 and top[0][0] >= top[1][0] for top in meta["input_top_logprobs"] if top)


def test_by_default_only_output_logprobs_come(tiny):
    meta = tiny.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True)["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert len(meta["output_token_logprobs"]) == 8
    assert "input_token_logprobs" not in tiny.generate(input_ids=PROMPT, sampling_params=GREEDY)["meta_info"]


def test_scoring_generates_nothing(tiny):
    item = tiny.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    assert item["output_ids"] == [] and item["meta_info"]["output_token_logprobs"] == []
    assert item["meta_info"]["completion_tokens"] == 0
    assert len(item["meta_info"]["input_token_logprobs"]) == len(PROMPT)


def test_a_stop_token_ends_and_is_named(tiny):
    free = tiny.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"]
    stop = free[4]
    item = tiny.generate(input_ids=PROMPT, sampling_params={**GREEDY, "stop_token_ids": [stop]})
    assert item["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert item["output_ids"] == free[: free.index(stop) + 1]


@pytest.mark.parametrize("body", [
    {},
    {"input_ids": []},
    {"input_ids": [[]]},
    {"input_ids": [-1]},
    {"input_ids": [320]},
    {"input_ids": [2**31]},
    {"input_ids": [1.5]},
    {"input_ids": ["5"]},
    {"input_ids": [[[5]]]},
    {"input_ids": [[5], 6]},
    {"input_ids": None},
    {"input_ids": "5"},
    {"input_ids": [5] * 600},
    {"text": "no tokenizer here"},
    {"input_ids": PROMPT, "logprob_start_len": 8, "return_logprob": True},
    {"input_ids": PROMPT, "logprob_start_len": -2, "return_logprob": True},
    {"input_ids": PROMPT, "top_logprobs_num": -1, "return_logprob": True},
    {"input_ids": PROMPT, "top_logprobs_num": 10**9, "return_logprob": True},
    {"input_ids": PROMPT, "lora_path": "no-such-adapter"},
    {"input_ids": PROMPT, "lora_path": "SEVEN-R8"},
    {"input_ids": PROMPT, "lora_path": "base:seven-r8"},
    {"input_ids": PROMPT, "lora_path": "seven/r8"},
    {"input_ids": PROMPT, "lora_path": 5},
    {"input_ids": [PROMPT, PROMPT, PROMPT], "lora_path": ["seven-r8", "no-such-adapter", "qv-r1"]},
    {"input_ids": [PROMPT, PROMPT], "lora_path": ["seven-r8"]},
    {"input_ids": [PROMPT, PROMPT], "sampling_params": [GREEDY]},
    {"input_ids": PROMPT, "sampling_params": 5},
    {"input_ids": [PROMPT, PROMPT], "rid": ["same", "same"]},
])
def test_a_wrong_request_is_refused_and_the_next_one_answered(tiny, body):
    before = tiny.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"]
    reply = tiny.post("/generate", body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"]
    assert tiny.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"] == before


@pytest.mark.parametrize("sampling", [
    {"temperature": -1}, {"temperature": "hot"}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": 0}, {"top_k": -2},
    {"min_p": -0.1}, {"min_p": 2}, {"max_new_tokens": -1}, {"max_new_tokens": 2.5}, {"min_new_tokens": 9, "max_new_tokens": 8},
    {"frequency_penalty": 3}, {"presence_penalty": -3}, {"repetition_penalty": 0}, {"no_such_parameter": 1},
    {"stop_token_ids": [320]}, {"stop_token_ids": [-1]}, {"stop_token_ids": [2**63]}, {"stop_token_ids": ["5"]},
    {"logit_bias": {"320": 1}}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"five": 1}},
])
def test_a_wrong_sampling_parameter_is_named(tiny, sampling):
    reply = tiny.post("/generate", {"input_ids": PROMPT, "sampling_params": sampling})
    assert reply.status_code == 400, reply.text
    assert next(iter(sampling)) in reply.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"{\"input_ids\": [5]} more", b"[" * 100000])
def test_a_body_that_is_not_a_json_object_is_refused(tiny, body):
    reply = tiny.http.post(tiny.url + "/generate", data=body, headers={"Content-Type": "application/json"}, timeout=60)
    assert reply.status_code == 400, reply.text
    assert tiny.get("/health").status_code == 200


def test_an_unknown_adapter_is_named_in_the_words_clients_look_for(tiny):
    message = tiny.post("/generate", {"input_ids": PROMPT, "lora_path": "ghost"}).json()["error"]["message"]
    assert "ghost" in message and "not loaded" in message and "never been loaded" in message


def test_many_requests_at_once_get_what_each_gets_alone(tiny):
    generator = random.Random(2)
    requests = [([generator.randrange(3, 320) for _ in range(generator.randrange(1, 90))],
                 generator.choice([None, *NAMES]), generator.randrange(1, 24)) for _ in range(48)]

    def run(request):
        prompt, adapter, new_tokens = request
        return tiny.score([prompt], adapter, new_tokens)[0]

    alone = [run(request) for request in requests]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        crowd = list(pool.map(run, requests))
    assert crowd == alone


def test_a_client_that_leaves_disturbs_nobody(tiny):
    import socket

    before = tiny.score([PROMPT], "seven-r8", 8)
    body = b'{"input_ids": [5, 6], "lora_path": "seven-r8", "sampling_params": {"max_new_tokens": 400, "ignore_eos": true}}'
    for _ in range(4):
        with socket.create_connection(("127.0.0.1", tiny.port)) as sock:
            sock.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    assert tiny.score([PROMPT], "seven-r8", 8) == before


def test_text_in_and_text_out(smollm2):
    item = smollm2.generate(text="The capital of France is", sampling_params={"temperature": 0.0, "max_new_tokens": 4})
    assert "Paris" in item["text"]
    items = smollm2.generate(text=["The capital of France is", "Once upon a time"],
                             sampling_params={"temperature": 0.0, "max_new_tokens": 4})
    assert items[0]["text"] == item["text"]


def test_text_in_logprobs(smollm2):
    meta = smollm2.generate(text="Once upon a time", sampling_params={"temperature": 0.0, "max_new_tokens": 2},
                            return_logprob=True, logprob_start_len=0, return_text_in_logprobs=True)["meta_info"]
    assert [text for _, _, text in meta["input_token_logprobs"]] == ["Once", " upon", " a", " time"]


def test_a_stop_string_ends_the_text_before_it(smollm2):
    sampling = {"temperature": 0.0, "max_new_tokens": 12, "stop": [" city"]}
    item = smollm2.generate(text="Once upon a time", sampling_params=sampling)
    assert item["meta_info"]["finish_reason"] == {"type": "stop", "matched": " city"}
    assert item["text"].endswith(", the") and " city" not in item["text"]


def test_token_ids_are_used_as_sent(smollm2):
    """Ids that no tokenizer would produce for their text: 'h' 'e' 'llo' instead of 'hello'."""
    from tokenizers import Tokenizer
    from tools.make_tiny_models import HOME

    tokenizer = Tokenizer.from_file(str(HOME / "smollm2/tokenizer.json"))
    split = [tokenizer.token_to_id(piece) for piece in ("h", "e", "llo")]
    assert tokenizer.encode("hello").ids != split
    meta = smollm2.generate(input_ids=split, sampling_params={"max_new_tokens": 3, "ignore_eos": True},
                            return_logprob=True, logprob_start_len=0)["meta_info"]
    assert [token for _, token, _ in meta["input_token_logprobs"]] == split
