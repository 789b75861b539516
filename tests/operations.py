"""Operations as torch's own counter sees them, and bytes as a mode that looks at each tensor."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, mm_flop

aten = torch.ops.aten
MATRIX = ("mm", "addmm", "addmm_")  # linear layers; the rest are products of attention


def addmm_in_place(self_shape, a_shape, b_shape, out_shape=None, **kwargs) -> int:
    return mm_flop(a_shape, b_shape)


def attention_forward(query, key, *unused, out_shape=None, **options) -> int:
    """Scores and their sum over values, in full."""
    return 4 * math.prod(query) * key[-2]


def attention_backward(grad, query, key, *unused, out_shape=None, **options) -> int:
    """Two products for each of the forward pass; what a kernel computes again is not counted."""
    return 2 * attention_forward(query, key)


MORE = {
    aten.addmm_: addmm_in_place,
    aten._scaled_dot_product_flash_attention_for_cpu: attention_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
}


def counted(action: Callable[[], object]) -> dict[str, float]:
    """{"linear", "attention"} of what runs in `action`, as far as there are any."""
    with FlopCounterMode(display=False, custom_mapping=MORE) as counter:
        action()
    seen: Counter[str] = Counter()
    for op, count in counter.get_flop_counts().get("Global", {}).items():
        seen["linear" if str(op).removeprefix("aten.") in MATRIX else "attention"] += count
    return dict(seen)


class Bytes(TorchDispatchMode):
    """`most`: the largest sum of the bytes of tensors that were made under it and were still there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._there: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._there | inputs:
                self._note(leaf.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def gone() -> None:
            self._there.discard(key)
            self.now -= size

        weakref.finalize(storage, gone).atexit = False
        self._there.add(key)
        self.now += size
        self.most = max(self.most, self.now)


SMALLEST = 256  # bytes: shapes, losses, norms and counts are not counted
# torch.ops.c10d's name -> (our word, the argument that holds the whole tensor)
OPS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
}


class Listener(TorchDispatchMode):
    """(ranks of the group, our word) -> bytes of all collectives that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = func._schema.name
        if kind.startswith("c10d::"):
            if kind[6:] in OPS:
                self._count(kind[6:], args)
            else:
                assert kind[6:] in ("recv_", "recv_any_source_", "barrier", "monitored_barrier_"), f"unknown: {kind}"
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, args: tuple) -> None:
        word, index = OPS[kind]
        group = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
        size = sum(t.numel() * t.element_size() for t in tree_leaves(args[index]))
        # Megatron sends between stages over the group of the world
        if len(ranks) > 1 and size >= SMALLEST:
            self.bytes["send" if word == "send" else ranks, word] += size
