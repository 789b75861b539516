"""Which forward passes a config needs."""

from __future__ import annotations

from aligner.config.schema import Config


def old_logprobs_in_update(cfg: Config) -> bool:
    """Whether the policy's update itself gives the logprobs before it (`algorithm.old_logprobs`): it is the only
    optimizer step of its rollout, so they are what its own forward pass finds, and nothing asks for them earlier."""
    a, b = cfg.algorithm, cfg.batch
    one_step = b.epochs == 1 and b.minibatch_samples in (0, b.prompts * b.group)
    asked_earlier = (
        cfg.mismatch.methods != ["none"]
        or cfg.mismatch.stop_above > 0
        or (a.kl.coef > 0 and a.kl.placement == "reward")
        or a.policy_loss in ("clip_cov", "kl_cov")
        or cfg.debug.first_step_checks
        or cfg.debug.rollout_only
    )
    return cfg.stage.name == "grpo" and a.old_logprobs == "auto" and one_step and not asked_earlier
