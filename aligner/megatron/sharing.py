"""What modules of our own know of Megatron: its config, its marks of parameters that tensor ranks share, and how a
checkpoint splits them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


@dataclass
class LayerConfig(TransformerConfig):
    """Megatron's config, and what layers are made of: Megatron's modules, TransformerEngine's or our own."""

    column: Callable[..., Any] | None = None  # linear layers
    row: Callable[..., Any] | None = None
    norm: Callable[..., Any] | None = None
    invariant: bool = False  # `model.kernels`
    rows: Callable[..., Tensor] | None = None  # attention of rows of any length (`varlen.attend`); None: by segments


def mark_shared(param: torch.nn.Parameter, axis: int = 0) -> None:
    """Mark that each tensor rank has a share of this axis."""
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, axis, 1


def checkpoint_entries(
    own: torch.nn.Module | Mapping[str, Tensor],
    prefix: str,
    offsets: tuple,
    metadata: dict | None,
    group: dist.ProcessGroup,
    axes: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return a module's tensors, or those named in `own`, for a checkpoint. `axes` has the axis of each tensor that
    the tensor ranks of `group` share; every rank has the others whole. Megatron's own modules use the global process
    groups."""
    tensors = own.state_dict(prefix="", keep_vars=True) if isinstance(own, torch.nn.Module) else own
    groups = {"tp_group": group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
    return make_sharded_tensors_for_checkpoint(dict(tensors), prefix, dict(axes or {}), offsets, **groups)


def with_fields(config: LayerConfig, **fields: Any) -> LayerConfig:
    """Return a copy for one kind of module, with other values. Megatron's checks of a new config do not run again."""
    own = copy.copy(config)
    for name, value in fields.items():
        setattr(own, name, value)
    return own


class SharedLinear(torch.nn.Module):
    """A matrix [out, in] that every tensor rank has whole. Its gradient comes from the rank's own tokens with
    sequence parallelism; without, it is the same on all ranks."""

    def __init__(self, config: LayerConfig, size: int, out: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(out, size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


class SharedVector(torch.nn.Module):
    """`weight` [size / tensor ranks]: this rank's share of a vector."""

    def __init__(self, config: LayerConfig, size: int, value: float, group: dist.ProcessGroup):
        super().__init__()
        self.group = group
        self.weight = torch.nn.Parameter(torch.full((size // group.size(),), value, dtype=config.params_dtype))
        mark_shared(self.weight)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        return checkpoint_entries(self, prefix, sharded_offsets, metadata, self.group, {"weight": 0})
