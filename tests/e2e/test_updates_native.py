"""The native update routes: safetensors images as bodies, prepare and commit, manifests and receipts, buckets that may be
sent again, leases, digests. Every reply is compared with what the bytes are."""

import concurrent.futures
import json
import subprocess
import time
import uuid

import pytest
import requests
import torch
import xxhash
from safetensors.torch import load_file, save

from tests.e2e import trainer_forms as forms
from tools.engine import Engine

PROMPT = [5, 17, 40, 8, 99, 3, 250]
UP = "model.layers.1.mlp.up_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
IMAGE = "update_weights_from_safetensors"


@pytest.fixture(scope="module")
def engine(tiny_dir):
    with Engine(tiny_dir, "--enable-lora", dtype="float32", skip_tokenizer=True) as engine:
        yield engine
        assert engine.process.poll() is None, engine.log()


@pytest.fixture(autouse=True)
def clean(engine):
    yield
    engine.post("/end_weight_update", {"abort": True})
    for card in engine.get("/v1/models").json()["data"][1:]:
        engine.unload(card["id"])
    assert engine.get("/weight_update_status").json()["session"]["state"] == "idle"


@pytest.fixture(scope="module")
def base(tiny_dir):
    return load_file(tiny_dir / "model.safetensors")


@pytest.fixture
def restored(engine, base):
    before = digests(engine)
    yield before
    image(engine, base, weight_version="default")
    assert digests(engine) == before


@pytest.fixture(scope="module")
def peft(adapter_dirs):
    return adapter_dirs["seven-r8"]


@pytest.fixture(scope="module")
def config(peft):
    return json.loads((peft / "adapter_config.json").read_text())


@pytest.fixture(scope="module")
def tensors(peft):
    return load_file(peft / "adapter_model.safetensors")


def scaled(tensors, factor):
    return {key: tensor * factor if "lora_B" in key else tensor for key, tensor in tensors.items()}


def named(name, tensors):
    return {f"{name}:{key}": tensor for key, tensor in tensors.items()}


def answer_of(reply, status):
    body = reply.json()
    assert reply.status_code == status and body["success"] is (status == 200), (reply.status_code, body)
    return body


def image(engine, tensors, status=200, config=None, **query):
    """Posts tensors as a safetensors image."""
    headers = {"X-Lora-Config": json.dumps(config)} if config is not None else {}
    data = tensors if isinstance(tensors, bytes) else save(tensors)
    return answer_of(requests.post(f"{engine.url}/{IMAGE}", params=query, data=data, headers=headers, timeout=60), status)


def call(engine, route, status=200, **body):
    return answer_of(engine.post("/" + route, body), status)


def digests(engine, **query):
    answer = answer_of(requests.get(engine.url + "/weight_digests", params=query, timeout=60), 200)
    return {name: item["xxh3"] for name, item in answer["tensors"].items()}


