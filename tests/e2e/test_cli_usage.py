"""Wrong usage exits 2 and says what to write instead."""

import subprocess

import pytest

from tools.engine import BINARY


@pytest.mark.parametrize("words,text", [
    (["push", "--engine", "http://x", "--adapter", "a=d", "b=d", "a=e"], "a is listed twice"),
    (["push", "--engine", "http://x", "--adapter", "a:b=d"], "a:b"),
    (["push", "--engine", "http://x", "--abort", "s", "--resume", "s"], "sends no weights"),
    (["watch", "d", "--engine", "http://x", "--adapter", "a=d"], "--adapter a, with the directory as the first word"),
    (["generate", "--engine", "http://127.0.0.1:1", "--ids", "1,x"], "no list of token ids"),
    (["generate", "--engine", "http://127.0.0.1:1", "--ids", "1,"], "no list of token ids"),
    (["generate", "--engine", "http://127.0.0.1:1", "--ids", "5K"], "no list of token ids"),
    (["generate", "--engine", "http://127.0.0.1:1", "hello"], '"hello" is not expected'),
    (["generate", "--engine", "http://127.0.0.1:1/v1", "--ids", "1"], "has a path"),
    (["verify", "--engine", "http://127.0.0.1:1/v1", "--base", "d"], "has a path"),
    (["verify", "--engine", "http://127.0.0.1:1", "--adapter", "d"], "NAME=DIR"),
    (["status", "http://127.0.0.1:1"], "is not expected here"),
    (["push", "--engine", "http://x", "--base", "d", "--version", ""], "--version"),
    (["push", "--engine", "http://x", "--base", "d", "--version", 300 * "v"], "--version"),
    (["push", "--engine", "http://x", "--base", "d", "--session-id", ""], "--session-id"),
    (["push", "--engine", "http://x", "--abort", ""], "--abort"),
    (["push", "--engine", "http://x", "--base", ""], "--base"),
    (["push", "--engine", "http://x", "--base", "d", "--bucket-size", "0"], "--bucket-size"),
    (["push", "--engine", "http://x", "--base", "d", "--timeout", "0"], "--timeout"),
    (["status", "--engine", "http://x", "--timeout", "0"], "--timeout"),
    (["verify", "--engine", "http://x", "--base", "d", "--timeout", "86401"], "--timeout"),
    (["generate", "--engine", "http://x", "--ids", "1", "--timeout", "-1"], "--timeout"),
    (["watch", "d", "--engine", "http://x", "--adapter", "a:b"], "a:b"),
    (["serve", "--model-path", "d", "--no-such-flag"], "--no-such-flag"),
    (["serve", "--model-path", "d", "word"], '"word"'),
    (["serve"], "--model-path is needed"),
])
def test_wrong_usage(words, text):
    done = subprocess.run([str(BINARY), *words], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and text in done.stderr, done.stderr
    assert done.stderr.endswith("; see --help\n") and len(done.stderr.splitlines()) == 1
    assert done.stderr.count("--help") == 1


def test_help_of_a_command_in_both_words():
    texts = [subprocess.run([str(BINARY), *words], capture_output=True, text=True, timeout=20).stdout
             for words in (["help", "push"], ["push", "--help"])]
    assert texts[0] == texts[1] and "usage: headrace push" in texts[0]


@pytest.mark.parametrize("command", ["push", "watch", "status", "verify", "inspect", "generate"])
def test_help_is_found_where_output_fails(command):
    """A full disk is a failure, except where something was done all the same; a reader that left is none."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([str(BINARY), command, "--help"], stdout=full, stderr=subprocess.PIPE, text=True,
                              timeout=20)
    assert done.returncode == (0 if command in ("push", "watch") else 1) and "could not be written" in done.stderr
    done = subprocess.run(f"{BINARY} {command} --help | head -0", shell=True, capture_output=True, text=True,
                          timeout=20)
    assert done.stderr == ""


def test_token_ids_may_have_commas():
    words = [str(BINARY), "generate", "--engine", "http://127.0.0.1:1", "--ids", "1,2,3", "4"]
    assert subprocess.run(words, capture_output=True, timeout=20).returncode == 1  # asked, and not reachable


@pytest.mark.parametrize("given,text", [("missing", "no such directory"), ("file", "give the directory"),
                                        ("model", "did you mean --base"),
                                        ("half", "adapter_model.safetensors is missing"),
                                        ("other", "adapter_config.json is missing")])
@pytest.mark.parametrize("command", ["push", "verify"])
def test_what_is_no_adapter_directory(command, given, text, tmp_path):
    (tmp_path / "file").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for folder, name in (("half", "adapter_config.json"), ("other", "adapter_model.safetensors")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("{}")
    words = [str(BINARY), command, "--engine", "http://127.0.0.1:1", "--adapter", f"a={tmp_path / given}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and text in done.stderr and "wanted a PEFT directory" in done.stderr, done.stderr
