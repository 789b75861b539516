"""Weights in fused modules: half-loaded ones hold NaN, and what is loaded takes effect when it is finalised. A rank
gets whole tensors and holds its share."""

import os
import re

import torch

from tensorrt_llm.calls import note

_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def module_of(name: str) -> str:
    parts = name.split(".")[:-1]
    return ".".join([*parts[:-1], _FUSED.get(parts[-1], parts[-1])])


class Module:
    """One fused module and the Hugging Face tensors it is made of."""

    def __init__(self, shapes: dict, shares: dict):
        self.shapes, self.shares = shapes, shares
        self.staged: dict | None = None
        self.updates = 0
        # a dummy model's values
        self.whole: dict = {name: self.share(name, torch.randn(shape)) for name, shape in shapes.items()}

    def share(self, name: str, tensor):
        axis, start, stop = self.shares[name]
        return tensor.narrow(axis, start, stop - start)

    def pre_reload_weights(self) -> None:
        self.staged = {}

    def load(self, name: str, tensor) -> None:
        if self.staged is None:
            raise RuntimeError(f"{name} was loaded without pre_reload_weights")
        if tuple(tensor.shape) != tuple(self.shapes[name]):
            raise RuntimeError(f"The size of tensor {name} must match")
        self.staged[name] = self.share(name, tensor).clone()

    def process_weights_after_loading(self) -> None:
        if self.staged is None:
            raise RuntimeError("process_weights_after_loading without a reload")
        if os.environ.get("FAKE_TRTLLM_STALE") and self.updates:
            return
        self.updates += 1
        missing = torch.full((), float("nan"))
        self.whole = {n: self.staged.get(n, self.share(n, missing.expand(shape))) for n, shape in self.shapes.items()}

    def post_load_weights(self) -> None:
        self.staged = None


class Model:
    def __init__(self, shapes: dict, shares: dict, partial: bool):
        self.partial, self.mapped, grouped = partial, True, {}
        for name, shape in shapes.items():
            grouped.setdefault(module_of(name), {})[name] = shape
        self._modules = {path: Module(own, shares) for path, own in grouped.items()}
        removed = Module({}, shares)
        removed._weights_removed = True
        self._modules["removed"] = removed
        if not partial:
            self.load_weights = self._load_all

    def modules(self):
        note("modules")
        return list(self._modules.values())

    def load_weights(self, weights: dict, allow_partial_loading: bool = False) -> None:
        if not self.mapped:
            raise RuntimeError("CUDA error: an illegal memory access was encountered: weights have been released")
        names = {n for m in self._modules.values() for n in m.shapes}
        if not allow_partial_loading and set(weights) != names:
            raise KeyError(f"{len(names - set(weights))} weights are missing")
        for name, tensor in weights.items():
            if not re.fullmatch(r"[a-z_0-9.]+", name) or name not in names:
                raise KeyError(name)
            self._modules[module_of(name)].load(name, tensor)

    def _load_all(self, weights: dict) -> None:
        Model.load_weights(self, weights)

    def forget(self) -> None:
        for module in self._modules.values():
            module.whole = {n: torch.full_like(t, float("nan")) for n, t in module.whole.items()}

    def tensors(self) -> dict:
        if not self.mapped:
            raise RuntimeError("CUDA error: an illegal memory access was encountered: weights have been released")
        if any(m.staged for m in self._modules.values()):
            raise RuntimeError("a forward of a model whose weights were not finalised")
        return {n: t for m in self._modules.values() for n, t in m.whole.items()}
