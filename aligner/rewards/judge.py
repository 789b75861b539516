"""A language model as a reward: it answers questions about responses, and its replies become scores.

`ask` returns the replies, from an engine (`rollout/replies.py`) or a server (`rewards/endpoint.py`). Nothing here
generates.
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
from aligner.rewards.rubric import criteria, rubric_score, unreadable_rubrics
from aligner.types import Prompt, Sample


class Question(NamedTuple):
    text: str
    key: str = ""  # of its samples; empty: they belong to no rollout
    vote: int = 0  # number of this reply among the replies to the question


LAST = 1 << 15  # characters at a reply's end that are read, where the grade stands
NUMBER = r"-?\d+(\.\d+)?([eE]-?\d+)?"  # of a JSON object
VERDICTS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}  # on a criterion
Reply = str | None | RequestFailed  # None: no reply
Ask = Callable[[Sequence[Question], int], list[Reply]]  # (questions, most tokens of a reply) -> a reply to each


class Judge:
    """A reward by grades or by comparisons.

    `grade`: the last number / scale, within [0, 1]; no number: no score.

    `pairwise`: 1, 1/2 or 0 for each comparison of two responses of a group, and their mean. Both orders are asked. If
    they disagree, or one cannot be read, it is a tie, so a preference for a position gains nothing. Failed requests are
    left out; if all failed, NaN.

    `rubric`: `rubric_score` of the answers to one question for each criterion of the row. A criterion without an
    answer leaves the response without a score.
    """

    main_thread: ClassVar[bool] = True  # the ranks that share an engine ask together

    def __init__(self, config: JudgeConfig, ask: Ask):
        self.config, self.ask, self.name, self.text = config, ask, config.name, config.text
        self.checks_rows = config.kind == "rubric"
        self._unread, self._asked = 0.0, 0.0
        self._met, self._judged = 0.0, 0.0

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        by_kind = {"grade": self._grades, "pairwise": self._comparisons, "rubric": self._rubrics}
        return by_kind[self.config.kind](samples)

    def unreadable(self, prompts: Sequence[Prompt]) -> dict[int, str]:
        """Return by index why rows have no rubric."""
        return unreadable_rubrics(prompts)

    def take_counts(self) -> dict[str, tuple[float, float]]:
        """Return unread -> (replies without a grade, questions) since the last call; of a rubric also met -> (criteria
        met, criteria with an answer)."""
        counts = {"unread": (self._unread, self._asked)}
        if self.config.kind == "rubric":
            counts["met"] = (self._met, self._judged)
        self._unread, self._asked, self._met, self._judged = 0.0, 0.0, 0.0, 0.0
        return counts

    def _grades(self, samples: Sequence[Sample]) -> list[float | None]:
        asked = [self._question([sample], response=sample.response) for sample in samples]
        return [_mean([self._grade(text) for text in votes]) for votes in self._replies(asked)]

    def _rubrics(self, samples: Sequence[Sample]) -> list[float | None]:
        rubrics = [criteria(sample.prompt.fields) or [] for sample in samples]
        asked = [
            self._question([sample], response=sample.response, criterion=criterion.text)
            for sample, rubric in zip(samples, rubrics, strict=True)
            for criterion in rubric
        ]
        answers = iter([_mean([self._grade(text) for text in votes]) for votes in self._replies(asked)])
        scores = []
        for rubric in rubrics:
            met = [next(answers) for _ in rubric]
            known = [one for one in met if one is not None and not math.isnan(one)]
            self._met += math.fsum(known)
            self._judged += len(known)
            scores.append(rubric_score(rubric, met))
        return scores

    def _grade(self, text: Reply) -> float | None:
        if text is None or isinstance(text, RequestFailed):
            return None if text is None else math.nan
        yes_or_no = self.config.parse == "yesno" or self.config.kind == "rubric"
        try:
            return VERDICTS[text.lower()] if yes_or_no else min(max(float(text) / self.config.scale, 0.0), 1.0)
        except (ValueError, KeyError):
            expected = f"a pattern that matches {'yes or no' if yes_or_no else 'numbers'}, found {text!r}"
            raise RewardError(f"reward.judges[].pattern={self.config.pattern!r}: expected {expected}") from None

    def _comparisons(self, samples: Sequence[Sample]) -> list[float | None]:
        pairs = self._pairs(samples)
        replies = self._replies(
            [
                self._question([samples[a], samples[b]], first=samples[a].response, second=samples[b].response)
                for pair in pairs
                for a, b in (pair, pair[::-1])
            ]
        )
        points: list[list[float | None]] = [[] for _ in samples]
        for (a, b), first, second in zip(pairs, replies[0::2], replies[1::2], strict=True):
            for one, other in zip(first, second, strict=True):
                won = 1.0 if (one, other) == ("A", "B") else 0.0 if (one, other) == ("B", "A") else 0.5
                won = math.nan if isinstance(one, RequestFailed) or isinstance(other, RequestFailed) else won
                points[a].append(won)
                points[b].append(1.0 - won)
        return [_mean(each) for each in points]

    def _pairs(self, samples: Sequence[Sample]) -> list[tuple[int, int]]:
        """Return the indices of two samples of a group, each pair once."""
        places = [(sample.prompt.id, sample.index) for sample in samples]
        starts = [i for i in range(len(samples)) if not i or places[i - 1][0] != places[i][0] or not places[i][1]]
        pairs: dict[tuple[int, int], None] = {}
        for start, stop in zip(starts, [*starts[1:], len(samples)], strict=True):
            size = stop - start
            for i in range(size):
                for k in range(1, (self.config.opponents or size - 1) + 1):
                    a, b = start + i, start + (i + k) % size
                    if a != b and (b, a) not in pairs:
                        pairs[a, b] = None
        return list(pairs)

    def _replies(self, questions: Sequence[Question]) -> list[list[Reply]]:
        """Return by question the grade in each reply; None: no grade."""
        votes = self.config.votes
        asked = [question._replace(vote=vote) for question in questions for vote in range(votes)]
        replies = self.ask(asked, self.config.max_tokens)
        grades = [self._read(reply) if isinstance(reply, str) else reply for reply in replies]
        self._unread += grades.count(None)
        self._asked += len(grades)
        return [grades[i : i + votes] for i in range(0, len(grades), votes)]

    def _read(self, reply: str) -> str | None:
        reply = reply[-LAST:]
        if self.config.parse != "json":
            return next(reversed(re.findall(self.config.regex, reply)), None)
        values = [members[self.config.member] for members in _objects(reply) if self.config.member in members]
        text = str(values[-1]).strip() if values else ""
        if self.config.kind == "pairwise":
            return text if text in ("A", "B") else None
        if self.config.kind == "rubric":
            return text if text.lower() in VERDICTS else None
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
    """Return a prompt as a question shows it: its text, or its conversation with the roles."""
    if prompt.messages is None:
        return prompt.text
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt.messages)


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the numbers. Without numbers: NaN if any is NaN, else None."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    if known:
        return sum(known) / len(known)
    return math.nan if any(value is not None for value in values) else None


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a text."""
    start = text.find("{")
    while start >= 0:
        try:
            members, end = json.JSONDecoder().raw_decode(text, start)
            yield members
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
