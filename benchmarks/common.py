"""Shared code of the benchmarks: description of machine and versions, and a clock."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from aligner.shakedown.rates import seconds

PACKAGES = ("torch", "megatron-core", "transformers")
ROOT = Path(__file__).parents[1]


def about(**fields: Any) -> dict[str, Any]:
    """Return versions and machine, as they stand in every JSON file."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    versions |= {"python": platform.python_version(), "commit": commit()}
    machine = {
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "cache_bytes": cache_bytes(),
        "load": os.getloadavg()[0],
    }
    if torch.cuda.is_available():
        machine["device"] = torch.cuda.get_device_name()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": date, "versions": versions, "machine": machine, "threads": torch.get_num_threads(), **fields}


def write_json(path: Path | None, parts: dict[str, Any], **fields: Any) -> None:
    """Write `parts` with `about`, if a path was asked for."""
    if path is not None:
        path.write_text(json.dumps({"about": about(**fields), **parts}, indent=1) + "\n", encoding="utf-8")


def commit() -> str:
    """Return the commit of the checkout; empty without one."""
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def processor() -> str:
    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.exists() else None
    return match[1] if match else platform.processor() or platform.machine()


def cache_bytes() -> int:
    """Return the size of the processor's last cache; 0 if unknown."""
    units, sizes = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}, [0]
    for size in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = size.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) * units.get(text[-1], 1))
    return max(sizes)


def busy_seconds(action: Callable[[], object], device: torch.device) -> float:
    """Measure like `seconds`, but CPU seconds if one thread computes on a CPU: other programs then do not count."""
    if device.type != "cpu" or torch.get_num_threads() > 1:
        return seconds(action, device)
    start = time.process_time()
    action()
    return time.process_time() - start
