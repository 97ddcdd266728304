"""Three ways to put an adapter into a payload, one producer and four readers that are programs of their own, one of them
late: what breaks with torch on both sides, and what this server makes of the same payloads.

HEADRACE_LATE_SECONDS is how late the late reader is (2; the nightly run takes 8).
"""

import base64
import gc
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e import trainer_forms as forms
from tools.engine import Engine

HERE = pathlib.Path(__file__).resolve().parent
LATE_SECONDS = float(os.environ.get("HEADRACE_LATE_SECONDS", 2))
ADAPTER = "seven-r8"
PROMPT = [5, 17, 40, 8, 99, 3, 250]


class Program:
    """A program that answers each line with a line."""

    def __init__(self, script, *arguments):
        self.process = subprocess.Popen([sys.executable, str(HERE / script), *map(str, arguments)], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env={**os.environ, "OMP_NUM_THREADS": "1"})

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        assert line, f"the program ended with {self.process.wait()}"
        return line.strip()

    def ask(self, line):
        self.tell(line)
        return self.answer()

    def end(self):
        self.process.stdin.close()
        assert self.process.wait(30) == 0


@pytest.fixture(scope="module")
def adapter(adapter_dirs):
    return adapter_dirs[ADAPTER]


@pytest.fixture(scope="module")
def digest(adapter):
    tensors, total = load_file(adapter / "adapter_model.safetensors"), hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


@pytest.fixture(scope="module")
def consumers():
    programs = [Program("trainer_payload_consumer.py") for _ in range(4)]
    assert [program.answer() for program in programs] == ["ready"] * 4
    yield programs
    for program in programs:
        program.end()


@pytest.fixture
def producer(adapter):
    program = Program("trainer_payload_producer.py", adapter)
    yield program
    if program.process.poll() is None:
        program.end()


def read_by_four(consumers, path, late):
    """The answers of all four, the late one first. The others are done and have let go before it comes."""
    first, *others = consumers
    for program in others if late else consumers:
        program.tell(f"read {path}")
    answers = [program.answer() for program in (others if late else consumers)]
    if late:
        assert [program.ask("drop") for program in others] == ["dropped"] * 3
        time.sleep(LATE_SECONDS)
        answers = [first.ask(f"read {path}"), *answers]
    for program in consumers:
        program.ask("drop")
    return answers


@pytest.mark.parametrize("late", [False, True], ids=["all on time", "one late"])
@pytest.mark.parametrize("form", ["file_descriptor", "file_system", "inline"])
def test_readers_with_torch(producer, consumers, digest, tmp_path, form, late):
    path = producer.ask(f"{form} {tmp_path / 'payload'}")
    late_one, *others = read_by_four(consumers, path, late)
    if form == "file_descriptor":  # no reader is a child of the producer
        assert all("AuthenticationError" in answer for answer in (late_one, *others))
    elif form == "file_system" and late:  # the early readers took the producer's reference with them
        assert others == [digest] * 3
        assert late_one.startswith("FAIL") and "/torch_" in late_one
    else:
        assert [late_one, *others] == [digest] * 4


def test_an_inline_payload_is_one(producer, adapter, tmp_path):
    """Substituting another form fails the last two lines."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    total = sum(tensor.nbytes for tensor in tensors.values())
    inline = base64.b64decode(pathlib.Path(producer.ask(f"inline {tmp_path / 'inline'}")).read_text())
    shared = base64.b64decode(pathlib.Path(producer.ask(f"file_system {tmp_path / 'shared'}")).read_text())
    assert len(inline) >= total and b"/torch_" not in inline
    assert len(shared) < total and b"/torch_" in shared


# ---- the same payloads, and this server ----

@pytest.fixture(scope="module")
def engine(tiny_dir, adapter):
    with Engine(tiny_dir, dtype="float32", skip_tokenizer=True) as engine:
        engine.load("from-disk", adapter)
        yield engine
        assert engine.process.poll() is None, engine.log()


@pytest.fixture
def load(engine, adapter):
    names = []

    def post(path):
        name = f"wire-{len(names)}"
        names.append(name)
        config = (adapter / "adapter_config.json").read_text()
        started = time.monotonic()
        reply = engine.post("/load_lora_adapter_from_tensors", {
            "lora_name": name, "config_dict": json.loads(config),
            "serialized_named_tensors": [pathlib.Path(path).read_text()]})
        if reply.status_code == 200:
            assert engine.score([PROMPT], name) == engine.score([PROMPT], "from-disk")
            engine.unload(name)
            return None
        assert reply.status_code == 400 and time.monotonic() - started < 5
        assert name not in reply.json()["loaded_adapters"]
        return reply.json()["error_message"]
    return post


def test_descriptors_are_refused_at_once(load, producer, tmp_path):
    message = load(producer.ask(f"file_descriptor {tmp_path / 'payload'}"))
    assert "file_descriptor" in message and "pickle.dumps" in message, message


def test_shared_memory_works_while_it_is_there(load, producer, tmp_path):
    assert load(producer.ask(f"file_system {tmp_path / 'payload'}")) is None


def test_shared_memory_that_is_gone_is_named(load, producer, consumers, tmp_path):
    """The server is the late reader now."""
    path = producer.ask(f"file_system {tmp_path / 'payload'}")
    for program in consumers[1:]:
        assert not program.ask(f"read {path}").startswith("FAIL")
    assert [program.ask("drop") for program in consumers[1:]] == ["dropped"] * 3
    message = load(path)
    assert "/torch_" in message and "pickle.dumps" in message, message


def test_an_inline_payload_outlives_its_producer(load, producer, tmp_path):
    path = producer.ask(f"inline {tmp_path / 'payload'}")
    producer.end()
    time.sleep(LATE_SECONDS)
    assert load(path) is None


def test_shared_memory_stays_flat(engine, adapter):
    """Each payload's reference is given back once: what the trainer lets go of is gone, and not before."""
    config = json.loads((adapter / "adapter_config.json").read_text())

    def objects():
        return sorted(path.name for path in pathlib.Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))

    before = objects()
    tensors = load_file(adapter / "adapter_model.safetensors")
    for _ in range(8):
        shared = {key: tensor.clone() for key, tensor in tensors.items()}
        payload = forms.forked(shared)
        assert len(objects()) == len(before) + len(tensors)
        engine.call("/load_lora_adapter_from_tensors", {
            "lora_name": "flat", "config_dict": config, "serialized_tensors": payload, "upsert": True})
        assert len(objects()) == len(before) + len(tensors)  # the trainer's own reference is not taken from it
        del shared
        gc.collect()
        assert objects() == before
    engine.unload("flat")
