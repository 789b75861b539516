"""TensorRT-LLM on ranks that only generate."""

from __future__ import annotations

from aligner.engines.child.in_place import FilledInPlace
from aligner.engines.trtllm.torch_backend import TrtllmEngine


class InPlaceTrtllmEngine(FilledInPlace, TrtllmEngine):
    """See `FilledInPlace` and `TrtllmEngine`."""
