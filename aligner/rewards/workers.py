"""Daemon threads that score: a reward function that hangs must not keep the process from ending.

(concurrent.futures' own pool joins its threads at exit.)
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class DaemonPool:
    def __init__(self, workers: int):
        self._jobs: queue.PriorityQueue = queue.PriorityQueue()
        self._number = itertools.count()
        self._threads = [threading.Thread(target=self._work, name=f"reward-{i}", daemon=True) for i in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable, *args: Any, last: bool = False) -> Future:
        """Queue a call, in the order of calls. `last`: after all other calls, so that slow ones delay no others."""
        future: Future = Future()
        self._jobs.put((last, next(self._number), (future, function, args)))
        return future

    def close(self) -> None:
        """Let the threads end after the jobs that are queued; does not wait for them."""
        for _ in self._threads:
            self._jobs.put((True, next(self._number), None))

    def _work(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            future, function, args = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*args))
            except BaseException as cause:  # raised to the caller of `result`
                future.set_exception(cause)
            del job, future, function, args  # an idle thread must not keep the last batch, and its run, alive
