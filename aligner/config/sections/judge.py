"""An entry of `reward.judges`: a question about answers, and how what is said to it becomes a score."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass

from aligner.config.checks import above, at_least, one_of
from aligner.errors import ConfigError

FIELDS = {"grade": ("response",), "pairwise": ("first", "second")}  # that a question must have
PATTERNS = {"grade": r"(\d+(?:\.\d+)?)", "pairwise": r"\b([AB])\b"}


@dataclass
class JudgeConfig:
    name: str = "judge"  # in metrics
    model: str = ""  # folder of the model that is asked, frozen, with its own tokenizer; empty: the run's own engine
    kind: str = "grade"  # grade: each response for itself; pairwise: the responses to a prompt against each other
    # the question: a format string over {prompt}, the row's columns, and {response}, or {first} and {second}
    question: str = ""
    weight: float = 1.0  # in the sum
    # what of the reply counts, its last match: a number, or A or B; empty: a number (grade), or A or B (pairwise)
    pattern: str = ""
    scale: float = 10.0  # grade: the number that is a score of 1; scores are held within 0 and 1
    opponents: int = 1  # pairwise: each response is compared with so many that follow it in its group; 0: with all
    max_tokens: int = 32  # of a reply

    def __post_init__(self) -> None:
        one_of("reward.judges[].kind", self.kind, tuple(FIELDS))
        above("reward.judges[].scale", self.scale, 0)
        at_least("reward.judges[].opponents", self.opponents, 0)
        at_least("reward.judges[].max_tokens", self.max_tokens, 1)
        try:
            fields = {name for _, name, _, _ in string.Formatter().parse(self.question) if name is not None}
            groups = re.compile(self.regex).groups
        except (ValueError, re.error) as error:
            key = "pattern" if isinstance(error, re.error) else "question"
            expected = "a regular expression" if key == "pattern" else "a format string: {{ and }} for braces"
            raise ConfigError(f"reward.judges[].{key}", getattr(self, key), expected, f"{error}.") from None
        if not fields.issuperset(FIELDS[self.kind]):
            expected = f"a text with {' and '.join(f'{{{name}}}' for name in FIELDS[self.kind])} for kind {self.kind}"
            raise ConfigError("reward.judges[].question", self.question, expected)
        if groups != 1:
            raise ConfigError("reward.judges[].pattern", self.pattern, "one group in parentheses: what counts")

    @property
    def regex(self) -> str:
        return self.pattern or PATTERNS[self.kind]
