"""Memory use of this process: in total, and between two moments."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the quick start's own process has no torch
    import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_highest = 0  # VmHWM before it was reset


def peak_rss_bytes() -> int:
    """Return the largest resident memory of this program.

    It comes from VmHWM where there is /proc: `getrusage` gives a program the peak of the process that started it, if
    larger (Linux keeps it over exec).
    """
    if _STATUS.is_file():
        return max(_highest, _status_bytes("VmHWM:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status_bytes(name: str) -> int:
    lines = (line.split() for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(next(lines)[1]) * 1024


class PeakMeter:
    """Meter of the largest memory in use between `start` and `stop`: of the GPU, by torch's allocations. Without a
    GPU it is the resident memory of the process (Linux; if its mark cannot be reset, and elsewhere, the value at
    `stop`)."""

    def __init__(self, device: torch.device):
        self.device = device

    def start(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self.device)
        elif _STATUS.is_file():
            global _highest
            _highest = max(_highest, _status_bytes("VmHWM:"))
            try:
                _CLEAR.write_text("5")  # proc(5): the peak becomes what is resident now
                self._peak = "VmHWM:"
            except OSError:  # a sandbox
                self._peak = "VmRSS:"

    def stop(self) -> int:
        if self.device.type == "cuda":
            import torch

            return torch.cuda.max_memory_allocated(self.device)
        return _status_bytes(self._peak) if _STATUS.is_file() else peak_rss_bytes()
