"""Values of calls in notations near JSON.

Gemma 4    {at:<|"|>Rome<|"|>,days:3,deep:{on:true}}: keys without quotes, texts within a token of their own, or JSON's
LFM2       at='Rome', days=3, on=True: Python's, and JSON's within them
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

GEMMA_QUOTE = '<|"|>'
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}
_WORD = re.compile(r"""[^\s,:={}\[\]()<>"'](?:[^,:={}\[\]()<>"'\n]*[^\s,:={}\[\]()<>"'])?""")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_CODES = {"x": 2, "u": 4}  # digits of an escape


class ValueReader:
    """A text that is read from a position on. Raises ValueError for what the notation does not have.

    `quotes`: each of them begins and ends a text. `escapes`: a backslash escapes within a text, and a quote that ends
    no value belongs to it: the template of LFM2.5 escapes none.
    """

    def __init__(self, text: str, at: int, quotes: tuple[str, ...], escapes: bool):
        self.text, self.at, self.quotes, self.escapes = text, at, quotes, escapes

    def passes(self, mark: str) -> bool:
        """Move behind white space and the mark, if that follows."""
        at = self._past_space(self.at)
        if follows := self.text.startswith(mark, at):
            self.at = at + len(mark)
        return follows

    def expect(self, mark: str) -> None:
        if not self.passes(mark):
            raise ValueError(f"expected {mark!r}, found {self.text[self.at : self.at + 20].strip()!r}")

    def ends(self) -> bool:
        return self._past_space(self.at) == len(self.text)

    def word(self) -> str:
        at = self._past_space(self.at)
        word = _WORD.match(self.text, at)
        if word is None:
            raise ValueError(f"expected a name, found {self.text[at : at + 20]!r}")
        self.at = word.end()
        return word[0]

    def pairs(self, between: str, closes: str) -> dict[str, Any]:
        """Read keys and values up to `closes`."""
        values: dict[str, Any] = {}
        while not self.passes(closes):
            key = self._quoted(quote) if (quote := self._quote()) else self.word()
            if key in values:
                raise ValueError(f"{key} is written twice")
            self.expect(between)
            values[key] = self.value()
            if not self.passes(","):
                self.expect(closes)
                break
        return values

    def value(self) -> Any:
        if quote := self._quote():
            return self._quoted(quote)
        if self.passes("{"):
            return self.pairs(":", "}")
        if not self.passes("["):
            return self._plain()
        items: list[Any] = []
        while not self.passes("]"):
            items.append(self.value())
            if not self.passes(","):
                self.expect("]")
                break
        return items

    def _plain(self) -> Any:
        word = self.word()
        if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        if _NUMBER.fullmatch(word) is None:
            raise ValueError(f"a value is a text in quotes, a number, true, false, null, a list or a mapping: {word!r}")
        return json.loads(word)

    def _quote(self) -> str:
        at = self._past_space(self.at)
        return next((quote for quote in self.quotes if self.text.startswith(quote, at)), "")

    def _quoted(self, quote: str) -> str:
        self.expect(quote)
        parts: list[str] = []
        while self.at < len(self.text):
            if self.text.startswith(quote, self.at) and self._closes(quote):
                self.at += len(quote)
                return "".join(parts)
            if self.escapes and self.text[self.at] == "\\":
                parts.append(self._escaped())
            else:
                parts.append(self.text[self.at])
                self.at += 1
        raise ValueError("a text has no end")

    def _closes(self, quote: str) -> bool:
        """Return whether a quote ends its text. Raises ValueError for one that begins the next value."""
        behind = self._past_space(self.at + len(quote))
        if not self.escapes or behind == len(self.text) or self.text[behind] in ",:)]}":
            return True
        if self.text[: self.at].rstrip()[-1:] in tuple("=:,([{"):
            raise ValueError("a text has no end")
        return False

    def _escaped(self) -> str:
        letter = self.text[self.at + 1 : self.at + 2]
        digits = self.text[self.at + 2 : self.at + 2 + _CODES.get(letter, 0)]
        if letter in _CODES and len(digits) == _CODES[letter] and all(c in "0123456789abcdefABCDEF" for c in digits):
            self.at += 2 + len(digits)
            return chr(int(digits, 16))
        self.at += 2
        known = letter in "\\\"'/"
        return letter if known else _ESCAPES.get(letter, "\\" + letter)

    def _past_space(self, at: int) -> int:
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        return at


def gemma_text(value: Any) -> str:
    """Write a value as Gemma 4 does; a key in quotes where it would be read otherwise."""
    if isinstance(value, str):
        return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_key(key)}:{gemma_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_text, value)) + "]"
    return json.dumps(value)


def _key(key: str) -> str:
    return key if _WORD.fullmatch(key) else gemma_text(key)


def python_text(value: Any) -> str:
    """Write a value as LFM2 does: Python's words and texts, JSON for lists and mappings."""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        return str(value)
    for letter, escape in (("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\r", "\\r")):
        value = value.replace(letter, escape)
    return f"'{value}'"
