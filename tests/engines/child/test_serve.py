"""The process around an engine: whatever comes, requests under way are let go."""

import multiprocessing
import threading
from unittest import mock

import pytest

from aligner.engines.child.serve import Abort, serve


class Request:
    def __init__(self, fails):
        self.fails, self.gone = fails, threading.Event()

    def abort(self):
        self.gone.set()
        if self.fails:
            raise ValueError("no such request")


@pytest.mark.parametrize("what", ["an abort", "the end", "what cannot be read", "an error of the trainer's"])
def test_all_are_let_go(what, capfd):
    """Also behind one whose abort fails."""
    ours, theirs = multiprocessing.Pipe()
    requests, abort = [Request(i == 0) for i in range(3)], Abort(ours)

    def say():
        if what == "an abort":
            theirs.send("abort")
        elif what == "the end":
            theirs.close()
        elif what == "what cannot be read":
            theirs.send_bytes(b"\xff no pickle")

    try:
        with abort.watching(requests):
            if what == "an error of the trainer's":
                raise KeyError("x")
            say()
            assert all(request.gone.wait(120) for request in requests)
    except KeyError:
        pass
    assert all(request.gone.is_set() for request in requests)
    assert abort.orphaned == (what in ("the end", "what cannot be read"))
    assert "no such request" in capfd.readouterr().err


@pytest.mark.parametrize("end", ["close", "orphaned"])
def test_a_worker_knows_whether_its_trainer_has_ended(end):
    ours, theirs = multiprocessing.Pipe()
    worker = mock.Mock()
    worker.describe.return_value = {}
    theirs.send(("start", ()))
    if end == "close":
        theirs.send(("close", ()))
    else:
        threading.Timer(0.2, theirs.close).start()
    serve(ours, lambda: worker)
    assert [call[0] for call in worker.method_calls] == ["describe", end]
