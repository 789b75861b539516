"""User buffers of TransformerEngine, in which messages of tensor parallelism go beside products, if
`model.megatron.tp_comm_overlap` is set.

A buffer has one size. TransformerEngine refuses to gather inputs of another size in it, and would sum what lies behind
inputs that are smaller. So a linear layer uses buffers only for a micro-batch of their size, and otherwise NCCL.
Micro-batches that lack few tokens are padded to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.kernels import NEAR
from aligner.errors import ConfigError
from aligner.megatron import groups
from aligner.megatron.groups import Layout

KEY = "model.megatron.tp_comm_overlap"
UNIT = 128  # tokens of a tensor rank: MXFP8's scales come in blocks of so many
FLAGS = ("ub_overlap_ag_fprop", "ub_overlap_rs_fprop", "ub_overlap_ag_dgrad")  # of a linear layer


@dataclass(frozen=True)
class UserBuffers:
    """Buffers for micro-batches of so many tokens of a context rank."""

    tokens: int
    ranks: int  # that share them

    def lacks_few(self, tokens: int) -> bool:
        return NEAR * self.tokens <= tokens < self.tokens

    def watch(self, module: torch.nn.Module) -> None:
        """Let the module's linear layers use buffers for inputs of their size only. Each call looks for itself: layers
        are recomputed in the backward pass of another micro-batch than the last one of the forward pass."""
        for linear in module.modules():
            if asked := [name for name in FLAGS if getattr(linear, name, False)]:
                rows = self.tokens // (self.ranks if linear.parallel_mode == "column" else 1)
                linear.register_forward_pre_hook(partial(_choose, asked, rows))


def _choose(flags: list[str], rows: int, linear: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
    for name in flags:
        setattr(linear, name, len(inputs[0]) == rows)


def make_buffers(cfg: ModelConfig, layout: Layout, dtype: torch.dtype, budget: int) -> UserBuffers:
    """Make the buffers of micro-batches of at most `budget` tokens, before the layers that use them, as Megatron-Core's
    training script does. Collective. Raises ConfigError."""
    from transformer_engine.pytorch.module import base

    node = groups.ranks_per_node[0]
    if node % layout.tensor and node > 1:  # 1: a rack, or GPUs that TransformerEngine judges
        raise ConfigError(KEY, True, f"parallel.tensor a divisor of the {node} ranks of a node, here {layout.tensor}")
    unit = UNIT * layout.tensor
    tokens = -(-budget // (layout.context * unit)) * unit
    modes = [base.UserBufferQuantizationMode.FP8] if cfg.megatron.get("fp8") else []
    if not modes or cfg.megatron.get("first_last_layers_bf16"):
        modes.append(base.UserBufferQuantizationMode.NONE)
    wanted = (tokens, cfg.hidden_size, layout.tensor, modes, dtype, dist.group.WORLD)
    if base.is_ub_initialized() and _made != [wanted]:
        base.destroy_ub()
    if not base.is_ub_initialized():
        backend = cfg.megatron.get("tp_comm_bootstrap_backend") or "nccl"
        how = {"quantization_modes": modes, "dtype": dtype, "bootstrap_backend": backend}
        try:
            base.initialize_ub([tokens, cfg.hidden_size], layout.tensor, **how)
        except RuntimeError as error:
            base.destroy_ub()  # what there is of them
            raise ConfigError(KEY, True, "false", f"TransformerEngine has no buffers here: {error}.") from error
        _made[:] = [wanted]
    return UserBuffers(tokens, layout.tensor)


_made: list[tuple] = []  # the size and kinds of TransformerEngine's buffers, which a process has once
