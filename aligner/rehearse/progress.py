"""Progress of rehearsed ranks on stderr. Imports no torch.

Their processes write an event a line: {"rank": 0, "phase": "update"} as a rank enters a phase, with "ended": true as it
ends.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import time
from collections.abc import Callable
from typing import Any, TextIO

REFRESH_S = 1.0  # of the line on a terminal
REPEAT_S = 30.0  # of the lines elsewhere: a log has one as a rank ends, and one now and then


class Progress:
    """Progress of `count` ranks. A terminal has one line that is rewritten; any other stream gets lines."""

    def __init__(self, count: int, stream: TextIO, clock: Callable[[], float] = time.monotonic):
        self.count, self.ended = count, 0
        self._stream, self._clock = stream, clock
        self._terminal = stream.isatty()
        self._start = self._shown = clock()
        self._running: dict[int, tuple[str, float]] = {}  # rank: its phase, and since when

    def event(self, event: dict[str, Any]) -> None:
        rank = event["rank"]
        if not event.get("ended"):
            self._running[rank] = (event["phase"], self._clock())
            return
        self._running.pop(rank, None)
        self.ended += 1
        self._write(f"rank {rank} rehearsed ({self.ended} of {self.count})\n")

    def line(self) -> str:
        now = self._clock()
        ranks = [f"rank {rank}: {phase}, {now - since:.0f} s" for rank, (phase, since) in self._running.items()]
        return f"rehearsing, {now - self._start:.0f} s, {self.ended} of {self.count} ranks done; " + (
            "; ".join(ranks) or "importing models and programs"
        )

    def tick(self) -> None:
        if self._terminal:
            self._write(self.line()[: shutil.get_terminal_size().columns - 1])
        elif self._clock() - self._shown >= REPEAT_S:
            self._shown = self._clock()
            self._write(self.line() + "\n")

    def close(self) -> None:
        self._write("")

    def _write(self, text: str) -> None:
        """Write in place of the terminal's line."""
        self._stream.write(f"\r\x1b[K{text}" if self._terminal else text)
        self._stream.flush()


def follow(pipe: int, progress: Progress) -> None:
    """Show the events of a pipe until its writers have ended."""
    rest = b""
    while True:
        if select.select([pipe], [], [], REFRESH_S)[0]:
            data = os.read(pipe, 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                progress.event(json.loads(line))
        progress.tick()
    progress.close()
