"""What a push that failed says of itself: where the new weights are served, in words, in JSON and by its exit code; and
nothing that it does not know."""

import json
import os
import signal
import subprocess
import threading
import time

import pytest

from tests.e2e.push_proxy import Proxy, Recorder
from tools.engine import BINARY, Engine
from tools.make_tiny_models import HOME as MODELS

DEAD = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def engines(tiny_dir):
    with Engine(tiny_dir, skip_tokenizer=True) as one, Engine(tiny_dir, skip_tokenizer=True) as two:
        yield one, two


def push(*words, code, **more):
    """The report and what was said in words."""
    done = subprocess.run([str(BINARY), "push", "--json", *map(str, words)], capture_output=True, text=True, timeout=60,
                          **more)
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    report = json.loads(done.stdout)
    assert report["success"] == (code == 0)
    return report, done.stderr


def served(report):
    return report["published"], [engine["serves"] for engine in report["engines"]]


# ---- exit code 1: no engine serves anything of it ----

def test_what_a_push_did_not_come_to_is_null(engines, adapter_dirs):
    report, text = push("--engine", engines[0].url, DEAD, "--adapter", f"a={adapter_dirs['qv-r1']}", code=1)
    assert served(report) == ("none", ["old", "old"]) and "nothing was published" in text
    assert [engine["state"] for engine in report["engines"]] == ["unknown", "unknown"]
    unknown = {"session_id", "transport", "atomic", "tensors", "bytes", "xxh3"}
    assert {key for key, value in report.items() if value is None} == unknown
    times = report["milliseconds"]
    assert times.pop("total") > 0 and set(times.values()) == {None}


def test_a_stage_that_was_not_reached_has_no_time(engines, adapter_dirs):
    with Proxy(engines[0], begin_weight_update=["lose call for ever"]) as proxy:
        report, _ = push("--engine", proxy.url, "--adapter", f"a={adapter_dirs['qv-r1']}", code=1)
    times = report["milliseconds"]
    assert served(report) == ("none", ["old"]) and report["tensors"] is None and report["sent_tensors"] == 0
    assert times["register"] > 0 and times["begin"] > 0
    assert times["stream"] is times["prepare"] is times["commit"] is None


def test_files_that_cannot_be_read_have_a_report_too(tmp_path):
    report, text = push("--engine", DEAD, "--adapter", f"a={tmp_path / 'none'}", code=1)
    assert report["published"] == "none" and "no such directory" in report["error"]
    assert report["status"] == "ERR_NOT_FOUND" and "nothing was published" in text


@pytest.mark.parametrize("key, text", [(["--api-key", "wrong"], "the key that was sent is not the one"),
                                       ([], "it wants a key, and none was sent")])
def test_a_key_that_is_wrong_or_missing(tiny_dir, adapter_dirs, key, text):
    with Engine(tiny_dir, "--api-key", "right", skip_tokenizer=True) as engine:
        report, said = push("--engine", engine.url, "--adapter", f"a={adapter_dirs['qv-r1']}", *key, code=1)
    assert report["published"] == "none" and text in said and "--api-key" in said and "nothing was published" in said


def test_a_base_update_that_waits_for_a_long_request_in_vain(smollm2):
    """The engine says so before the publisher stops listening, and a resume within the lease finishes it."""
    long = threading.Thread(target=smollm2.generate, kwargs={
        "text": "Once", "sampling_params": {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True}})
    long.start()
    words = ["--engine", smollm2.url, "--timeout", "2"]
    report, text = push(*words, "--base", MODELS / "smollm2", code=1)
    assert served(report) == ("none", ["old"]) and report["status"] == "ERR_TIMEOUT"
    assert [engine["state"] for engine in report["engines"]] == ["prepared"]
    assert "1 requests still ran" in text and "committed: none; finish it within 10.0 s (the lease)" in text
    assert f"headrace push --resume {report['session_id']}" in text
    smollm2.post("/abort_request", {"abort_all": True})
    long.join()
    done, _ = push(*words, "--resume", report["session_id"], code=0)
    assert served(done) == ("all", ["new"])
    unknown = {"tensors", "bytes", "xxh3"}
    assert {key for key, value in done.items() if value is None} == unknown


# ---- exit code 3: something of it is served, or may be ----

class Forgetful(Proxy):
    """An engine whose session ends between prepare and commit, as its lease may."""

    def handle(self, handler, method, path, body):
        if "commit_weight_update" in path:
            self.engine.post("/abort_weight_update", {"session_id": json.loads(body)["session_id"]})
        super().handle(handler, method, path, body)


