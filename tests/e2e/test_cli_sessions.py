"""Sessions that stay open, at the command line: a dead pusher's is outlasted or ended by its id, and two pushers to one
fleet go one after the other."""

import json
import subprocess
import time

import pytest

from tests.e2e.push_proxy import Proxy
from tools.engine import BINARY, Engine


@pytest.fixture(scope="module")
def engines(tiny_dir):
    with Engine(tiny_dir, skip_tokenizer=True) as one, Engine(tiny_dir, skip_tokenizer=True) as two:
        yield one, two


def cli(*words, code=0):
    done = subprocess.run([str(BINARY), *map(str, words)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def session(engine):
    return engine.get("/weight_update_status").json()["session"]


def version(engine):
    return engine.get("/model_info").json()["weight_version"]


def begin(engine, name, **more):
    engine.call("/begin_weight_update", {"session_id": name, "sync_base": False, **more})


def test_a_push_waits_for_the_end_of_another_session(engines, adapter_dirs):
    for engine in engines:
        begin(engine, f"dead-{engine.port}", lease_seconds=0.7)
        start = time.monotonic()
        cli("push", "--engine", *(each.url for each in engines), "--adapter", f"a={adapter_dirs['seven-r8']}",
            "--version", f"after-{engine.port}", "--timeout", 4)
        assert time.monotonic() - start > 0.5
        assert [version(each) for each in engines] == [f"after-{engine.port}"] * 2


def test_after_the_wait_the_session_is_named_and_can_be_aborted(engines, adapter_dirs):
    one, two = engines
    before = version(one)
    begin(two, "of-yesterday")
    words = ["push", "--engine", one.url, two.url, "--adapter", f"a={adapter_dirs['seven-r8']}", "--timeout", 0.4]
    text = cli(*words, code=1).stderr
    assert two.url in text and "'of-yesterday'" in text and "--abort" in text
    assert version(one) == before and session(one)["state"] == "idle" and session(two)["session_id"] == "of-yesterday"
    for _ in range(2):
        said = cli("push", "--abort", "of-yesterday", "--engine", one.url, two.url)
        assert session(two)["state"] == "idle"
    assert said.stdout.count("of-yesterday") == 2
    rows = json.loads(cli("push", "--abort", "of-yesterday", "--engine", one.url, "--json").stdout)["engines"]
    assert rows[0]["result"] == "not open"
    cli(*words)


def test_the_state_says_when_a_silent_session_goes(engines):
    one, _ = engines
    assert session(one)["lease_ms"] == 0
    begin(one, "silent", lease_seconds=90)
    told = one.get("/server_info").json()["internal_states"][0]["weight_update"]
    assert session(one)["lease_ms"] == told["lease_ms"] == 90_000
    assert "dropped after 90.0 s of silence" in cli("status", "--engine", one.url).stdout
    row, = json.loads(cli("status", "--engine", one.url, "--json").stdout)["engines"]
    assert row["session_lease_ms"] == 90_000
    cli("push", "--abort", "silent", "--engine", one.url)
    assert session(one)["lease_ms"] == 0 and "silence" not in cli("status", "--engine", one.url).stdout


@pytest.mark.parametrize("transport", ["auto", "sglang"])
def test_a_push_that_gives_up_leaves_the_session_of_another_alone(engines, adapter_dirs, transport):
    one, _ = engines
    begin(one, f"another-{transport}")
    cli("push", "--engine", one.url, "--adapter", f"a={adapter_dirs['seven-r8']}", "--timeout", 0.3, "--transport",
        transport, code=1)
    assert session(one)["session_id"] == f"another-{transport}"
    cli("push", "--abort", f"another-{transport}", "--engine", one.url)


def test_abort_of_what_is_published_or_away_says_so(engines, adapter_dirs):
    one, _ = engines
    cli("push", "--engine", one.url, "--adapter", f"a={adapter_dirs['seven-r8']}", "--session-id", "done")
    assert "published" in cli("push", "--abort", "done", "--engine", one.url, code=1).stderr
    assert "http://127.0.0.1:1" in cli("push", "--abort", "x", "--engine", one.url, "http://127.0.0.1:1", code=1).stderr
    assert "sends no weights" in cli("push", "--abort", "x", "--engine", one.url, "--base", "d", code=2).stderr


def test_the_lease_is_little_more_than_the_timeout(engines, adapter_dirs):
    one, _ = engines
    with Proxy(one, update_weights_from_safetensors=[3.0]) as proxy:
        process = subprocess.Popen([str(BINARY), "push", "--engine", proxy.url, "--timeout", "16", "--adapter",
                                    f"a={adapter_dirs['seven-r8']}"], stderr=subprocess.DEVNULL)
        while "update_weights_from_safetensors" not in proxy.seen:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.wait()
        refused = one.post("/begin_weight_update", {"session_id": "next"}).json()["message"]
        assert "18.0 s" in refused or "18000 ms" in refused
        time.sleep(3.2)
    cli("push", "--abort", session(one)["session_id"], "--engine", one.url)


def test_two_pushers_go_one_after_the_other(engines, adapter_dirs):
    one, two = engines
    published = session(one)["sessions_published"]
    words = ["--adapter", f"a={adapter_dirs['seven-r8']}", "--timeout", "20"]
    both = [subprocess.Popen([str(BINARY), "push", "--engine", *urls, *words, "--version", name],
                             stderr=subprocess.PIPE, text=True)
            for _ in range(3)
            for name, urls in (("x", [one.url, two.url]), ("y", [two.url, one.url]))]
    for process in both:
        _, text = process.communicate(timeout=60)
        assert process.returncode == 0, text
    assert session(one)["sessions_published"] == published + len(both)
    assert version(one) == version(two)
