"""Answers that are not mathematics: a letter of multiple choice, or words."""

from __future__ import annotations

import re

from aligner.rewards.math_numbers import LONGEST, plain
from aligner.rewards.math_stated import FUNCTIONS, SEARCHED, marked, sentences, without_lead

# Texts of data sets for a missing or incomparable answer.
PLACEHOLDERS = {"proof", "see proof", "notfound", "not found", "nan", "none", "null", "n/a", "<na>", "nat"}
# Words of three letters or less that are not a product of variables.
_SHORT_WORDS = """yes no odd even true all any one two six ten zero none not red blue tie win sum day may jun jul sun
mon tue wed thu fri sat up down left he she it both max min east west cat dog boy girl man men key"""
SHORT_WORDS = set(_SHORT_WORDS.split())

_WRAPPED = re.compile(r"\\(?:text\w*|math(?:rm|bf|it|sf)|mbox|boxed|fbox|operatorname)\s*\{([^{}]*)\}")
_MARKUP = re.compile(r"[*_`\"“”$]|\\[()\[\]]|\\left|\\right|\\ ")
_CHOICE = r"[(\[]?\s*(?P<{name}>[A-Ja-j])\s*(?P<{name}_closed>[)\]])?"
# What may follow the letter: its end, its option's text behind a mark, or a reason. Not a word, as in "A cat".
_END = (
    r"(?![\w'’])(?=\s*(?:$|[\n.,;:!?)\]}(]|[-–—]\s|(?:because|since|as|which|with|is (?:correct|right))\b)|(?<=[)\]]))"
)
_SECOND = r"\s*[)\]]?\s*(?:,|/|&|or\b|and\b)\s*(?:or\b|and\b)?\s*(?:[(\[][A-Ja-j][)\]]|[A-J])(?![\w'’])"
_KIND = r"(?:(?:the\s+)?(?:option|choice|letter|answer)\s*:?\s*)?"
_STATED = re.compile(
    rf"\b(?:answer|choice|option)\b(?:\s+(?:to|for)\s+(?:the|this)\s+\w+)?\s*(?:is|:|=|would be|must be|should be)\s*:?"
    rf"\s*(?:(?:therefore|thus|hence|then|most likely|\w{{2,15}}ly),?\s+)?{_KIND}{_CHOICE.format(name='stated')}{_END}"
    rf"|(?:答案|故选|选择)\s*(?:是|为|:|选)?\s*{_CHOICE.format(name='chinese')}{_END}"
    rf"|\b(?:option|choice|answer)\s+{_CHOICE.format(name='right')}\s+is\s+(?:the\s+)?(?:correct|right|true|best)\b"
    rf"|[(\[](?P<closed>[A-Ja-j])[)\]]\s+is\s+(?:the\s+)?(?:correct|right|best)\b"
    rf"|\b(?-i:(?P<best>[A-J]))\s+is\s+(?:the\s+)?(?:(?:correct|right|best)\s+)?(?:answer|option|choice)\b"
    rf"|(?<!not )(?<!n't )(?<!never )\b(?:choose|pick|select|go with)\s+{_KIND}{_CHOICE.format(name='chosen')}{_END}",
    re.IGNORECASE,
)
_ONLY = re.compile(
    rf"(?:(?:so|thus|hence|therefore)\b,?\s*)?(?:{_KIND.strip()})?\s*{_CHOICE.format(name='only')}[.:]?", re.IGNORECASE
)
_OPTION = re.compile(
    r"(?:option\s+|choice\s+|answer\s*:?\s*)?(?:[(\[]\s*(?P<inside>[A-Ja-j])\s*[)\]][.:]?|(?P<letter>[A-J])\s*[).:\]])(?:\s+(?P<rest>\S.*))?",
    re.IGNORECASE,
)
_NO_TEXT = re.compile(r"[+*/=^<>]|-\s|(?:or|and)\b|[(\[]?[A-J][)\]]?$")  # beside a letter: a formula, or another
_WORD = re.compile(r"[^\W_]+")


