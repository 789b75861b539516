"""A language model as a reward: it is asked about answers, and its replies become scores.

`ask` replies to questions, whoever does so: an engine (`rollout/replies.py`), or a server (`rewards/endpoint.py`).
Nothing here generates.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from aligner.config.sections.judge import JudgeConfig
from aligner.errors import RewardError
from aligner.rewards.base import describe
from aligner.rewards.client import RequestFailed, item_key
from aligner.types import Prompt, Sample


class Question(NamedTuple):
    text: str
    key: str = ""  # of the samples that it is about; empty: of no rollout
    vote: int = 0  # which of the replies to it


LAST = 1 << 15  # characters of a reply that are read, from its end, where what counts stands
NUMBER = r"-?\d+(\.\d+)?([eE]-?\d+)?"  # of a JSON object
Reply = str | None | RequestFailed  # None: it could not be asked
Ask = Callable[[Sequence[Question], int], list[Reply]]  # (questions, tokens of a reply at most) -> a reply to each


class Judge:
    """`grade`: the number that counts / scale, within [0, 1]; no number: no score. `pairwise`: 1, 1/2 or 0 of each
    comparison of two responses of a group, and their mean. Both orders are asked: if they disagree, or one is not read,
    it is a tie, so that liking a place gains nothing. What failed is left out; where nothing is left, NaN."""

    main_thread: ClassVar[bool] = True  # the ranks that share an engine ask together

    def __init__(self, config: JudgeConfig, ask: Ask):
        self.config, self.ask, self.name, self.text = config, ask, config.name, config.text
        self._unread, self._asked = 0.0, 0.0

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        return self._grades(samples) if self.config.kind == "grade" else self._comparisons(samples)

    def take_counts(self) -> dict[str, tuple[float, float]]:
        """unread -> (replies that said nothing, questions) since the last call."""
        found = {"unread": (self._unread, self._asked)}
        self._unread, self._asked = 0.0, 0.0
        return found

    def _grades(self, samples: Sequence[Sample]) -> list[float | None]:
        asked = [self._question([sample], response=sample.response) for sample in samples]
        return [_mean([self._grade(text) for text in votes]) for votes in self._replies(asked)]

    def _grade(self, text: Reply) -> float | None:
        if text is None or isinstance(text, RequestFailed):
            return None if text is None else math.nan
        if self.config.parse == "yesno":
            return float(text.lower() == "yes")
        try:
            return min(max(float(text) / self.config.scale, 0.0), 1.0)
        except ValueError:
            expected = f"a pattern that matches numbers, found {text!r}"
            raise RewardError(f"reward.judges[].pattern={self.config.pattern!r}: expected {expected}") from None

    def _comparisons(self, samples: Sequence[Sample]) -> list[float | None]:
        pairs = self._pairs(samples)
        found = self._replies(
            [
                self._question([samples[a], samples[b]], first=samples[a].response, second=samples[b].response)
                for pair in pairs
                for a, b in (pair, pair[::-1])
            ]
        )
        points: list[list[float | None]] = [[] for _ in samples]
        for (a, b), first, second in zip(pairs, found[0::2], found[1::2], strict=True):
            for one, other in zip(first, second, strict=True):
                won = 1.0 if (one, other) == ("A", "B") else 0.0 if (one, other) == ("B", "A") else 0.5
                won = math.nan if isinstance(one, RequestFailed) or isinstance(other, RequestFailed) else won
                points[a].append(won)
                points[b].append(1.0 - won)
        return [_mean(each) for each in points]

    def _pairs(self, samples: Sequence[Sample]) -> list[tuple[int, int]]:
        """Places of two samples of a group, each two once."""
        places = [(sample.prompt.id, sample.index) for sample in samples]
        starts = [i for i in range(len(samples)) if not i or places[i - 1][0] != places[i][0] or not places[i][1]]
        found: dict[tuple[int, int], None] = {}
        for start, stop in zip(starts, [*starts[1:], len(samples)], strict=True):
            size = stop - start
            for i in range(size):
                for k in range(1, (self.config.opponents or size - 1) + 1):
                    a, b = start + i, start + (i + k) % size
                    if a != b and (b, a) not in found:
                        found[a, b] = None
        return list(found)

    def _replies(self, questions: Sequence[Question]) -> list[list[Reply]]:
        """What counts of each reply to each; None: nothing."""
        votes = self.config.votes
        asked = [question._replace(vote=vote) for question in questions for vote in range(votes)]
        replies = self.ask(asked, self.config.max_tokens)
        found = [self._read(reply) if isinstance(reply, str) else reply for reply in replies]
        self._unread += found.count(None)
        self._asked += len(found)
        return [found[i : i + votes] for i in range(0, len(found), votes)]

    def _read(self, reply: str) -> str | None:
        reply = reply[-LAST:]
        if self.config.parse != "json":
            return next(reversed(re.findall(self.config.regex, reply)), None)
        values = [found[self.config.member] for found in _objects(reply) if self.config.member in found]
        text = str(values[-1]).strip() if values else ""
        if self.config.kind == "pairwise":
            return text if text in ("A", "B") else None
        return text if re.fullmatch(NUMBER, text) else None

    def _question(self, about: Sequence[Sample], **texts: str) -> Question:
        sample = about[0]
        try:
            text = self.text.format(**{**sample.prompt.fields, "prompt": asked(sample.prompt), **texts})
            return Question(text, item_key(*about))
        except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
            known = ", ".join(["prompt", *texts, *sample.prompt.fields])
            raise RewardError(
                f"reward.judges[].question={self.text!r}: expected a format string over {known} "
                f"({type(error).__name__}: {error}) for {describe(sample)}"
            ) from error


def asked(prompt: Prompt) -> str:
    """A prompt in a question: its text, or who says what in its conversation."""
    if prompt.messages is None:
        return prompt.text
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt.messages)


def _mean(values: Sequence[float | None]) -> float | None:
    """Of those that are there; NaN where there are none, and not all for want of a number."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    if known:
        return sum(known) / len(known)
    return math.nan if any(value is not None for value in values) else None


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in a text."""
    start = text.find("{")
    while start >= 0:
        try:
            found, end = json.JSONDecoder().raw_decode(text, start)
            yield found
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
