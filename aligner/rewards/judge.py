"""A language model as a reward: it is asked about answers, and its replies become scores.

`ask` replies to questions, whoever does so: the run's own engine (`rollout/replies.py`); a judge somewhere else is
another function of the same kind. Nothing here generates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import ClassVar

from aligner.config.sections.judge import JudgeConfig
from aligner.errors import RewardError
from aligner.rewards.base import describe
from aligner.types import Prompt, Sample

# (questions, tokens of a reply at most) -> a reply to each, None where it could not be asked
Ask = Callable[[Sequence[str], int], list[str | None]]


class Judge:
    """Of a reply the last match of `pattern` counts. `grade`: the number / scale, within [0, 1]; no number: no score.
    `pairwise`: 1, 1/2 or 0 of each comparison of two responses of a group, and their mean. Both orders are asked:
    if they disagree, or one is not read, it is a tie, so that liking a place gains nothing."""

    main_thread: ClassVar[bool] = True  # the ranks that share an engine ask together

    def __init__(self, config: JudgeConfig, ask: Ask):
        self.config, self.ask, self.name = config, ask, config.name
        self._unread, self._asked = 0.0, 0.0

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        return self._grades(samples) if self.config.kind == "grade" else self._comparisons(samples)

    def take_counts(self) -> dict[str, tuple[float, float]]:
        """unread -> (replies that said nothing, questions) since the last call."""
        found = {"unread": (self._unread, self._asked)}
        self._unread, self._asked = 0.0, 0.0
        return found

    def _grades(self, samples: Sequence[Sample]) -> list[float | None]:
        found = self._replies([self._question(sample, response=sample.response) for sample in samples])
        scores: list[float | None] = []
        for text in found:
            try:
                scores.append(None if text is None else min(max(float(text) / self.config.scale, 0.0), 1.0))
            except ValueError:
                expected = f"a pattern that matches numbers, found {text!r}"
                raise RewardError(f"reward.judges[].pattern={self.config.pattern!r}: expected {expected}") from None
        return scores

    def _comparisons(self, samples: Sequence[Sample]) -> list[float | None]:
        pairs = self._pairs(samples)
        orders = [order for a, b in pairs for order in ((a, b), (b, a))]
        found = self._replies(
            [self._question(samples[a], first=samples[a].response, second=samples[b].response) for a, b in orders]
        )
        points: list[list[float]] = [[] for _ in samples]
        for (a, b), one, other in zip(pairs, found[0::2], found[1::2], strict=True):
            won = 1.0 if (one, other) == ("A", "B") else 0.0 if (one, other) == ("B", "A") else 0.5
            points[a].append(won)
            points[b].append(1.0 - won)
        return [sum(each) / len(each) if each else None for each in points]

    def _pairs(self, samples: Sequence[Sample]) -> list[tuple[int, int]]:
        """Places of two samples of a group, each two once."""
        starts = [i for i, sample in enumerate(samples) if sample.index == 0]
        found: dict[tuple[int, int], None] = {}
        for start, stop in zip(starts, [*starts[1:], len(samples)], strict=True):
            size = stop - start
            for i in range(size):
                for k in range(1, (self.config.opponents or size - 1) + 1):
                    a, b = start + i, start + (i + k) % size
                    if a != b and (b, a) not in found:
                        found[a, b] = None
        return list(found)

    def _replies(self, questions: list[str]) -> list[str | None]:
        """What counts of the reply to each; None: nothing."""
        found: list[str | None] = []
        for reply in self.ask(questions, self.config.max_tokens):
            matches = re.findall(self.config.regex, reply) if reply is not None else []
            found.append(matches[-1] if matches else None)
        self._unread += found.count(None)
        self._asked += len(found)
        return found

    def _question(self, sample: Sample, **texts: str) -> str:
        try:
            return self.config.question.format(**{**sample.prompt.fields, "prompt": asked(sample.prompt), **texts})
        except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
            known = ", ".join(["prompt", *texts, *sample.prompt.fields])
            raise RewardError(
                f"reward.judges[].question={self.config.question!r}: expected a format string over {known} "
                f"({type(error).__name__}: {error}) for {describe(sample)}"
            ) from error


def asked(prompt: Prompt) -> str:
    """A prompt in a question: its text, or who says what in its conversation."""
    if prompt.messages is None:
        return prompt.text
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt.messages)
