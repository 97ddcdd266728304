"""Starts a `headrace serve` process and speaks to it; what tests, benchmarks and the demo share."""

import collections
import os
import pathlib
import signal
import socket
import subprocess
import threading
import time

import requests

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINARY = pathlib.Path(os.environ.get("HEADRACE", ROOT / "build/src/cli/headrace"))

Scores = collections.namedtuple("Scores", "prompt output ids")


class EngineError(RuntimeError):
    """A refused request: carries the HTTP status and the decoded body."""

    def __init__(self, route, status, body):
        super().__init__(f"{route}: HTTP {status}: {body}")
        self.status = status
        self.body = body


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Engine:
    """One running engine. Use as a context manager; the process ends with the block."""

    def __init__(self, model, *flags, dtype=None, start_timeout=120, skip_tokenizer=False):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [str(BINARY), "serve", "--model-path", str(model), "--host", "127.0.0.1", "--port", str(self.port)]
        if dtype:
            command += ["--dtype", dtype]
        if skip_tokenizer:
            command.append("--skip-tokenizer-init")
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command + [str(flag) for flag in flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace")
        self._log = collections.deque(maxlen=400)
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()
        self.http = requests.Session()
        try:
            self._wait_ready(start_timeout)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        self.ready_seconds = time.monotonic() - self.started

    def _drain(self):
        for line in self.process.stdout:
            self._log.append(line)

    def log(self) -> str:
        return "".join(self._log)

    def _wait_ready(self, timeout):
        deadline = self.started + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                self._reader.join(5)
                raise EngineError("start", self.process.returncode, self.log())
            try:
                if requests.get(self.url + "/health", timeout=5).status_code == 200:
                    return
            except requests.ConnectionError:
                pass
            time.sleep(0.01)
        raise EngineError("start", None, f"not ready after {timeout} s\n{self.log()}")

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.stop()

    def stop(self, timeout=30) -> int:
        """SIGTERM, then the exit status; a process that does not end in time is killed and reported."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise EngineError("stop", None, f"still running {timeout} s after SIGTERM\n{self.log()}") from None
        self._reader.join(5)
        return self.process.returncode

    def get(self, route):
        return self.http.get(self.url + route, timeout=60)

    def post(self, route, body):
        """The raw response, whatever its status."""
        return self.http.post(self.url + route, json=body, timeout=600)

    def call(self, route, body):
        """The decoded body of a success; EngineError otherwise."""
        reply = self.post(route, body)
        if reply.status_code != 200:
            raise EngineError(route, reply.status_code, reply.text)
        return reply.json()

    def load(self, name, path, **more):
        return self.call("/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more})

    def unload(self, name):
        return self.call("/unload_lora_adapter", {"lora_name": name})

    def generate(self, **body):
        return self.call("/generate", body)

    def score(self, prompts, adapters=None, new_tokens=0, sampling=None):
        """Logprobs of every prompt token (the first is None) and of new_tokens generated ones, for a list of
        prompts given as ids. adapters: None, one name, or a name or None per prompt. Returns a list of Scores."""
        body = {
            "input_ids": prompts,
            "sampling_params": {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0.0, **(sampling or {})},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if adapters is not None:
            body["lora_path"] = adapters
        return [read_scores(item) for item in self.call("/generate", body)]


def read_scores(item) -> Scores:
    meta = item["meta_info"]
    return Scores(
        [triple[0] for triple in meta["input_token_logprobs"]],
        [triple[0] for triple in meta["output_token_logprobs"]],
        list(item["output_ids"]))
