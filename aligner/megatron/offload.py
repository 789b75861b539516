"""Memory of a model on its device, moved to host memory and back.

Gradients are freed and come back as zeros, by Megatron's own buffers (every optimizer step zeroes them first).

Optimizer state and weights keep their bytes. Megatron's `offload_to_cpu` of optimizers is not used: it does not pin,
and it gives float32 shards, which are views of the weights, a storage of their own. Here tensors stay the same
objects over the same storage, and only its memory is emptied and filled
again. Views, process groups and checkpoints notice nothing.

On a CPU the bytes move to other host memory; on CUDA to pinned memory, with one synchronisation each way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor

from aligner.megatron.train import ShardedModel

KINDS = ("gradients", "optimizer", "weights")  # in the order in which they are offloaded


class FrozenMemory:
    """Memory of weights that are only read. `offload` and `restore` do nothing where a kind is already away, or here.
    No collectives."""

    def __init__(self, device: torch.device, weights: Callable[[], Iterable[Tensor]], pin: bool = True):
        self.device, self._weights = device, weights
        self.pin = pin and device.type == "cuda"
        self.away: set[str] = set()
        self._parked: dict[str, list[tuple[torch.UntypedStorage, Tensor]]] = {}
        self._pool: dict[tuple[str, int], Tensor] = {}  # pinned memory is slow to get, so it is kept

    def kinds(self) -> tuple[str, ...]:
        return ("weights",)

    def held_bytes(self, kind: str) -> int:
        """Return the bytes on the device now."""
        return sum(storage.nbytes() for storage in self._storages(kind))

    def offload(self, kind: str) -> int:
        """Offload to host memory (gradients: drop). Returns the freed bytes."""
        if kind in self.away or kind not in self.kinds():
            return 0
        storages = [storage for storage in self._storages(kind) if storage.resizable()]
        self.away.add(kind)
        size = sum(storage.nbytes() for storage in storages)
        parked = []
        for i, storage in enumerate(storages):
            host = self._host(kind, i, storage.nbytes())
            host.copy_(_bytes(storage), non_blocking=True)
            parked.append((storage, host))
        self._synchronize()  # the copies are done before their sources are freed
        for storage, _ in parked:
            storage.resize_(0)
        self._parked[kind] = parked
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # an engine in another process can have it
        return size

    def restore(self, kind: str) -> int:
        """Restore from host memory. Returns the bytes in use again."""
        if kind not in self.away:
            return 0
        self.away.remove(kind)
        parked = self._parked.pop(kind)
        for storage, host in parked:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        self._synchronize()
        return sum(host.numel() for _, host in parked)

    def _storages(self, kind: str) -> list[torch.UntypedStorage]:
        """Return each storage once, those that are away with 0 bytes. Memory that numpy has seen, on a CPU, is not
        ours to free: it stays."""
        return list(_unique(self._weights()).values())

    def _host(self, kind: str, index: int, size: int) -> Tensor:
        if not self.pin:
            return torch.empty(size, dtype=torch.uint8)
        host = self._pool.get((kind, index))
        if host is None or host.numel() != size:
            host = self._pool[kind, index] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return host

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class ModelMemory(FrozenMemory):
    """Memory of a model and of its optimizer, if it has one."""

    def __init__(self, model: ShardedModel, pin: bool = True):
        super().__init__(model.device, self._parameters, pin)
        self.model = model

    def kinds(self) -> tuple[str, ...]:
        return KINDS if self.model.optimizer is not None else super().kinds()

    def offload(self, kind: str) -> int:
        if kind != "gradients":
            return super().offload(kind)
        if kind in self.away or kind not in self.kinds():
            return 0
        size = sum(storage.nbytes() for storage in self._storages(kind) if storage.resizable())
        if size:
            self.away.add(kind)
            with _quiet():
                self.model.wrapped.offload_grad_buffers()
        return size

    def restore(self, kind: str) -> int:
        if kind != "gradients" or kind not in self.away:
            return super().restore(kind)
        self.away.remove(kind)
        with _quiet():
            self.model.wrapped.restore_grad_buffers()
        return self.held_bytes(kind)

    def _parameters(self) -> Iterator[Tensor]:
        """Yield the parameters, without those shared with another model's trunk: every phase that reads this model
        reads the trunk's too (`run/phases.py`)."""
        trunk = self.model.trunk
        theirs = set() if trunk is None else set(trunk.module.parameters())
        yield from (p for p in self.model.module.parameters() if not p.is_meta and p not in theirs)
        for held in self.model.held:
            yield from (held.codes, held.scales)

    def _storages(self, kind: str) -> list[torch.UntypedStorage]:
        if kind == "weights":
            return super()._storages(kind)
        if kind == "gradients":
            wrapped = self.model.wrapped
            return list(_unique(b.grad_data for b in wrapped.buffers + wrapped.expert_parallel_buffers).values())
        means = self.model.ema.means if self.model.ema is not None else []
        storages, weights = _unique(chain(_optimizer_tensors(self.model.optimizer), means)), _unique(self._parameters())
        return [storage for key, storage in storages.items() if key not in weights]


def _optimizer_tensors(optimizer) -> Iterator[Tensor]:
    """Yield main parameters and moments; of float32 models the former are the weights. Counters of steps stay."""
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = member.optimizer
        if inner is None:  # a rank without parameters of this part
            continue
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (t for t in state.values() if isinstance(t, Tensor) and t.dim())


def _unique(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return storages by their identity, as an empty storage has no address."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages.setdefault(storage._cdata, storage)
    return storages


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _quiet() -> warnings.catch_warnings:
    """Silence torch's deprecation warnings of typed storage, which Megatron requests of tensors."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
