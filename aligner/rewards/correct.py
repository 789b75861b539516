"""Correct answers, by the scores of reward functions."""

from __future__ import annotations

import math
from collections.abc import Mapping

from aligner.rewards.composite import Component, RewardPipeline


def correct_answers(components: Mapping[str, Component], full_score: float, rewards: RewardPipeline) -> list[bool]:
    """Return whether each answer has full score from every function that applies and can give it.

    `components`: the functions' scores, without those of models.
    """
    able = able_to_give(full_score, rewards)
    columns = [components[name] for name in able if name in components] or list(components.values())
    least = full_score - 1e-6
    known = ([value for value in values if value is not None] for values in zip(*columns, strict=True))
    return [bool(values) and all(value >= least for value in values) for values in known]


def able_to_give(full_score: float, rewards: RewardPipeline) -> list[str]:
    """Return the functions whose `best_score`, where they name one, is not below `full_score`.

    A penalty, for one, does not recognise correct answers.
    """
    return [r.name for r, _ in rewards.rewards if getattr(r, "best_score", math.inf) >= full_score - 1e-6]
