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