def raw(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def xxh3(tensor):
    return xxhash.xxh3_128_hexdigest(raw(tensor))


def receipt_digest(tensors):
    """Over the sorted (name, NUL, digest)."""
    whole = xxhash.xxh3_128()
    for name in sorted(tensors, key=str.encode):
        whole.update(name.encode() + b"\0" + xxhash.xxh3_128_digest(raw(tensors[name])))
    return whole.hexdigest()


def bits(engine, name=None):
    return engine.score([PROMPT], name, new_tokens=8)


def begin(engine, session=None, **more):
    """Opens a session of a fresh id, or of the one given; returns its id."""
    return call(engine, "begin_weight_update", session_id=session or uuid.uuid4().hex, **more)["session_id"]


def status(engine):
    return engine.get("/weight_update_status").json()["session"]


# ---- a file as it is ----

def test_curl_posts_the_file_that_peft_saved(engine, peft, tmp_path):
    engine.load("expected", peft)
    config = (peft / "adapter_config.json").read_text().replace("\n", " ")
    done = subprocess.run(
        ["curl", "-s", "-H", f"X-Lora-Config: {config}", "--data-binary", f"@{peft / 'adapter_model.safetensors'}",
         f"{engine.url}/{IMAGE}?lora_name=mine&weight_version=17"], capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout)
    assert answer["success"] is True and answer["session"] == "own" and answer["upsert"] is True
    assert answer["receipt"]["weight_version"] == "17"
    assert bits(engine, "mine") == bits(engine, "expected")


def test_the_config_may_be_registered_before(engine, peft, config, tensors):
    message = image(engine, tensors, 400, lora_name="mine")["message"]
    assert "not registered" in message and "X-Lora-Config" in message
    call(engine, "register_lora_adapter", lora_name="mine", config_dict=config)
    image(engine, tensors, lora_name="mine")
    image(engine, scaled(tensors, 2), lora_name="mine")  # and is kept for the next version
    engine.load("expected", peft)
    assert bits(engine, "mine") != bits(engine, "expected")
    image(engine, tensors, lora_name="mine")
    assert bits(engine, "mine") == bits(engine, "expected")


def test_the_receipt_says_what_came(engine, config, tensors):
    answer = image(engine, tensors, lora_name="mine", config=config, audit="true")
    receipt = answer["receipt"]
    sent = named("mine", tensors)
    assert receipt["state"] == "published" and receipt["tensors"] == len(sent)
    assert receipt["bytes"] == sum(tensor.nbytes for tensor in sent.values())
    assert receipt["xxh3"] == receipt_digest(sent)
    [adapter] = receipt["adapters"]
    assert adapter["xxh3"] == receipt_digest(tensors) and adapter["unchanged"] is False and adapter["id"] > 0
    assert receipt["audit"] == {name: {"bytes": tensor.nbytes, "xxh3": xxh3(tensor), "sha256": forms.sha256(tensor)}
                                for name, tensor in sent.items()}
    assert set(receipt["milliseconds"]) == {"receive", "verify", "build", "publish"}
    assert "audit" not in image(engine, tensors, lora_name="mine")["receipt"]


def test_the_same_adapter_again_is_called_unchanged(engine, config, tensors):
    first = image(engine, tensors, lora_name="mine", config=config)["receipt"]["adapters"][0]
    second = image(engine, tensors, lora_name="mine")["receipt"]["adapters"][0]
    assert (first["unchanged"], second["unchanged"]) == (False, True) and first["xxh3"] == second["xxh3"]


def test_without_upsert_a_loaded_name_is_refused(engine, config, tensors):
    image(engine, tensors, lora_name="mine", config=config, upsert="false")
    before = bits(engine, "mine")
    for more in ({}, {"config": config}):
        message = image(engine, scaled(tensors, 2), 400, lora_name="mine", upsert="false", **more)["message"]
        assert "already loaded" in message
    assert bits(engine, "mine") == before


def test_a_body_may_come_in_chunks_of_unknown_length(engine, config, tensors, peft):
    data = save(tensors)
    pieces = (data[at:at + 10_000] for at in range(0, len(data), 10_000))
    reply = requests.post(f"{engine.url}/{IMAGE}?lora_name=mine", data=pieces, timeout=60,
                          headers={"X-Lora-Config": json.dumps(config)})
    answer_of(reply, 200)
    engine.load("expected", peft)
    assert bits(engine, "mine") == bits(engine, "expected")


@pytest.mark.parametrize("query, words", [
    ({"lora_nam": "x"}, ["lora_nam"]), ({"lora_name": "a:b"}, ["':'"]), ({"lora_name": "mine", "flush_cache": "perhaps"}, ["flush_cache"]),
    ({"lora_name": "mine", "index": "-1"}, ["index"]), ({"lora_name": "mine", "pinned": "2"}, ["pinned"]),
    ({"lora_name": "mine", "weight_version": "x" * 300}, ["version"]), ({}, ["lora_name"])])
def test_a_query_that_says_something_wrong(engine, config, tensors, query, words):
    message = image(engine, tensors, 400, config=config, **query)["message"]
    assert all(word in message for word in words), message
    assert engine.get("/v1/models").json()["data"][1:] == []


def test_a_key_of_the_query_given_twice(engine, tensors):
    url = f"{engine.url}/{IMAGE}?lora_name=a&lora_name=b"
    assert "twice" in answer_of(requests.post(url, data=save(tensors), timeout=60), 400)["message"]


@pytest.mark.parametrize("data, word", [(b"", "came nothing"), (b"not safetensors", "safetensors"), (b"\x08" + b"\0" * 7 + b"{}      ", "tensor"),
                                        (b"PK\x03\x04" + b"\0" * 60, "body")])
def test_a_body_that_is_no_image(engine, config, data, word):
    assert word in image(engine, data, 400, config=config, lora_name="mine")["message"]


def test_an_image_that_is_cut_short(engine, config, tensors):
    image(engine, save(tensors)[:-100], 400, config=config, lora_name="mine")


@pytest.mark.parametrize("header", ["{", "[]", '{"r": 8, "r": 8}', "nonsense"])
def test_a_config_header_that_is_no_config(engine, tensors, header):
    reply = requests.post(f"{engine.url}/{IMAGE}?lora_name=mine", data=save(tensors), headers={"X-Lora-Config": header}, timeout=60)
    assert "config_dict" in answer_of(reply, 400)["message"]


def test_base_tensors_outside_a_session(engine, base, restored):
    answer = image(engine, {UP: base[UP] * 1.5}, weight_version="b")
    assert answer["flush_cache"] is False and answer["receipt"]["base_tensors"] == 1
    assert digests(engine)[UP] == xxh3(base[UP] * 1.5)
    message = image(engine, {UP: base[UP]}, 400, complete_base="true")["message"]
    assert "model.layers" in message or "model." in message
    assert digests(engine)[UP] == xxh3(base[UP] * 1.5)


# ---- digests ----

def test_digests_are_those_of_the_bytes(engine, base, config, tensors):
    assert digests(engine) == {name: xxh3(tensor) for name, tensor in base.items()}
    image(engine, tensors, lora_name="mine", config=config)
    expected = {name.removeprefix("base_model.model."): xxh3(tensor) for name, tensor in tensors.items()}
    scalings = {name.replace("lora_A.weight", "scaling"): xxh3(torch.tensor(config["lora_alpha"] / config["r"]))
                for name in expected if name.endswith("lora_A.weight")}
    assert len(scalings) == len(expected) // 2 and digests(engine, lora_name="mine") == expected | scalings
    image(engine, tensors, lora_name="other", config=config | {"lora_alpha": 3 * config["lora_alpha"]})
    differing = dict(digests(engine, lora_name="mine").items() - digests(engine, lora_name="other").items())
    assert differing == scalings  # two adapters that differ in lora_alpha alone
    whole = call_digest(engine, lora_name="mine").json()["tensors"]
    assert all(whole[name]["dtype"] == "F32" and whole[name]["shape"] == [] for name in scalings)
    assert call_digest(engine, lora_name="ghost").status_code == 400
    assert call_digest(engine, typo="x").status_code == 400


def call_digest(engine, **query):
    return requests.get(engine.url + "/weight_digests", params=query, timeout=60)


# ---- prepare and commit ----

def test_nothing_changes_before_the_commit(engine, base, config, tensors, restored):
    image(engine, tensors, lora_name="mine", config=config, weight_version="0")
    before = bits(engine), bits(engine, "mine")
    s = begin(engine)
    new = {UP: base[UP] * 1.5, **named("mine", scaled(tensors, 2))}
    image(engine, new, session_id=s)
    answer = call(engine, "prepare_weight_update", session_id=s, weight_version="1")
    assert answer["receipt"]["state"] == "prepared" and answer["receipt"]["xxh3"] == receipt_digest(new)
    assert (bits(engine), bits(engine, "mine")) == before and status(engine)["state"] == "prepared"
    assert engine.get("/model_info").json()["weight_version"] == "0"
    first = call(engine, "commit_weight_update", session_id=s)["receipt"]
    assert first["state"] == "published" and first["weight_version"] == "1"
    again = call(engine, "commit_weight_update", session_id=s)["receipt"]  # the answer was lost
    assert {**again, "milliseconds": None} == {**first, "milliseconds": None}
    assert bits(engine) != before[0] and bits(engine, "mine") != before[1]
    assert engine.get("/model_info").json()["weight_version"] == "1"


def test_prepare_may_be_repeated_and_abort_undoes_it(engine, config, tensors):
    image(engine, tensors, lora_name="mine", config=config)
    before = bits(engine, "mine")
    s = begin(engine, sync_base=False)
    image(engine, named("mine", scaled(tensors, 2)), session_id=s)
    first = call(engine, "prepare_weight_update", session_id=s)["receipt"]
    assert call(engine, "prepare_weight_update", session_id=s)["receipt"] == first
    assert "prepared" in image(engine, named("mine", tensors), 400, session_id=s)["message"]
    call(engine, "abort_weight_update", session_id=s)
    call(engine, "abort_weight_update", session_id=s)  # again is fine
    call(engine, "commit_weight_update", 400, session_id=s)
    assert bits(engine, "mine") == before


def test_a_session_goes_by_its_name(engine, base):
    s = begin(engine, "my-session")
    assert s == "my-session" and begin(engine, s) == s  # the reply was lost
    assert "already open" in call(engine, "begin_weight_update", 400, session_id="other")["message"]
    for route in ("prepare_weight_update", "commit_weight_update", "end_weight_update"):
        call(engine, route, 400, session_id="other")
    assert status(engine)["session_id"] == s
    call(engine, "commit_weight_update", 400)  # whose?
    assert "session" in image(engine, {UP: base[UP]}, 400, session_id="other")["message"]
    call(engine, "abort_weight_update", session_id=s)


def test_a_bucket_of_a_session_that_is_over_is_never_applied_by_itself(engine, base):
    s = begin(engine)
    call(engine, "abort_weight_update", session_id=s)
    before = digests(engine)
    image(engine, {UP: base[UP] * 2}, 400, session_id=s)
    assert digests(engine) == before


@pytest.mark.parametrize("form", ["xxh3", "sha256", "both", "text", "names", "list"])
def test_a_manifest_is_verified(engine, config, tensors, form):
    call(engine, "register_lora_adapter", lora_name="mine", config_dict=config)
    sent = named("mine", tensors)
    first = next(iter(sent))

    def manifest(tensors):
        entry = {"xxh3": lambda t: {"xxh3": xxh3(t)}, "sha256": lambda t: {"sha256": forms.sha256(t)},
                 "both": lambda t: {"xxh3": xxh3(t), "sha256": forms.sha256(t)}, "text": xxh3, "names": lambda t: None,
                 "list": None}[form]
        return list(tensors) if entry is None else {name: entry(tensor) for name, tensor in tensors.items()}

    def end(manifest, status):
        s = begin(engine, sync_base=False)
        image(engine, sent, session_id=s)
        return call(engine, "end_weight_update", status, session_id=s, manifest=manifest)

    wrong = [manifest({**sent, "mine:ghost": sent[first]}), manifest({name: t for name, t in sent.items() if name != first})]
    if form not in ("names", "list"):
        wrong.append(manifest({**sent, first: sent[first] + 1}))
    for bad in wrong:
        assert "[LORA-CHECK]" in end(bad, 400)["message"]
    assert engine.get("/v1/models").json()["data"][1:] == []
    assert end(manifest(sent), 200)["checksums_verified"] is True


def test_a_manifest_of_base_tensors(engine, base, restored):
    s = begin(engine)
    image(engine, {UP: base[UP], DOWN: base[DOWN]}, session_id=s)
    call(engine, "end_weight_update", 400, session_id=s, manifest={UP: xxh3(base[UP])}, covers_base=True)
    s = begin(engine)
    image(engine, {UP: base[UP] * 2, DOWN: base[DOWN]}, session_id=s)
    call(engine, "end_weight_update", 400, session_id=s, manifest={UP: xxh3(base[UP])})
    s = begin(engine)
    image(engine, {UP: base[UP], DOWN: base[DOWN]}, session_id=s)
    call(engine, "end_weight_update", session_id=s, manifest={UP: xxh3(base[UP]), DOWN: xxh3(base[DOWN])}, covers_base=True)
    assert digests(engine) == restored


def test_a_whole_base_in_buckets_of_any_size_is_the_same(engine, base, restored):
    changed = {name: tensor * 1.25 if "mlp" in name else tensor for name, tensor in base.items()}
    seen = set()
    for most in (1 << 30, 60_000, 1):
        s = begin(engine)
        for bucket in forms.buckets(changed.items(), most):
            image(engine, dict(bucket), session_id=s)
        answer = call(engine, "end_weight_update", session_id=s, complete_base=True)
        assert answer["complete_base"] is True
        seen.add(answer["receipt"]["xxh3"])
    assert seen == {receipt_digest(changed)}
    assert digests(engine) == {name: xxh3(tensor) for name, tensor in changed.items()}


def test_an_incomplete_base_is_refused_where_a_complete_one_was_asked_for(engine, base):
    before = digests(engine)
    s = begin(engine)
    image(engine, {name: tensor * 2 for name, tensor in base.items() if name != UP}, session_id=s)
    assert UP.replace(".weight", "") in call(engine, "end_weight_update", 400, session_id=s, complete_base=True)["message"]
    assert digests(engine) == before


# ---- sending again ----

def test_a_bucket_with_an_index_may_be_sent_again(engine, base, restored):
    s = begin(engine)
    for _ in range(2):
        image(engine, {UP: base[UP] * 2}, session_id=s, stream="rank-0", index=0)
    image(engine, {DOWN: base[DOWN] * 2}, session_id=s, stream="rank-1", index=0)
    for _ in range(2):
        image(engine, {"model.norm.weight": base["model.norm.weight"]}, session_id=s, stream="rank-0", index=1)
    assert status(engine)["tensors"] == 3
    call(engine, "end_weight_update", session_id=s)
    assert digests(engine)[UP] == xxh3(base[UP] * 2)


def test_a_bucket_that_was_refused_must_come_before_the_end(engine, base, restored):
    before = digests(engine)
    s = begin(engine)
    image(engine, {UP: base[UP] * 2}, session_id=s, stream="rank-0", index=0)
    image(engine, {DOWN: base[DOWN] * 2}, 400, session_id=s, stream="rank-0", index=2)  # one before it is missing
    call(engine, "end_weight_update", 400, session_id=s)
    assert digests(engine) == before
    s = begin(engine)
    image(engine, {DOWN: base[DOWN] * 2}, 400, session_id=s, stream="rank-0", index=1)
    image(engine, {UP: base[UP] * 2}, session_id=s, stream="rank-0", index=0)
    image(engine, {DOWN: base[DOWN] * 2}, session_id=s, stream="rank-0", index=1)
    call(engine, "end_weight_update", session_id=s)
    assert digests(engine)[DOWN] == xxh3(base[DOWN] * 2)


def test_several_ranks_post_at_once(engine, base, restored):
    changed = {name: tensor * 1.25 if "mlp" in name else tensor for name, tensor in base.items()}
    items = list(changed.items())
    s = begin(engine)

    def rank(which):
        for index, item in enumerate(items[which::4]):
            image(engine, dict([item]), session_id=s, stream=f"rank-{which}", index=index)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(rank, range(4)))
    call(engine, "end_weight_update", session_id=s, complete_base=True)
    assert digests(engine) == {name: xxh3(tensor) for name, tensor in changed.items()}


