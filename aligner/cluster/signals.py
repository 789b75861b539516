"""Requests to stop: signals that only set a flag, which the ranks look at together between two steps."""

from __future__ import annotations

import signal
from types import FrameType

CHOICES = ("USR1", "USR2", "HUP")  # of `cluster.signal`


class StopSignals:
    """While entered, in the main thread, the signal `name` and TERM (preemption, `scancel`) are noted in `received`
    instead of ending the process. Only the first one counts."""

    def __init__(self, name: str = "USR1"):
        self.received = 0  # the number of the first signal
        self._numbers = (signal.Signals[f"SIG{name}"], signal.SIGTERM)
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._note) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def note(self, number: int) -> None:
        """As if it had come to this process."""
        self.received = self.received or number

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.note(number)
