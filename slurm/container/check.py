"""Check that an image has all that a run needs: exit code 1 and a line for each problem. Run at its build (Dockerfile),
and by hand in an image of your own; with --cpu for one without CUDA and its kernels."""

from __future__ import annotations

import importlib
import platform
import re
import sys
from collections.abc import Iterator

TORCH = (2, 11)  # the lower bound of setup.py
NEEDED = (
    "megatron.core",
    "transformers",
    "datasets",
    "hydra",
    "safetensors",
    "threadpoolctl",
    "math_verify",
    "httpx",
    "mpi4py",
)
# the last one is Apex's
KERNELS = ("transformer_engine.pytorch", "flash_attn", "fla.ops.gated_delta_rule", "amp_C")
MACHINES = ("x86_64", "aarch64")


def problems(cpu: bool = False) -> Iterator[str]:
    if platform.machine() not in MACHINES:
        yield f"machine {platform.machine()}: expected one of {', '.join(MACHINES)}"
    if sys.version_info[:2] != (3, 12):
        yield f"python {platform.python_version()}: expected 3.12"
    torch = yield from _imported("torch")
    if torch is not None:
        if tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2]) < TORCH:
            yield f"torch {torch.__version__}: expected {'.'.join(map(str, TORCH))} or later"
        if not hasattr(torch.nn.functional, "grouped_mm"):
            yield f"torch {torch.__version__}: has no torch.nn.functional.grouped_mm, which experts need"
        if not cpu and not torch.version.cuda:
            yield f"torch {torch.__version__}: built without CUDA for {platform.machine()}"
        for name in () if cpu else KERNELS:
            yield from _imported(name)
    for name in NEEDED:
        yield from _imported(name)


def _imported(name: str):
    """Import a module. If it fails, yield a line with the reason and return None: unfit libraries raise all kinds of
    errors."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        yield f"{name} does not import: {type(error).__name__}: {error}"
        return None


if __name__ == "__main__":
    missing = list(problems("--cpu" in sys.argv[1:]))
    print("\n".join(missing) or f"complete on {platform.machine()}, with torch {sys.modules['torch'].__version__}")
    sys.exit(1 if missing else 0)
