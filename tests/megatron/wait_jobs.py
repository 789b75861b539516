"""What the ranks run for `test_waits.py` and `test_update.py`: which reads of an update step would let a host wait for
a GPU, and what is done to gradients and weights."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import megatron.core
import torch
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import aligner
from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron import train
from aligner.megatron.update import norm_of_all, scale_all
from aligner.ops.kernels.upload import _mapped
from aligner.roles.batching import micro_batches
from aligner.roles.policy import Policy
from tests.megatron.jobs import build, nll_loss, shares
from tests.tiny import ADAM, LLAMA, batch

SOURCES = tuple(f"{Path(package.__path__[0])}/" for package in (aligner, megatron.core))
WAITS = {"_local_scalar_dense", "nonzero", "bincount", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}


class Waits(TorchDispatchMode):
    """Which tensors would be on the GPU: what a model's parameters, buffers and uploads lead to. `found`: how often
    the host asks such a tensor for its numbers, or for a shape that they decide, by (file, function)."""

    def __init__(self, model: train.ShardedModel):
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()
        self._there: dict[int, torch.UntypedStorage] = {}  # kept, so that no address is another's
        for tensor in [*model.module.parameters(), *model.module.buffers(), *model._frequencies.values()]:
            self.add(tensor)
        for buffer in model.wrapped.buffers + model.wrapped.expert_parallel_buffers:
            self.add(buffer.grad_data)
        for group in model.optimizer.param_groups:
            for tensor in group["params"]:
                self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._there[storage._cdata] = storage

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._there

    def note(self) -> None:
        frame = sys._getframe(1)
        while not frame.f_code.co_filename.startswith(SOURCES):
            frame = frame.f_back
        self.found[frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_name] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.partition("::")[2]
        there = any(leaf in self for leaf in tree_leaves((args, kwargs)))
        masks = name.startswith("index") and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1])
        )
        fills = name.startswith("index_put") and args[2].numel() == 1  # which needs no shape
        of_unknown_size = func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if there and (name in WAITS or (masks and not fills) or of_unknown_size):
            self.note()
        out = func(*args, **kwargs)
        if there:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self.add(leaf)
        return out

    def __enter__(self):
        self._patches = ExitStack()

        def reading(original):
            def read(tensor, *args, **kwargs):
                if tensor in self:
                    self.note()
                return original(tensor, *args, **kwargs)

            return read

        def there(tensor):
            tensor = tensor.clone()  # the host's stays where it is
            self.add(tensor)
            return tensor

        self._patches.enter_context(mock.patch.object(train, "upload", lambda item, device: _mapped(item, there)))
        for name in ("tolist", "cpu", "numpy"):  # of a tensor on the CPU they are no operations
            self._patches.enter_context(mock.patch.object(Tensor, name, reading(getattr(Tensor, name))))
        return super().__enter__()

    def __exit__(self, *args):
        super().__exit__(*args)
        self._patches.close()


def waits(cfg: ModelConfig, parallel: ParallelConfig, micro: int = 2) -> dict:
    """Of a pass for logprobs and of the second optimizer step, and how many micro-batches each had."""
    model, full = build(cfg, parallel, ADAM, dtype=torch.bfloat16), batch(cfg)
    each = len(full.lengths) // model.layout.data
    mine, loss = full.select(torch.arange(each) + each * model.layout.dp_rank), nll_loss(model, full)
    parts = micro_batches(mine, BatchConfig(micro_batch_samples=micro))
    model.step(parts, loss)  # what is asked once is not asked again
    with Waits(model) as step:
        model.step(parts, loss)
    with Waits(model) as logprobs:
        Policy(model, BatchConfig(logprob_tokens=40)).logprobs(mine)
    return {"step": dict(step.found), "logprobs": dict(logprobs.found), "micro_batches": len(parts)}


def norms(count: int) -> dict:
    tensors = [torch.randn(7, i + 1) for i in range(count)]
    with _Reads() as reads:
        one, _ = norm_of_all(1, torch.zeros(1), [tensors], False)
    wanted, _ = local_multi_tensor_l2_norm(1, torch.zeros(1), [tensors], False)
    assert one.dtype == wanted.dtype and one.shape == wanted.shape
    return {"one": float(one), "megatron": float(wanted), "reads": reads.count}


def scaled(count: int) -> dict:
    """Over themselves, as Megatron clips, and into others."""
    tensors = [torch.randn(7, i + 1) for i in range(count)]
    over, wanted, into = ([t.clone() for t in tensors] for _ in range(3))
    local_multi_tensor_scale(1, torch.zeros(1), [tensors, wanted], 0.3)
    scale_all(1, torch.zeros(1), [over, over], 0.3)
    scale_all(1, torch.zeros(1), [tensors, into], 0.3)
    return {"over": over, "into": into, "megatron": wanted}


def exchanges() -> dict:
    """How often an optimizer step shares out gradients, and weights."""
    model, full = build(LLAMA, ParallelConfig(), ADAM), batch(LLAMA)
    with torch.profiler.profile() as profile:
        model.step([shares(model, full)], nll_loss(model, full))
    counts = Counter({event.key: event.count for event in profile.key_averages()})
    of = {"gradients": "c10d::reduce_scatter_tensor_coalesced_", "weights": "c10d::allgather_into_tensor_coalesced_"}
    return {what: counts[name] for what, name in of.items()}


class _Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
