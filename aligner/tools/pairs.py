"""Preference pairs for the quick start: right answers, against the model's own wrong ones and changed digits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from aligner.tools.generate import Answerer
from aligner.types import Prompt, SamplingParams

TEMPERATURES = (1.0, 1.0, 1.5)  # one sampled negative each; a last one is the right answer with one digit changed


def change_digit(answer: str, rng: random.Random) -> str:
    """`answer` with one of its digits replaced by another; never a leading zero that the answer did not have."""
    places = [i for i, c in enumerate(answer) if c.isdigit()]
    place = rng.choice(places)
    leading = place == places[0] and len(places) > 1
    digits = [d for d in "0123456789" if d != answer[place] and not (leading and d == "0")]
    return answer[:place] + rng.choice(digits) + answer[place + 1 :]


def make_pairs(
    model: Answerer, rows: Sequence[dict[str, Any]], max_response_tokens: int, seed: int
) -> list[dict[str, str]]:
    """{prompt, chosen, rejected} rows, len(TEMPERATURES) + 1 for each row of {prompt, answer}, in random order.

    A sampled answer that is right becomes a wrong one by changing a digit, so that every pair has a definite order.
    """
    rng = random.Random(seed)
    ids = model.tokenizer([row["prompt"] for row in rows], add_special_tokens=False).input_ids
    prompts = [Prompt(i, tuple(tokens), row["prompt"]) for i, (tokens, row) in enumerate(zip(ids, rows, strict=True))]
    pairs = []
    for draw, temperature in enumerate(TEMPERATURES):
        sampling = SamplingParams(max_response_tokens, temperature)
        for row, sample in zip(rows, model.answer(prompts, 1, sampling, seed + draw), strict=True):
            wrong = sample.response.strip()
            pairs.append(_pair(row, wrong if wrong != row["answer"] else change_digit(row["answer"], rng)))
    pairs += [_pair(row, change_digit(row["answer"], rng)) for row in rows]
    rng.shuffle(pairs)
    return pairs


def _pair(row: dict[str, Any], rejected: str) -> dict[str, str]:
    return {"prompt": row["prompt"], "chosen": row["answer"], "rejected": rejected}
