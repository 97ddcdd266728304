"""`headrace push`, `verify`, `status`, `inspect` and `generate` against engines, whole or not at all: what is served after a
push is what a load from the same files serves; every lost or late call is survived or named; and what SGLang's forms
carry is what torch reads."""

import base64
import json
import pickle
import shutil
import signal
import subprocess
import time

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from tests.e2e import trainer_forms as forms
from tests.e2e.push_proxy import Proxy, Recorder
from tools.engine import BINARY, Engine

PROMPT = [5, 17, 40, 8, 99, 3, 250]
ROUTES = ["register_lora_adapter", "begin_weight_update", "update_weights_from_safetensors", "prepare_weight_update",
          "commit_weight_update"]


def cli(*words, code=0, env=None, timeout=60):
    done = subprocess.run([str(BINARY), *map(str, words)], capture_output=True, text=True, timeout=timeout, env=env)
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def push(*words, code=0, **more):
    done = cli("push", *words, "--json", code=code, **more)
    receipt = json.loads(done.stdout)
    assert receipt["success"] == (code == 0)
    return receipt, done.stderr


@pytest.fixture(scope="module")
def engines(tiny_dir):
    with Engine(tiny_dir, skip_tokenizer=True) as one, Engine(tiny_dir, skip_tokenizer=True) as two:
        yield one, two
        for engine in (one, two):
            assert engine.process.poll() is None, engine.log()


@pytest.fixture(scope="module")
def engine(engines):
    return engines[0]


@pytest.fixture(autouse=True)
def clean(engines):
    yield
    for engine in engines:
        assert session(engine)["state"] == "idle"
        for card in engine.get("/v1/models").json()["data"][1:]:
            engine.unload(card["id"])


@pytest.fixture(scope="module")
def loaded(tiny_dir, adapter_dirs):
    """Scores of adapters that were loaded from their files."""
    with Engine(tiny_dir, skip_tokenizer=True) as engine:
        for name in ("seven-r8", "qv-r1"):
            engine.load(name, adapter_dirs[name])
        yield {name: engine.score([PROMPT], name)[0].prompt for name in ("seven-r8", "qv-r1", None)}


def session(engine):
    return engine.get("/weight_update_status").json()["session"]


def version(engine):
    return engine.get("/model_info").json()["weight_version"]


def scores(engine, name=None):
    return engine.score([PROMPT], name)[0].prompt


