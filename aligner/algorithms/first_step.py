"""Checks of what must hold exactly before any update (`debug.first_step_checks`); each names its worst value.

KL of the policy to itself is 0. Policy = reference before the first update. The ratio is 1 in the first, on-policy
update. A reward model with a zero head loses ln 2. A preference loss has its value for equal policy and reference. A
student that is its own teacher has nothing to learn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import AlignerError
from aligner.ops.agree import fail_together
from aligner.ops.reduce import sum_over
from aligner.ops.rl.mismatch import worst_token
from aligner.roles.policy import Policy, Reference
from aligner.types import LabelTargets, RolloutBatch, ScalarMetrics, TrainBatch

# nats, of the worst token: two forward passes of the same weights over differently cut batches
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
LOSS_TOLERANCE = 1e-5
PAIR_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the loss, relative where it is above 1


@dataclass
class FirstStepChecks:
    """Checks that run in the first call of `before_update` and of `after_update` only, and only if `wanted`. They
    raise AlignerError on every rank."""

    wanted: bool
    _before: bool = False
    _after: bool = False

    def before_update(self, rollout: RolloutBatch, policy: Policy, reference: Reference | None) -> None:
        """Check the logprobs before the update. Collective. Needs old_logprobs, and ref_logprobs with a reference."""
        if not self.wanted or self._before:
            return
        self._before = True
        assert rollout.old_logprobs is not None
        limit = TOLERANCE[policy.model.dtype]
        backwards = torch.arange(len(rollout.lengths)).flip(0)
        again = policy.logprobs(rollout.select(backwards))[backwards.argsort()]
        cause = _differ("the policy's logprobs, computed twice", rollout, again, rollout.old_logprobs, limit)
        # both started from model.init; the policy's tokens may go where the engine's routers sent them
        fresh = policy.model.step_count == 0 and rollout.routing is None
        if not cause and reference is not None and fresh:
            what = "the logprobs of reference and policy, which start from the same weights"
            cause = _differ(what, rollout, rollout.ref_logprobs, rollout.old_logprobs, limit)
        fail_together(cause, AlignerError, form="{cause} (rank {rank})")

    def after_update(self, stats: ScalarMetrics, dtype: torch.dtype) -> None:
        """Check `stats` of the policy's first update: its loss was computed before its optimizer step."""
        if not self.wanted or self._after:
            return
        self._after = True
        ratios = {name: stats[name] for name in ("policy/ratio_max", "policy/ratio_mean") if name in stats}
        limit = math.expm1(TOLERANCE[dtype])
        worst = max(ratios, key=lambda name: abs(ratios[name] - 1), default=None)
        if worst is None or math.isnan(stats.get("policy/ratio_mean", 0.0)):  # no token of the minibatch counts
            return
        if not abs(ratios[worst] - 1) <= limit:
            raise AlignerError(
                f"debug.first_step_checks: {worst}={ratios[worst]:.6g} at the first update: expected 1 within "
                f"{limit:.2g}, because the policy has not moved since its logprobs were computed"
            )

    def after_reward_update(self, stats: ScalarMetrics, expected: float) -> None:
        """Check `stats` of the first update of a reward model with a zero head; expected: mean softplus of the
        margins."""
        if not self.wanted or self._after:
            return
        self._after = True
        for name, wanted in {"rm/loss": expected, "rm/chosen_mean": 0.0, "rm/rejected_mean": 0.0}.items():
            if not abs(stats[name] - wanted) <= LOSS_TOLERANCE:
                raise AlignerError(
                    f"debug.first_step_checks: {name}={stats[name]:.6g} at the first update of a zero score head: "
                    f"expected {wanted:.6g} within {LOSS_TOLERANCE:g}"
                )

    def after_preference_update(self, stats: ScalarMetrics, expected: Mapping[str, float], dtype: torch.dtype) -> None:
        """Check `stats` of the first update by preference losses. `expected` has their values for equal policy and
        reference, by metric."""
        if not self.wanted or self._after:
            return
        self._after = True
        for name, wanted in expected.items():
            limit = PAIR_TOLERANCE[dtype] * max(1.0, abs(wanted))
            if not abs(stats[name] - wanted) <= limit:
                raise AlignerError(
                    f"debug.first_step_checks: {name}={stats[name]:.8g} at the first update: expected {wanted:.8g} "
                    f"within {limit:.2g}, its value where policy and reference are the same. Usual causes: dropout, "
                    "other tokens before or in the answers, positions of packed rows"
                )

    def after_distillation(self, stats: ScalarMetrics, dtype: torch.dtype) -> None:
        """Check `stats` of the first update of a student that starts as its teacher."""
        if not self.wanted or self._after:
            return
        self._after = True
        divergence, limit = stats["distill/divergence"], PAIR_TOLERANCE[dtype]
        if not abs(divergence) <= limit:
            raise AlignerError(
                f"debug.first_step_checks: distill/divergence={divergence:.6g} at the first update of a student that "
                f"is its own teacher: expected 0 within {limit:g}. Usual causes: dropout, positions of packed rows"
            )


def zero_head_loss(pairs: TrainBatch, margin: bool, group: dist.ProcessGroup) -> float:
    """Return the loss of a reward model whose scores are all 0: -logsigma(-margin), averaged over the ranks' pairs;
    ln 2 without margins. Rows 2i are the chosen ones."""
    none = torch.zeros(len(pairs.lengths) // 2, dtype=torch.float64)
    margins = pairs.of(LabelTargets).labels[0::2].double() if margin else none
    each = torch.nn.functional.softplus(margins)
    total, count = sum_over(torch.stack([each.sum(), torch.tensor(float(len(each)), dtype=torch.float64)]), group)
    return float(total / count)


def _differ(what: str, rollout: RolloutBatch, a: Tensor | None, b: Tensor, limit: float) -> str:
    """Return the error of two logprobs [B, T] of the same tokens, "" if they agree."""
    assert a is not None
    if not a.numel():
        return ""
    worst, row, column = worst_token(a, b, rollout.response_mask)
    if worst <= limit:
        return ""
    on = rollout.response_mask.bool()
    kl = float(torch.where(on, b - a, 0.0).sum() / on.sum())
    token = int(rollout.tokens[row, column])
    return (
        f"debug.first_step_checks: {what}, differ by up to {worst:.3g} nats (KL {kl:.3g}): expected at "
        f"most {limit:g}. Worst: prompt slot {int(rollout.group[row])}, token {column} (id {token}): "
        f"{float(a[row, column]):.6g} and {float(b[row, column]):.6g}"
    )
