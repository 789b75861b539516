"""vLLM on ranks that only generate."""

from __future__ import annotations

from aligner.engines.child.in_place import FilledInPlace
from aligner.engines.vllm.engine import VllmEngine


class InPlaceVllmEngine(FilledInPlace, VllmEngine):
    """See `FilledInPlace` and `VllmEngine`."""
