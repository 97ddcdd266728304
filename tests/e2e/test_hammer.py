"""A hundred pushes while sixty-four requests run: every output is of one version, and of the one it says."""

import http.client
import json
import threading
import time

import pytest
from safetensors.torch import save

from tests.e2e import observe
from tests.e2e.trainer_model import Learner
from tools.engine import Engine

PUSHES, REQUESTS = 100, 64
NAME = "policy"
BODY = {"input_ids": [5, 17, 40, 8, 99, 3, 250], "return_logprob": True,
        "sampling_params": {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.0}}
SLACK_BYTES = 8 << 20  # of heap that is not given back; the pushes of the test carry several times as much


def at_rest(engine):
    """Memory and descriptors once nothing runs any more."""
    observe.at_rest(engine)
    engine.http.close()
    return observe.resident(engine), observe.descriptors(engine)


def ask(connection, body):
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    answer = json.loads(reply.read())
    assert reply.status == 200, answer
    meta = answer["meta_info"]
    bits = tuple((token, logprob) for logprob, token, _ in meta["output_token_logprobs"])
    return bits, meta["weight_versions"], meta["weight_version"]


class Clients:
    """Threads that each keep one request running until the block ends; `seen` is all they were answered."""

    def __init__(self, engine, body, n=REQUESTS):
        self.engine, self.body, self.stop, self.seen, self.errors = engine, json.dumps(body).encode(), False, [], []
        self.threads = [threading.Thread(target=self._run) for _ in range(n)]

    def _run(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.engine.port, timeout=60)
        try:
            while not self.stop:
                self.seen.append(ask(connection, self.body))
        except Exception as error:  # told by the block that waits for the threads
            self.errors.append(error)
        finally:
            connection.close()

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exc):
        self.stop = True
        for thread in self.threads:
            thread.join()
        if self.errors and exc[0] is None:
            raise self.errors[0]


@pytest.fixture(scope="module")
def engine(tiny_dir):
    with Engine(tiny_dir, "--max-running-requests", REQUESTS, dtype="float32", skip_tokenizer=True) as engine:
        yield engine
        assert engine.process.poll() is None, engine.log()


@pytest.fixture
def push(engine):
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)

    def post(image, version, route, headers):
        connection.request("POST", f"/update_weights_from_safetensors?weight_version={version}{route}", image, headers)
        reply = connection.getresponse()
        answer = json.loads(reply.read())
        assert reply.status == 200 and answer["success"], answer
    yield post
    connection.close()


def references(engine, body, versions, push):
    """The bits of every version, alone on the engine. All differ from each other."""
    connection, found = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60), {}
    for version, content in versions.items():
        push(content, version)
        bits, spans, _ = ask(connection, json.dumps(body))
        assert spans == [{"version": version, "start": 0, "end": 12}]
        found[bits] = version
    connection.close()
    assert len(found) == len(versions), "two versions have the same logprobs"
    return found


def push_all(engine, body, versions, push):
    """Pushes each version while all requests run, the next one once an answer of this one has come."""
    with Clients(engine, body) as clients:
        while len(clients.seen) < REQUESTS and not clients.errors:
            time.sleep(0.01)
        for version, content in versions:
            looked = len(clients.seen)
            push(content, version)
            while not clients.errors:
                now = len(clients.seen)
                if any(last == version for _, _, last in clients.seen[looked:now]):
                    break
                looked = now
                time.sleep(0.001)
    return clients.seen


def hammer(engine, body, versions, push):
    version_of = references(engine, body, versions, push)
    items = list(versions.items())
    push(items[0][1], items[0][0])
    some = len(items) // 4
    seen = push_all(engine, body, items[1:some], push)  # several versions at once have been in use now
    memory, files = at_rest(engine)
    seen += push_all(engine, body, items[some:], push)
    for bits, spans, last in seen:
        assert bits in version_of, "an output that is of no version, or of two"
        assert spans == [{"version": version_of[bits], "start": 0, "end": 12}]
        assert last == version_of[bits]
    assert {last for _, _, last in seen} == set(versions)
    memory_after, files_after = at_rest(engine)
    assert files_after <= files
    assert memory_after <= memory + SLACK_BYTES, f"{(memory_after - memory) >> 20} MiB more"


def test_a_hundred_adapter_pushes_under_load(engine, tiny_dir, push):
    learner = Learner(tiny_dir, r=64)
    headers = {"X-Lora-Config": json.dumps(learner.config())}
    versions = {}
    for i in range(PUSHES + 1):
        learner.step()
        versions[f"v{i}"] = save({key: tensor.contiguous() for key, tensor in learner.adapter().items()})
    assert sum(map(len, versions.values())) > 4 * SLACK_BYTES
    hammer(engine, {**BODY, "lora_path": NAME}, versions,
           lambda image, version: push(image, version, f"&lora_name={NAME}", headers))
    assert len(engine.get("/v1/models").json()["data"]) == 2
    engine.unload(NAME)


def test_base_pushes_under_load(engine, tiny_dir, push):
    """A base update waits for the requests that run, and those that come wait for it: no output is of two versions."""
    learner, versions = Learner(tiny_dir), {}
    for i in range(20):
        learner.step_base()
        versions[f"b{i}"] = save({key: tensor.contiguous() for key, tensor in learner.base_parameters().items()})
    hammer(engine, BODY, versions, lambda image, version: push(image, version, "", {}))
