"""The rules by which layers of linear attention remember (`model.linear.rule`), for the trainer and the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from aligner.families.rows import DECAY
from aligner.ops.kernels import delta_rule, mamba2


class LinearRule(NamedTuple):
    """`prepared` returns the arguments of `rows` and of `steps`. Signatures are those of `delta_rule`."""

    prepared: Callable[..., tuple[Tensor, ...]]
    rows: Callable[..., tuple[Tensor, Tensor]]
    steps: Callable[..., Tensor]
    still: Callable[..., tuple[Tensor, ...]]
    norm: Callable[..., Tensor]
    by_head: Callable[..., Tensor]
    vectors: tuple[str, ...]  # parameters with a number for each head of values
    biased: bool  # the mixing of channels has a bias
    wide_norm: bool  # the norm's weight has a number for each output of every head, not for those of one


def vector_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a vector in a model of `dtype`."""
    return torch.float32 if name == DECAY else dtype


RULES = {
    "delta": LinearRule(
        delta_rule.prepared,
        delta_rule.delta_rule,
        delta_rule.delta_steps,
        delta_rule.still,
        delta_rule.gated_norm,
        delta_rule.by_head,
        ("A_log", "dt_bias"),
        biased=False,
        wide_norm=False,
    ),
    "mamba2": LinearRule(
        mamba2.prepared,
        mamba2.scan,
        mamba2.scan_steps,
        mamba2.still,
        mamba2.gated_norm,
        mamba2.by_group,
        ("A_log", "dt_bias", "D"),
        biased=True,
        wide_norm=True,
    ),
}
