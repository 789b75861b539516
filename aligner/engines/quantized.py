"""Rollouts from quantised weights: every matrix of the layers goes through int8 or FP8 on its way into an engine.

One scale per output row, from that row's largest value at this refit: nothing is calibrated or kept. The engine
computes with the values that int8 or FP8 can hold, in its own dtype (activations are not quantised). So it shows the
effect of quantisation on a run, on any device, and saves neither memory nor time.

By nvidia-modelopt's `TensorQuantizer` where it is installed; the functions here give the same bits on a CPU
(tests/engines/test_quantized.py compares them where modelopt is).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from aligner.engines.base import EngineWrapper, RolloutEngine
from aligner.ops.kernels.checksum import tensor_checksum

Quantize = Callable[[Tensor], Tensor]  # [rows, columns] -> the nearest values that can be held, in the same dtype
# Hugging Face's names of the projections of attention, MLP and experts; neither embeddings, head, router nor norms
_OF_ENTRIES = r"\.attn\.(?:compressor\.)?w(?:kv|gate|[qo]_[ab])"  # DeepSeek-V4's attention
MATRIX = re.compile(rf"\.layers\.\d+(?:\..*(?:_proj(?:_with_mqa)?|\.w[123])|{_OF_ENTRIES})\.weight$")
LARGEST = {"int8": 127.0, "fp8": 448.0}  # E4M3
_NOTHING = 2.0**-24  # a row below this is 0


def has_modelopt() -> bool:
    return importlib.util.find_spec("modelopt") is not None


def quantize_rows(weight: Tensor, kind: str) -> Tensor:
    """Return round(x * L / amax) * amax / L for each row, in float32, with L of `LARGEST`; on E4M3's grid for fp8."""
    x = weight.float()
    amax = x.abs().amax(1, keepdim=True)
    empty = amax <= _NOTHING
    amax = torch.where(empty, 1.0, amax)
    if kind == "int8":
        scale = torch.full_like(amax, LARGEST[kind]) / amax
        held = (x * scale).round_().clamp_(-127, 127) / scale
    else:
        scale = LARGEST[kind] / amax  # not the same bits: torch multiplies a number with the inverse
        held = (x * scale).clamp_(-448, 448).to(torch.float8_e4m3fn).float() * (1 / scale)
    return torch.where(empty, 0.0, held).to(weight.dtype)


def make_quantizer(kind: str, modelopt: bool) -> tuple[Quantize, str]:
    """Return the function that quantises, and the package it comes from."""
    if not modelopt:
        return lambda weight: quantize_rows(weight, kind), "aligner (nvidia-modelopt is not installed)"
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

    bits = 8 if kind == "int8" else (4, 3)
    # without a calibrated amax it takes the input's, row by row
    inner = TensorQuantizer(QuantizerAttributeConfig(num_bits=bits, axis=0))
    return inner, f"nvidia-modelopt {importlib.metadata.version('nvidia-modelopt')}"


def quantized_engine(engine: RolloutEngine, kind: str, hashes: bool) -> tuple[QuantizedEngine, str]:
    """Return an engine with quantised weights around `engine`, and the package that quantises."""
    quantize, by = make_quantizer(kind, has_modelopt())
    return QuantizedEngine(engine, quantize, hashes=hashes), by


class QuantizedEngine(EngineWrapper):
    """`RolloutEngine` around another one. With `hashes` (`refit.verify=checksum`) a tensor has the checksum of the
    original if the engine holds exactly its quantised form, else the checksum of the engine's tensor."""

    def __init__(self, engine: RolloutEngine, quantize: Quantize, hashes: bool = False):
        super().__init__(engine)
        self.hashes, self._quantize = hashes, quantize
        self._originals: dict[str, tuple[int, int]] = {}  # name -> checksums of the original, and as quantised

    def begin_update(self, version: int) -> None:
        self._originals.clear()
        self.engine.begin_update(version)

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.engine.update_weights(self._quantized(tensors))

    @torch.no_grad()
    def _quantized(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if not MATRIX.search(name) or tensor.dim() != 2:
                yield name, tensor
                continue
            held = self._quantize(tensor.detach())
            if self.hashes:
                self._originals[name] = tensor_checksum(tensor.to(self.dtype)), tensor_checksum(held.to(self.dtype))
            yield name, held

    def checksums(self) -> dict[str, int]:
        checksums = dict(self.engine.checksums())
        for name, (original, held) in self._originals.items():
            if checksums.get(name) == held:
                checksums[name] = original
        return checksums
