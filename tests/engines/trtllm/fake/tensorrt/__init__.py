"""What of TensorRT a refit needs: weights by name, read from memory when the refit is carried out and not before.

Settings: FAKE_TRTLLM_EXTRA and FAKE_TRTLLM_LACKS, a name it lists beside its own, or does not; FAKE_TRTLLM_COMBINED,
`a+b`: a cannot be given without b; FAKE_TRTLLM_REFUSED, a name it takes no weights for; FAKE_TRTLLM_REFIT_FAILS, the
number of the refit that fails; FAKE_TRTLLM_STALE, refits after the first change nothing. In builder, models and
runtime: FAKE_TRTLLM_FUSED, gate and fc are one parameter whatever the plugins say; FAKE_TRTLLM_TRANSFORMERS5, the
rotary base is not found; FAKE_TRTLLM_BEYOND, tokens beyond the vocabulary.
"""

import ctypes
import os
from enum import Enum

import torch
from tensorrt_llm.calls import COUNTS, note

DataType = Enum("DataType", ["FLOAT", "HALF", "BF16", "INT32"])
TensorLocation = Enum("TensorLocation", ["HOST", "DEVICE"])
_TORCH = {DataType.FLOAT: torch.float32, DataType.HALF: torch.float16, DataType.BF16: torch.bfloat16}


class Weights:
    def __init__(self, type: DataType, ptr: int, count: int):
        self.dtype, self.ptr, self.size = DataType(type), int(ptr), int(count)

    def read(self) -> torch.Tensor:
        dtype = _TORCH[self.dtype]
        raw = ctypes.string_at(self.ptr, self.size * dtype.itemsize)
        return torch.frombuffer(bytearray(raw), dtype=dtype)


class Refitter:
    def __init__(self, engine, logger):
        note("Refitter")
        if not engine.refittable:
            raise RuntimeError("createInferRefitter: the engine was built without BuilderFlag.REFIT")
        if logger != "trt logger":
            raise TypeError("incompatible constructor arguments")
        self.engine, self.supplied = engine, {}

    def get_all_weights(self) -> list[str]:
        extra = [name for name in [os.environ.get("FAKE_TRTLLM_EXTRA")] if name]
        gone = os.environ.get("FAKE_TRTLLM_LACKS", "")
        return [name for name in [*self.engine.weights, *self.engine.constants, *extra] if name != gone]

    def get_missing_weights(self) -> list[str]:
        """Of those that were combined with one that is given."""
        pairs = [p.split("+") for p in os.environ.get("FAKE_TRTLLM_COMBINED", "").split(",") if p]
        return [b for a, b in pairs if a in self.supplied and b not in self.supplied]

    def set_named_weights(self, name: str, weights: Weights, location: TensorLocation) -> bool:
        note("set_named_weights", name)
        assert location is TensorLocation.HOST, "nothing is on a device here"
        known = self.engine.weights.get(name)
        if known is None or known.numel() != weights.size or known.dtype != _TORCH[weights.dtype]:
            return False
        if name == os.environ.get("FAKE_TRTLLM_REFUSED"):
            return False
        self.supplied[name] = weights
        return True

    def refit_cuda_engine(self) -> bool:
        note("refit_cuda_engine")
        if self.get_missing_weights():
            return False
        if os.environ.get("FAKE_TRTLLM_REFIT_FAILS") == str(COUNTS["refit_cuda_engine"]):
            return False
        if os.environ.get("FAKE_TRTLLM_STALE") and self.engine.refits:
            return True
        for name, weights in self.supplied.items():  # what is not given stays as it was
            self.engine.weights[name] = weights.read().view(self.engine.weights[name].shape)
        self.engine.refits += 1
        return True
