"""Requests to stop: signals that only set a flag, which the ranks read together between two steps."""

from __future__ import annotations

import os
import signal
from types import FrameType

CHOICES = ("USR1", "USR2", "HUP")  # of `cluster.signal`
AGAIN = b"\nCtrl-C: saves and stops after this step; a second one ends it at once, unsaved\n"


def catchable(number: int) -> bool:
    """Return whether a signal may be caught: not HUP if it is ignored, as `nohup` promises that it stays so."""
    return number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN


class StopSignals:
    """Handlers of requests to stop. While entered, in the main thread, the signal `name`, TERM (preemption, `scancel`)
    and the first INT (Ctrl-C) are recorded in `received` instead of ending the process. Only the first one counts.
    `last`: this process does nothing more afterwards, so a later request is ignored, and its exit code stays."""

    def __init__(self, name: str = "USR1", last: bool = False):
        self.received = 0  # the number of the first signal
        self.last = last
        self._numbers = (signal.Signals[f"SIG{name}"], signal.SIGTERM, signal.SIGINT)
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._note) for number in self._numbers if catchable(number)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            ignored = self.last and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if ignored else handler)  # type: ignore[arg-type]

    def note(self, number: int) -> None:
        """Record a signal as if this process had received it."""
        self.received = self.received or number

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.note(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # Python's own handler would wait for the end of a collective
            if "RANK" not in os.environ:  # the launcher prints it for its ranks
                os.write(2, AGAIN)
