"""What an engine shows of itself to those outside: its counters, its memory, its descriptors."""

import os
import time


def state(engine) -> dict:
    return engine.get("/server_info").json()["internal_states"][0]


def wait_for(engine, condition, seconds=20):
    """Until the counters meet the condition."""
    deadline = time.monotonic() + seconds
    while not condition(state(engine)):
        assert time.monotonic() < deadline, state(engine)
        time.sleep(0.005)


def at_rest(engine) -> dict:
    """The counters once nothing runs: every lease and every page is back, and every request has ended once."""
    wait_for(engine, lambda s: s["running"] == s["queued"] == s["leases"] == 0)
    now = state(engine)
    assert now["leases_acquired"] == now["leases_released"], now
    assert now["kv_pages_free"] + now["kv_pages_cached"] == now["kv_pages"], now
    assert now["requests_started"] == now["requests_finished"] + now["requests_aborted"], now
    return now


def resident(engine) -> int:
    """Bytes of memory in use."""
    with open(f"/proc/{engine.process.pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS:"))


def descriptors(engine) -> int:
    """Open ones, once their number stands: an engine closes its end of a connection a little after the client."""
    counts = []
    while len(counts) < 3 or len(set(counts[-3:])) > 1:
        counts.append(len(os.listdir(f"/proc/{engine.process.pid}/fd")))
        assert len(counts) < 100, counts
        time.sleep(0.1)
    return counts[-1]
