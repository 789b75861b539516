"""Threads that others wait for, and how they end."""

import threading
from concurrent.futures import Future

import pytest

from aligner.awaited import AwaitedThread


class Odd(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), MemoryError(), Odd("x"), None])
def test_whoever_waits_hears_of_any_end(error):
    begun, go = threading.Event(), threading.Event()
    done, open_ = Future(), Future()

    def work():
        begun.set()
        assert go.wait(120)
        if error is not None:
            raise error

    thread = AwaitedThread("a worker", work)
    thread.owe(done), thread.owe(open_)
    thread.start()
    assert begun.wait(120)
    done.set_result(7)
    go.set()
    with pytest.raises(RuntimeError, match=f"`a worker` has ended{f' by {type(error).__name__}' if error else ''}"):
        open_.result(120)
    assert done.result() == 7
    with pytest.raises(RuntimeError, match="has ended"):  # nobody is owed anything any more
        thread.owe(Future()).result(120)
