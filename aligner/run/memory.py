"""How much memory this process has used."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_rss_bytes() -> int:
    """The most resident memory this program has had.

    From VmHWM where there is /proc: `getrusage` gives a program the peak of the process that started it, if larger
    (Linux keeps it over exec).
    """
    status = Path("/proc/self/status")
    if status.is_file():
        lines = (line.split() for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(next(lines)[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
