"""Standard output that ends before the command does, as in `aligner keys | head`. Standard library only."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

CLOSED = 128 + signal.SIGPIPE  # exit code, as of a program that SIGPIPE ends


@contextmanager
def quiet_pipe() -> Iterator[None]:
    """Exit with CLOSED, and without a message, when the block or its end writes into a pipe that nobody reads. Other
    errors, and other exit codes of the block, stay."""
    try:
        yield
        print(end="", flush=True)
    except BrokenPipeError:
        if not output_closed():
            raise
        _drop_output()
        sys.exit(CLOSED)
    except BaseException as error:
        try:
            print(end="", flush=True)
        except BrokenPipeError:
            _drop_output()
            if isinstance(error, SystemExit) and not error.code:
                sys.exit(CLOSED)
        raise


def _drop_output() -> None:
    """Let what is still in the buffer go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def output_closed() -> bool:
    """Return whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
