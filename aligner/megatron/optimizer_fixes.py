"""What Megatron-Core 0.19's distributed optimizer gets wrong when it is saved and loaded, set right from outside: each
fix names the case that needs it, and `tests/megatron/test_sharded_checkpoint.py` fails without any of them. And, which
is no fix, torch's Adam in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


def mend(optimizer: MegatronOptimizer) -> None:
    """Once, after construction."""
    _fuse(optimizer)
    for part in _distributed(optimizer):
        _mend_places(part)
        part.get_parameter_state_dp_zero = partial(_gather_spaced, part, part.get_parameter_state_dp_zero)
        if _is_torch_adam(part):
            part._set_main_param_and_optimizer_states = partial(_set_states, part._set_main_param_and_optimizer_states)


def give_state(optimizer: MegatronOptimizer) -> None:
    """A torch Adam that never stepped cannot tell its step, which Megatron asks for before it lays out what to
    save or load: give it the empty state that its first step would make."""
    for part in filter(_is_torch_adam, _distributed(optimizer)):
        state = part.optimizer.state
        for param in (p for group in part.optimizer.param_groups for p in group["params"]):
            if not state[param]:
                moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                state[param] = {"step": torch.zeros((), device=param.device), **moments}


def after_load(optimizer: MegatronOptimizer) -> None:
    """Megatron restores ONE step tensor for all parameters, and torch's Adam would advance it once for each of them.
    Settings come from the checkpoint, which may be of an Adam that was not fused, and with it steps on the CPU."""
    _fuse(optimizer)
    for part in filter(_is_torch_adam, _parts(optimizer)):
        for param, state in part.optimizer.state.items():
            state["step"] = state["step"].to(param.device, torch.float32, copy=True)


def with_settings_of(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> dict[Any, Any]:
    """A loaded state with this optimizer's own learning rates, weight decay, betas and eps: a run may go on with
    others, by which Megatron would not even find the parameter groups, as it looks for them by their settings."""
    parts = _parts(optimizer)
    states = [state] if len(parts) == 1 else [state[i] for i in range(len(parts))]
    for part, loaded in zip(parts, states, strict=True):
        groups = loaded.get("optimizer", loaded)["param_groups"]
        for there, here in zip(groups, part.optimizer.param_groups, strict=True):
            there.update({name: value for name, value in here.items() if name not in ("params", "step")})
    return state


def _fuse(optimizer: MegatronOptimizer) -> None:
    """torch's Adam in one pass over weights, gradients and moments, not in ten (3.5 times faster on a CPU); Adam of
    TransformerEngine and Apex, which Megatron takes where it finds them, is fused anyway."""
    for part in filter(_is_torch_adam, _parts(optimizer)):
        for group in part.optimizer.param_groups:
            group["fused"] = True


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _distributed(optimizer: MegatronOptimizer) -> Iterator[DistributedOptimizer]:
    for part in _parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            yield part


def _is_torch_adam(part: MegatronOptimizer) -> bool:
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)


def _mend_places(part: DistributedOptimizer) -> None:
    """Where a group holds both dtypes (a float32 score head on a bfloat16 body) its main parameters are reordered,
    float32 first, but the map from model parameters to them is not."""
    for group, (full, half) in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
        for place, param in enumerate([*full, *half]):
            part.model_param_group_index_map[param] = group, place


def _gather_spaced(part: DistributedOptimizer, original: Callable, **kwargs: Any) -> dict | None:
    """The gathered state comes without the padding between buckets, but is then read at offsets that count it. A
    stage has several buckets where it shares its embedding with another."""
    state = original(**kwargs)
    for index, buffer in enumerate(part.buffers) if state is not None else ():
        for tensors in state[index].values():
            for name, packed in tensors.items():
                if isinstance(packed, Tensor):
                    tensors[name] = _spaced(packed, buffer)
    return state


def _spaced(packed: Tensor, buffer: Any) -> Tensor:
    whole, start = packed.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        size = bucket.numel_unpadded
        whole[bucket.offset : bucket.offset + size] = packed[start : start + size]
        start += size
    return whole


def _set_states(original: Callable, model_param: Tensor, tensors: dict[str, Any]) -> None:
    """Megatron looks for a `step` tensor per parameter, which it has itself restored from the groups: there is none to
    copy."""
    original(model_param, {"step": None, **tensors})
