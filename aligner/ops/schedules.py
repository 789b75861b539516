"""Learning-rate schedules, as pure functions of the step."""

from __future__ import annotations

import math

from aligner.config.sections.optim import OptimConfig


def lr_at(step: int, cfg: OptimConfig, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based) out of `total_steps`.

    Warm-up: lr * (step + 1) / w while step < w = warmup_steps, or below 1 that fraction of total_steps, rounded up.
    Then lr until decay_from * total_steps (or the end of warm-up, if later), then linear or cosine decay that reaches
    min_lr at total_steps and stays there. `constant` never decays.
    """
    warmup = cfg.warmup_steps if cfg.warmup_steps >= 1 else math.ceil(cfg.warmup_steps * total_steps)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    start = max(float(warmup), cfg.decay_from * total_steps)
    if cfg.schedule == "constant" or step < start:
        return cfg.lr
    if step >= total_steps:
        return cfg.min_lr
    progress = (step - start) / (total_steps - start)
    if cfg.schedule == "linear":
        left = 1.0 - progress
    else:
        assert cfg.schedule == "cosine", f"schedule {cfg.schedule!r}"
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * left
