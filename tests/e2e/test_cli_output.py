"""What commands print for a person."""

import json
import subprocess

import pytest

from tools.engine import BINARY, Engine


@pytest.fixture(scope="module")
def engine(tiny_dir):
    with Engine(tiny_dir, skip_tokenizer=True) as engine:
        yield engine


def cli(*words):
    done = subprocess.run([str(BINARY), *map(str, words)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def test_generate_tells_the_version_of_the_engine_and_of_the_adapter(engine, adapter_dirs):
    for name, version in (("mine", "mine-7"), ("other", "other-3")):
        cli("push", "--engine", engine.url, "--adapter", f"{name}={adapter_dirs['qv-r1']}", "--version", version)
    words = ["generate", "--engine", engine.url, "--ids", "5,17,40", "--max-new-tokens", 2]
    said = cli(*words, "--adapter", "mine").stderr
    assert said == "weight version other-3\nadapter mine, version mine-7\n"
    assert cli(*words).stderr == "weight version other-3\n"
    engine.load("plain", adapter_dirs["qv-r1"])
    assert cli(*words, "--adapter", "plain").stderr.endswith("\nadapter plain, without a version\n")


def test_push_says_where_an_audit_is(engine, adapter_dirs):
    words = ["push", "--engine", engine.url, "--adapter", f"a={adapter_dirs['qv-r1']}"]
    assert "\naudit      " in cli(*words, "--audit").stdout and "--json" in cli(*words, "--audit").stdout
    assert "audit" not in cli(*words).stdout
    receipt = json.loads(cli(*words, "--audit", "--json").stdout)
    audit = receipt["engines"][0]["receipt"]["audit"]
    assert len(audit) == receipt["tensors"] and all(len(each["sha256"]) == 64 for each in audit.values())
    line, = [line for line in cli("push", "--help").stdout.splitlines() if "--audit" in line]
    assert "--json" in line
