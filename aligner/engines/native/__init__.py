"""The project's own engine: plain PyTorch, CPU and CUDA."""

from aligner.engines.native.engine import NativeEngine

__all__ = ["NativeEngine"]
