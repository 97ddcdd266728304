"""The publisher: one verified stream from this trainer to every engine."""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace import _library, sources
from headrace._library import LIBRARY
from headrace._turns import Turns
from headrace.receipts import HeadraceError, Receipt, make_error, take_receipt
from headrace.sources import Adapter, Config, Source

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DEFAULT_BUCKET_BYTES = 512 << 20
# Ranks wait in a collective while rank 0 speaks to the engines: in timeouts, as publisher.h asks for it of a group.
GROUP_PATIENCE = 8


class _Stream:
    """The library's source of units over the parts of one push. Lives until the push has returned."""

    def __init__(self, parts: list[sources.Part], most_bytes: int) -> None:
        self.failure: BaseException | None = None
        self._units = self._all(parts, most_bytes)
        self._alive: dict[int, sources.PackedUnit] = {}
        self._names = {part.name: part.name.encode() for part in parts if part.name is not None}
        self._count = 0
        self._next = _library.NEXT(self._on_next)
        self._release = _library.RELEASE(self._on_release)
        self._release_address = ctypes.cast(self._release, ctypes.c_void_p).value
        self.source = _library.UnitSource(None, self._next)

    @staticmethod
    def _all(parts: list[sources.Part], most_bytes: int) -> Iterator[tuple[str | None, sources.PackedUnit]]:
        for part in parts:
            for unit in sources.pack(part, most_bytes):
                yield part.name, unit

    def _on_next(self, _self: Any, out: Any, error: Any) -> int:
        try:
            name, unit = next(self._units, (None, None))
            if unit is None:
                out[0].n = 0
                return _library.OK
            self._count += 1
            self._alive[self._count] = unit
            out[0].tensors = unit.address
            out[0].n = unit.count
            out[0].adapter = None if name is None else self._names[name]
            out[0].owner = self._count
            out[0].release = self._release_address
            return _library.OK
        except BaseException as failure:  # raised again once the library has returned
            self.failure = failure
            return _library.fill_error(error, _library.ERR_INTERNAL, f"{type(failure).__name__}: {failure}")

    def _on_release(self, owner: int) -> None:
        self._alive.pop(owner, None)


class _Watch:
    """The library's progress callback; also where Ctrl-C is noticed while the library works."""

    def __init__(self, progress: Callable[[int, int, str], bool | None] | None) -> None:
        self.failure: BaseException | None = None
        self._progress = progress
        self.function = _library.PROGRESS(self._on_progress)

    def _on_progress(self, _ctx: Any, progress: Any) -> bool:
        try:
            if self._progress is None:
                return True
            now = progress[0]
            return self._progress(now.bytes, now.total_bytes, _library.text(now.stage)) is not False
        except BaseException as failure:  # raised again once the library has returned
            self.failure = failure
            return False


class _Group:
    """The library's collective over torch.distributed: a gloo group of its own with the ranks of the given one, so that
    nothing else of the trainer can come between its messages."""

    def __init__(self, group: ProcessGroup, seconds: float) -> None:
        import datetime

        import torch.distributed as dist

        self._dist = dist
        self._own = dist.new_group(dist.get_process_group_ranks(group), backend="gloo",
                                   timeout=datetime.timedelta(seconds=seconds))
        self.rank, self.size = dist.get_rank(self._own), dist.get_world_size(self._own)
        self._allgather = _library.ALLGATHER(self._on_allgather)
        self.struct = _library.Group(None, self.rank, self.size, self._allgather)

    def _on_allgather(self, _self: Any, mine: int, n: int, each: Any, ctx: int, error: Any) -> int:
        try:
            everyone: list[Any] = [None] * self.size
            self._dist.all_gather_object(everyone, ctypes.string_at(mine, n) if n else b"", group=self._own)
        except Exception as failure:
            return _library.fill_error(error, _library.ERR_PEER,
                                       f"a rank of the group is gone or did not answer in time: {failure}")
        for rank, message in enumerate(everyone):
            each(ctx, rank, message, len(message))
        return _library.OK

    def agree(self, failure: BaseException | None) -> None:
        """Before a push: a rank whose source cannot be pushed takes all the others with it, instead of leaving them to
        wait for it."""
        everyone: list[Any] = [None] * self.size
        self._dist.all_gather_object(everyone, failure and f"{type(failure).__name__}: {failure}", group=self._own)
        if failure is not None:
            raise failure
        for rank, message in enumerate(everyone):
            if message is not None:
                raise HeadraceError(f"rank {rank} cannot push: {message}", "ERR_INVALID")


