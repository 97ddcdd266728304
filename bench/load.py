"""A load generator that leaves the processors to the server: one thread over raw sockets, bodies written beforehand,
replies only timed and stored while the clock runs, and parsed after it."""

import dataclasses
import json
import selectors
import socket
import time


@dataclasses.dataclass
class Call:
    """One request and what came of it; times are seconds since the start of the load."""

    body: dict
    at: float = 0.0
    stamp_every: bool = False  # the time of every piece of a stream, not of the first alone
    wire: bytes = b""
    data: bytearray = dataclasses.field(default_factory=bytearray)
    sent: float = 0.0
    first_event: float | None = None
    stamps: list = dataclasses.field(default_factory=list)
    ended: float | None = None

    def reply(self):
        """The decoded body; for a stream that of its last event."""
        head, _, body = bytes(self.data).partition(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0] + b" ":
            raise SystemExit(f"bench: a request was refused: {head[:100]!r} {body[:300]!r}")
        if b"text/event-stream" in head:
            events = [line for line in body.split(b"\n") if line.startswith(b"data: {")]
            return json.loads(events[-1][6:])
        return json.loads(body)

    @property
    def first_token_seconds(self):
        return self.first_event - self.sent

    def longest_gap(self, after=0.0, before=float("inf")):
        """Of the pauses between two pieces of the stream that overlap a window, the longest."""
        pairs = zip(self.stamps, self.stamps[1:])
        return max((b - a for a, b in pairs if b > after and a < before), default=0.0)


def _prepare(call, port):
    body = json.dumps(call.body).encode()
    call.wire = (f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
                 f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n").encode() + body


def _receive(call, sock, now):
    piece = sock.recv(1 << 16)
    if not piece:
        call.ended = now
        return False
    call.data += piece
    if call.first_event is None and b"data: " in call.data:
        call.first_event = now
    if call.stamp_every:
        call.stamps.append(now)
    return True


@dataclasses.dataclass
class Load:
    seconds: float
    client_cpu: float


def drive(port, calls, timeout=1800) -> Load:
    """Sends each call at its time on a connection of its own and returns when all are answered."""
    for call in calls:
        _prepare(call, port)
    waiting = sorted(calls, key=lambda call: call.at)
    selector, left, next_call = selectors.EpollSelector(), len(calls), 0
    cpu, start = time.process_time(), time.perf_counter()
    while left:
        now = time.perf_counter() - start
        if now > timeout:
            raise SystemExit(f"bench: {left} of {len(calls)} requests were not answered within {timeout} s")
        while next_call < len(waiting) and waiting[next_call].at <= now:
            call = waiting[next_call]
            next_call += 1
            sock = socket.create_connection(("127.0.0.1", port))
            call.sent = time.perf_counter() - start
            sock.sendall(call.wire)
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ, call)
        pause = waiting[next_call].at - now if next_call < len(waiting) else 5.0
        for key, _ in selector.select(max(0.0, min(pause, 5.0))):
            if not _receive(key.data, key.fileobj, time.perf_counter() - start):
                selector.unregister(key.fileobj)
                key.fileobj.close()
                left -= 1
    return Load(time.perf_counter() - start, time.process_time() - cpu)
