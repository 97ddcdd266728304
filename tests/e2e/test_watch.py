"""`headrace watch` beside a trainer that writes checkpoints: each whole one is published once, the newest wins, and what is
half written is never touched."""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.push_proxy import Proxy
from tools.engine import BINARY, Engine

PROMPT = [5, 17, 40, 8, 99, 3, 250]


@pytest.fixture(scope="module")
def engine(tiny_dir):
    with Engine(tiny_dir, skip_tokenizer=True) as engine:
        yield engine
        assert engine.process.poll() is None, engine.log()


class Watch:
    def __init__(self, folder, engine, *words):
        self.engine = engine
        self.process = subprocess.Popen(
            [str(BINARY), "watch", str(folder), "--engine", engine.url, "--interval", "0.03", "--json", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def stop(self):
        """Versions that were published, in order; and what was said."""
        self.process.send_signal(signal.SIGINT)
        out, text = self.process.communicate(timeout=10)
        assert self.process.returncode == 0, text
        lines = [json.loads(line) for line in out.splitlines()]
        return [line["weight_version"] for line in lines if line["success"]], text


def version(engine):
    return engine.get("/model_info").json()["weight_version"]


def published(engine):
    return engine.get("/weight_update_status").json()["session"]["sessions_published"]


def wait_for(what, seconds=15):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def settle():
    time.sleep(0.3)  # ten looks


def write(source, target):
    """As a trainer does: file after file, the tensors in pieces."""
    target.mkdir(parents=True)
    shutil.copy(source / "adapter_config.json", target)
    with open(target / "adapter_model.safetensors", "wb") as out:
        out.write((source / "adapter_model.safetensors").read_bytes())


def test_each_checkpoint_is_published_once_and_the_newest_wins(engine, adapter_dirs, tmp_path):
    before = published(engine)
    with Watch(tmp_path, engine, "--adapter", "w") as watch:
        settle()
        assert published(engine) == before
        write(adapter_dirs["qv-r1"], tmp_path / "checkpoint-10")
        wait_for(lambda: version(engine) == "checkpoint-10")
        first = engine.score([PROMPT], "w")[0].prompt
        settle()
        write(adapter_dirs["seven-r8"], tmp_path / "checkpoint-20")
        wait_for(lambda: version(engine) == "checkpoint-20")
        assert engine.score([PROMPT], "w")[0].prompt != first
        settle()
        shutil.copytree(tmp_path / "checkpoint-10", tmp_path / "checkpoint-5")  # older files, copied with their times
        settle()
        versions, text = watch.stop()
    assert versions == ["checkpoint-10", "checkpoint-20"]
    assert text.count("nothing there yet") == 1
    assert published(engine) == before + 2
    assert engine.get("/weight_update_status").json()["session"]["state"] == "idle"


def test_what_is_half_written_waits(engine, adapter_dirs, tmp_path):
    before = published(engine)
    source = (adapter_dirs["seven-r8"] / "adapter_model.safetensors").read_bytes()
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    with Watch(tmp_path, engine, "--adapter", "w") as watch:
        with open(folder / "adapter_model.safetensors", "wb") as out:
            for at in range(0, len(source), len(source) // 5 + 1):
                out.write(source[at:at + len(source) // 5 + 1])
                out.flush()
                settle()
                assert published(engine) == before
        settle()
        assert published(engine) == before  # no config yet
        shutil.copy(adapter_dirs["seven-r8"] / "adapter_config.json", folder)
        wait_for(lambda: version(engine) == "checkpoint-7")
        versions, text = watch.stop()
    assert versions == ["checkpoint-7"]
    assert published(engine) == before + 1


def test_the_folder_itself_and_a_replaced_file(engine, adapter_dirs, tmp_path):
    folder = tmp_path / "run"
    write(adapter_dirs["qv-r1"], folder)
    with Watch(folder, engine, "--adapter", "w") as watch:
        wait_for(lambda: version(engine) == "run")
        before = published(engine)
        tensors = load_file(folder / "adapter_model.safetensors")
        save_file({name: t * 2 for name, t in tensors.items()}, folder / "new")
        os.replace(folder / "new", folder / "adapter_model.safetensors")
        wait_for(lambda: published(engine) == before + 1)
        versions, _ = watch.stop()
    assert versions == ["run", "run"]


def test_an_adapter_with_a_name_lies_in_a_folder_of_it(engine, adapter_dirs, tmp_path):
    write(adapter_dirs["qv-r1"], tmp_path / "checkpoint-3" / "policy")
    with Watch(tmp_path, engine, "--adapter", "policy", "--once") as watch:
        out, text = watch.process.communicate(timeout=15)
        assert watch.process.returncode == 0, text
    assert version(engine) == "checkpoint-3"
    assert "policy" in [card["id"] for card in engine.get("/v1/models").json()["data"]]


def test_what_an_engine_refuses_is_said_once_and_the_next_one_goes(engine, adapter_dirs, tmp_path):
    write(adapter_dirs["seven-r8"], tmp_path / "checkpoint-1")
    config = json.loads((tmp_path / "checkpoint-1" / "adapter_config.json").read_text())
    (tmp_path / "checkpoint-1" / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with Watch(tmp_path, engine, "--adapter", "w") as watch:
        settle()
        write(adapter_dirs["seven-r8"], tmp_path / "checkpoint-2")
        wait_for(lambda: version(engine) == "checkpoint-2")
        versions, text = watch.stop()
    assert versions == ["checkpoint-2"] and text.count("use_dora") == 1


def test_an_engine_that_comes_back_gets_it(engine, adapter_dirs, tmp_path):
    write(adapter_dirs["seven-r8"], tmp_path / "checkpoint-11")
    with Proxy(engine, server_info=["lose call for ever"], weight_update_status=["lose call for ever"]) as proxy:
        with Watch(tmp_path, proxy, "--adapter", "w") as watch:
            settle()
            assert version(engine) != "checkpoint-11"
            proxy.faults.clear()
            wait_for(lambda: version(engine) == "checkpoint-11")
            versions, text = watch.stop()
    assert versions == ["checkpoint-11"] and text.count("is not reachable") == 1


def test_base_checkpoints(engine, tiny_dir, tmp_path):
    before = engine.score([PROMPT])[0].prompt
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(tiny_dir, folder, copy_function=shutil.copy)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t * 0.9 for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    with Watch(tmp_path, engine, "--base") as watch:
        wait_for(lambda: version(engine) == "checkpoint-4")
        versions, _ = watch.stop()
    assert versions == ["checkpoint-4"] and engine.score([PROMPT])[0].prompt != before


def test_a_folder_that_is_not_there(engine, tmp_path):
    done = subprocess.run([str(BINARY), "watch", str(tmp_path / "none"), "--engine", engine.url, "--base"],
                          capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and "none" in done.stderr
