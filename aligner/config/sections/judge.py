"""An entry of `reward.judges`: a question about answers, and how a reply becomes a score."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from pathlib import Path

from aligner.config.key import IGNORE, Section, key, section
from aligner.config.rule import rules
from aligner.config.sections.servers import EndpointConfig
from aligner.errors import ConfigError

# fields that a question must have
FIELDS = {"grade": ("response",), "pairwise": ("first", "second"), "rubric": ("response", "criterion")}
PATTERNS = {"grade": r"(\d+(?:\.\d+)?)", "pairwise": r"\b([AB])\b", "rubric": r"(?i)\b(yes|no)\b"}
MEMBERS = {"grade": "score", "pairwise": "winner", "rubric": "criteria_met"}  # of a JSON object
RUBRIC_QUESTION = """Read a conversation, a response to it, and one criterion.

Conversation:
{prompt}

Response:
{response}

Criterion:
{criterion}

Does the response meet the criterion? A criterion may describe a fault: then yes means that the response has it. \
Reply with one word, yes or no."""


@dataclass
class JudgeConfig(Section, key="reward.judges[]"):
    name: str = key("judge", "Name in metrics.")
    model: str = key(
        "", "Folder of a frozen judge model with its own tokenizer. Empty: the run's own engine.", resume=IGNORE
    )
    endpoint: EndpointConfig = section(EndpointConfig, resume=IGNORE)
    kind: str = key(
        "grade",
        "Kind of judgement. grade: each response alone; pairwise: two responses to a prompt; rubric: each response by "
        "each criterion in the row's column `rubric`.",
        choices=tuple(FIELDS),
    )
    question: str = key(
        "",
        "Question: a format string over {prompt}, the row's columns, and {response} (rubric: also {criterion}), or "
        "{first} and {second}. Empty with rubric: whether the response meets the criterion.",
    )
    question_file: str = key("", "Text file with the question.", resume=IGNORE)
    weight: float = key(1.0, "Weight in the sum.")
    parse: str = key(
        "regex",
        "Part of the reply that counts. regex: the last match of pattern; json: a member of the last JSON object; "
        "yesno (not pairwise): the last yes or no, a score of 1 or 0.",
        choices=("regex", "json", "yesno"),
    )
    pattern: str = key(
        "",
        "Pattern (regex; empty: a number, pairwise A or B, rubric yes or no), or name of the member (json; empty: "
        "score, pairwise winner, rubric criteria_met, which is true or false).",
    )
    scale: float = key(10.0, "Grade that is a score of 1 (grade). Scores are clamped to [0, 1].", above=0)
    opponents: int = key(
        1, "Number of the group's following responses to compare each one with (pairwise). 0: all.", least=0
    )
    votes: int = key(1, "Replies of an endpoint per question; their mean counts.", least=1)
    max_tokens: int = key(32, "Maximum tokens of a reply.", least=1)

    RULES = rules("""
kind=pairwise => parse =regex|json | with kind {kind}
endpoint.base_url !endpoint.model => endpoint.model | the model's name at {endpoint.base_url}
endpoint.base_url => model = | with reward.judges[].endpoint.base_url
!endpoint.temperature => votes =1
    | without reward.judges[].endpoint.temperature: replies to a question would be equal
question => question_file = | with question
""")

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            groups = re.compile(self.regex).groups
        except re.error as error:
            raise ConfigError("reward.judges[].pattern", self.pattern, "a regular expression", f"{error}.") from None
        if groups != 1:
            raise ConfigError("reward.judges[].pattern", self.pattern, "one group in parentheses: what counts")
        if not self.question_file:
            self.check_question("question", self.text)

    def check_question(self, name: str, text: str) -> None:
        """Check a question. Raises ConfigError."""
        key, shown = f"reward.judges[].{name}", getattr(self, name)
        try:
            fields = {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}
        except ValueError as error:
            raise ConfigError(key, shown, "a format string: {{ and }} for braces", f"{error}.") from None
        if not fields.issuperset(FIELDS[self.kind]):
            expected = f"a text with {' and '.join(f'{{{name}}}' for name in FIELDS[self.kind])} for kind {self.kind}"
            raise ConfigError(key, shown, expected)

    @property
    def regex(self) -> str:
        if self.parse == "yesno":
            return PATTERNS["rubric"]
        return (self.pattern if self.parse == "regex" else "") or PATTERNS[self.kind]

    @property
    def member(self) -> str:
        return self.pattern or MEMBERS[self.kind]

    @property
    def text(self) -> str:
        """The question. Raises ConfigError if its file cannot be read."""
        if not self.question_file:
            return self.question or (RUBRIC_QUESTION if self.kind == "rubric" else "")
        key = "reward.judges[].question_file"
        try:
            text = Path(self.question_file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(key, self.question_file, "a text file that can be read", f"{error}.") from None
        self.check_question("question_file", text)
        return text

    @property
    def own(self) -> bool:
        """Whether the run's own engine replies."""
        return not (self.model or self.endpoint.base_url)
