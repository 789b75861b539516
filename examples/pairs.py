"""Preference pairs for the quick start: right answers, against the model's own wrong ones and changed digits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from aligner.tools.generate import Answerer
from aligner.types import Prompt, SamplingParams

PAIRS = 4  # of a question
SAMPLES = 3  # answers drawn for them
TEMPERATURE = 1.2


def change_digit(answer: str, rng: random.Random) -> str:
    """Return `answer` with one of its digits replaced by another; never a leading zero that the answer did not have."""
    places = [i for i, c in enumerate(answer) if c.isdigit()]
    position = rng.choice(places)
    leading = position == places[0] and len(places) > 1
    digits = [d for d in "0123456789" if d != answer[position] and not (leading and d == "0")]
    return answer[:position] + rng.choice(digits) + answer[position + 1 :]


def make_pairs(
    model: Answerer, rows: Sequence[dict[str, Any]], max_response_tokens: int, seed: int
) -> list[dict[str, str]]:
    """Return {prompt, chosen, rejected} rows, PAIRS for each row of {prompt, answer}, in random order.

    Rejected are the different wrong ones among SAMPLES answers of the model; the rest are right answers with a digit
    changed, so that every pair has a definite order."""
    rng = random.Random(seed)
    ids = model.tokenizer([row["prompt"] for row in rows], add_special_tokens=False).input_ids
    prompts = [Prompt(i, tuple(tokens), row["prompt"]) for i, (tokens, row) in enumerate(zip(ids, rows, strict=True))]
    samples = model.answer(prompts, SAMPLES, SamplingParams(max_response_tokens, TEMPERATURE), seed)
    pairs = []
    for i, row in enumerate(rows):
        answers = (sample.response.strip() for sample in samples[i * SAMPLES : (i + 1) * SAMPLES])
        wrong = list(dict.fromkeys(answer for answer in answers if answer != row["answer"]))
        while len(wrong) < PAIRS:
            changed = change_digit(row["answer"], rng)
            if changed not in wrong:
                wrong.append(changed)
        pairs += [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": answer} for answer in wrong]
    rng.shuffle(pairs)
    return pairs
