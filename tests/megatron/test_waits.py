"""How often the host waits for the device, counted on the CPU by which tensors would be on a GPU."""

import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import megatron.core
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import aligner
from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron import train
from aligner.ops.kernels.upload import _mapped
from aligner.roles.batching import micro_batches
from aligner.roles.policy import Policy
from tests.megatron.models import build, equal_shares, nll_loss
from tests.tiny import ADAM, LLAMA, MODELS, MOE, WINDOWS, batch

pytestmark = pytest.mark.multirank
MICRO = 2  # rows of a micro-batch
CPU_ALONE = {("logprobs.py", "of"), ("experts.py", "grouped_linear")}
NORM, METRICS = ("clip_grads.py", "get_grad_norm_fp32"), ("train.py", "reduce_outputs")
SENT, LOAD = ("moe.py", "forward"), ("expert_load.py", "metrics")
AUX = replace(MOE, moe=replace(MOE.moe, aux_coef=0.1))


SOURCES = tuple(f"{Path(package.__path__[0])}/" for package in (aligner, megatron.core))
KERNELS = ("te_extension.py", "te_rows.py")  # stand-ins for what computes on the device
WAITS = {"_local_scalar_dense", "nonzero", "bincount", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}


class Waits(TorchDispatchMode):
    """Which tensors would be on the GPU: what a model's parameters, buffers and uploads lead to. `counts`: how often
    the host asks such a tensor for its numbers, or for a shape that they decide, by (file, function)."""

    def __init__(self, model: train.ShardedModel):
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()
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
            if frame.f_code.co_filename.endswith(KERNELS):
                return
            frame = frame.f_back
        self.counts[frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_name] += 1

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


def waits(cfg: ModelConfig, layout: dict) -> tuple[dict, dict]:
    """In the second optimizer step, which knows what only the first one reads, and in a pass for logprobs."""
    model, full = build(cfg, ParallelConfig(**layout), ADAM, dtype=torch.bfloat16), batch(cfg)
    own, loss = equal_shares(model, full), nll_loss(model, full)
    parts = micro_batches(own, BatchConfig(micro_batch_samples=MICRO))
    model.step(parts, loss)
    with Waits(model) as step:
        model.step(parts, loss)
    with Waits(model) as logprobs:
        Policy(model, BatchConfig(logprob_tokens=40)).logprobs(own)
    return tuple(
        {position: n for position, n in one.counts.items() if position not in CPU_ALONE} for one in (step, logprobs)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cfg", "layout", "world"),
    [
        (MODELS["qwen3"], {}, 1),
        (WINDOWS["gemma3"], {"context": 2}, 2),
        (replace(LLAMA, recompute="full"), {"tensor": 2, "sequence": True}, 2),
        (LLAMA, {"pipeline": 2}, 2),
        (MOE, {}, 1),
        (MOE, {"expert": 2}, 2),
        (replace(MOE, recompute="full"), {"expert": 2}, 2),  # which knows the counts of its first pass
        (AUX, {"tensor": 2, "sequence": True}, 2),  # with padding
    ],
)
def test_the_host_waits_for_numbers_it_needs_and_no_others(ranks, cfg, layout, world):
    every, experts = ranks.run(waits, world=world, cfg=cfg, layout=layout), layout.get("expert", 1)
    for rank, (step, logprobs) in enumerate(every):
        wanted = Counter({NORM: 1})
        if "pipeline" not in layout or rank == world - 1:
            wanted[METRICS] = 1
        if cfg.moe.num_experts:
            wanted[LOAD] = 1
        if experts > 1:  # the host passes the counts of tokens to send
            wanted[SENT] = len(batch(cfg).lengths) // experts // MICRO * cfg.num_layers
        assert step == wanted
        assert set(logprobs) <= {("batching.py", "forward_rows"), SENT} and (SENT not in logprobs or experts > 1)
        assert logprobs.get(("batching.py", "forward_rows"), 0) <= 1, "once for all micro-batches"
