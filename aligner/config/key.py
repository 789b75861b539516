"""Keys of the config. Each declares its own facts: default, meaning, values, the effect of a new value on a resumed
run, whether stored rollouts depend on it, and which stages read it.

Validation, docs/reference/keys.md, the board's form, the identity check of a resume, the rollout key and the refusal of
unread keys are derived from this.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import Field, dataclass, field, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from aligner.config.checks import AUTO
from aligner.config.rule import Rule, value_of
from aligner.errors import ConfigError
from aligner.user_code import is_path, is_source

# what a new value means for a run that resumes from a checkpoint
REFUSE = "refuse"  # unless run.accept_changes
REPORT = "report"  # taken over, in one line
IGNORE = "ignore"  # taken over, unmentioned


FUNCTION = "module:function, path.py:function"


@dataclass(frozen=True)
class Facts:
    """Facts of a key, or of a section for all its keys. None and "" mean: as the section around it."""

    meaning: str = ""
    choices: tuple[Any, ...] = ()  # of a text, or of each element of a list
    function: bool = False  # besides the choices, the path of a function
    named: str = ""  # besides the choices, the path of an object of this class
    file: bool = False  # besides the choices, a Python file or module (`is_source`)
    joined: str = ""  # separator of several choices in one text
    least: float | None = None  # of a number, or of each element of a list
    most: float | None = None
    above: float | None = None
    below: float | None = None
    off: float | None = None  # a number outside the bounds that is valid as well
    entries: tuple[str, ...] = ()  # of a mapping; the bounds are of their values
    auto: bool = False  # "auto", or an integer within the bounds; without bounds true or false
    valid: tuple[Callable[[Any], bool], str] | None = None  # a further check, and what it expects
    resume: str = ""  # REFUSE, REPORT, IGNORE
    rollouts: bool | None = None  # whether stored rollouts depend on it
    read_for: tuple[str, ...] | None = None  # stages with one of these purposes read it; (): all do
    like: str = ""  # of a section: another one with the same keys; these facts then override those of its keys

    def within(self, around: Facts) -> Facts:
        """Return these facts, completed by those of the section around."""
        return replace(
            self,
            resume=self.resume or around.resume,
            rollouts=around.rollouts if self.rollouts is None else self.rollouts,
            read_for=around.read_for if self.read_for is None or around.like else self.read_for,
            like=self.like or around.like,
        )

    @property
    def range(self) -> str:
        """Bounds as `>= 0` or `in (0, 1]`; empty without bounds."""
        low = self.least if self.above is None else self.above
        high = self.most if self.below is None else self.below
        if high is None:
            return "" if low is None else f"{'>=' if self.above is None else '>'} {low}"
        return f"in {'[' if self.above is None else '('}{low}, {high}{']' if self.below is None else ')'}"

    @property
    def expected(self) -> str:
        """Expected form of a single value."""
        if self.choices:
            others = ["or " + FUNCTION] * self.function + ["or path.py"] * self.file
            others += [f"or module:{self.named}, path.py:{self.named}"] * bool(self.named)
            return ", ".join(["one of " + ", ".join(map(str, self.choices)), *others])
        if self.auto:
            return f"auto, or an integer {self.range}" if self.range else "auto, true or false"
        return f"a number {self.range}" + (f", or {self.off} for off" if self.off is not None else "")

    def check(self, key: str, value: Any) -> None:
        """Check a value. Raises ConfigError."""
        if self.entries:
            for name, one in value.items():
                if name not in self.entries:
                    raise ConfigError(f"{key}.{name}", one, f"one of the entries {', '.join(self.entries)}")
                replace(self, entries=()).check(f"{key}.{name}", one)
            return
        parts = [text.strip() for text in value.split(self.joined)] if self.joined else value
        for element in parts if isinstance(parts, list) and not self.auto else (parts,):
            if not self._fits(element):
                raise ConfigError(key, element, self.expected)
        if self.valid and not self.valid[0](value):
            raise ConfigError(key, value, self.valid[1])

    def _fits(self, value: Any) -> bool:
        if self.choices:
            by_path = ((self.function or self.named) and is_path(value)) or (self.file and is_source(value))
            return value in self.choices or by_path
        if self.auto and type(value) is not (int if self.range else bool):  # True is no count
            return value == AUTO
        return value == self.off or all(
            (
                self.least is None or value >= self.least,
                self.above is None or value > self.above,
                self.most is None or value <= self.most,
                self.below is None or value < self.below,
            )
        )


def key(default: Any, meaning: str, **facts: Any) -> Any:
    """Return a field of a section; `facts` are those of `Facts`. Lists and mappings are copied for each section."""
    metadata = {"facts": Facts(meaning, **facts)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, **facts: Any) -> Any:
    """Return a field that is a section, with the facts that its keys share."""
    return field(default_factory=kind, metadata={"facts": Facts(**facts)})


def facts_of(f: Field) -> Facts:
    return f.metadata.get("facts", Facts())


class Section:
    """Base of the dataclasses of the schema. It checks each value when a section is made, then the rules between its
    keys, whose names are within the section."""

    # without annotations, which would make them keys
    KEY = ""  # dotted
    RULES = tuple[Rule, ...]()
    WORDS = MappingProxyType[str, str]({})  # property -> its name in messages

    def __init_subclass__(cls, key: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.KEY = key or cls.KEY

    def __post_init__(self) -> None:
        """Check the section. Raises ConfigError."""
        for f in fields(self):
            facts, value = facts_of(f), getattr(self, f.name)
            if facts.auto and isinstance(value, str):  # an interpolation gives texts
                plain = {"true": True, "false": False}.get(value.lower(), value)
                setattr(self, f.name, value := int(value) if value.isdecimal() else plain)
            facts.check(self._full(f.name), value)
        for rule in self.RULES:
            rule.check(partial(value_of, self), self.WORDS, self._full)

    def _full(self, name: str) -> str:
        return f"{self.KEY}.{name}" if self.KEY else name
