"""Memory of this node that the job may use."""

from __future__ import annotations

import os
from pathlib import Path

GROUPS, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def node_bytes() -> int:
    """Return the machine's memory, or the least limit of this process's control groups: a job's (Slurm's --mem), or a
    container's."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in GROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (ROOT / "memory", "memory.limit_in_bytes") if controllers else (ROOT, "memory.max")
        own = top / path.lstrip("/")  # in a container it may be the host's path, and only `top` is there
        for group in (own, *own.parents):
            file = group / name
            text = file.read_text().strip() if group.is_relative_to(top) and file.is_file() else ""
            limits += [int(text)] if text.isdecimal() else []
    return min(limits)
