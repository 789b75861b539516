"""Shared code of the benchmarks: description of machine and versions, a clock, and rates of matrix products and
copies."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from aligner.ops.kernels.products import product_into

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


# ---- clocks


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(action: Callable[[], object], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    action()
    wait(device)
    return time.perf_counter() - start


def busy_seconds(action: Callable[[], object], device: torch.device) -> float:
    """Measure like `seconds`, but CPU seconds if one thread computes on a CPU: other programs then do not count."""
    if device.type != "cpu" or torch.get_num_threads() > 1:
        return seconds(action, device)
    start = time.process_time()
    action()
    return time.process_time() - start


def median_seconds(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Measure after one run that warms caches and buffers."""
    action()
    return statistics.median(seconds(action, device) for _ in range(repeats))


# ---- rates: actions to time, with their operations or bytes


class Products:
    """Products x [m, k] W^T for each (m, n, k) of `shapes`, in the fastest way, like linear layers. `operations` of one
    call."""

    def __init__(self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: torch.device):
        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        self.operations = sum(2.0 * m * n * k for m, n, k in shapes)
        self._sets = [(random(m, k), random(n, k).t(), random(m, n)) for m, n, k in shapes]

    def __call__(self) -> None:
        for x, w, out in self._sets:
            product_into(out, x, w)


class Copy:
    """A flat copy that reads and writes `moved` bytes in all."""

    def __init__(self, moved: float, device: torch.device):
        self.moved = 8 * max(1, int(moved) // 8)
        self._source = torch.ones(self.moved // 8, dtype=torch.float32, device=device)
        self._target = torch.zeros_like(self._source)

    def __call__(self) -> None:
        self._target.copy_(self._source)