def changed_base(tiny_dir, out):
    """The model with other weights."""
    shutil.copytree(tiny_dir, out)
    tensors = load_file(out / "model.safetensors")
    save_file({name: t * 0.9 + 0.01 for name, t in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    return out


# ---- what is served afterwards ----

def test_adapters_of_a_push_are_those_of_a_load(engines, adapter_dirs, loaded):
    one, two = engines
    receipt, _ = push("--engine", one.url, two.url, "--adapter", f"a={adapter_dirs['seven-r8']}",
                      f"b={adapter_dirs['qv-r1']}", "--version", "step-1")
    tensors = {f"{name}:{key}": t for name, folder in (("a", "seven-r8"), ("b", "qv-r1"))
               for key, t in load_file(adapter_dirs[folder] / "adapter_model.safetensors").items()}
    assert receipt["tensors"] == len(tensors) and receipt["transport"] == "safetensors" and receipt["atomic"]
    for engine, said in zip(engines, receipt["engines"]):
        assert said["state"] == "published" and said["receipt"]["xxh3"] == receipt["xxh3"]
        assert version(engine) == "step-1"
        assert scores(engine, "a") == loaded["seven-r8"] and scores(engine, "b") == loaded["qv-r1"]
        assert scores(engine) == loaded[None]
    overall = xxhash.xxh3_128()
    for name in sorted(tensors):
        raw = tensors[name].contiguous().view(torch.uint8).numpy().tobytes()
        overall.update(name.encode() + b"\0" + xxhash.xxh3_128(raw).digest())
    assert receipt["xxh3"] == overall.hexdigest()


@pytest.mark.parametrize("transport", ["safetensors", "sglang", "sglang-load"])
def test_every_transport_brings_the_same(engine, adapter_dirs, loaded, transport):
    receipt, _ = push("--engine", engine.url, "--adapter", f"a={adapter_dirs['seven-r8']}", "--version", transport,
                      "--transport", transport, "--bucket-size", "3K")
    assert receipt["transport"] == transport and version(engine) == transport
    assert scores(engine, "a") == loaded["seven-r8"]
    push("--engine", engine.url, "--adapter", f"a={adapter_dirs['qv-r1']}", "--transport", transport)
    assert scores(engine, "a") == loaded["qv-r1"]


@pytest.mark.parametrize("words", [[], ["--pause", "retract"], ["--pause", "in_place", "--transport", "sglang"],
                                   ["--transport", "sglang-load", "--pause", "abort"]])
def test_base_weights(engine, tiny_dir, tmp_path, words):
    other = changed_base(tiny_dir, tmp_path / "other")
    with Engine(other, skip_tokenizer=True) as reference:
        want = scores(reference)
    before = scores(engine)
    push("--engine", engine.url, "--base", other, "--version", "other", "--bucket-size", "20K", *words)
    assert scores(engine) == want != before and version(engine) == "other"
    cli("verify", "--engine", engine.url, "--base", other)
    cli("verify", "--engine", engine.url, "--base", tiny_dir, code=4)
    push("--engine", engine.url, "--base", tiny_dir, "--version", "default")
    assert scores(engine) == before


def test_base_and_adapters_in_one_push(engine, tiny_dir, adapter_dirs, loaded):
    receipt, _ = push("--engine", engine.url, "--base", tiny_dir, "--adapter", f"a={adapter_dirs['seven-r8']}",
                      "--audit")
    audit = receipt["engines"][0]["receipt"]["audit"]
    assert len(audit) == receipt["tensors"] and all(len(row["sha256"]) == 64 for row in audit.values())
    assert scores(engine, "a") == loaded["seven-r8"]


def test_any_bucket_size_gives_one_digest(engine, adapter_dirs):
    """I27"""
    seen = {}
    for size in ("1", "700", "4K", "1M", "512M"):
        receipt, _ = push("--engine", engine.url, "--adapter", f"a={adapter_dirs['seven-r8']}", "--bucket-size", size)
        seen[size] = receipt["buckets"]
        assert receipt["engines"][0]["receipt"]["xxh3"] == receipt["xxh3"]
        seen.setdefault("digest", receipt["xxh3"])
        assert receipt["xxh3"] == seen["digest"]
    assert seen["1"] == receipt["tensors"] and seen["512M"] == 1


# ---- calls that get lost ----

@pytest.mark.parametrize("fault", ["lose call", "lose reply"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_lost_call_is_made_again(engines, adapter_dirs, loaded, route, fault):
    one, two = engines
    published = session(two)["sessions_published"]
    with Proxy(two, **{route: [fault]}) as proxy:
        receipt, _ = push("--engine", one.url, proxy.url, "--adapter", f"a={adapter_dirs['seven-r8']}",
                          "--version", fault)
        assert proxy.seen.count(route) == 2
    assert receipt["engines"][0]["retries"] == 0
    assert scores(two, "a") == loaded["seven-r8"] and version(two) == fault
    assert session(two)["sessions_published"] == published + 1


@pytest.mark.parametrize("route", ROUTES[:-1])
def test_what_stays_lost_leaves_no_trace(engines, adapter_dirs, loaded, route):
    one, two = engines
    push("--engine", one.url, two.url, "--adapter", f"a={adapter_dirs['qv-r1']}", "--version", "before")
    with Proxy(two, **{route: ["lose call for ever"]}) as proxy:
        receipt, text = push("--engine", one.url, proxy.url, "--adapter", f"a={adapter_dirs['seven-r8']}",
                             "--version", "after", code=1)
        assert proxy.url in text and route.split("_")[0].replace("update", "stream") in text
        assert "nothing was published" in text
    for engine in engines:
        assert scores(engine, "a") == loaded["qv-r1"] and version(engine) == "before"


def test_a_dead_engine_is_named_and_the_other_untouched(engines, adapter_dirs):
    one, _ = engines
    before = version(one)
    done = cli("push", "--engine", one.url, "http://127.0.0.1:1", "--adapter", f"a={adapter_dirs['seven-r8']}",
               "--version", "never", code=1)
    assert "http://127.0.0.1:1" in done.stderr and "nothing was published" in done.stderr
    assert version(one) == before


def test_a_commit_that_was_cut_is_resumed(engines, adapter_dirs, loaded):
    one, two = engines
    with Proxy(two, commit_weight_update=["lose call for ever"]) as proxy:
        words = ["--engine", one.url, proxy.url, "--timeout", "0.5"]
        receipt, text = push(*words, "--adapter", f"a={adapter_dirs['seven-r8']}", "--version", "cut", code=3)
        assert [said["state"] for said in receipt["engines"]] == ["published", "unknown"]
        assert f"committed: {one.url}" in text and receipt["session_id"] in text
        assert version(one) == "cut" != version(two) and session(two)["state"] == "prepared"
        _, text = push(*words, "--resume", receipt["session_id"], code=3)  # the engine is still away
        assert f"committed: {one.url}" in text and "nothing was published" not in text
        proxy.faults.clear()
        done, _ = push(*words, "--resume", receipt["session_id"], "--version", "cut")
        again = cli("push", *words, "--resume", receipt["session_id"], "--version", "cut").stdout
        # how much, it cannot know
        assert again.startswith(f"published  version cut, session {receipt['session_id']}\n"), again
    assert [said["state"] for said in done["engines"]] == ["published", "published"]
    assert version(two) == "cut" and scores(two, "a") == loaded["seven-r8"]


def test_a_commit_whose_answer_is_lost_may_have_been_made(engine, adapter_dirs, loaded):
    """The only engine serves the new weights: saying that nothing was published would be wrong."""
    with Proxy(engine, commit_weight_update=["lose reply for ever"]) as proxy:
        words = ["--engine", proxy.url, "--timeout", "0.5"]
        receipt, text = push(*words, "--adapter", f"a={adapter_dirs['seven-r8']}", "--version", "unheard", code=3)
        assert [said["state"] for said in receipt["engines"]] == ["unknown"] and receipt["commit_begun"]
        assert receipt["session_id"] in text and "nothing was published" not in text
        assert version(engine) == "unheard"
        proxy.faults.clear()
        done, _ = push(*words, "--resume", receipt["session_id"], "--version", "unheard")
    assert done["engines"][0]["state"] == "published" and scores(engine, "a") == loaded["seven-r8"]


def test_words_of_an_engine_cannot_move_the_cursor(adapter_dirs):
    evil = {"success": False, "message": "\x1b[2J\x07all is well\r\nheadrace: published\x7f"}
    with Recorder(begin_weight_update=(400, evil)) as recorder:
        done = cli("push", "--engine", recorder.url, "--adapter", f"a={adapter_dirs['seven-r8']}", code=1)
    assert "all is well" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not set(done.stderr) & set("\x1b\x07\r\x7f")


def test_resume_of_what_was_rolled_back_says_how_to_go_on(engine):
    done = cli("push", "--engine", engine.url, "--resume", "push-of-yesterday", code=1)
    assert "push the same weights again" in done.stderr


def test_a_late_engine_is_named(engines, adapter_dirs):
    one, two = engines
    with Proxy(two, update_weights_from_safetensors=[1.0]) as proxy:
        _, text = push("--engine", one.url, proxy.url, "--adapter", f"a={adapter_dirs['seven-r8']}", "--timeout",
                       "0.3", code=1)
        assert proxy.url in text and "no answer within" in text
        deadline = time.monotonic() + 5
        while session(two)["state"] != "idle" and time.monotonic() < deadline:
            time.sleep(0.01)


def test_ctrl_c_rolls_back(engines, adapter_dirs):
    one, two = engines
    before = version(one)
    with Proxy(two, update_weights_from_safetensors=[2.0]) as proxy:
        process = subprocess.Popen([str(BINARY), "push", "--engine", one.url, proxy.url, "--version", "never",
                                    "--adapter", f"a={adapter_dirs['seven-r8']}"], stderr=subprocess.PIPE, text=True)
        while "update_weights_from_safetensors" not in proxy.seen:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, text = process.communicate(timeout=20)
        assert process.returncode == 1
        assert text == "headrace: error: the push was cancelled by its caller (at stream); nothing was published\n"
        time.sleep(2.2)  # the delayed bucket arrives at a session that is over
    assert version(one) == before and session(one)["state"] == "idle"


# ---- refusals ----

def test_the_engine_says_why_in_its_own_words(engine, adapter_dirs, tmp_path):
    odd = shutil.copytree(adapter_dirs["seven-r8"], tmp_path / "odd")
    config = json.loads((odd / "adapter_config.json").read_text())
    (odd / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    done = cli("push", "--engine", engine.url, "--adapter", f"a={odd}", code=1)
    assert "register" in done.stderr and "dora" in done.stderr.lower()


def test_the_receipt_in_words_names_what_was_pushed(engine, adapter_dirs):
    done = cli("push", "--engine", engine.url, "--adapter", f"a={adapter_dirs['seven-r8']}",
               f"b={adapter_dirs['qv-r1']}", "--version", "named")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0][0] == "published" and "named," in lines[0]
    assert ["adapter", "a"] in lines and ["adapter", "b"] in lines
    assert any(line[:3] == ["engine", engine.url, "published,"] for line in lines)


@pytest.mark.parametrize("words,text", [
    ([], "--engine is missing"),
    (["--engine", "http://x"], "nothing to push"),
    (["--engine", "ftp://x", "--base", "d"], "another scheme"),
    (["--engine", "http://x", "http://x", "--base", "d"], "listed twice"),
    (["--engine", "http://x", "--adapter", "noname"], "NAME=DIR"),
    (["--engine", "http://x", "--base", "d", "--pause", "sometimes"], "sometimes"),
    (["--engine", "http://x", "--base", "d", "--transport", "pigeon"], "pigeon"),
    (["--engine", "http://x", "--base", "d", "--bucket-size", "12Q"], "12Q"),
    (["--engine", "http://x", "--resume", "s", "--base", "d"], "sends no weights"),
    (["--engine", "http://x", "--frob"], "--frob"),
])
def test_wrong_usage_exits_2(words, text):
    done = subprocess.run([str(BINARY), "push", *words], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and text in done.stderr


@pytest.mark.parametrize("command", ["push", "watch", "status", "verify", "inspect", "generate"])
def test_help_names_exit_codes(command):
    done = cli(command, "--help")
    assert f"usage: headrace {command}" in done.stdout and "exit codes:" in done.stdout


def test_keys(tiny_dir, adapter_dirs):
    with Engine(tiny_dir, "--api-key", "s3cret", skip_tokenizer=True) as engine:
        words = ["--engine", engine.url, "--adapter", f"a={adapter_dirs['seven-r8']}"]
        done = cli("push", *words, code=1)
        assert "s3cret" not in done.stderr
        cli("push", *words, "--api-key", "s3cret")
        cli("push", *words, env={"HEADRACE_API_KEY": "s3cret"})
        cli("verify", *words, env={"HEADRACE_API_KEY": "s3cret"})


def test_the_admin_key_is_enough(tiny_dir, adapter_dirs):
    with Engine(tiny_dir, "--api-key", "user", "--admin-api-key", "admin", skip_tokenizer=True) as engine:
        words = ["--engine", engine.url, "--adapter", f"a={adapter_dirs['seven-r8']}", "--api-key"]
        cli("push", *words, "admin")
        cli("verify", *words, "admin")
        text = cli("push", *words, "user", code=1).stderr
        assert "--api-key" in text and "HEADRACE_API_KEY" in text and "admin key" in text
        row, = json.loads(cli("status", "--engine", engine.url, "--json", code=1).stdout)["engines"]
        assert row["state"] == "refused" and row["error"].startswith("refused: ") and row["running"] is None


# ---- the others ----

def test_verify_names_what_differs(engines, adapter_dirs, tmp_path):
    one, two = engines
    words = ["--engine", one.url, two.url, "--adapter", f"a={adapter_dirs['seven-r8']}"]
    push(*words)
    cli("verify", *words)
    odd = shutil.copytree(adapter_dirs["seven-r8"], tmp_path / "odd")
    tensors = load_file(odd / "adapter_model.safetensors")
    name = sorted(tensors)[3]
    tensors[name].view(-1)[0] += 1
    save_file(tensors, odd / "adapter_model.safetensors")
    push("--engine", two.url, "--adapter", f"a={odd}")
    done = cli("verify", *words, "--json", code=4)
    rows = json.loads(done.stdout)["engines"]
    assert [row["equal"] for row in rows] == [True, False]
    assert rows[1]["differences"] == [f"{name.removeprefix('base_model.model.')}: other bytes"]


def test_verify_sees_another_scaling(engine, adapter_dirs, tmp_path):
    """The same tensors under another lora_alpha compute something else."""
    push("--engine", engine.url, "--adapter", f"a={adapter_dirs['seven-r8']}")
    odd = shutil.copytree(adapter_dirs["seven-r8"], tmp_path / "odd")
    config = json.loads((odd / "adapter_config.json").read_text())
    (odd / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 2 * config["lora_alpha"]}))
    done = cli("verify", "--engine", engine.url, "--adapter", f"a={odd}", "--json", code=4)
    [row] = json.loads(done.stdout)["engines"]
    assert row["differences"] and all(".scaling" in difference for difference in row["differences"])


def test_status(engines):
    one, _ = engines
    done = cli("status", "--engine", one.url, "http://127.0.0.1:1", "--json", code=1)
    good, bad = json.loads(done.stdout)["engines"]
    assert good["state"] == "serving" and good["weight_version"] == version(one) and good["session"] == "idle"
    assert bad["state"] == "unreachable" and bad["error"]
    assert one.url in cli("status", "--engine", one.url).stdout


def test_generate(engine, adapter_dirs):
    push("--engine", engine.url, "--adapter", f"a={adapter_dirs['seven-r8']}")
    words = ["generate", "--engine", engine.url, "--ids", *PROMPT, "--max-new-tokens", "5"]
    said = [json.loads(cli(*words, *more, "--json").stdout)["output_ids"] for more in ([], ["--adapter", "a"])]
    sampling = {"max_new_tokens": 5, "temperature": 0}
    assert said == [engine.generate(input_ids=PROMPT, sampling_params=sampling, lora_path=name)["output_ids"]
                    for name in (None, "a")]
    assert cli(*words).stdout.split() == [str(token) for token in said[0]]
    assert "ghost" in cli(*words, "--adapter", "ghost", code=1).stderr


@pytest.mark.parametrize("form", ["file", "adapter", "checkpoint", "pickle", "flattened"])
def test_inspect(form, tiny_dir, adapter_dirs, tmp_path):
    folder = adapter_dirs["seven-r8"]
    tensors = load_file(folder / "adapter_model.safetensors")
    path = {"file": folder / "adapter_model.safetensors", "adapter": folder, "checkpoint": tiny_dir}.get(form)
    if form == "checkpoint":
        tensors = load_file(tiny_dir / "model.safetensors")
    if path is None:
        path = tmp_path / "payload"
        path.write_bytes(pickle.dumps(tensors) if form == "pickle" else pickle.dumps(forms.flattened(tensors.items())))
    listed = json.loads(cli("inspect", path, "--json").stdout)["tensors"]
    assert listed.keys() == tensors.keys()
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert listed[name]["xxh3"] == xxhash.xxh3_128(raw).hexdigest()
        assert listed[name]["shape"] == list(tensor.shape)
    assert f"{len(tensors)} tensors" in cli("inspect", path).stdout


def test_inspect_refuses_what_is_none(tmp_path):
    (tmp_path / "odd.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{nonsens")
    (tmp_path / "evil").write_bytes(b"\x80\x02cos\nsystem\nX\x04\0\0\0true\x85R.")
    assert "odd.safetensors" in cli("inspect", tmp_path / "odd.safetensors", code=1).stderr
    assert "system" in cli("inspect", tmp_path / "evil", code=1).stderr
    cli("inspect", tmp_path / "missing", code=1)


# ---- what SGLang's forms carry ----

def holds_its_bytes(payload: bytes, tensors) -> bool:
    return len(payload) >= sum(t.numel() * t.element_size() for t in tensors.values())


def names_no_shared_memory(payload: bytes) -> bool:
    return b"/torch_" not in payload


def test_a_payload_is_read_by_torch_and_cannot_expire(adapter_dirs):
    tensors = load_file(adapter_dirs["seven-r8"] / "adapter_model.safetensors")
    with Recorder(server_info=(200, {"tp_size": 2}), begin_weight_update=(404, {})) as old:
        receipt, _ = push("--engine", old.url, "--adapter", f"a={adapter_dirs['seven-r8']}", "--version", "v")
        (load,) = old.bodies("load_lora_adapter_from_tensors")
        assert old.bodies("update_weight_version") == [{"new_version": "v", "abort_all_requests": False}]
    assert receipt["transport"] == "sglang-load" and not receipt["atomic"]
    assert len(load["serialized_named_tensors"]) == 2 and load["lora_name"] == "a" and load["upsert"] is True
    assert load["config_dict"] == json.loads((adapter_dirs["seven-r8"] / "adapter_config.json").read_text())
    for text in load["serialized_named_tensors"]:
        payload = base64.b64decode(text, validate=True)
        read = pickle.loads(payload)
        assert read.keys() == tensors.keys() and all(torch.equal(read[name], t) for name, t in tensors.items())
        assert holds_its_bytes(payload, tensors) and names_no_shared_memory(payload)
    # The form that expires has neither property.
    shared = base64.b64decode(forms.forked(tensors))
    assert not holds_its_bytes(shared, tensors) and not names_no_shared_memory(shared)


def unflatten(payload: bytes) -> dict:
    """As an engine does it; the metadata class stands where torch's own pickle looks for it."""
    forms.bucket_metadata_class()
    bucket = pickle.loads(payload)
    flat = bucket["flattened_tensor"]
    return {each.name: flat[each.start_idx:each.end_idx].clone().view(each.dtype).reshape(each.shape)
            for each in bucket["metadata"]}


def test_sessions_of_sglang_as_they_leave(adapter_dirs):
    tensors = load_file(adapter_dirs["seven-r8"] / "adapter_model.safetensors")
    replies = {"server_info": (200, {"tp_size": 1}), "begin_weight_update": (200, {"success": True})}
    with Recorder(**replies) as engine:
        receipt, _ = push("--engine", engine.url, "--adapter", f"a={adapter_dirs['seven-r8']}", "--bucket-size", "8K")
        routes = [route for method, route, _ in engine.calls if method == "POST"]
        buckets = engine.bodies("update_weights_from_tensor")
        end, = engine.bodies("end_weight_update")
    assert receipt["transport"] == "sglang" and len(buckets) == receipt["buckets"] > 1
    assert routes == (["register_lora_adapter", "begin_weight_update"] + ["update_weights_from_tensor"] * len(buckets) +
                      ["end_weight_update"])
    seen = {}
    for bucket in buckets:
        assert bucket["load_format"] == "flattened_bucket" and bucket["flush_cache"] is False
        seen.update(unflatten(base64.b64decode(bucket["serialized_named_tensors"][0])))
    assert seen.keys() == {f"a:{name}" for name in tensors}
    assert all(torch.equal(seen[f"a:{name}"], t) for name, t in tensors.items())
    assert end["expected_lora_checksums"] == forms.manifest({"a": tensors})


class Rival(Proxy):
    """Another trainer registers the name under a config of its own, after begin and before the first bucket."""

    def __init__(self, engine, config):
        self.config = config
        super().__init__(engine)

    def handle(self, handler, method, path, body):
        if "update_weights_from_safetensors" in path and self.config is not None:
            config, self.config = self.config, None
            self.engine.post("/register_lora_adapter", {"lora_name": "a", "config_dict": config})
        super().handle(handler, method, path, body)


def test_a_push_is_not_published_under_the_config_of_another_trainer(engines, adapter_dirs, loaded):
    one, two = engines
    folder = adapter_dirs["seven-r8"]
    config = json.loads((folder / "adapter_config.json").read_text())
    before = version(one), version(two)
    with Rival(two, {**config, "lora_alpha": 3 * config["lora_alpha"]}) as proxy:
        words = "--engine", one.url, proxy.url, "--adapter", f"a={folder}", "--version", "rival"
        _, text = push(*words, code=1)
        assert f"engine {proxy.url}, prepare: the adapter 'a' was registered again by somebody else" in text
        assert (version(one), version(two)) == before
        push(*words)
    assert scores(one, "a") == scores(two, "a") == loaded["seven-r8"]


@pytest.mark.parametrize("info", [b'{"routes": [{"path": "/prepare_wei', b"<html>hello</html>", b"", b"[]", b"{}"])
def test_an_engine_that_cannot_be_understood_is_not_taken_for_another_kind(info, adapter_dirs):
    with Recorder(server_info=(200, info)) as odd:
        _, text = push("--engine", odd.url, "--adapter", f"a={adapter_dirs['seven-r8']}", code=1)
        assert f"engine {odd.url} cannot be asked what it speaks" in text
        assert [route for _, route, _ in odd.calls] == ["weight_update_status", "server_info"]


def test_an_engine_without_server_info_is_not_headrace(adapter_dirs):
    with Recorder(server_info=(404, b"Not Found"), begin_weight_update=(404, {})) as old:
        receipt, _ = push("--engine", old.url, "--adapter", f"a={adapter_dirs['seven-r8']}")
    assert receipt["transport"] == "sglang-load"


def test_an_answer_that_is_cut_short_is_no_answer(adapter_dirs):
    routes = [{"path": "/prepare_weight_update"}, {"path": "/update_weights_from_safetensors"}]
    for half in (b'{"success": tr', b""):
        with Recorder(server_info=(200, {"routes": routes}), begin_weight_update=(200, half)) as engine:
            _, text = push("--engine", engine.url, "--adapter", f"a={adapter_dirs['seven-r8']}", code=1)
            assert f"engine {engine.url}, begin" in text
            assert "update_weights_from_safetensors" not in [route for _, route, _ in engine.calls]


def test_the_plainest_form_of_a_fleet_is_used(engine, adapter_dirs):
    with Recorder(server_info=(200, {"tp_size": 1}), begin_weight_update=(404, {})) as old:
        receipt, _ = push("--engine", engine.url, old.url, "--adapter", f"a={adapter_dirs['seven-r8']}")
    assert receipt["transport"] == "sglang-load"


# ---- memory ----

def test_the_sender_holds_two_buckets_and_not_the_checkpoint(tiny_dir, tmp_path):
    """I22: 400 MB in tensors of 4 MB through buckets of 16 MB."""
    folder = tmp_path / "large"
    folder.mkdir()
    shutil.copy(tiny_dir / "config.json", folder)
    save_file({f"model.layers.{i}.x.weight": torch.zeros(1 << 20) for i in range(100)}, folder / "model.safetensors")
    routes = [{"path": "/prepare_weight_update"}, {"path": "/update_weights_from_safetensors"}]
    with Recorder(keep=False, server_info=(200, {"routes": routes}),
                  prepare_weight_update=(400, {"success": False, "message": "enough"})) as engine:
        command = [str(BINARY), "push", "--engine", engine.url, "--base", str(folder), "--bucket-size", "16M"]
        done = subprocess.run(["/usr/bin/env", "python3", "-c", MEASURE, *command], capture_output=True, text=True,
                              timeout=120)
        received = sum(size for _, route, size in engine.calls if route == "update_weights_from_safetensors")
    assert "enough" in done.stderr and received > 400 << 20
    assert int(done.stdout.split()[-1]) < (2 * 16 + 4 + 30) << 10, done.stdout  # KiB; 30 MB for the program


MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
