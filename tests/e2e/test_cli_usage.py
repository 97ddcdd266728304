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
])
def test_wrong_usage(words, text):
    done = subprocess.run([str(BINARY), *words], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and text in done.stderr, done.stderr


def test_token_ids_may_have_commas():
    words = [str(BINARY), "generate", "--engine", "http://127.0.0.1:1", "--ids", "1,2,3", "4"]
    assert subprocess.run(words, capture_output=True, timeout=20).returncode == 1  # asked, and not reachable


@pytest.mark.parametrize("given,text", [("missing", "no such directory"), ("file", "give the directory"),
                                        ("model", "did you mean --base")])
def test_what_is_no_adapter_directory(given, text, tmp_path):
    (tmp_path / "file").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    words = [str(BINARY), "push", "--engine", "http://127.0.0.1:1", "--adapter", f"a={tmp_path / given}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and text in done.stderr and "wanted a PEFT directory" in done.stderr, done.stderr
