"""The process around one engine: answers the trainer's calls until it is asked to close, or the trainer is gone.

    python -m aligner.engines.child.serve DESCRIPTOR MODULE:WORKER

Its environment is free of the launcher's variables.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from aligner.errors import AlignerError
from aligner.loading import for_good
from aligner.processes import leave_requests_to_rank


def _orphaned(parent: int) -> bool:
    """Return whether the trainer is gone. A process that it forked may hold its end of the connection open."""
    return os.getppid() != parent


class Abort:
    """A watch on the connection while requests run: an `abort`, or the end of the trainer, cancels all of them."""

    def __init__(self, connection: Connection):
        self.connection, self.asked, self.orphaned = connection, False, False
        self.parent = os.getppid()

    @contextlib.contextmanager
    def watching(self, futures: list) -> Iterator[None]:
        self.asked, self._over = False, threading.Event()
        thread = threading.Thread(target=self._watch, args=(futures,), daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            _let_go(futures)
            raise
        finally:
            self._over.set()
            thread.join()

    def _watch(self, futures: list) -> None:
        while not self._over.is_set():
            try:
                if not self.connection.poll(0.05):
                    if not _orphaned(self.parent):
                        continue
                    raise EOFError
                self.connection.recv()  # nothing but `abort` comes while a call runs
            except Exception as error:  # also an unreadable message: nobody would listen any more
                if not isinstance(error, EOFError | OSError):
                    traceback.print_exc()
                self.orphaned = True
            self.asked = True
            _let_go(futures)
            return


def _let_go(futures: list) -> None:
    """Cancel all requests; print the package's errors."""
    for future in list(futures):
        try:
            future.abort()
        except Exception:
            traceback.print_exc()


def serve(connection: Connection, make_worker: Callable[..., Any]) -> None:
    """Answer calls. `start(*arguments)` makes the worker (a later one replaces it); others are methods, before it of
    its class. Returns after `close`, or when the trainer is gone."""
    worker, abort, closes = None, Abort(connection), False
    while not abort.orphaned:
        try:
            while not connection.poll(2.0):
                if _orphaned(abort.parent):
                    raise EOFError
            name, arguments = connection.recv()
        except (EOFError, OSError):
            break
        if closes := name == "close":
            break
        if name == "abort":  # came after its call had ended
            continue
        try:
            if name == "start":
                if worker is not None:
                    worker.close()
                worker = make_worker(*arguments)
                answer = worker.describe()
            elif name == "generate":
                answer = worker.generate(*arguments, lambda n: connection.send(("progress", n)), abort)
            else:
                answer = getattr(worker or make_worker, name)(*arguments)
        except Exception as error:  # whatever the package raises: the trainer decides
            traceback.print_exc()
            cause = error if isinstance(error, AlignerError) else AlignerError(f"{type(error).__name__}: {error}")
            _answer(connection, "error", cause)
            continue
        _answer(connection, "ok", answer)
    if worker is not None:
        worker.close() if closes else worker.orphaned()


def _answer(connection: Connection, kind: str, value: Any) -> None:
    with contextlib.suppress(OSError):  # the trainer is gone; the next recv ends the loop
        connection.send((kind, value))


if __name__ == "__main__":
    leave_requests_to_rank()
    with for_good():
        worker = pkgutil.resolve_name(sys.argv[2])
    serve(Connection(int(sys.argv[1])), worker)
