"""Mismatch of engine and trainer: the correction of a rollout, and the gate (a warning above one bound, a stop above
another)."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from aligner.config.sections.mismatch import MismatchConfig
from aligner.errors import MismatchError
from aligner.ops.reduce import gathered
from aligner.ops.rl.mismatch import REJECTIONS, WEIGHTS, worst_token
from aligner.types import RolloutBatch, ScalarMetrics

FirstLayer = Callable[[list[int], int], str]  # `Policy.first_layer`


def correct_mismatch(rollout: RolloutBatch, config: MismatchConfig) -> None:
    """Apply `mismatch.correction`: set `token_weights` (TIS, IcePop), or `rejected` and make those samples invalid
    (geometric mask, veto). Call it after the logprobs and before token rewards and advantages: a rejected sample may
    be in no baseline, std, loss or denominator."""
    if config.methods == ["none"] or rollout.old_logprobs is None:  # without them the update sets the weights
        return
    log_ratio, mask = rollout.old_logprobs - rollout.rollout_logprobs, rollout.response_mask
    rollout.token_weights = token_weights(log_ratio, mask, config)
    for name in config.methods:
        if name in REJECTIONS:
            rejected = ~REJECTIONS[name](log_ratio, mask, **config.bounds(name))
            rollout.rejected = rejected if rollout.rejected is None else rollout.rejected | rejected
            rollout.valid = rollout.valid & ~rejected


def token_weights(log_ratio: Tensor, mask: Tensor, config: MismatchConfig) -> Tensor | None:
    """Return float32 [B, T], None if `mismatch.correction` has no weights. A row's weights depend only on that row."""
    for name in config.methods:
        if name in WEIGHTS:
            return WEIGHTS[name](log_ratio, mask, **config.bounds(name))
    return None


def check_mismatch(
    metrics: ScalarMetrics, rollout: RolloutBatch, config: MismatchConfig, first_layer: FirstLayer | None = None
) -> None:
    """Warn (rank 0) or raise MismatchError (all ranks: the metric is reduced) by `mismatch/token_mult_prob_error`; with
    `mismatch.expect=zero` raise it if the bits of any token differ. `first_layer`: see `Policy`."""
    if config.expect == "zero":
        _require_equal(rollout, first_layer)
    error = metrics["mismatch/token_mult_prob_error"]
    if config.stop_above and not error <= config.stop_above:  # NaN is no match either
        raise MismatchError(
            f"mismatch/token_mult_prob_error={error:.4g} > mismatch.stop_above={config.stop_above}: the engine's "
            f"probabilities are not the trainer's. {worst_sample(rollout)}"
        )
    if not error <= config.warn_above and dist.get_rank() == 0:
        print(
            f"warning: mismatch/token_mult_prob_error={error:.4g} > mismatch.warn_above={config.warn_above}",
            file=sys.stderr,
            flush=True,
        )


def _require_equal(rollout: RolloutBatch, first_layer: FirstLayer | None) -> None:
    """Raise MismatchError on every rank, naming the first token of the first sample of all ranks whose logprobs
    differ. Collective over the world."""
    on = rollout.response_mask.bool()
    differs = ((rollout.old_logprobs != rollout.rollout_logprobs) & on).nonzero()
    sums = [gathered(count) for count in (len(differs), int(on.sum()))]
    if not any(sums[0]):
        return
    slots = gathered(int(rollout.group[differs[0, 0]]) if len(differs) else None)
    text = ""
    if slots[dist.get_rank()] == min(slot for slot in slots if slot is not None):  # other ranks have other slots
        row, column = differs[0].tolist()
        text = _described(rollout, row, column, "9")
        if first_layer is not None:
            tokens, begin = rollout.tokens[row, : column + 1].tolist(), int(on[row].nonzero()[0])
            text += f". {first_layer(tokens, begin)}"
    raise MismatchError(
        f"mismatch.expect=zero: {sum(sums[0])} of {sum(sums[1])} tokens have other bits of their logprob in the engine "
        f"than in the trainer, first {max(gathered(text))}"
    )


def worst_sample(rollout: RolloutBatch) -> str:
    """Describe the sample of all ranks with the largest |old - rollout| logprob, with its tokens. Collective over the
    world."""
    return max(gathered(_worst_here(rollout)), key=lambda worst: worst[0])[1]  # the lowest rank of equals


def _worst_here(rollout: RolloutBatch) -> tuple[float, str]:
    """Return (size, description); a NaN is the largest of all. (-1, ...) without samples."""
    if not len(rollout.tokens):
        return -1.0, "no rank has samples"
    assert rollout.old_logprobs is not None
    size, row, column = worst_token(rollout.old_logprobs, rollout.rollout_logprobs, rollout.response_mask)
    return size, f"Worst sample of all ranks: {_described(rollout, row, column, '4')}"


def _described(rollout: RolloutBatch, row: int, column: int, digits: str) -> str:
    slot = int(rollout.group[row])
    sample = int((rollout.group[:row] == slot).sum())
    tokens = rollout.tokens[row, : int(rollout.lengths[row])].tolist()
    trainer, engine = float(rollout.old_logprobs[row, column]), float(rollout.rollout_logprobs[row, column])
    return (
        f"prompt slot {slot}, sample {sample} (rank {dist.get_rank()}), token {column} (id {tokens[column]}): engine "
        f"{engine:.{digits}g}, trainer {trainer:.{digits}g} nats; tokens {tokens}"
    )
