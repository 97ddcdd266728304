"""The order of a publisher's calls: each waits for those that were made before it, whatever threads they come from.

A call that blocks waits for its turn, and runs, on the thread of its caller. One in the background has a thread of its
own, and its future resolves after its turn has ended, so that a callback of the future may make calls, and wait for
them.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class _Turn:
    def __init__(self) -> None:
        self.come = threading.Event()
        self.thread = threading.get_ident()


class Turns:
    """A queue of calls, of which the first one runs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: collections.deque[_Turn] = collections.deque()
        self._closed = False

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """The turn of a call on this thread. RuntimeError from inside another call on it, which would wait for
        itself. ValueError after close."""
        turn = _Turn()
        try:
            self._join(turn, blocks=True)
            turn.come.wait()
            yield
        finally:
            self._leave(turn)

    def later(self, call: Callable[[], T], may_cancel: bool) -> concurrent.futures.Future[T]:
        """Makes the call on a thread of its own when its turn comes; may_cancel: unless it is cancelled before.
        ValueError after close."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        if not may_cancel:
            future.set_running_or_notify_cancel()
        turn = _Turn()
        # the thread keeps its arguments until it ends, but what the call holds is free once the future resolves
        thread = threading.Thread(target=self._run, args=(turn, [call], future), name="headrace-push")
        self._join(turn, blocks=False)
        try:
            thread.start()
        except BaseException:
            self._leave(turn)
            raise
        return future

    def close(self) -> None:
        """Takes no call any more, and waits until those that were made have ended."""
        with self._changed:
            self._refuse_inside("close")
            self._closed = True
            self._changed.wait_for(lambda: not self._queue)

    # ---- inside ----

    def _refuse_inside(self, what: str) -> None:
        if any(turn.thread == threading.get_ident() for turn in self._queue):
            raise RuntimeError(f"{what} from inside a call of the same publisher (its progress callback, a source or a "
                               "signal handler) would wait for itself: wait until the call has returned, or push with "
                               "push_async")

    def _join(self, turn: _Turn, blocks: bool) -> None:
        with self._changed:
            if self._closed:
                raise ValueError("the publisher is closed")
            if blocks:
                self._refuse_inside("a call")
            else:
                turn.thread = -1  # not yet on any
            self._queue.append(turn)
            self._queue[0].come.set()

    def _leave(self, turn: _Turn) -> None:
        """Wherever in the queue it stands, or if it never came to it."""
        with self._changed:
            if turn in self._queue:
                self._queue.remove(turn)
            if self._queue:
                self._queue[0].come.set()
            self._changed.notify_all()

    def _run(self, turn: _Turn, holder: list[Callable[[], T]], future: concurrent.futures.Future[T]) -> None:
        turn.come.wait()
        turn.thread = threading.get_ident()
        result, failure = None, None
        try:
            if future.running() or future.set_running_or_notify_cancel():
                result = holder.pop()()
        except BaseException as raised:
            failure = raised
        holder.clear()
        self._leave(turn)
        if failure is not None:
            future.set_exception(failure)
        elif not future.cancelled():
            future.set_result(result)  # type: ignore[arg-type]
        del future, failure  # its traceback has this frame
