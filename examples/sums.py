"""The quick start's task: adding and subtracting two numbers of two digits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from aligner.types import Sample

NUMBERS = (10, 99)
QUESTION = "State the final answer to the following arithmetic problem: {} {} {} ="


def questions(size: int, seed: int) -> list[dict[str, str]]:
    """Return rows {prompt, answer} of `size` (at most 16,200) different questions, which depend only on `seed`.

    The draws are those of reasoning-gym's `chain_sum` for two terms of two digits, so its rows are these."""
    rows: dict[str, str] = {}
    while len(rows) < size:
        draw = random.Random(seed)
        draw.randint(2, 2), draw.randint(2, 2)  # it draws how many terms and digits, too
        first, second = draw.randint(*NUMBERS), draw.randint(*NUMBERS)
        sign = draw.choice("+-")
        rows.setdefault(QUESTION.format(first, sign, second), str(first + second if sign == "+" else first - second))
        seed += 1
    return [{"prompt": prompt, "answer": answer} for prompt, answer in rows.items()]


def score(samples: Sequence[Sample]) -> list[float]:
    """Score 1 for the row's number; for a text that has its digits among others, their share of the text; else 0."""
    return [_score(sample.response.strip(), sample.prompt.fields["answer"]) for sample in samples]


def _score(response: str, answer: str) -> float:
    try:
        if Decimal(response) == Decimal(answer):
            return 1.0
    except InvalidOperation:
        pass
    return len(answer) / len(response) if answer in response else 0.0
