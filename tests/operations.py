"""Operations as torch's own counter sees them, and bytes as a mode that looks at each tensor."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable

import torch
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
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._there | given:
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
