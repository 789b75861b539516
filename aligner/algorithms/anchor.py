"""Reference point of an update's ratio where nobody computed the logprobs before it (`algorithm.old_logprobs`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from aligner.config.sections.mismatch import MismatchConfig
from aligner.ops.rl.policy_term import interpolated_logprobs
from aligner.run.mismatch import token_weights
from aligner.types import PolicyTargets


@dataclass(frozen=True)
class Anchor:
    way: str = "auto"  # `algorithm.old_logprobs`
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    before: int = 0  # weight version as the step began
    now: int = 0  # and of the update

    def __call__(self, targets: PolicyTargets, logprobs: Tensor) -> PolicyTargets:
        """Return a micro-batch's targets with `old_logprobs`, from the update's own `logprobs` [B, T], and with the
        weights of `mismatch.correction`, which need them."""
        if self.way == "engine":
            return replace(targets, old_logprobs=targets.rollout_logprobs)
        old = logprobs  # with auto this is the only update: they are the logprobs before it
        if self.way == "proxy":
            old = interpolated_logprobs(old, targets.rollout_logprobs, targets.versions, self.before, self.now)
        weights = token_weights(old - targets.rollout_logprobs, targets.response_mask, self.mismatch)
        return replace(targets, old_logprobs=old, token_weights=weights)
