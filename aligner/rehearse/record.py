"""Results of one rank's rehearsal, with lines of our source."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[1])
HERE = str(Path(__file__).resolve().parent)
MEGATRON = "/megatron/core/"
_own: dict[str, str] = {}  # file -> its name in reports, "" for others' files
BETWEEN = "between"  # two phases
MADE = 16  # lines with most tensors that are kept
GROWN_MARKS = 4  # a line with more after each of so many steps keeps what it makes; rows end in three (`program.py`)


def _name(file: str) -> str:
    if file not in _own:
        ours = file.startswith(ROOT) and not file.startswith(HERE)
        _own[file] = f"aligner{file.removeprefix(ROOT)}" if ours else ""
    return _own[file]


def source_line(depth: int = 1) -> str:
    """Return `file:line` of our innermost frame."""
    frame = sys._getframe(depth)
    while frame is not None:
        name = _name(frame.f_code.co_filename)
        if name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def stack(depth: int = 1, limit: int = 6) -> str:
    """Return our and Megatron's innermost frames, innermost first."""
    frames, frame = [], sys._getframe(depth)
    while frame is not None and len(frames) < limit:
        file = frame.f_code.co_filename
        name = _name(file) or (f"megatron/core/{file.rpartition(MEGATRON)[2]}" if MEGATRON in file else "")
        if name:
            frames.append(f"{name}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(frames)


def line_of(error: BaseException) -> str:
    """Return the line of our source that raised the error, or its cause: our innermost frame."""
    if error.__cause__ is not None and (first := line_of(error.__cause__)) != "?":
        return first
    innermost, trace = "?", error.__traceback__
    while trace is not None:
        name = _name(trace.tb_frame.f_code.co_filename)
        if name:
            innermost = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return innermost


@dataclass
class Phase:
    peak_bytes: int = 0
    held: dict[str, int] = field(default_factory=dict)  # by owner, at its end
    flops: float = 0.0
    product_flops: float = 0.0  # of them, without attention's
    kernels: int = 0  # that are launched
    seconds: float = 0.0  # by the clock of `prices.py`
    device_s: Counter[str] = field(default_factory=Counter)  # kind: seconds of kernels or messages
    launch_s: float = 0.0  # of the host, to launch them
    idle_s: float = 0.0  # in which the device has no work, as the host has launched none
    bubble_s: float = 0.0  # in which a pipeline's other stages work
    decode_steps: int = 0  # of an engine: fewer than a job's
    comm: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)  # (what, place): times
    attention: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kernel, place): times
    entries: int = 0
    micro_batches: int = 0  # that models are given
    made: Counter[tuple[str, str]] = field(default_factory=Counter)  # (place, operation): tensors made on the device
    doubles: Counter[str] = field(default_factory=Counter)  # place: those in float64
    uploads: Counter[str] = field(default_factory=Counter)  # place: copies from memory that is not pinned


COUNTERS = ("waits", "attention", "made", "doubles", "uploads", "device_s")
NUMBERS = ("flops", "product_flops", "kernels", "seconds", "launch_s", "idle_s")


@dataclass(frozen=True)
class Counts:
    """Counters of a phase at some moment."""

    phase: Phase
    sequences: dict[str, int]  # how many calls


class RehearsalRecord:
    """Results of one rank. `sequences`: group -> its calls in order, as (what, stack, the moment of the call, that of
    its wait or None)."""

    def __init__(self) -> None:
        self.phases: dict[str, Phase] = {}
        self.sequences: dict[str, list[list[Any]]] = defaultdict(list)
        self._moment = 0
        self.groups: dict[str, list[int]] = {}  # of `sequences`: its ranks
        self.errors: list[dict[str, str]] = []
        self.whole = True  # else it ended while waiting for a rank that has failed
        self.grows: dict[str, str] = {}  # line -> description of its growth
        self._marks: dict[str, list[Counter[str]]] = defaultdict(list)
        self.listener: Callable[[str], None] | None = None  # called with each phase
        self.enter("build")

    def enter(self, name: str) -> None:
        """Enter the outermost phase `name`."""
        self.name = name
        self.phase = self.phases.setdefault(name, Phase())
        self.phase.entries += 1
        if self.listener is not None and name != BETWEEN:
            self.listener(name)

    def call(self, key: str, what: str, stack: str) -> list[Any]:
        """Note a call of a group, in which nobody waits yet."""
        self.sequences[key].append([what, stack, self.moment(), None])
        return self.sequences[key][-1]

    def moment(self) -> int:
        """Count the moments of this rank's calls and waits, of all groups."""
        self._moment += 1
        return self._moment

    def counts(self) -> Counts:
        return Counts(deepcopy(self.phase), {key: len(calls) for key, calls in self.sequences.items()})

    def repeat(self, since: Counts, times: int) -> None:
        """Count the events since then so many times more. They are one entry of a group's calls, in which ranks that
        repeat differently differ."""
        phase, before = self.phase, since.phase
        for name in NUMBERS:
            now, then = getattr(phase, name), getattr(before, name)
            setattr(phase, name, now + times * (now - then))
        for name in COUNTERS:
            now, then = getattr(phase, name), getattr(before, name)
            now.update({key: times * (number - then[key]) for key, number in now.items()})
        for key, entry in phase.comm.items():
            for i, then in enumerate(before.comm.get(key, (0, 0))):
                entry[i] += times * (entry[i] - then)
        for key, calls in self.sequences.items():
            if new := len(calls) - since.sequences.get(key, 0):
                self.call(key, f"these {new} calls {times} times more", calls[-1][1])

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count only memory."""
        phase = self.phase
        before = deepcopy(phase)
        yield
        for name in (*NUMBERS, "comm", *COUNTERS):
            setattr(phase, name, getattr(before, name))

    def fail(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        self.errors.append({"phase": self.name, "place": line_of(error), "text": text})

    def mark(self, point: str, live: Counter[str]) -> None:
        """Record the bytes on the device by the line that made them, at the same `point` of each step."""
        marks = self._marks[point]
        marks.append(live)
        if len(marks) <= GROWN_MARKS:
            return
        recent = marks[-GROWN_MARKS - 1 :]
        for line, now in live.items():
            sizes = [seen[line] for seen in recent]
            if all(a < b for a, b in pairwise(sizes)):
                self.grows[line] = f"{now - sizes[-2]} bytes more on the device after each {point}"

    def data(self) -> dict[str, Any]:
        """Return plain data, for JSON."""

        def table(counter: Counter) -> list[list[Any]]:
            return [[*(key if isinstance(key, tuple) else (key,)), n] for key, n in counter.most_common()]

        phases = {
            name: {
                "peak_bytes": phase.peak_bytes,
                "held": phase.held,
                "entries": phase.entries,
                "micro_batches": phase.micro_batches,
                "flops": phase.flops,
                "product_flops": phase.product_flops,
                "kernels": phase.kernels,
                "seconds": phase.seconds,
                "device_s": dict(phase.device_s),
                "launch_s": phase.launch_s,
                "idle_s": phase.idle_s,
                "bubble_s": phase.bubble_s,
                "decode_steps": phase.decode_steps,
                "collectives": [[*key, calls, size] for key, (calls, size) in phase.comm.items()],
                "waits": table(phase.waits),
                "attention": table(phase.attention),
                "made": table(phase.made)[:MADE],
                "float64": table(phase.doubles),
                "unpinned_copies": table(phase.uploads),
            }
            for name, phase in self.phases.items()
        }
        calls = {"groups": self.groups, "sequences": self.sequences, "whole": self.whole}
        return {"phases": phases, "errors": self.errors, "grows": self.grows} | calls
