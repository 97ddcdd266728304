"""Pushes to an engine on this machine: time from the call of push to the first token that is computed with the new
version, of an adapter of 31.5 MB in 384 tensors; what a tensor costs where there are 18,000 of them; what requests that
run feel of it; and how much memory the sender takes.

The engine serves a random model of 48 layers and hidden size 160, so that the adapter (q, k, v and o, rank 256, bf16) is
what moves and a forward step is short; how short is printed. The publisher is the Python package with one Publisher,
the tensors lie in host memory, and every push carries other bytes than the one before. The first token is asked for by
a request of one prompt token once push has returned; its reply must name the new version.

For comparison in the same run: SGLang's JSON route (flattened buckets in base64, SHA-256 manifest), and the same push
with Python on both ends (pickle, base64, JSON, http.server, SHA-256, copy into place), which is timed to its reply.
"""

import argparse
import base64
import hashlib
import http.client
import json
import os
import pathlib
import pickle
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench import base_sync  # noqa: E402
from bench.decode import machine  # noqa: E402
from bench.push_model import adapter_config, adapter_tensors, write_llama  # noqa: E402
from tests.e2e import trainer_package  # noqa: E402
from tools.engine import Engine  # noqa: E402

LAYERS, HIDDEN, RANK = 48, 160, 256
MANY, MANY_RANK = 47, 347  # adapters in one push: 18,048 tensors, 2.0 GB
NATIVE_P50_MS, SGLANG_MS, RATIO, PER_TENSOR_US, PAUSE_MS, BASE_SHARE = 20, 250, 15, 5, 1.0, 0.5
MEMORY_BUCKET = 64 << 20


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