class Publisher:
    """Publishes adapters and base weights to engines: everywhere or nowhere, verified to the byte.

    Its calls (`push`, `push_async`, `resume`) run one after the other in the order in which they were made, also when
    several threads make them: each waits for those before it.

    Args:
        engines: one URL ("http://host:port") or several.
        api_key: of the engines (where they have an admin key, that one); None: HEADRACE_API_KEY of the environment, if
            it is set; "": none.
        transport: "auto", or "safetensors", "sglang", "sglang-load" as `headrace/publisher.h` describes them.
        bucket_bytes: most bytes of one message; never changes what is published.
        timeout: seconds for one call to all engines, retries included; more than 0.
        pause: what base updates do to running requests: None (wait for them to end), "in_place", "retract" or "abort".
            Adapter pushes never pause anybody.
        audit: SHA-256 of every tensor in the engines' receipts.
        group: a torch.distributed group whose processes publish as one, each with what it holds. All of them construct
            the publisher and call `push`, also those that hold nothing.
        progress: called now and then with (bytes sent, total bytes, stage), on the thread that pushes; returning False
            cancels the push, and so does an exception, which the push then raises.

    Raises:
        ValueError: an option makes no sense.
        HeadraceError: an engine is no URL or named twice, or the transport is unknown. No engine is spoken to yet.
    """

    def __init__(self, engines: str | Sequence[str], *, api_key: str | None = None, transport: str = "auto",
                 bucket_bytes: int = DEFAULT_BUCKET_BYTES, timeout: float = 60.0, pause: str | None = None,
                 audit: bool = False, group: ProcessGroup | None = None,
                 progress: Callable[[int, int, str], bool | None] | None = None) -> None:
        if not 0 < timeout < float("inf"):
            raise ValueError(f"timeout is {timeout!r}: seconds above 0 are wanted; a call that may take no time cannot "
                             "succeed, and one that may take for ever hangs the trainer on a dead engine")
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes!r}: at least 1 is wanted")
        if pause not in _library.PAUSES:
            raise ValueError(f"pause is {pause!r}: None, 'in_place', 'retract' or 'abort' is wanted")
        urls = [engines] if isinstance(engines, str) else list(engines)
        self._unit_bytes = max(1, min(bucket_bytes // 8, sources.MOST_UNIT_BYTES))
        self._group = None if group is None else _Group(group, GROUP_PATIENCE * timeout)
        self._watch = _Watch(progress)
        self._turns = Turns()
        api_key = os.environ.get("HEADRACE_API_KEY") if api_key is None else api_key

        options = _library.PublisherOptions()
        options.engines = (ctypes.c_char_p * len(urls))(*[url.encode() for url in urls])
        options.n_engines = len(urls)
        options.api_key = api_key.encode() if api_key else None
        options.transport = transport.encode()
        options.bucket_bytes = bucket_bytes
        options.timeout_ms = max(1, int(timeout * 1000))
        options.audit = audit
        options.pause = _library.PAUSES[pause]
        options.group = ctypes.pointer(self._group.struct) if self._group else None
        options.progress = self._watch.function
        handle, error = ctypes.c_void_p(), _library.Error()
        status = LIBRARY.hr_publisher_create(ctypes.byref(options), ctypes.byref(handle), ctypes.byref(error))
        if status != _library.OK:
            raise make_error(status, error)
        self._handle = handle
        # the callbacks must outlive the handle
        self._finalizer = weakref.finalize(self, _destroy, handle, self._watch, self._group)

    # ---- pushing ----

    def push(self, source: Adapter | Source | None = None, *, adapter: str | None = None, config: Config | None = None,
             pinned: bool = False, adapters: Mapping[str, Adapter | Source] | None = None, base: Source | None = None,
             complete_base: bool = False, version: str | int | None = None, unchanged: bool = False,
             session_id: str | None = None) -> Receipt:
        """Publishes, and returns when every engine serves the new weights. The tensors may be changed or freed then.
        Waits for the calls of this publisher that were made before.

        Args:
            source: one adapter: a PEFT model, a dict of tensors under PEFT's names, a directory that PEFT wrote, or an
                `Adapter`, which says more.
            adapter: its name in the engines.
            config: of it; needed with a dict of tensors. See `Adapter`.
            pinned: engines do not evict it.
            adapters: several adapters at once, by name.
            base: base weights: a model (with or without a LoRA around it), a dict of tensors under the names of the
                checkpoint, or a model directory.
            complete_base: every base weight comes; engines refuse when one is missing.
            version: what engines report as weight_version from then on.
            unchanged: nothing has changed here since the last push. When all processes of the group say so, nothing is
                sent and the receipt says skipped.
            session_id: names this push; one is made otherwise.

        Raises:
            HeadraceError: some engine or process failed; every engine serves what it served before, except as the
                message says.
            TypeError, ValueError: the source cannot be pushed (a merged model, DoRA, a sparse tensor, ...), or the
                publisher is closed.
            RuntimeError: called from inside another call of this publisher (its progress callback, for instance).
        """
        with self._turns.wait():
            parts, failure = self._parts(source, adapter, config, pinned, adapters, base)
            return self._run(parts, failure, base is not None, complete_base, version, unchanged, session_id)

    def push_async(self, source: Adapter | Source | None = None, *, adapter: str | None = None,
                   config: Config | None = None, pinned: bool = False,
                   adapters: Mapping[str, Adapter | Source] | None = None, base: Source | None = None,
                   complete_base: bool = False, version: str | int | None = None, unchanged: bool = False,
                   session_id: str | None = None) -> concurrent.futures.Future[Receipt]:
        """`push` on a thread of its own, when the calls before it have ended. The tensors are held, and must not be
        changed, until the future resolves. What the sources are is looked up at once, so that a source that cannot be
        pushed raises here. The future can be cancelled until its turn comes, except in a group, where the other
        processes would wait for it. Its callbacks may call the publisher."""
        parts, failure = self._parts(source, adapter, config, pinned, adapters, base)
        return self._turns.later(functools.partial(self._run, parts, failure, base is not None, complete_base, version,
                                                   unchanged, session_id), may_cancel=self._group is None)

    def resume(self, session_id: str, version: str | int | None = None) -> Receipt:
        """Finishes a push whose commit was interrupted (`Receipt.session_id`, or "session_id" in the report of the
        error): engines that had prepared commit, those that had committed say so again. In groups rank 0 calls it.
        The receipt does not know what the push has sent: its `tensors`, `bytes` and `xxh3` are None."""
        receipt, error = ctypes.POINTER(_library.PushReceipt)(), _library.Error()
        with self._turns.wait():
            status = LIBRARY.hr_publisher_resume(self._handle, session_id.encode(), _version(version),
                                                 ctypes.byref(receipt), ctypes.byref(error))
            if status != _library.OK:
                raise make_error(status, error, LIBRARY.hr_publisher_report(self._handle))
            return take_receipt(receipt)

    @property
    def ranks(self) -> int:
        """Processes that publish as one."""
        return 1 if self._group is None else self._group.size

    def close(self) -> None:
        """Waits for the calls that were made before, also those of `push_async` that have not begun (cancel their
        futures first where they shall not), and frees everything; later calls are refused. Nothing of an engine
        changes."""
        self._turns.close()
        self._finalizer()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- inside ----

    def _parts(self, source: Adapter | Source | None, adapter: str | None, config: Config | None, pinned: bool,
               adapters: Mapping[str, Adapter | Source] | None,
               base: Source | None) -> tuple[list[sources.Part], Exception | None]:
        """What is pushed. In a group a failure is kept, so that the other ranks are told of it."""
        try:
            return self._make_parts(source, adapter, config, pinned, adapters, base), None
        except Exception as failure:
            if self._group is None:
                raise
            return [], failure

    @staticmethod
    def _make_parts(source: Adapter | Source | None, adapter: str | None, config: Config | None, pinned: bool,
                    adapters: Mapping[str, Adapter | Source] | None, base: Source | None) -> list[sources.Part]:
        named: dict[str, Adapter | Source] = dict(adapters or {})
        if (source is None) != (adapter is None):
            raise TypeError("an adapter is pushed with its name: push(source, adapter='name'); base weights with base=")
        if source is not None and adapter is not None:
            if adapter in named:
                raise TypeError(f"the adapter {adapter!r} is given twice")
            named[adapter] = source if isinstance(source, Adapter) else Adapter(source, config, pinned)
        parts = [] if base is None else [sources.base_part(base)]
        parts += [sources.adapter_part(name, item) for name, item in named.items()]
        if not parts:
            raise TypeError("nothing to push: neither an adapter nor base weights were given")
        return parts

    def _run(self, parts: list[sources.Part], failure: Exception | None, sync_base: bool, complete_base: bool,
             version: str | int | None, unchanged: bool, session_id: str | None) -> Receipt:
        """The push itself, in its turn: nobody else touches the handle, nor the report of this call."""
        if self._group is not None:
            self._group.agree(failure)
        stream = _Stream(parts, self._unit_bytes)
        adapters = [_library.PushAdapter(part.name.encode(), part.config, len(part.config), part.pinned)
                    for part in parts if part.name is not None]
        push = _library.Push()
        push.adapters = (_library.PushAdapter * len(adapters))(*adapters)
        push.n_adapters = len(adapters)
        push.sync_base, push.complete_base, push.unchanged = sync_base, complete_base, unchanged
        push.weight_version = _version(version)
        push.session_id = None if session_id is None else session_id.encode()
        push.total_bytes = sum(part.nbytes for part in parts)
        push.source = stream.source
        receipt, error = ctypes.POINTER(_library.PushReceipt)(), _library.Error()
        self._watch.failure = None
        status = LIBRARY.hr_publisher_push(self._handle, ctypes.byref(push), ctypes.byref(receipt),
                                           ctypes.byref(error))
        if status == _library.OK:
            return take_receipt(receipt)
        refusal = make_error(status, error, LIBRARY.hr_publisher_report(self._handle))
        cause = stream.failure or self._watch.failure
        if cause is not None:
            raise cause from refusal
        raise refusal


def _destroy(handle: ctypes.c_void_p, *_held: object) -> None:
    LIBRARY.hr_publisher_destroy(handle)


def _version(version: str | int | None) -> bytes | None:
    return None if version is None else str(version).encode()


__all__ = ["Publisher"]