def test_a_session_that_is_refused_at_commit_cannot_be_resumed(engines, adapter_dirs):
    one, two = engines
    words = ["--adapter", f"a={adapter_dirs['qv-r1']}", "--version", "half"]
    with Forgetful(two) as proxy:
        report, text = push("--engine", one.url, proxy.url, *words, code=3)
        assert served(report) == ("some", ["new", "old"])
        assert f"committed: {one.url}" in text and "push the same weights again as a new session" in text
        # Resuming it says the same, by the same code; where no engine has it, by the other one.
        again, text = push("--engine", one.url, two.url, "--resume", report["session_id"], code=3)
        assert served(again) == ("some", ["new", "old"]) and "push the same weights again" in text
    only, text = push("--engine", two.url, "--resume", report["session_id"], code=1)
    assert "has restarted, or has dropped it when its lease ran out" in text
    assert served(only) == ("none", ["old"]) and "nothing was published" not in text
    push("--engine", one.url, two.url, *words, code=0)


def test_a_commit_that_was_not_answered_may_have_been_made(engines, adapter_dirs):
    one, two = engines
    with Proxy(two, commit_weight_update=["lose reply for ever"]) as proxy:
        words = ["--engine", one.url, proxy.url, "--timeout", "0.4"]
        report, _ = push(*words, "--adapter", f"a={adapter_dirs['qv-r1']}", code=3)
        assert served(report) == ("some", ["new", "unknown"])
    away, text = push("--engine", one.url, DEAD, "--timeout", "0.4", "--resume", report["session_id"], code=3)
    assert served(away) == ("unknown", ["unknown", "unknown"]) and DEAD in text
    done, _ = push("--engine", one.url, two.url, "--resume", report["session_id"], code=0)
    assert served(done) == ("all", ["new", "new"])


def test_an_engine_that_dies_in_the_middle(engines, tiny_dir, adapter_dirs):
    one, _ = engines
    before = one.get("/model_info").json()["weight_version"]
    with Engine(tiny_dir, skip_tokenizer=True) as mortal, Proxy(mortal, update_weights_from_safetensors=[0.5]) as proxy:
        def kill():
            while "update_weights_from_safetensors" not in proxy.seen:
                time.sleep(0.01)
            mortal.process.kill()
            mortal.process.wait()
            proxy.faults["update_weights_from_safetensors"] = ["lose call for ever"]
            proxy.faults["abort_weight_update"] = ["lose call for ever"]
        killer = threading.Thread(target=kill)
        killer.start()
        report, text = push("--engine", one.url, proxy.url, "--adapter", f"a={adapter_dirs['qv-r1']}",
                            "--version", "never", "--timeout", "3", code=1)
        killer.join()
    assert served(report) == ("none", ["old", "old"]) and proxy.url in text and "nothing was published" in text
    assert one.get("/model_info").json()["weight_version"] == before


# ---- transports that take nothing back ----

REFUSE = (400, {"success": False, "message": "no room"})


def test_base_weights_that_came_half_are_said(tiny_dir):
    words = ["--base", tiny_dir, "--transport", "sglang", "--engine"]
    with Recorder(update_weights_from_tensor=REFUSE) as engine:
        report, text = push(*words, engine.url, code=3)
        assert served(report) == ("unknown", ["unknown"])
        assert "base weights may be half written, and engines serve them" in text
        assert "nothing was published" not in text
        _, text = push(*words, engine.url, "--pause", "retract", code=3)
        assert "engines stay paused: their base weights may be half written" in text
    with Recorder(begin_weight_update=REFUSE) as engine:
        report, text = push(*words, engine.url, code=1)
        assert served(report) == ("none", ["old"]) and "nothing was published" in text and "half" not in text


def test_adapters_that_were_loaded_before_the_failure_are_said(adapter_dirs):
    words = ["--transport", "sglang-load", "--adapter", f"a={adapter_dirs['qv-r1']}", "--engine"]
    with Recorder() as good, Recorder(load_lora_adapter_from_tensors=REFUSE) as bad:
        report, text = push(*words, good.url, bad.url, code=3)
    assert served(report) == ("unknown", ["unknown", "old"])
    assert bad.url in text and "engines may serve adapters that were sent before" in text


def test_an_adapter_that_was_refused_first_of_all_has_changed_nothing(adapter_dirs):
    """Only where the engine takes it in the place of the one that it has: elsewhere that one is unloaded before."""
    words = ["--transport", "sglang-load", "--adapter", f"a={adapter_dirs['qv-r1']}", "--engine"]
    with Recorder(load_lora_adapter_from_tensors=REFUSE) as engine:
        report, text = push(*words, engine.url, code=1)
        assert served(report) == ("none", ["old"]) and "may serve" not in text and "nothing was published" in text
    with Recorder(load_lora_adapter_from_tensors=(400, {"success": False, "message": "no upsert here"})) as engine:
        report, text = push(*words, engine.url, code=3)
        assert "unload_lora_adapter" in [route for _, route, _ in engine.calls]
        assert served(report) == ("unknown", ["unknown"]) and "may serve" in text


def test_adapters_of_a_session_leave_nothing(adapter_dirs):
    with Recorder(update_weights_from_tensor=REFUSE) as engine:
        report, text = push("--transport", "sglang", "--adapter", f"a={adapter_dirs['qv-r1']}", "--engine", engine.url,
                            code=1)
    assert served(report) == ("none", ["old"]) and "nothing was published" in text


