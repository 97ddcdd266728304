"""The server under load, SmolLM2: throughput of 512 concurrent requests against the engine's best fixed batch in the
same run, where CPU time goes, time to first token, whether a long scored prompt stalls others, and what idling costs.

Requests are those of a rollout: ids in, sampled at temperature 1, logprobs of what is generated, all of one length, no
two with a common beginning. bench/fixed_batch.c asks the engine for the same ones without HTTP.

CPU time is taken per thread. Threads other than the engine's are HTTP and JSON. What scheduling and the handing over of
tokens cost cannot be read off a thread that also computes, so the same requests are served once more by a model so
small that next to nothing is computed: all CPU time of its scheduler thread counts as scheduling, an upper bound.
"""

import argparse
import os
import pathlib
import random
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.decode import machine  # noqa: E402
from bench.load import Call, drive  # noqa: E402
from tools import make_tiny_models  # noqa: E402
from tools.engine import Engine  # noqa: E402

FIXED_BATCH = pathlib.Path(os.environ.get("FIXED_BATCH", ROOT / "build/bench/fixed_batch"))
TINY = "llama-gqa-tied"
CONCURRENT, PROMPT, OUTPUT = 512, 64, 32
FIXED_REQUESTS = 256
STREAMS, STREAM_TOKENS = 16, 256
LONG_PROMPT = 8000
IDLE_SECONDS = 5
THROUGHPUT_BAR, OVERHEAD_BAR, STALL_BAR_SECONDS = 0.90, 0.08, 1.0
COMPUTE_THREADS = ("hr-scheduler", "hr-compute")


# ---- requests ----

def body(number, vocab=49152, prompt=PROMPT, output=OUTPUT, **more):
    most = min(40000, vocab - 100)
    return {
        "input_ids": [100 + (number * 7919 + i * 104729) % most for i in range(prompt)],
        "sampling_params": {"max_new_tokens": output, "temperature": 1.0, "ignore_eos": True, "sampling_seed": number},
        **more,
    }


def check(calls, output=OUTPUT):
    for call in calls:
        made = call.reply()["meta_info"]["completion_tokens"]
        if made != output:
            raise SystemExit(f"bench: a request was answered with {made} tokens, not {output}")


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


# ---- CPU time ----

def thread_seconds(pid):
    """CPU seconds of each thread so far, by (id, name)."""
    seconds = {}
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        seconds[task.name, name] = int((task / "schedstat").read_text().split()[0]) * 1e-9
    return seconds


class CpuUse:
    """CPU seconds of a process's threads inside a with block, by name."""

    def __init__(self, pid):
        self.pid = pid

    def __enter__(self):
        self.before = thread_seconds(self.pid)
        return self

    def __exit__(self, *exc):
        self.by_name = {}
        for key, now in thread_seconds(self.pid).items():
            self.by_name[key[1]] = self.by_name.get(key[1], 0.0) + now - self.before.get(key, 0.0)

    @property
    def total(self):
        return sum(self.by_name.values())

    @property
    def http(self):
        return sum(seconds for name, seconds in self.by_name.items() if name not in COMPUTE_THREADS)


# ---- the parts ----

def fixed_batches(model):
    """Tokens per second, by wall clock and of CPU time, of each batch size."""
    command = [str(FIXED_BATCH), str(model), str(PROMPT), str(OUTPUT), str(FIXED_REQUESTS)]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    if out.returncode != 0:
        raise SystemExit(f"bench: fixed_batch failed: {out.stderr}")
    rates = {}
    for line in out.stdout.splitlines():
        size, per_second, per_cpu = line.split()
        rates[int(size)] = (float(per_second), float(per_cpu))
    return rates


def requests(engine, first, vocab=49152):
    """512 at once, not streamed. Returns tokens per second, the CPU use and the client's CPU seconds."""
    calls = [Call(body(first + i, vocab, return_logprob=True)) for i in range(CONCURRENT)]
    with CpuUse(engine.process.pid) as use:
        load = drive(engine.port, calls)
    check(calls)
    return CONCURRENT * (PROMPT + OUTPUT) / load.seconds, use, load


def scheduling_seconds(flags):
    """CPU seconds of a scheduler that has the same requests and next to nothing to compute."""
    model = make_tiny_models.write(TINY)
    with Engine(model, "--threads", 1, *flags, skip_tokenizer=True) as engine:
        requests(engine, 0, vocab=320)
        _, use, _ = requests(engine, CONCURRENT, vocab=320)
    return use.by_name["hr-scheduler"]


def first_tokens(engine, first, per_second):
    """Times to the first token: 512 streams at once, and 128 that arrive at half of what the server can do."""
    burst = [Call(body(first + i, stream=True)) for i in range(CONCURRENT)]
    drive(engine.port, burst)
    draw, at, steady = random.Random(1), 0.0, []
    for i in range(128):
        at += draw.expovariate(per_second / (PROMPT + OUTPUT) / 2)
        steady.append(Call(body(first + CONCURRENT + i, stream=True), at=at))
    drive(engine.port, steady)
    check(burst + steady)
    return [[call.first_token_seconds for call in calls] for calls in (burst, steady)]


