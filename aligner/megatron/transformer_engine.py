"""Whether this process has TransformerEngine. Megatron imports it wherever it is installed, and fails with one that
does not load. So it is imported before Megatron, and hidden if that fails."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from aligner import loading

NAME, EXTENSION = "transformer_engine", "transformer_engine_torch"


@dataclass
class Availability:
    lacks: str = ""  # why it is not used; empty: it is
    broken: bool = False  # installed, on a GPU, and of no use


TE = Availability("Megatron is not imported yet")


def load(megatron: Callable[[], None]) -> None:
    """Call `megatron`, which imports it, with TransformerEngine; without it if that fails."""
    settle(loading.kernels)
    try:
        megatron()
    except Exception as error:
        if TE.lacks:
            raise
        _hide(Availability(f"Megatron-Core does not load with it: {_words(error)}", broken=True), "megatron")
        megatron()


def settle(kernels: str) -> None:
    """Import it, or hide it, by `model.kernels`."""
    if kernels == "own":
        _hide(Availability("model.kernels=own"))
    elif importlib.util.find_spec(NAME) is None:
        _hide(Availability("it is not installed"))
    elif not torch.cuda.is_available():
        _hide(Availability("there is no GPU"))
    else:
        try:
            importlib.import_module(f"{NAME}.pytorch")  # which its own __init__ leaves out if it fails
        except Exception as error:
            _hide(Availability(f"it does not import: {_words(error)}", broken=True))
        else:
            _note(Availability())


def _note(availability: Availability) -> None:
    TE.lacks, TE.broken = availability.lacks, availability.broken


def _hide(availability: Availability, *also: str) -> None:
    """Hide it from Megatron, transformers and all others, and remove what a failed import has left."""
    _note(availability)
    for name in [name for name in sys.modules if name.split(".")[0] in (NAME, EXTENSION, *also)]:
        del sys.modules[name]
    sys.modules[NAME] = None  # type: ignore[assignment]  # an import then fails, and find_spec says None


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