class FirstToken:
    """Asks for one token over a connection that is kept."""

    def __init__(self, engine, adapter):
        self.connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)
        self.body = json.dumps({"input_ids": [7], "lora_path": adapter, "sampling_params": {
            "max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}}).encode()

    def __call__(self, version):
        self.connection.request("POST", "/generate", self.body, {"Content-Type": "application/json"})
        answer = json.loads(self.connection.getresponse().read())
        if answer.get("meta_info", {}).get("weight_version") != version:
            raise SystemExit(f"bench: not the version {version}: {answer}")


class Report:
    def __init__(self):
        self.rows, self.missed = {}, []

    def add(self, name, values, bar=None, fine=True, text=""):
        self.rows[name] = {**values, "bar": bar, "ok": bool(fine)}
        shown = ", ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
                          for key, value in values.items())
        if bar:
            shown += f"; bar {bar}: {'ok' if fine else 'MISSED'}"
        print(f"  {name}: {shown}{'  ' + text if text else ''}", flush=True)
        if not fine:
            self.missed.append(name)


def timed(pushes, push, first_token, name):
    """Milliseconds of each push until its first token; the first three are not counted."""
    times = []
    for i in range(pushes + 3):
        version = f"{name}-{i}"
        started = time.perf_counter()
        push(i, version)
        if first_token:
            first_token(version)
        times.append((time.perf_counter() - started) * 1e3)
    return times[3:]


# ---- the same push with Python on both ends ----

def python_push(port, tensors):
    """Pickle, base64, JSON; returns when the receiver has everything in place."""
    import torch

    sums = {name: hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()
            for name, tensor in tensors.items()}
    body = json.dumps({"lora_name": "policy", "config_dict": adapter_config(RANK), "expected_checksums": sums,
                       "serialized_named_tensors": [base64.b64encode(pickle.dumps(tensors)).decode()]})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/load_lora_adapter_from_tensors", body.encode(), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    if not answer["success"]:
        raise SystemExit(f"bench: {answer}")


def python_rows(report, tensors, pushes, native_p50):
    receiver = subprocess.Popen([sys.executable, str(ROOT / "bench/python_receiver.py")], stdout=subprocess.PIPE,
                                text=True)
    try:
        port = int(receiver.stdout.readline())
        times = timed(pushes, lambda i, version: python_push(port, tensors[i % 2]), None, "python")
    finally:
        receiver.kill()
        receiver.wait()
    ratio = percentile(times, 0.5) / native_p50
    report.add("Python on both ends", {"p50_ms": percentile(times, 0.5), "p99_ms": percentile(times, 0.99),
                                       "pushes": pushes, "native is faster by": ratio}, f">= {RATIO}x", ratio >= RATIO)


# ---- what running requests feel ----

class Stream:
    """A request that generates all the time, for another process; `stamps` are the times at which its tokens came."""

    def __init__(self, engine):
        self.client = subprocess.Popen([sys.executable, str(ROOT / "bench/stream_stamps.py"), str(engine.port)],
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def stop(self):
        lines, _ = self.client.communicate(timeout=60)
        self.stamps = [float(line) if line else None for line in lines.splitlines()]

    def gaps(self, windows):
        """The longest gap that overlaps each window, in ms."""
        pairs = [(a, b) for a, b in zip(self.stamps, self.stamps[1:]) if a is not None and b is not None]
        return [max((b - a for a, b in pairs if b > start and a < end), default=0.0) * 1e3 for start, end in windows]


def pause_rows(report, headrace, model, tensors, pushes, flags):
    """The engine computes with half of the cores, so that a push does not take away those it computes with."""
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    with Engine(model, "--threads", threads, *flags, skip_tokenizer=True) as engine, headrace.Publisher(
            engine.url) as publisher:
        publisher.push(tensors[1], adapter="policy", config=adapter_config(RANK))
        pause_row(report, engine, publisher, tensors, pushes, threads)


def pause_row(report, engine, publisher, tensors, pushes, threads):
    config, publishing = adapter_config(RANK), []
    stream = Stream(engine)
    time.sleep(1.5)
    windows, quiet = [], []
    for i in range(pushes):
        started = time.perf_counter()
        receipt = publisher.push(tensors[i % 2], adapter="policy", config=config)
        ended = time.perf_counter()
        publishing.append(receipt.engines[0].seconds["publish"] * 1e3)
        time.sleep(ended - started)
        windows.append((started, ended))
        quiet.append((ended, time.perf_counter()))
        time.sleep(0.01)
    stream.stop()
    beside, alone = stream.gaps(windows), stream.gaps(quiet)
    pause = statistics.median(beside) - statistics.median(alone)
    report.add("publishing in the engine, with the wait for the step under way",
               {"p50_ms": percentile(publishing, 0.5), "p99_ms": percentile(publishing, 0.99)})
    report.add(f"pause seen by a running request, {threads} compute thread(s)",
               {"ms": pause, "longest gap p50 with": statistics.median(beside), "without": statistics.median(alone),
                "max with": max(beside), "max without": max(alone)}, f"<= {PAUSE_MS} ms", pause <= PAUSE_MS)


# ---- many tensors, and the sender's memory ----

def resident(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def many_rows(report, headrace, model, repeats, flags):
    import gc

    with Engine(model, *flags, skip_tokenizer=True) as engine, headrace.Publisher(
            engine.url, bucket_bytes=MEMORY_BUCKET) as publisher:
        def push(rank, seed, version):
            one = adapter_tensors(LAYERS, HIDDEN, rank, seed)
            adapters = {f"a{i}": headrace.Adapter({name: tensor.clone() for name, tensor in one.items()},
                                                  adapter_config(rank)) for i in range(MANY)}
            gc.collect()
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
            before, started = resident("VmRSS"), time.perf_counter()
            receipt = publisher.push(adapters=adapters, version=version)
            return time.perf_counter() - started, receipt, resident("VmHWM") - before

        small = min(push(1, i, f"s{i}")[0] for i in range(repeats))
        runs = [push(MANY_RANK, i, f"m{i}") for i in range(repeats)]
    tensors, extra = runs[0][1].tensors, max(run[2] for run in runs)
    report.add(f"{tensors} tensors of 320 bytes, all that a tensor costs",
               {"seconds": small, "us_per_tensor": small / tensors * 1e6}, f"<= {PER_TENSOR_US} us",
               small / tensors * 1e6 <= PER_TENSOR_US)
    best = min(run[0] for run in runs)
    report.add(f"{runs[0][1].bytes / 1e9:.2f} GB in {tensors} tensors",
               {"seconds": best, "GB/s": runs[0][1].bytes / best / 1e9})
    report.add(f"sender's extra memory, buckets of {MEMORY_BUCKET >> 20} MiB", {"MiB": extra / 2**20},
               f"<= {2 * MEMORY_BUCKET >> 20} MiB and a unit", extra <= 2 * MEMORY_BUCKET + (16 << 20))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pushes", type=int, default=200)
    parser.add_argument("--rows", default="native,audit,sglang,python,pause,many,base", help="which parts to run")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    parser.add_argument("flags", nargs="*", help="flags for the engine, after --")
    arguments = parser.parse_args()
    rows, flags, report = arguments.rows.split(","), arguments.flags, Report()
    headrace = trainer_package.load()
    model = write_llama(f"push-{LAYERS}x{HIDDEN}", layers=LAYERS, hidden=HIDDEN, intermediate=160, head_dim=32)
    tensors = [adapter_tensors(LAYERS, HIDDEN, RANK, seed) for seed in (1, 2)]
    size = sum(tensor.nbytes for tensor in tensors[0].values())
    print(f"push, {size / 1e6:.1f} MB in {len(tensors[0])} tensors, on {machine()}", flush=True)
    config, few = adapter_config(RANK), max(10, arguments.pushes // 4)

    if set(rows) - {"many", "base"}:
        with Engine(model, *flags, skip_tokenizer=True) as engine:
            def run(name, pushes, bar=None, bound=None, **options):
                with headrace.Publisher(engine.url, **options) as publisher:
                    times = timed(pushes, lambda i, version: publisher.push(
                        tensors[i % 2], adapter="policy", config=config, version=version), first_token, name)
                p50 = percentile(times, 0.5)
                report.add(name, {"p50_ms": p50, "p99_ms": percentile(times, 0.99), "min_ms": min(times),
                                  "pushes": pushes}, bar, bound is None or p50 <= bound)
                return p50

            first_token = FirstToken(engine, "policy")
            p50 = run("native, XXH3", arguments.pushes, f"<= {NATIVE_P50_MS} ms p50", NATIVE_P50_MS)
            steps = timed(20, lambda i, version: None, lambda version: first_token(f"native, XXH3-{arguments.pushes + 2}"),
                          "step")
            report.add("of which the request for the first token", {"p50_ms": percentile(steps, 0.5)})
            if "audit" in rows:
                run("native, XXH3 and SHA-256", few, audit=True)
            if "sglang" in rows:
                run("SGLang's JSON route", few, f"<= {SGLANG_MS} ms", SGLANG_MS, transport="sglang")
        if "pause" in rows:
            pause_rows(report, headrace, model, tensors, 2 * few, flags)
        if "python" in rows:
            python_rows(report, tensors, 10, p50)
    if "many" in rows:
        many_rows(report, headrace, model, 3, flags)
    if "base" in rows:
        pushed, raw = base_sync.measure(headrace, flags)
        share = pushed / raw
        report.add("base sync of 1.2 GB, second on", {"GB/s": pushed, "raw POST GB/s": raw, "share": share},
                   f">= {BASE_SHARE:.0%}", share >= BASE_SHARE)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "cores": len(os.sched_getaffinity(0)),
                                              "rows": report.rows}, indent=1) + "\n")
    if report.missed:
        print("missed: " + "; ".join(report.missed))
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
