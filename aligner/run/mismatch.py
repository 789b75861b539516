"""The gate on engine against trainer: a warning above one bound, a stop above another."""

from __future__ import annotations

import sys

import torch.distributed as dist

from aligner.config.schema import MismatchConfig
from aligner.errors import MismatchError
from aligner.types import RolloutBatch, ScalarMetrics


def check_mismatch(metrics: ScalarMetrics, rollout: RolloutBatch, config: MismatchConfig) -> None:
    """Warn (rank 0) or raise MismatchError (all ranks: the metric is reduced) by `mismatch/token_mult_prob_error`."""
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


def worst_sample(rollout: RolloutBatch) -> str:
    """The sample of this rank with the largest |old - rollout| logprob, with its tokens."""
    assert rollout.old_logprobs is not None
    size = (rollout.old_logprobs - rollout.rollout_logprobs).abs() * rollout.response_mask
    row, column = divmod(int(size.argmax()), size.shape[1])
    tokens = rollout.tokens[row, : int(rollout.lengths[row])].tolist()
    return f"Worst here: sample {row}, token {column} off by {float(size[row, column]):.3g} nats; tokens {tokens}"
