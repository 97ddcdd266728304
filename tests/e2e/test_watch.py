"""`headrace watch` beside a trainer that writes checkpoints: each look publishes the newest whole one, once; one that is
bad gives way to the next older one, what is half written is never touched, and an engine that restarts gets it
again."""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.push_proxy import Proxy, Recorder
from tools.engine import BINARY, Engine

PROMPT = [5, 17, 40, 8, 99, 3, 250]


@pytest.fixture(scope="module")
def engine(tiny_dir):
    with Engine(tiny_dir, skip_tokenizer=True) as engine:
        yield engine
        assert engine.process.poll() is None, engine.log()


class Watch:
    def __init__(self, folder, engines, *words):
        urls = [engine.url for engine in (engines if isinstance(engines, list) else [engines])]
        self.process = subprocess.Popen(
            [str(BINARY), "watch", str(folder), "--engine", *urls, "--interval", "0.03", "--json", *words],
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

    def end(self, code):
        """Of a watch with --once, which ends by itself: what it said."""
        _, text = self.process.communicate(timeout=15)
        assert self.process.returncode == code, text
        return text


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


def refused_one(source, target):
    write(source, target)
    config = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))


def cut_one(source, target):
    write(source, target)
    os.truncate(target / "adapter_model.safetensors", 1000)


# ---- one that is bad gives way to the next older one ----

@pytest.mark.parametrize("bad", [refused_one, cut_one])
@pytest.mark.parametrize("once", [True, False])
def test_a_bad_checkpoint_gives_way_to_the_older_one(engine, adapter_dirs, tmp_path, bad, once):
    write(adapter_dirs["qv-r1"], tmp_path / "checkpoint-1")
    write(adapter_dirs["seven-r8"], tmp_path / "checkpoint-2")
    bad(adapter_dirs["seven-r8"], tmp_path / "checkpoint-3")
    bad(adapter_dirs["seven-r8"], tmp_path / "checkpoint-4")
    before = published(engine)
    with Watch(tmp_path, engine, "--adapter", "w", *(["--once"] if once else [])) as watch:
        wait_for(lambda: published(engine) == before + 1)
        if once:
            text = watch.end(0)
        else:
            settle()
            write(adapter_dirs["seven-r8"], tmp_path / "checkpoint-5")
            wait_for(lambda: version(engine) == "checkpoint-5")
            versions, text = watch.stop()
            assert versions == ["checkpoint-2", "checkpoint-5"]
    assert version(engine) == ("checkpoint-2" if once else "checkpoint-5")
    for name in ("checkpoint-3", "checkpoint-4"):  # each is said once
        assert sum(name in line for line in text.splitlines()) == 1, text


@pytest.mark.parametrize("bad", [refused_one, cut_one])
def test_once_ends_when_nothing_can_be_published(engine, adapter_dirs, tmp_path, bad):
    bad(adapter_dirs["seven-r8"], tmp_path / "checkpoint-1")
    bad(adapter_dirs["qv-r1"], tmp_path / "checkpoint-2")
    before = published(engine)
    with Watch(tmp_path, engine, "--adapter", "w", "--once") as watch:
        text = watch.end(1)
    assert published(engine) == before and "nothing was published" in text.splitlines()[-1]
    assert "checkpoint-1" in text and "checkpoint-2" in text


def test_once_waits_for_a_first_checkpoint_that_is_being_written(engine, adapter_dirs, tmp_path):
    cut_one(adapter_dirs["seven-r8"], tmp_path / "checkpoint-1")
    with Watch(tmp_path, engine, "--adapter", "w", "--once", "--interval", "0.1") as watch:
        settle()
        shutil.copy(adapter_dirs["seven-r8"] / "adapter_model.safetensors", tmp_path / "checkpoint-1")
        watch.end(0)
    assert version(engine) == "checkpoint-1"


@pytest.mark.parametrize("keys", [["--api-key", "right"], ["--api-key", "wrong", "--admin-api-key", "right"]])
def test_a_wrong_key_is_no_fault_of_a_checkpoint(tiny_dir, adapter_dirs, tmp_path, keys):
    write(adapter_dirs["qv-r1"], tmp_path / "checkpoint-1")
    write(adapter_dirs["qv-r1"], tmp_path / "checkpoint-2")
    with Engine(tiny_dir, *keys, skip_tokenizer=True) as engine:
        with Watch(tmp_path, engine, "--adapter", "w", "--api-key", "wrong", "--once") as watch:
            text = watch.end(1)
        assert "given up" not in text and "--api-key" in text.splitlines()[-1] and "nothing was published" in text
        with Watch(tmp_path, engine, "--adapter", "w", "--api-key", "wrong") as watch:
            settle()
            versions, text = watch.stop()
        assert versions == [] and text.count("it is tried again") == 1 and "given up" not in text


