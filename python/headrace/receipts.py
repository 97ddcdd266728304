"""What a push tells: a receipt when it succeeded, an error with the same facts when it did not."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import re
from typing import Any

from headrace._library import LIBRARY, Error, text


@dataclasses.dataclass(frozen=True)
class EngineReceipt:
    """What one engine did.

    Attributes:
        url: the engine, as it was named.
        state: "published", "prepared", "rolled_back", "open", "idle", or "unknown" when it did not answer.
        instance: names the engine process.
        weight_version: in force after the push; "" when unchanged.
        base_mode: how base weights were applied ("shadow" or "in_place"); "" when none came.
        ranks: of the engine that applied it.
        tensors: as the engine counted them.
        bytes: as the engine counted them.
        xxh3: digest over all tensors as the engine holds them; "" when it does not say.
        seconds: per stage ("receive", "verify", "build", "publish") in the engine.
        retries: calls that had to be made again.
        error: what it last refused, or why it cannot be reached; "".
        received: the engine's own receipt as it came.
    """

    url: str
    state: str
    instance: str
    weight_version: str
    base_mode: str
    ranks: int
    tensors: int
    bytes: int
    xxh3: str
    seconds: dict[str, float]
    retries: int
    error: str
    received: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Receipt:
    """What a push did.

    Attributes:
        session_id: names the push to every engine; `Publisher.resume` takes it.
        transport: what was used ("safetensors", "sglang", "sglang-load").
        weight_version: what engines say from now on; "" when unchanged.
        skipped: every process said that nothing had changed, and nothing was sent.
        atomic: all engines had prepared before the first one committed.
        rank: of this process in the group.
        ranks: processes that pushed together.
        tensors: of all ranks, replicas counted once.
        bytes: of all ranks, replicas counted once.
        sent_tensors: by this process, to each engine.
        sent_bytes: by this process, to each engine.
        buckets: by this process, to each engine.
        xxh3: digest over names and bytes of all tensors, computed here as they left; it does not depend on buckets.
        seconds: per stage ("pause", "register", "begin", "stream", "prepare", "commit") and "total".
        engines: one for each engine; in groups filled on rank 0.
        json: all of it as the library writes it.
    """

    session_id: str
    transport: str
    weight_version: str
    skipped: bool
    atomic: bool
    rank: int
    ranks: int
    tensors: int
    bytes: int
    sent_tensors: int
    sent_bytes: int
    buckets: int
    xxh3: str
    seconds: dict[str, float]
    engines: tuple[EngineReceipt, ...]
    json: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        if self.skipped:
            return f"push {self.session_id}: nothing had changed, nothing was sent"
        version = f", version {self.weight_version}" if self.weight_version else ""
        return (f"push {self.session_id}: {self.tensors} tensors, {self.bytes / 1e6:.1f} MB{version}, "
                f"{len(self.engines)} engines, {self.seconds['total'] * 1e3:.0f} ms, XXH3-128 {self.xxh3}")


class HeadraceError(RuntimeError):
    """A push that failed, in the words of whoever failed first.

    Attributes:
        status: name of the cause, for instance "ERR_PEER", "ERR_DIGEST", "ERR_ADAPTER_INCOMPATIBLE".
        engine: URL of the engine that it came from; None when it was none.
        stage: of that engine: "connect", "register", "begin", "bucket", "prepare", "commit", ...; None when none was.
        report: what each engine said last, as far as it is known.
    """

    def __init__(self, message: str, status: str, engine: str | None = None, stage: str | None = None,
                 report: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.engine = engine
        self.stage = stage
        self.report = report or {}


def _seconds(struct: Any, names: list[str]) -> dict[str, float]:
    return {name: getattr(struct, name + "_ns") * 1e-9 for name in names}


def _engine(struct: Any) -> EngineReceipt:
    return EngineReceipt(
        url=text(struct.url), state=text(struct.state), instance=text(struct.instance),
        weight_version=text(struct.weight_version), base_mode=text(struct.base_mode), ranks=struct.ranks,
        tensors=struct.tensors, bytes=struct.bytes, xxh3=bytes(struct.xxh3).hex() if struct.has_xxh3 else "",
        seconds=_seconds(struct, ["receive", "verify", "build", "publish"]), retries=struct.retries,
        error=text(struct.error), received=json.loads(struct.received) if struct.received else {})


def take_receipt(pointer: Any) -> Receipt:
    """Copies a receipt of the library and frees it."""
    try:
        struct = pointer.contents
        return Receipt(
            session_id=text(struct.session_id), transport=text(struct.transport),
            weight_version=text(struct.weight_version), skipped=struct.skipped, atomic=struct.atomic,
            rank=struct.rank, ranks=struct.ranks, tensors=struct.tensors, bytes=struct.bytes,
            sent_tensors=struct.sent_tensors, sent_bytes=struct.sent_bytes, buckets=struct.buckets,
            xxh3=bytes(struct.xxh3).hex(),
            seconds=_seconds(struct, ["pause", "register", "begin", "stream", "prepare", "commit", "total"]),
            engines=tuple(_engine(struct.engines[i]) for i in range(struct.n_engines)),
            json=text(LIBRARY.hr_push_receipt_json(pointer)))
    finally:
        LIBRARY.hr_push_receipt_free(pointer)


# How the library names the first cause: "engine URL, STAGE: why", or "engine URL cannot be asked what it speaks".
_ENGINE = re.compile(r"engine (?P<engine>https?://[^\s,]+)(?:, (?P<stage>[a-z ]+):)?")


def make_error(status: int, error: Error, publisher: ctypes.c_void_p | None = None) -> HeadraceError:
    message = text(error.message)
    cause = _ENGINE.search(message)
    report = {} if publisher is None else json.loads(LIBRARY.hr_publisher_report(publisher))
    return HeadraceError(message, text(LIBRARY.hr_status_name(status)), cause and cause["engine"],
                         cause and (cause["stage"] or "connect"), report)
