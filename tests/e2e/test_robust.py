"""What the outside may do to the server: thousands of connections, slow and broken clients, huge and deep bodies, a full
queue, a stop while requests wait. After each the next good request is answered."""

import concurrent.futures
import json
import resource
import socket
import threading
import time

import pytest
import requests

from tests.e2e.observe import wait_for
from tools.engine import Engine

PROMPT = [5, 17, 40, 8, 99, 3, 250]
GREEDY = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
LONG = {"temperature": 0.0, "max_new_tokens": 480, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def good(tiny):
    yield tiny
    assert len(tiny.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"]) == 4
    wait_for(tiny, lambda s: s["running"] == s["queued"] == s["leases"] == 0, 10)


def connect(engine):
    return socket.create_connection(("127.0.0.1", engine.port), timeout=30)


def request(body, path=b"/generate"):
    data = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (path, len(data), data)


def read_status(sock):
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        if not piece:
            break
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0)
    while len(rest) < length:
        rest += sock.recv(65536)
    return int(head.split()[1])


def test_two_thousand_idle_connections_that_all_ask(good):
    good.call("/generate", {"input_ids": PROMPT, "sampling_params": GREEDY})
    socks = []
    try:
        for _ in range(2000):
            socks.append(connect(good))
        assert len(good.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"]) == 4
        for _ in range(5):  # a lost wake-up shows about once in ten thousand requests
            for sock in socks:
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert {read_status(sock) for sock in socks} == {200}
        for sock in socks[:500]:  # kept alive: the same connections once more
            sock.sendall(request({"input_ids": PROMPT, "sampling_params": GREEDY}))
        assert {read_status(sock) for sock in socks[:500]} == {200}
    finally:
        for sock in socks:
            sock.close()


def test_five_hundred_clients_that_vanish_together(good):
    socks = [connect(good) for _ in range(500)]
    for i, sock in enumerate(socks):
        sock.sendall(request({"input_ids": PROMPT, "lora_path": "seven-r8", "sampling_params": LONG, "stream": i % 2 == 0}))
    for sock in socks:
        sock.close()


def test_a_client_that_sends_byte_by_byte(good):
    with connect(good) as sock:
        for byte in request({"input_ids": PROMPT, "sampling_params": GREEDY}):
            sock.sendall(bytes([byte]))
        assert read_status(sock) == 200


def test_a_client_that_reads_its_stream_late(good):
    with connect(good) as sock:
        sock.sendall(request({"input_ids": PROMPT, "sampling_params": LONG, "stream": True, "return_logprob": True,
                              "top_logprobs_num": 20}))
        time.sleep(0.5)
        data = b""
        while b"[DONE]" not in data[-100:]:
            piece = sock.recv(1 << 20)
            assert piece
            data += piece
        assert b'"type":"length"' in data


@pytest.mark.parametrize("data", [b"\x00\x01\x02\x03\r\n\r\n", b"GET\r\n\r\n", b"POST /generate HTTP/9.9\r\n\r\n",
                                  b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20000 + b"\r\n", b"GET /" + b"a" * 100000])
def test_bytes_that_are_no_request(good, data):
    with connect(good) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
        except OSError:
            pass  # cut off already


@pytest.mark.parametrize("framing", [
    b"Content-Length: 2\r\nContent-Length: 44", b"Content-Length: 44\r\ncontent-length: 2",
    b"Content-Length: 2\r\nContent-Length: 2",
    b"Content-Length: 2\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: chunked\r\nContent-Length: 2",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", b"Transfer-Encoding: gzip, chunked",
    b"Content-Length: 2, 44", b"Content-Length: -2", b"Content-Length: 0x2",
    b"Content-Length : 2", b"Content-Length\t: 2", b"Content-Length:\r\n 2", b"Content-Length: 2\r\n 4",
    b" Content-Length: 2",
    b"Transfer-Encoding : chunked", b"Transfer-Encoding:\r\n\tchunked"])
def test_a_body_whose_end_is_unclear(good, framing):
    """What one reader takes for a body and another for the next request is refused, and nothing more is read."""
    body = b"{}GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    if framing.lower().find(b"chunked") >= 0:
        body = b"2\r\n{}\r\n0\r\n\r\n" + body[2:]
    with connect(good) as sock:
        sock.sendall(b"POST /flush_cache HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n%s" % (framing, body))
        data = b""
        try:
            while piece := sock.recv(65536):
                data += piece
        except ConnectionResetError:
            pass  # closed with bytes of ours unread
    assert data.startswith(b"HTTP/1.1 400") and b"HTTP/1.1 200" not in data


def test_a_body_over_the_limit(good):
    reply = requests.post(good.url + "/generate", data=b" " * ((32 << 20) + 1), timeout=60)
    assert reply.status_code == 413 and "limit" in reply.json()["error"]["message"]


@pytest.mark.parametrize("data", [
    b"[" * (1 << 20), b'{"a":' * 200000, b'{"input_ids":' + b"[" * 100 + b"]" * 100 + b"}",
    b'{"input_ids":[' + b"1," * 3000000 + b"1]}", b'{"text":"' + b"\\u0041" * 2000000 + b'"}',
    b'{"input_ids":[' + b"[5]," * 9000 + b"[5]]}", b'{"input_ids":[1e999]}', b'{"input_ids":[' + b"9" * 100000 + b"]}"])
def test_huge_and_deep_json(good, data):
    started = time.monotonic()
    reply = requests.post(good.url + "/generate", data=data, timeout=60)
    assert reply.status_code == 400 and reply.json()["error"]["message"]
    assert len(reply.content) < 4096
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("body", [
    {"input_ids": [320]}, {"input_ids": [2**32]}, {"input_ids": [2**63]}, {"input_ids": [-1]},
    {"input_ids": PROMPT, "sampling_params": {"stop_token_ids": [2**31]}},
    {"input_ids": PROMPT, "sampling_params": {"logit_bias": {str(2**31): 1}}},
    {"input_ids": PROMPT, "return_logprob": True, "token_ids_logprob": [320]},
    {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 2**40},
    {"input_ids": [5] * 512}, {"input_ids": [PROMPT, [5] * 10000]},
])
def test_neighbours_of_a_wrong_request_are_not_disturbed(good, body):
    expected = good.score([PROMPT], "seven-r8", 40)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        neighbours = [pool.submit(good.score, [PROMPT], "seven-r8", 40) for _ in range(3)]
        assert good.post("/generate", body).status_code == 400
        assert all(future.result() == expected for future in neighbours)


def test_a_full_queue_is_told_and_recovers(tiny_dir):
    with Engine(tiny_dir, "--max-queued-requests", 4, skip_tokenizer=True) as engine:
        engine.call("/pause_generation", {"mode": "in_place"})
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(engine.generate, input_ids=PROMPT, sampling_params=GREEDY) for _ in range(4)]
            while engine.get("/server_info").json()["internal_states"][0]["queued"] < 4:
                time.sleep(0.01)
            for body in ({"input_ids": PROMPT}, {"input_ids": [PROMPT] * 3}, {"input_ids": PROMPT, "stream": True}):
                reply = engine.post("/generate", body)
                assert reply.status_code == 503 and int(reply.headers["Retry-After"]) >= 1
            assert engine.get("/health_generate").status_code == 200
            engine.call("/continue_generation", {})
            assert all(len(future.result(20)["output_ids"]) == 4 for future in waiting)
        assert engine.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"]


@pytest.mark.parametrize("paused", [False, True])
def test_a_stop_while_requests_wait(tiny_dir, paused):
    with Engine(tiny_dir, "--max-running-requests", 2, "--drain-timeout", 1, skip_tokenizer=True) as engine:
        if paused:
            engine.call("/pause_generation", {"mode": "in_place"})
        with concurrent.futures.ThreadPoolExecutor(24) as pool:
            waiting = [pool.submit(engine.post, "/generate", {"input_ids": PROMPT, "sampling_params": LONG}) for _ in range(24)]
            time.sleep(0.1)
            started = time.monotonic()
            assert engine.stop() == 0
            assert time.monotonic() - started < 10
            for future in waiting:
                try:
                    reply = future.result(10)
                except requests.ConnectionError:
                    continue  # it came after the door was shut
                assert reply.status_code in (200, 503)
                if reply.status_code == 200:
                    assert reply.json()["meta_info"]["finish_reason"]["type"] in ("length", "abort")


def test_long_texts_hold_up_nobody(smollm2):
    """More of them than there are threads for connections; others are answered meanwhile."""
    text = " " * 600000
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        started = time.monotonic()
        long = [pool.submit(smollm2.post, "/generate", {"text": text, "stream": i % 2 == 0}) for i in range(12)]
        waits = []
        while not all(future.done() for future in long):
            asked = time.monotonic()
            assert requests.get(smollm2.url + "/health", timeout=60).status_code == 200
            waits.append(time.monotonic() - asked)
            time.sleep(0.01)
        assert max(waits) < (time.monotonic() - started) / 4
        for future in long:
            assert future.result().status_code == 400
            assert "longer than the model's context length" in future.result().json()["error"]["message"]


def test_a_long_text_is_answered_like_a_short_one(smollm2):
    body = {"text": "a" + " " * 70000, "sampling_params": GREEDY, "rid": "long"}
    whole = smollm2.generate(**body)
    assert whole["meta_info"]["prompt_tokens"] > 1000 and len(whole["output_ids"]) == 4
    events = smollm2.post("/generate", {**body, "stream": True}).text.split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["output_ids"] == whole["output_ids"]
    state = smollm2.get("/server_info").json()["internal_states"][0]
    assert state["running"] == state["queued"] == state["leases"] == 0


def test_an_idle_server_uses_no_cpu(tiny_dir):
    with Engine(tiny_dir, skip_tokenizer=True) as engine:
        engine.generate(input_ids=PROMPT, sampling_params=GREEDY)
        time.sleep(0.3)

        def ticks():
            fields = open(f"/proc/{engine.process.pid}/stat").read().rsplit(")", 1)[1].split()
            return int(fields[11]) + int(fields[12])

        before = ticks()
        time.sleep(1)
        assert ticks() - before <= 2


def test_many_clients_of_all_kinds_at_once(good):
    """Good requests give the same answer while others are wrong, vanish, stream and abort."""
    expected = good.generate(input_ids=PROMPT, lora_path="qv-r1", sampling_params=GREEDY)["output_ids"]
    over = threading.Event()

    def disturb(kind):
        count = 0
        while not over.is_set():
            count += 1
            if kind == 0:
                assert good.post("/generate", {"input_ids": [999]}).status_code == 400
            elif kind == 1:
                with connect(good) as sock:
                    sock.sendall(request({"input_ids": PROMPT, "lora_path": "seven-r8", "sampling_params": LONG}))
            elif kind == 2:
                good.post("/generate", {"input_ids": [PROMPT] * 4, "rid": "batch", "sampling_params": {"max_new_tokens": 50}})
            elif kind == 3:
                assert good.post("/abort_request", {"rid": "batch"}).status_code == 200
            else:
                assert "[DONE]" in good.post("/generate", {"input_ids": PROMPT, "stream": True, "sampling_params": GREEDY}).text
        return count

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        others = [pool.submit(disturb, kind) for kind in range(5)]
        for _ in range(4):
            answers = pool.map(lambda _: good.generate(input_ids=PROMPT, lora_path="qv-r1", sampling_params=GREEDY), range(16))
            assert all(item["output_ids"] == expected for item in answers)
        over.set()
        assert all(future.result(30) > 0 for future in others)