# ---- a trainer that is gone ----

def test_a_session_that_hears_nothing_is_rolled_back(engine, base):
    before = digests(engine)
    begin(engine, "dead", lease_seconds=0.3)
    image(engine, {UP: base[UP] * 2}, session_id="dead")
    assert "already open" in call(engine, "begin_weight_update", 400)["message"]
    deadline = time.monotonic() + 10
    while status(engine)["state"] != "idle":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    call(engine, "end_weight_update", 400, session_id="dead")
    assert digests(engine) == before
    begin(engine, "next")
    call(engine, "end_weight_update", abort=True)


def test_a_client_that_leaves_in_the_middle_of_a_bucket_leaves_no_trace(engine, base):
    import socket
    before = digests(engine)
    s = begin(engine)
    data = save({UP: base[UP] * 2})
    for sent in (0, 100, len(data) // 2, len(data) - 1):
        with socket.create_connection(("127.0.0.1", engine.port)) as sock:
            sock.sendall(f"POST /{IMAGE}?session_id={s} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data[:sent])
    assert status(engine)["tensors"] == 0
    image(engine, {UP: base[UP]}, session_id=s)
    call(engine, "end_weight_update", session_id=s)
    assert digests(engine) == before


# ---- guards ----

@pytest.mark.parametrize("how", ["image", "pickle"])
@pytest.mark.parametrize("option", [{"complete_base": True}, {"audit": True}, {"timeout_seconds": 5}])
def test_what_only_an_end_can_guard_is_refused_beside_a_bucket_of_a_session(engine, base, how, option):
    """And the bucket has not come: the session cannot end as if it had."""
    s = begin(engine)
    if how == "image":
        query = {key: str(value).lower() for key, value in option.items()}
        message = image(engine, {UP: base[UP]}, 400, **query)["message"]
    else:
        message = call(engine, "update_weights_from_tensor", 400,
                       serialized_named_tensors=[forms.plain([(UP, base[UP])])], **option)["message"]
    assert next(iter(option)) in message and "session" in message
    image(engine, {UP: base[UP]}, session_id=s, complete_base="false", audit="false")
    assert next(iter(option)) in call(engine, "end_weight_update", 400, session_id=s)["message"]


@pytest.mark.parametrize("options", [
    {"pinned": "true"}, {"pinned": "true", "lora_name": "mine"}, {"upsert": "false"}, {"index": 0}])
def test_an_option_that_would_mean_nothing_is_refused(engine, base, options):
    name, value = next(iter(options.items()))
    assert name in image(engine, {UP: base[UP]}, 400, **options)["message"]


def test_audit_of_a_session_has_sha256_of_base_tensors(engine, base):
    s = begin(engine, audit=True)
    image(engine, {UP: base[UP]}, session_id=s)
    answer = call(engine, "end_weight_update", session_id=s, audit=True)
    assert answer["receipt"]["audit"] == {UP: {"bytes": base[UP].nbytes, "xxh3": xxh3(base[UP]), "sha256": forms.sha256(base[UP])}}


def test_a_config_beside_a_bucket_of_a_session_is_refused(engine, config, tensors):
    s = begin(engine, sync_base=False)
    assert "register" in image(engine, tensors, 400, lora_name="mine", config=config, session_id=s)["message"]


def test_bare_names_in_a_session_belong_to_the_adapter_of_the_query(engine, config, tensors, peft):
    call(engine, "register_lora_adapter", lora_name="mine", config_dict=config)
    s = begin(engine, sync_base=False)
    image(engine, tensors, session_id=s, lora_name="mine")
    call(engine, "end_weight_update", session_id=s, manifest=list(named("mine", tensors)))
    engine.load("expected", peft)
    assert bits(engine, "mine") == bits(engine, "expected")


def test_a_large_body_many_times_takes_no_more_memory(engine, base):
    """The pages of one body serve the next."""
    def resident():
        with open(f"/proc/{engine.process.pid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

    data = save({"ghost.weight": torch.zeros(4 << 20)})  # 16 MiB that are refused
    image(engine, data, 400)
    before = resident()
    for _ in range(20):
        image(engine, data, 400)
    assert resident() - before < 8 * 1024