def test_base_weights_written_under_running_requests_are_warned_of(tiny_dir, engines):
    words = ["--base", tiny_dir, "--transport", "sglang", "--engine"]
    with Recorder() as engine:
        _, text = push(*words, engine.url, code=0)
        assert "old and new weights mixed" in text and "--pause" in text
        assert "mixed" not in push(*words, engine.url, "--pause", "retract", code=0)[1]
    assert "mixed" not in push("--base", tiny_dir, "--engine", engines[0].url, code=0)[1]


# ---- finding out what engines speak ----

class Slow(Recorder):
    def handle(self, handler, method, path, body):
        if method == "OPTIONS":
            time.sleep(0.5)
        super().handle(handler, method, path, body)


def test_engines_are_asked_at_the_same_time(adapter_dirs):
    with Slow() as one, Slow() as two, Slow() as three:
        start = time.monotonic()
        push("--engine", one.url, two.url, three.url, "--adapter", f"a={adapter_dirs['qv-r1']}", code=0)
        assert time.monotonic() - start < 1.3


@pytest.fixture
def stopped(engines):
    """An engine that takes connections and does not answer."""
    engines[1].process.send_signal(signal.SIGSTOP)
    yield engines[1]
    engines[1].process.send_signal(signal.SIGCONT)


def test_an_engine_that_hangs_costs_one_timeout(engines, stopped, adapter_dirs):
    start = time.monotonic()
    _, text = push("--engine", engines[0].url, stopped.url, "--adapter", f"a={adapter_dirs['qv-r1']}", "--timeout", 1,
                   code=1)
    assert time.monotonic() - start < 1.8 and stopped.url in text and "no answer within 1000 ms" in text


@pytest.mark.parametrize("flag", ["--adapter", "--abort"])
def test_ctrl_c_ends_a_wait(stopped, adapter_dirs, flag):
    """A push rolls back and says so; an abort has nothing to clean up."""
    words = [flag, f"a={adapter_dirs['qv-r1']}" if flag == "--adapter" else "s"]
    process = subprocess.Popen([str(BINARY), "push", "--engine", stopped.url, *words], stderr=subprocess.PIPE,
                               text=True)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=5)
    if flag == "--abort":
        assert process.returncode == -signal.SIGINT
    else:
        assert process.returncode == 1, text
        assert "cancelled" in text and "nothing was published" in text and "reachable" not in text


# ---- the other commands ----

def cli(*words, code):
    done = subprocess.run([str(BINARY), *map(str, words)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def test_verify_compares_the_others_when_an_engine_is_away(engines, adapter_dirs):
    one, _ = engines
    good, bad = f"a={adapter_dirs['seven-r8']}", f"a={adapter_dirs['qv-r1']}"
    push("--engine", one.url, "--adapter", good, code=0)
    done = cli("verify", "--engine", DEAD, one.url, "--adapter", good, code=1)
    assert f"{DEAD}  a: not compared" in done.stdout and f"engine {DEAD} is not reachable" in done.stderr
    assert f"{one.url}  a: equal, 28 tensors and 14 scalings" in done.stdout
    told = json.loads(cli("verify", "--engine", DEAD, one.url, "--adapter", good, "--json", code=1).stdout)
    assert told["equal"] is None and [row["equal"] for row in told["engines"]] == [None, True]
    assert DEAD in told["engines"][0]["error"] and told["engines"][1]["tensors_equal"] == 28
    # What differs is the stronger answer.
    told = json.loads(cli("verify", "--engine", DEAD, one.url, "--adapter", bad, "--json", code=4).stdout)
    assert told["equal"] is False and [row["equal"] for row in told["engines"]] == [None, False]


def test_status_says_the_version_of_an_adapter(engines, adapter_dirs):
    one, _ = engines
    push("--engine", one.url, "--adapter", f"a={adapter_dirs['qv-r1']}", "--version", "of-a", code=0)
    assert "adapter a, version of-a, rank 1" in cli("status", "--engine", one.url, code=0).stdout
    row, = json.loads(cli("status", "--engine", one.url, "--json", code=0).stdout)["engines"]
    assert ("a", "of-a") in [(adapter["name"], adapter["weight_version"]) for adapter in row["adapters"]]


def test_lines_do_not_go_where_stdout_was(engines, adapter_dirs):
    """With stdout closed a descriptor that the push opens would get its number, and the receipt."""
    with Proxy(engines[0], prepare_weight_update=[0.5]) as proxy:
        words = f"push --engine {proxy.url} --adapter a={adapter_dirs['qv-r1']} --version closed"
        process = subprocess.Popen(f"exec {BINARY} {words} >&-", shell=True, stderr=subprocess.PIPE, text=True)
        while "prepare_weight_update" not in proxy.seen:
            assert process.poll() is None
            time.sleep(0.01)
        assert os.readlink(f"/proc/{process.pid}/fd/1") == "/dev/null"
        assert process.communicate(timeout=20)[1] == "" and process.returncode == 0
    assert engines[0].get("/model_info").json()["weight_version"] == "closed"
