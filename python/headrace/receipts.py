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
        serves: "new" weights, the "old" ones that it served before, or "unknown".
        instance: names the engine process; another one than in the last receipt has restarted, without adapters.
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
    serves: str
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
    """What a push, or a resume, did.

    Attributes:
        published: where the new weights are served: "all" engines, or "none" when nothing was sent; None on ranks other
            than 0, which do not speak of engines.
        session_id: names the push to every engine; `Publisher.resume` takes it.
        transport: what was used ("safetensors", "sglang", "sglang-load").
        weight_version: what engines say from now on; "" when unchanged.
        skipped: every process said that nothing had changed, and nothing was sent.
        atomic: all engines had prepared before the first one committed.
        rank: of this process in the group.
        ranks: processes that pushed together.
        tensors: of all ranks, replicas counted once; None when nothing was sent, and after a resume.
        bytes: of all ranks, replicas counted once; None as above.
        sent_tensors: by this process, to each engine.
        sent_bytes: by this process, to each engine.
        buckets: by this process, to each engine.
        xxh3: digest over names and bytes of all tensors, computed here as they left; it does not depend on buckets.
            None as above.
        seconds: per stage ("pause", "register", "begin", "stream", "prepare", "commit") and "total".
        engines: one for each engine; in groups filled on rank 0.
        json: all of it as the library writes it.
    """

    published: str | None
    session_id: str
    transport: str
    weight_version: str
    skipped: bool
    atomic: bool
    rank: int
    ranks: int
    tensors: int | None
    bytes: int | None
    sent_tensors: int
    sent_bytes: int
    buckets: int
    xxh3: str | None
    seconds: dict[str, float]
    engines: tuple[EngineReceipt, ...]
    json: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        if self.skipped:
            return f"push {self.session_id}: nothing had changed, nothing was sent"
        said = [f"push {self.session_id}"]
        if self.ranks > 1:
            said[0] += f", rank {self.rank} of {self.ranks}"
        if self.tensors is None or self.bytes is None:
            said[0] += ": resumed"
        else:
            said[0] += f": {_counted(self.tensors, 'tensor')}"
            said.append(_size(self.bytes))
        if self.weight_version:
            said.append(f"version {self.weight_version}")
        if self.engines:
            said.append(_counted(len(self.engines), "engine"))
        said.append(f"{self.seconds['total'] * 1e3:.3g} ms")
        if self.xxh3 is not None:
            said.append(f"XXH3-128 {self.xxh3}")
        return ", ".join(said)


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _size(nbytes: int) -> str:
    """With three digits or so, in the unit that suits it."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return _counted(nbytes, "byte")


class HeadraceError(RuntimeError):
    """A push that failed, in the words of whoever failed first.

    Attributes:
        status: name of the cause, for instance "ERR_PEER", "ERR_DIGEST", "ERR_ADAPTER_INCOMPATIBLE".
        engine: URL of the engine that it came from; None when it was none.
        stage: of that engine: "connect" (it cannot be asked what it speaks), "register", "begin", "stream", "prepare",
            "commit", ...; None when none was.
        report: what each engine said last, as far as it is known, and where the new weights are served: "published" is
            "all", "some", "none" or "unknown" (None on ranks other than 0). Empty for what failed before a push began.
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


def _engine(struct: Any, told: dict[str, Any]) -> EngineReceipt:
    return EngineReceipt(
        url=text(struct.url), state=text(struct.state), serves=told["serves"], instance=text(struct.instance),
        weight_version=text(struct.weight_version), base_mode=text(struct.base_mode), ranks=struct.ranks,
        tensors=struct.tensors, bytes=struct.bytes, xxh3=bytes(struct.xxh3).hex() if struct.has_xxh3 else "",
        seconds=_seconds(struct, ["receive", "verify", "build", "publish"]), retries=struct.retries,
        error=text(struct.error), received=told["receipt"] or {})


def take_receipt(pointer: Any) -> Receipt:
    """Copies a receipt of the library and frees it."""
    try:
        struct, written = pointer.contents, text(LIBRARY.hr_push_receipt_json(pointer))
        told = json.loads(written)
        counted = struct.tensors > 0  # no push succeeds without tensors, but a resume, and one that was skipped
        return Receipt(
            published=told["published"], session_id=text(struct.session_id), transport=text(struct.transport),
            weight_version=text(struct.weight_version), skipped=struct.skipped, atomic=struct.atomic,
            rank=struct.rank, ranks=struct.ranks, tensors=struct.tensors if counted else None,
            bytes=struct.bytes if counted else None, sent_tensors=struct.sent_tensors, sent_bytes=struct.sent_bytes,
            buckets=struct.buckets, xxh3=bytes(struct.xxh3).hex() if counted else None,
            seconds=_seconds(struct, ["pause", "register", "begin", "stream", "prepare", "commit", "total"]),
            engines=tuple(_engine(struct.engines[i], told["engines"][i]) for i in range(struct.n_engines)),
            json=written)
    finally:
        LIBRARY.hr_push_receipt_free(pointer)


# How the library names an engine as the first cause: "engine URL, STAGE: why", or what it says of connecting and of
# what came after a commit.
_ENGINE = re.compile(r"engine (?P<engine>https?://[^\s,]+)(?:, (?P<stage>[a-z ]+):|"
                     r" (?P<connect>is not reachable|cannot be asked)|(?P<commit> has (?:answered|committed)))")


def make_error(status: int, error: Error, report: bytes | None = None) -> HeadraceError:
    """The error of a call that failed; the report is of this same call."""
    message, name = text(error.message), text(LIBRARY.hr_status_name(status))
    engine = stage = None
    if (cause := _ENGINE.search(message)) is not None:
        engine, stage = cause["engine"], cause["stage"] or ("connect" if cause["connect"] else "commit")
    if name == "ERR_DTYPE":
        message += "; convert it before the push, with .float() or .to(torch.bfloat16) (dequantise a quantised one)"
    return HeadraceError(message, name, engine, stage, json.loads(text(report or b"{}")))
