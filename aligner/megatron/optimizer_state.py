"""What Megatron's optimizers hold of a model, parameter by parameter, whichever class they are of; and torch's Adam in
one pass over memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Owned:
    """Numbers [start, start + n) of the model's flat parameter `param` that this rank's optimizer updates."""

    param: Tensor
    start: int
    main: Tensor  # float32 weights, n numbers: a view of a float32 `param`, a copy of one in bfloat16
    moments: dict[str, Tensor]  # of MOMENTS, n numbers each
    alone: bool  # no other data-parallel rank has these numbers


def is_distributed(optimizer: MegatronOptimizer) -> bool:
    return any(isinstance(part, DistributedOptimizer) for part in _parts(optimizer))


def owned(optimizer: MegatronOptimizer) -> Iterator[Owned]:
    """In the same order whenever it is asked for. `give_state` first."""
    for part in _parts(optimizer):
        alone = isinstance(part, DistributedOptimizer)
        for param, main in _mains(part):
            start = part._get_model_param_range_map(param)["param"].start if alone else 0
            state = part.optimizer.state[main]
            yield Owned(param, start, main, {name: state[name] for name in MOMENTS}, alone)


def give_state(optimizer: MegatronOptimizer) -> None:
    """An Adam that never stepped has no moments to save or to load into: give it those its first step would make."""
    for part in _parts(optimizer):
        for _, main in _mains(part):
            state = part.optimizer.state[main]
            if not state:
                state.update({name: torch.zeros_like(main) for name in MOMENTS})
                if _is_torch_adam(part):
                    state["step"] = torch.zeros((), device=main.device)


def set_step(optimizer: MegatronOptimizer, count: int) -> None:
    """torch's Adam counts the steps of each parameter, in tensors of its own; TransformerEngine's and Apex's of each
    group."""
    for part in _parts(optimizer):
        if _is_torch_adam(part):
            for state in part.optimizer.state.values():
                state["step"].fill_(count)
        else:
            for group in part.optimizer.param_groups:
                group["step"] = count


def fuse(optimizer: MegatronOptimizer) -> None:
    """torch's Adam in one pass over weights, gradients and moments, not in ten (3.5 times faster on a CPU); Adam of
    TransformerEngine and Apex, which Megatron takes where it finds them, is fused anyway. Once, after construction."""
    for part in filter(_is_torch_adam, _parts(optimizer)):
        for group in part.optimizer.param_groups:
            group["fused"] = True


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Those that hold something: a rank may have no parameters of one of them."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if part.optimizer is not None]


def _mains(part: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """(the model's parameter, its float32 weights), which are the keys of the inner optimizer's state."""
    if isinstance(part, DistributedOptimizer):
        pairs = (
            (part.model_fp32_groups, part.shard_fp32_groups),
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        )
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        pairs = (
            (part.fp32_from_fp32_groups, part.fp32_from_fp32_groups),
            (part.float16_groups, part.fp32_from_float16_groups),
        )
    else:
        groups = [group["params"] for group in part.param_groups]
        pairs = ((groups, groups),)
    for params, mains in pairs:
        yield from zip(chain.from_iterable(params), chain.from_iterable(mains), strict=True)


def _is_torch_adam(part: MegatronOptimizer) -> bool:
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)
