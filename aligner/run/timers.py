"""Wall-clock seconds of each phase of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Timers:
    """Timers: `with timers("generate"): ...` adds to this step's `time/generate_s`; `take()` returns the step's
    times.

    A phase inside another is named by its path (`time/eval/generate_s`) and is part of the outer one's seconds, so
    the phases without a slash are disjoint and add up. Used from the main thread only.

    `synchronize` waits for the GPU at both ends of a phase. Off by default: kernels are launched asynchronously, and
    waiting for them at each phase stalls the launch of the next. Without it, time on the GPU counts for the phase
    that first needs a result, which is the phase itself if it ends by reading one (tokens, a loss).
    """

    def __init__(self, synchronize: bool = False):
        self.synchronize = synchronize
        self._seconds: dict[str, float] = {}
        self._path: list[str] = []
        self.on_phase: Callable[[str], None] = lambda name: None  # called with the phase that runs now, "" for none
        self.around: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()  # of each phase

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._path.append(phase)
        name = "/".join(self._path)
        self.on_phase(name)
        start = self._now()
        try:
            with self.around(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start
            self._path.pop()
            self.on_phase("/".join(self._path))

    def take(self) -> dict[str, float]:
        """Return the seconds since the last take, by phase: {"time/generate_s": 1.5}. Running phases count in the
        next."""
        taken = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken

    def _now(self) -> float:
        if self.synchronize:
            import torch

            if torch.cuda.is_available():
                torch.cuda.synchronize()
        return time.perf_counter()
