"""Measures of several answers to one prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from math import comb


def pass_at(k: int, samples: int, correct: int) -> float:
    """Return the chance that k of the samples, drawn without replacement, hold a correct one: 1 - C(n - c, k) / C(n,
    k), the unbiased estimate of pass@k (Chen et al. 2021, arXiv:2107.03374)."""
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def majority(answers: Sequence[Hashable], correct: Sequence[bool]) -> float:
    """Return the share of correct samples among those with the most frequent answer (self-consistency, Wang et al.
    2022, arXiv:2203.11171). Answers that are equally frequent count equally."""
    votes = defaultdict(list)
    for answer, right in zip(answers, correct, strict=True):
        votes[answer].append(right)
    most = max(map(len, votes.values()))
    winners = [rights for rights in votes.values() if len(rights) == most]
    return sum(map(sum, winners)) / (most * len(winners))
