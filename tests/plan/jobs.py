"""What the ranks run for the tests of this folder: a real model's bytes, and the bytes of its collectives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron.model import Head
from aligner.megatron.train import ShardedModel
from aligner.refit.transfer import WeightStream
from aligner.roles.critic import Critic
from aligner.roles.policy import Policy
from aligner.roles.reward_model import RewardModel
from aligner.stages.sft import sft_loss
from aligner.types import LossOutput, TrainBatch
from tests.megatron.jobs import build
from tests.operations import counted
from tests.tiny import ADAM

SMALLEST = 256  # bytes: shapes, losses, norms and counts are not counted
ROWS, WIDTH = 8, 24
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


def rows(cfg: ModelConfig, model: ShardedModel, prompt: int) -> TrainBatch:
    """This data-parallel rank's rows, all of one length: what a micro-batch holds is known. The loss reads what comes
    after `prompt` tokens."""
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, cfg.vocab_size, (ROWS, WIDTH), generator=g)
    mask = torch.ones(ROWS, WIDTH)
    mask[:, :prompt] = 0
    full = TrainBatch(tokens, torch.full((ROWS,), WIDTH), mask, labels=torch.randn(ROWS, generator=g))
    return full.select(torch.arange(ROWS).chunk(model.layout.data)[model.layout.dp_rank])


def step(
    cfg: ModelConfig,
    parallel: ParallelConfig,
    optim: OptimConfig = ADAM,
    outputs: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    micro_rows: int = 4,
    recompute: bool = False,
    prompt: int = 1,
    logits_bytes: int = 1 << 30,
    critic: bool = False,
) -> dict:
    """One pass without gradient and one optimizer step: operations of both, and of the step bytes of buffers and
    optimizer state, and of collectives by axis. With `outputs` of a reward model, or of a critic."""
    cfg = replace(cfg, recompute="full" if recompute else "none")
    model = build(cfg, parallel, optim, Head("score", outputs) if outputs else Head(), dtype)
    mine, layout = rows(cfg, model, prompt), model.layout
    batch = BatchConfig(micro_batch_samples=micro_rows, logits_bytes=logits_bytes)
    if critic:
        role = Critic(model, batch)
        forward = partial(role.values, mine, mine.loss_mask)
        update = partial(role.update, mine, lambda values, b: LossOutput(((values - 1).square() * b.loss_mask).mean()))
    elif outputs:
        role = RewardModel(model, batch)
        forward = partial(role.raw_scores, mine)
        update = partial(role.update, mine, lambda scores, b: LossOutput((scores - 1).square().mean()), unit=1)
    else:
        role = Policy(model, batch)
        forward = partial(role.logprobs, mine, mine.loss_mask)
        update = partial(role.update, mine, sft_loss(mine, layout.pgs.dp))
    operations = {"forward": counted(forward)}
    with Listener() as heard:
        operations["update"] = counted(update)
    buffers = [*model.wrapped.buffers, *model.wrapped.expert_parallel_buffers]
    pgs = layout.pgs
    groups = {
        "tp": pgs.tp,
        "cp": pgs.cp,
        "pp": pgs.pp,
        "dp": pgs.dp_cp,
        "ep": pgs.ep,
        "edp": pgs.expt_dp,
        "ends": pgs.embd,
    }
    return {
        "stage": layout.pp_rank,
        "operations": operations,
        "parameters": sum(p.numel() for p in model.module.parameters()),
        "weights": sum(p.numel() * p.element_size() for p in model.module.parameters()),
        "gradients": sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
        "main_gradients": sum(p.main_grad.numel() * 4 for p in model.module.parameters() if p.requires_grad),
        "tensors": len(list(model.module.parameters())),
        "optimizer": _state_bytes(model),
        "heard": dict(heard.bytes),
        "axes": {axis: tuple(dist.get_process_group_ranks(g)) for axis, g in groups.items() if g is not None},
    }


def _state_bytes(model: ShardedModel) -> int:
    """Moments, and main parameters that are not the model's own storage."""
    total, own = 0, {p.untyped_storage().data_ptr() for p in model.module.parameters()}
    for part in getattr(model.optimizer, "chained_optimizers", [model.optimizer]):
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                tensors = [part.optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq")]
                tensors += [p] if p.untyped_storage().data_ptr() not in own else []
                total += sum(t.numel() * t.element_size() for t in tensors)
    return total


def refit(cfg: ModelConfig, parallel: ParallelConfig) -> dict:
    """Bytes of the collectives that bring all weights to this rank, by axis."""
    model = build(cfg, parallel, dtype=torch.bfloat16)
    stream, pgs = WeightStream(model, 1 << 20), model.layout.pgs
    with Listener() as heard:
        for _ in stream:
            pass
    groups = {"tp": pgs.tp, "pp": pgs.pp, "ep": pgs.ep}
    return {
        "stage": model.layout.pp_rank,
        "heard": dict(heard.bytes),
        "axes": {axis: tuple(dist.get_process_group_ranks(g)) for axis, g in groups.items()},
    }