def is_placeholder(reference: str) -> bool:
    """Return whether a reference is a data set's text for a missing one."""
    return bare(reference[:LONGEST]).strip(" .").casefold() in PLACEHOLDERS


def bare(text: str) -> str:
    """Remove emphasis, dollars, LaTeX's wrappers of text, and repeated blanks and empty lines, on which patterns would
    take long."""
    text = re.sub(r"[^\S\n]+", " ", _MARKUP.sub("", unwrapped(text)))
    return re.sub(r" ?\n[ \n]*", "\n", text).strip()


def unwrapped(text: str) -> str:
    """Remove LaTeX's wrappers of text."""
    for _ in range(3):  # \boxed{\text{\textbf{B}}}
        text = _WRAPPED.sub(r" \1 ", text)
    return text


def letter_of(answer: str) -> tuple[str, str]:
    r"""Return (letter, its text) if a whole answer is one option: `B`, `(b)`, `\text{B}`, `B) 42`; else two empty
    texts."""
    text = bare(answer) if len(answer) <= LONGEST else ""
    only = _ONLY.fullmatch(text)
    if only:
        return only["only"].upper(), ""
    option = _OPTION.fullmatch(text)
    if option is None or _NO_TEXT.match(option["rest"] or ""):
        return "", ""
    return (option["inside"] or option["letter"]).upper(), option["rest"] or ""


def letter_in(response: str) -> str:
    """Return the letter that a response states as its answer; empty if there is none, or several at that position."""
    inner, kind = marked(response)
    stated = letter_of(inner)[0]
    if stated:
        return stated
    text = bare(inner if kind == "answer" else response[-SEARCHED:])
    matches = [*_STATED.finditer(text)]
    if matches:
        last = matches[-1]
        letter = next(text for name, text in last.groupdict().items() if text and "_" not in name)
        second = re.match(_SECOND, text[last.end() :], re.IGNORECASE if letter.islower() else 0)
        return "" if second else letter.upper()
    lines = [letter_of(line) for line in text.split("\n") if line.strip()] or [("", "")]
    alone = {letter for letter, rest in lines if letter and not rest}
    if len(alone) == 1 and alone.intersection((lines[0][0], lines[-1][0])):
        return alone.pop()
    options = {letter for letter, _ in lines if letter}
    return lines[-1][0] if len(options) == 1 else ""


def words_of(text: str) -> str:
    """Return an answer in words in its comparable form: without case, punctuation, article."""
    words = _WORD.findall(bare(text).casefold().replace("'", ""))
    return " ".join(words[1:] if words[1:] and words[0] in ("a", "an", "the") else words)


def is_words(reference: str) -> bool:
    """Return whether a reference is words, not a product of variables."""
    text = bare(reference)
    if re.search(r"[\d\\^_=<>+*/{}()\[\]|!]", text):
        return False
    words = _WORD.findall(text)
    if {word.lower() for word in words} & (FUNCTIONS | {"infinity", "inf"}):
        return False
    if any(len(w) > 3 or w.lower() in SHORT_WORDS or (w.istitle() and len(w) > 1) for w in words):
        return True
    return len(words) == 1 and len(words[0]) > 1 and "\\text" in reference


def says(response: str, words: str) -> bool:
    """Return whether a response states these words as its answer: behind a mark, "the answer is", or in its last
    line."""
    inner, kind = marked(response)
    if kind and words_of(without_lead(inner)) == words:
        return True
    if kind == "boxed":
        return False
    lines = [line for line in (inner if kind == "answer" else response).strip().split("\n") if line.strip()] or [""]
    candidates = (*sentences("\n".join(lines[-5:])), without_lead(lines[-1].strip("# ")))
    return any(words_of(candidate) == words for candidate in candidates if len(candidate) <= LONGEST)


def reference_letter(gold: str) -> tuple[str, str]:
    """Return `letter_of` a reference. With a text beside it, only a capital is a letter."""
    letter, rest = letter_of(plain(gold))
    return ("", "") if rest and not bare(gold).lstrip("([")[0].isupper() else (letter, rest)
