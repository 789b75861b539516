"""State of Megatron's optimizers by parameter, for all of their classes; and torch's Adam in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam
MOMENTUM = ("momentum_buffer",)  # of Muon


@dataclass(frozen=True)
class OptimizerShard:
    """Numbers [start, start + n) of the model's flat parameter `param` that this rank's optimizer updates."""

    param: Tensor
    start: int
    main: Tensor  # float32 weights, n numbers: a view of a float32 `param`, a copy of one in bfloat16
    moments: dict[str, Tensor]  # of MOMENTS or MOMENTUM, n numbers each
    alone: bool  # no other data-parallel rank has these numbers


def is_distributed(optimizer: MegatronOptimizer) -> bool:
    return any(isinstance(member, DistributedOptimizer) for member in _parts(optimizer))


def owned(optimizer: MegatronOptimizer) -> Iterator[OptimizerShard]:
    """Yield each parameter's numbers in a fixed order. Call `give_state` first."""
    for member in _parts(optimizer):
        alone = isinstance(member, DistributedOptimizer)
        for param, main in _mains(member):
            start = member._get_model_param_range_map(param)["param"].start if alone else 0
            state = member.optimizer.state[main]
            yield OptimizerShard(param, start, main, {name: state[name] for name in _moments(member)}, alone)


def give_state(optimizer: MegatronOptimizer) -> None:
    """Give an optimizer that never stepped the moments that its first step would make, so that they can be saved or
    loaded."""
    for member in _parts(optimizer):
        for _, main in _mains(member):
            state = member.optimizer.state[main]
            if not state and member.config.use_precision_aware_optimizer:  # TransformerEngine's has their dtypes
                member.optimizer.initialize_state(main, False)
            elif not state:
                state.update({name: torch.zeros_like(main) for name in _moments(member)})
                if _is_torch_adam(member):
                    state["step"] = torch.zeros((), device=main.device)


def set_step(optimizer: MegatronOptimizer, count: int) -> None:
    """Set the count of steps. torch's Adam counts the steps of each parameter in its own tensors, TransformerEngine's
    and Apex's those of each group."""
    for member in _parts(optimizer):
        if _is_torch_adam(member):
            for state in member.optimizer.state.values():
                state["step"].fill_(count)
        else:
            for group in member.optimizer.param_groups:
                group["step"] = count


def fuse(optimizer: MegatronOptimizer) -> None:
    """Make torch's Adam pass once over weights, gradients and moments instead of ten times (3.5 times faster on a
    CPU). Adam of TransformerEngine and Apex, which Megatron prefers, is always fused. Call it once, after
    construction."""
    for member in filter(_is_torch_adam, _parts(optimizer)):
        for group in member.optimizer.param_groups:
            group["fused"] = True


def parameters_and_mains(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (the model's parameter, its float32 weights) of all members."""
    return chain.from_iterable(map(_mains, _parts(optimizer)))


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that hold something: a rank may have no parameters of one of them."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [member for member in parts if member.optimizer is not None]


def _mains(member: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (the model's parameter, its float32 weights), which are the keys of the inner optimizer's state."""
    if isinstance(member, DistributedOptimizer):
        pairs = (
            (member.model_fp32_groups, member.shard_fp32_groups),
            (member.model_float16_groups, member.shard_fp32_from_float16_groups),
        )
    elif isinstance(member, Float16OptimizerWithFloat16Params):
        pairs = (
            (member.fp32_from_fp32_groups, member.fp32_from_fp32_groups),
            (member.float16_groups, member.fp32_from_float16_groups),
        )
    else:
        groups = [group["params"] for group in member.param_groups]
        pairs = ((groups, groups),)
    for params, mains in pairs:
        yield from zip(chain.from_iterable(params), chain.from_iterable(mains), strict=True)


def _moments(member: MegatronOptimizer) -> tuple[str, ...]:
    return MOMENTUM if "momentum" in member.optimizer.defaults else MOMENTS


def _is_torch_adam(member: MegatronOptimizer) -> bool:
    return isinstance(member.optimizer, torch.optim.Adam | torch.optim.AdamW)
