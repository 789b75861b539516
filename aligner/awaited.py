"""Threads that others wait for: when one ends, its waiters get an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any


class AwaitedThread(threading.Thread):
    """A daemon that runs `work` and owes others the results of futures. Once it has ended in any way, futures that
    are not done raise RuntimeError."""

    def __init__(self, name: str, work: Callable[[], object]):
        super().__init__(name=name, daemon=True)
        self._work = work
        self._owed: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._over: RuntimeError | None = None

    def owe[T](self, future: Future[T]) -> Future[T]:
        with self._lock:
            over = self._over
            if over is None:
                self._owed.add(future)
        if over is not None:
            _fail(future, over)
        else:
            future.add_done_callback(self._done)
        return future

    def run(self) -> None:
        over = RuntimeError(f"the thread `{self.name}` has ended")
        try:
            self._work()
        except BaseException as cause:  # also SystemExit: its waiters must not be left behind
            over = RuntimeError(f"the thread `{self.name}` has ended by {type(cause).__name__}: {cause}")
            over.__cause__ = cause
        with self._lock:
            self._over, owed = over, list(self._owed)
        for future in owed:
            _fail(future, over)

    def _done(self, future: Future[Any]) -> None:
        with self._lock:
            self._owed.discard(future)


def _fail(future: Future[Any], error: BaseException) -> None:
    with suppress(InvalidStateError):
        future.set_exception(error)
