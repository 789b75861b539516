"""Clocks, and rates of matrix products and copies. As a program: print the rates of each card as JSON."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch

from aligner.ops.kernels.products import product_into
from aligner.plan.devices import sheet_of

PACKAGES = ("torch", "megatron-core", "transformers", "aligner")
# shares of the data sheet below which a card is not fit
LEAST = {"bfloat16 products, operations/s": 0.55, "copies, bytes/s": 0.60}
REPEATS = 10


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(action: Callable[[], object], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    action()
    wait(device)
    return time.perf_counter() - start


def median_seconds(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Measure after one run that warms caches and buffers."""
    action()
    return statistics.median(seconds(action, device) for _ in range(repeats))


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


def measured_rates(device: torch.device, small: bool) -> tuple[float, float]:
    """Return operations per second of bfloat16 products, and bytes per second of copies, read and written."""
    n, size = (256, 1 << 20) if small else (8192, 4 << 30)
    products, copy = Products([(n, n, n)], torch.bfloat16, device), Copy(2 * size, device)
    matrix_rate = products.operations / median_seconds(products, device, REPEATS)
    return matrix_rate, copy.moved / median_seconds(copy, device, REPEATS)


def card(device: torch.device) -> dict[str, Any]:
    """Return name and memory, and for each rate: measured, the data sheet's (0 if unknown), the least share of it."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.machine()
    sheet = sheet_of(name)
    products, copies = measured_rates(device, small=not cuda)
    host = torch.empty(1 << 30 if cuda else 1 << 20, dtype=torch.uint8, pin_memory=cuda)
    target = host.to(device)
    upload = host.numel() / median_seconds(lambda: target.copy_(host, non_blocking=True), device, REPEATS)
    measured = {
        "bfloat16 products, operations/s": products,
        "copies, bytes/s": copies,
        "from the host, bytes/s": upload,
    }
    known = {"bfloat16 products, operations/s": sheet.flops, "copies, bytes/s": sheet.bandwidth} if sheet else {}
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else 0
    rates = {key: (value, known.get(key, 0.0), LEAST.get(key, 0.0)) for key, value in measured.items()}
    return {"name": name, "memory_bytes": memory, "rates": rates}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m aligner.shakedown.rates", description="Print the rates of each card as JSON."
    )
    parser.add_argument("--cpu", action="store_true", help="of the CPU, with small tensors")
    args = parser.parse_args(argv)
    kinds = ["cpu"] if args.cpu else [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda} | {n: version(n) for n in PACKAGES}
    print(json.dumps({"versions": versions, "cards": [card(torch.device(kind)) for kind in kinds]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
