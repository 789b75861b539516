"""Check that an image has all that a run needs: exit code 1 and a line for each problem. Run at its build (Dockerfile),
and by hand in an image of your own."""

from __future__ import annotations

import importlib
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
TE = "transformer_engine.pytorch"


def problems() -> Iterator[str]:
    torch = yield from _imported("torch")
    if torch is not None:
        if tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2]) < TORCH:
            yield f"torch {torch.__version__}: expected {'.'.join(map(str, TORCH))} or later"
        if not hasattr(torch.nn.functional, "grouped_mm"):
            yield f"torch {torch.__version__}: has no torch.nn.functional.grouped_mm, which experts need"
        yield from _imported(TE)
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
    missing = list(problems())
    print("\n".join(missing) or f"complete, with torch {sys.modules['torch'].__version__}")
    sys.exit(1 if missing else 0)