# ---- engines that restart ----

@pytest.fixture
def world(tiny_dir, adapter_dirs, tmp_path):
    """Two engines, the second one behind a proxy, which can hand its place to another process; checkpoint-1 is
    there."""
    write(adapter_dirs["seven-r8"], tmp_path / "checkpoint-1")
    with Engine(tiny_dir, skip_tokenizer=True) as one, Engine(tiny_dir, skip_tokenizer=True) as old, \
            Engine(tiny_dir, skip_tokenizer=True) as new, Proxy(old) as proxy:
        def restart():
            old.process.kill()
            old.process.wait()
            proxy.engine = new
        yield one, proxy, new, restart


def adapters(engine):
    return {card["id"]: card["lora_version"] for card in engine.get("/v1/models").json()["data"][1:]}


def test_an_engine_that_restarted_gets_it_again_and_it_alone(world, adapter_dirs, tmp_path):
    one, proxy, new, restart = world
    with Watch(tmp_path, [one, proxy], "--adapter", "w") as watch:
        wait_for(lambda: published(one) == 1)
        settle()
        restart()
        wait_for(lambda: adapters(new) == {"w": "checkpoint-1"})
        assert one.score([PROMPT], "w")[0].prompt == new.score([PROMPT], "w")[0].prompt
        settle()
        assert published(one) == 1 and published(new) == 1  # once
        write(adapter_dirs["qv-r1"], tmp_path / "checkpoint-2")
        wait_for(lambda: version(one) == version(new) == "checkpoint-2")
        settle()
        versions, text = watch.stop()
    assert versions == ["checkpoint-1", "checkpoint-1", "checkpoint-2"] and published(new) == 2
    line, = [line for line in text.splitlines() if "pushed again" in line]
    assert proxy.url in line and "checkpoint-1" in line


def test_what_others_push_or_unload_is_no_restart(world, adapter_dirs, tmp_path):
    one = world[0]
    with Watch(tmp_path, one, "--adapter", "w") as watch:
        wait_for(lambda: published(one) == 1)
        subprocess.run([str(BINARY), "push", "--engine", one.url, "--adapter", f"x={adapter_dirs['qv-r1']}",
                        "--version", "x-1"], check=True, capture_output=True, timeout=30)
        one.unload("w")
        settle()
        versions, _ = watch.stop()
    assert versions == ["checkpoint-1"] and adapters(one) == {"x": "x-1"}


def test_all_get_the_newest_that_is_left_when_the_files_of_what_was_lost_are_gone(world, adapter_dirs, tmp_path):
    one, proxy, new, restart = world
    write(adapter_dirs["qv-r1"], tmp_path / "checkpoint-2")
    with Watch(tmp_path, [one, proxy], "--adapter", "w") as watch:
        wait_for(lambda: version(one) == "checkpoint-2")
        shutil.rmtree(tmp_path / "checkpoint-2")
        restart()
        wait_for(lambda: version(one) == version(new) == "checkpoint-1")
        versions, text = watch.stop()
    assert versions == ["checkpoint-2", "checkpoint-1"] and text.count("are gone") == 1


def test_an_engine_without_an_instance_is_asked_for_the_adapter(adapter_dirs, tmp_path):
    write(adapter_dirs["qv-r1"], tmp_path / "checkpoint-1")
    there = (200, {"object": "list", "data": [{"id": "base"}, {"id": "w"}]})
    with Recorder(**{"v1/models": there}) as engine:
        def ends():
            return len(engine.bodies("end_weight_update"))
        with Watch(tmp_path, engine, "--adapter", "w") as watch:
            wait_for(lambda: ends() == 1)
            settle()
            assert ends() == 1
            engine.replies["v1/models"] = (200, {"object": "list", "data": [{"id": "base"}]})
            wait_for(lambda: ends() > 1)
            engine.replies["v1/models"] = there
            settle()
            count = ends()
            settle()
            assert ends() == count
            _, text = watch.stop()
    assert engine.url in text and "pushed again" in text


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