def streams(first):
    return [Call(body(first + i, output=STREAM_TOKENS, stream=True), stamp_every=True) for i in range(STREAMS)]


def stall(engine, first):
    """Longest pause of any stream after all have begun: alone, and while a long prompt is scored; the seconds the long
    prompt took."""
    alone = streams(first)
    drive(engine.port, alone)
    pause_alone = max(call.longest_gap(max(c.first_event for c in alone)) for call in alone)
    begun = max(call.first_event for call in alone)

    beside = streams(first + STREAMS)
    scored = Call(body(first + 2 * STREAMS, prompt=LONG_PROMPT, output=1, return_logprob=True, logprob_start_len=0,
                       top_logprobs_num=5), at=begun + 1.0)
    drive(engine.port, beside + [scored])
    check(alone + beside, STREAM_TOKENS)
    rows = scored.reply()["meta_info"]["input_top_logprobs"]
    if len(rows) != LONG_PROMPT or any(len(row) != 5 for row in rows[1:]):
        raise SystemExit("bench: the long prompt's logprobs are not complete")
    if scored.sent > min(call.ended for call in beside):
        raise SystemExit("bench: the streams ended before the long prompt came; the machine is too fast for this length")
    pause_beside = max(call.longest_gap(scored.sent, scored.ended) for call in beside)
    return pause_alone, pause_beside, scored.ended - scored.sent


def idle_seconds(engine):
    time.sleep(1)
    with CpuUse(engine.process.pid) as use:
        time.sleep(IDLE_SECONDS)
    return use.total


# ---- the report ----

def verdict(missed, text, fine):
    print(f"  {text}: {'ok' if fine else 'MISSED'}", flush=True)
    return missed + (not fine)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--rounds", type=int, default=2, help="fixed batches and the server in turns, the best of each")
    parser.add_argument("flags", nargs="*", help="flags for the server, after --")
    arguments = parser.parse_args()
    model, flags, missed, made = arguments.model, arguments.flags, 0, 0
    print(f"serve, {model.name}, {PROMPT} prompt and {OUTPUT} output tokens, on {machine()}", flush=True)

    with Engine(model, *flags) as engine:
        fixed, served, best = {}, 0.0, None
        for _ in range(arguments.rounds):
            for size, rates in fixed_batches(model).items():
                fixed[size] = tuple(map(max, fixed.get(size, (0, 0)), rates))
            rate, use, load = requests(engine, made)
            made += CONCURRENT
            if rate > served:
                served, best = rate, (use, load)
        use, load = best
        print("fixed batches, tokens/s (of CPU time): " +
              ", ".join(f"{size}: {wall:.0f} ({cpu:.0f})" for size, (wall, cpu) in fixed.items()))
        per_cpu = CONCURRENT * (PROMPT + OUTPUT) / use.total
        bar = max(wall for wall, _ in fixed.values())
        print(f"{CONCURRENT} requests at once: {served:.0f} tokens/s ({per_cpu:.0f} of CPU time), "
              f"{load.seconds:.1f} s; the client took {load.client_cpu:.2f} s of CPU time")
        missed = verdict(missed, f"{served / bar:.1%} of the best fixed batch, bar {THROUGHPUT_BAR:.0%}; by CPU time, which "
                         f"other work on the machine touches less, {per_cpu / max(cpu for _, cpu in fixed.values()):.1%}",
                         served >= THROUGHPUT_BAR * bar)

        scheduling = scheduling_seconds(flags)
        share = (use.http + scheduling) / use.total
        print(f"CPU time {use.total:.1f} s: " + ", ".join(f"{name} {s:.2f}" for name, s in sorted(use.by_name.items())) +
              f"; of the scheduler's at most {scheduling:.2f} is scheduling")
        missed = verdict(missed, f"HTTP and JSON {use.http / use.total:.2%}, scheduling at most "
                         f"{scheduling / use.total:.2%}, bar {OVERHEAD_BAR:.0%} together", share <= OVERHEAD_BAR)

        for name, times in zip((f"{CONCURRENT} at once", "arriving at half of that rate"),
                               first_tokens(engine, made, served)):
            print(f"time to first token, {name}: p50 {percentile(times, 0.5):.2f} s, p99 {percentile(times, 0.99):.2f} s")
        made += 2 * CONCURRENT

        alone, beside, took = stall(engine, made)
        print(f"a prompt of {LONG_PROMPT} tokens (the model's context is 8192), scored with top 5, took {took:.1f} s beside "
              f"{STREAMS} streams")
        missed = verdict(missed, f"longest pause of a stream {alone * 1e3:.0f} ms without it, {beside * 1e3:.0f} ms with it, "
                         f"bar {STALL_BAR_SECONDS * 1e3:.0f} ms", beside <= STALL_BAR_SECONDS)

        idle = idle_seconds(engine)
        missed = verdict(missed, f"idle for {IDLE_SECONDS} s: {idle * 1e3:.2f} ms of CPU time, bar 10", idle < 0.010)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
