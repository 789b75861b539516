"""Rules between keys, as a table of text: `CONDITION => KEY REQUIREMENT | reason | hint`.

Where the condition holds, each key (several with commas) must meet the requirement. Otherwise an error names key and
value, and expects the requirement in words and the reason. A condition is terms separated by spaces, or alternatives
of such with `or`:

    engine.lag                  on: not 0, false or empty          !engine.lag       off
    engine.name=native|vllm     one of these, `=` alone: empty     engine.name!=vllm none of these
    batch.group>1               than a number, or another key      also <, <=, >=, and == another key
    model.num_heads%parallel.tensor    a multiple                  batch.a/batch.b   a divisor
    mismatch.methods~veto|icepop       a list with one of these    !a.b~x            with none

A requirement is the end of such a term, or `off`; without one the condition itself is refused. Names are dotted keys,
properties of sections, or names that the checker's `look` resolves. In reasons `{name}` is a value, `{name=}` name
and value, and `{~}` those of the first `~` that are present.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from aligner.errors import ConfigError, LayoutError

Look = Callable[[str], Any]  # name -> value
_TERM = re.compile(r"(?P<off>!?)(?P<name>@?[\w.\[\] ]+?)(?:(?P<how>!=|<=|>=|==|[=<>~%/])(?P<right>\S*))?")
_WORDS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "a number >", "%": "a multiple of"}
_WORDS |= {"/": "a divisor of", "!=": "another than", "==": ""}
_OFF = "off"
_FILLED = re.compile(r"\{([\w.]+)(=?)\}")


@dataclass(frozen=True)
class Rule:
    when: tuple[str, ...]  # alternatives
    key: str
    must: str
    reason: str
    hint: str = ""

    def check(self, look: Look, words: Mapping[str, str], full: Callable[[str], str]) -> None:
        """Check the rule. Raises ConfigError, or LayoutError for keys that divide ranks. `words`: the name in a
        message of a number that is no key; `full`: a name -> the key that it comes from."""
        if any(all(holds(term, look) for term in terms.split()) for terms in self.when) and not self._kept(look):
            expected = _filled(self._demand(words, full) + self._reason(look), look)
            kind = LayoutError if self._of_ranks else ConfigError
            raise kind(full(self.key), look(self.key), expected.strip(), self.hint)

    @property
    def names(self) -> list[str]:
        """The names that it looks up."""
        ends = [f"{self.key}{self.must}"] if self.must not in ("", _OFF) else [self.key]
        terms = [_term(term) for term in (*(term for terms in self.when for term in terms.split()), *ends)]
        right = [right for _, _, how, right in terms if how not in ("", "=", "!=", "~") and _number(right) is None]
        return [*(name for _, name, *_ in terms), *right, *(match[1] for match in _FILLED.finditer(self.reason))]

    def _kept(self, look: Look) -> bool:
        return bool(self.must) and (not look(self.key) if self.must == _OFF else _compare(self.key, self.must, look))

    @property
    def _of_ranks(self) -> bool:
        return self.key.startswith("parallel.") or bool(re.match(r"\W+(ranks|parallel|engine.tensor)", self.must))

    def _demand(self, words: Mapping[str, str], full: Callable[[str], str]) -> str:
        """Return the requirement for people: "at most model.max_position={model.max_position}"."""
        if not self.must or self.must == _OFF:
            return self.must
        _, _, how, right = _term(f"key{self.must}")
        if how == "=":
            *others, last = right.split("|")
            return f"{', '.join(others)} or {last}" if others else last or "empty"
        if how != "!=" and _number(right) is None:
            right = words.get(right, f"{full(right)}={{{right}}}")
        return f"{_WORDS[how]} {right}".strip()

    def _reason(self, look: Look) -> str:
        listed = next((term for terms in self.when for term in terms.split() if "~" in term), "")
        reason = self.reason.replace("{~}", ", ".join(_listed(listed, look)) if listed else "")
        return reason if reason[:1] in ",:;" else f" {reason}"


def rules(text: str, **lists: Sequence[str]) -> tuple[Rule, ...]:
    """Read the rules of a table, with `$name` for these `lists`. Lines that begin with a blank continue a rule."""
    lines = (" ".join(line.split()) for line in re.split(r"\n(?=\S)", text.strip()))
    return tuple(rule for line in lines for rule in _read(line, lists))


def _read(line: str, lists: Mapping[str, Sequence[str]]) -> list[Rule]:
    left, *texts = re.split(r"\s\|(?=\s)", line)
    for name, values in lists.items():
        left = left.replace(f"${name}", "|".join(values))
        texts = [text.replace(f"${name}", ", ".join(values)) for text in texts]
    when, _, demand = left.partition("=>")
    match = re.fullmatch(r"([\w.\[\], ]+?)(?: (off|[=<>%/!~]\S*))?", demand.strip())
    assert match and len(texts) < 3, f"no rule: {line}"
    must, words = match[2] or "", [text.strip() for text in texts] or [""]
    return [Rule(tuple(when.strip().split(" or ")), key, must, *words) for key in match[1].split(", ")]


def value_of(section: Any, name: str) -> Any:
    """Return a section's key or property by its dotted name; entries that a mapping lacks are empty."""
    for word in name.split("."):
        section = section.get(word, "") if isinstance(section, Mapping) else getattr(section, word)
    return section


def holds(term: str, look: Look) -> bool:
    off, name, how, right = _term(term)
    return (bool(look(name)) if not how else _compare(name, how + right, look)) != bool(off)


@cache
def _term(term: str) -> tuple[str, str, str, str]:
    match = _TERM.fullmatch(term)
    assert match, f"no term of a rule: {term}"
    return match["off"], match["name"], match["how"] or "", match["right"] or ""


def _compare(name: str, end: str, look: Look) -> bool:
    """Return whether the value meets the `end` of a term."""
    _, _, how, right = _term(f"key{end}")
    value = look(name)
    if how in ("=", "!="):
        return any(_same(value, option) for option in right.split("|")) == (how == "=")
    if how == "~":
        return any(option in value for option in right.split("|"))
    if how == "==":
        return value == look(right)
    number = look(right) if (fixed := _number(right)) is None else fixed
    if how in "%/":
        large, small = (value, number) if how == "%" else (number, value)
        return bool(small) and large % small == 0
    return {"<": value < number, "<=": value <= number, ">": value > number, ">=": value >= number}[how]


def _same(value: Any, text: str) -> bool:
    if isinstance(value, bool | str):
        return str(value).lower() == text.lower()
    return value == _number(text) if isinstance(value, int | float) else str(value or "") == text


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _listed(term: str, look: Look) -> list[str]:
    _, name, _, right = _term(term)
    return [one for one in look(name) if one in right.split("|")]


def _filled(text: str, look: Look) -> str:
    return _FILLED.sub(lambda m: (m[1] + m[2]) * bool(m[2]) + _shown(look(m[1])), text)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
