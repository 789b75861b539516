"""A process that compares math answers: JSON lines {gold, response or null, timeout_s} in, {score} or
{error} out.

A process, not a thread: sympy on a model's text can compute 9^(9^9) inside one C call that holds the interpreter lock
and cannot be interrupted. The kernel's alarm, with its default action, then kills this process, also if its
parent is gone. It imports math-verify late.

The answer of a response is searched in this order (docs/reference/rewards.md): after the last mark, behind "the
answer is", and at its end, by math-verify. A reference is a letter of multiple choice, words, or mathematics.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
import resource
import signal
import sys
from typing import Any, NamedTuple

from aligner.processes import leave_requests_to_rank
from aligner.rewards.math_numbers import NUMBER, amount, brackets, formula, listed, plain
from aligner.rewards.math_stated import is_answer, last_box, marked, sentences, tail, without_lead
from aligner.rewards.math_words import (
    is_placeholder,
    is_words,
    letter_in,
    letter_of,
    reference_letter,
    says,
    unwrapped,
    words_of,
)

MEMORY_BYTES = 4 << 30  # of address space: a huge power fails here instead of taking the node's memory
DECIMALS = 6  # to which math-verify compares numbers
DIGITS = 4  # significant digits to which small numbers are compared
SMALLEST = 6000  # decimals; smaller numbers than 10 to the minus this are compared as formulas only

_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*(\S[^\n]*)")
_COORDINATES = re.compile(r"(?<![\w\\^}$(\[])[(\[](?:[^()\[\]$\n,]{1,40},){1,9}[^()\[\]$\n,]{1,40}[)\]](?![$)\]])")


class ParsedReference(NamedTuple):
    """A parsed reference: a letter, words, or math-verify's candidates with the brackets around them. Other fields are
    empty."""

    letter: str
    words: str
    candidates: list
    brackets: str
    text: str


def gold_answer(text: str) -> str:
    r"""Return a reference's answer: the content of its last \boxed{}, the text after its last `####`, or all of it.

    It is one formula, except for formulas within a text.
    """
    text = plain(text).strip()
    box, inner = last_box(text)
    hashes = _HASHES.findall(text)
    if box >= 0 or hashes:
        return formula(without_lead(inner if box >= 0 else hashes[-1]))
    answer = formula(text)
    return text if "$" in text and _words_around(text) else answer


def _words_around(text: str) -> bool:
    return re.search(r"[^\W\d_]{2,}", re.sub(r"\$[^$]*\$", "", text)) is not None and amount(text) == text


def is_number(text: str) -> bool:
    """Return whether a reference is a number, with or without a unit: then math-verify can read it."""
    return re.fullmatch(rf"{NUMBER}%?", gold_answer(text)) is not None


def read(text: str) -> list:
    """Return math-verify's candidates for a formula; empty if there are none."""
    from math_verify import parse

    return parse(f"${text}$", parsing_timeout=None) if text.strip() else []


@functools.lru_cache(maxsize=1024)  # the samples of a group have one reference
def reference(gold: str) -> ParsedReference:
    """Parse a reference. Raises ValueError if it has no comparable answer."""
    from math_verify import parse

    if not gold.strip():
        raise ValueError("the reference answer is empty")
    if is_placeholder(gold):
        raise ValueError(f"the reference answer {gold!r} means that there is none")
    letter, rest = reference_letter(gold)
    if letter and (rest or not gold.strip().islower()):
        beside = reference(rest) if rest else ParsedReference("", "", [], "", "")
        return beside._replace(letter=letter)
    text = gold_answer(gold)
    if is_words(text):
        return ParsedReference("", words_of(text), [], "", text)
    try:
        candidates = parse(text, parsing_timeout=None) if "$" in text else read(text)
    except (MemoryError, RecursionError, OverflowError) as cause:
        raise ValueError(f"the reference answer {gold[:200]!r} is too large: {cause}") from cause
    if all(isinstance(candidate, str) for candidate in candidates):  # only the text itself: nothing was parsed
        raise ValueError(f"no mathematical expression found in the reference answer {gold[:200]!r}")
    return ParsedReference(letter, "", candidates, brackets(text), text)


def stated(response: str) -> tuple[str | None, str]:
    """Return (the answer, or None if none is stated; then the text to search for it)."""
    inner, kind = marked(response)
    if kind == "answer" and ("\n" in inner or not is_answer(without_lead(inner))):
        return _of_sentence(inner)
    return (without_lead(inner), "") if kind else _of_sentence(response)


def _of_sentence(text: str) -> tuple[str | None, str]:
    for sentence in sentences(text):
        answer = formula(sentence)
        if re.fullmatch(rf"{NUMBER}%?", answer) or brackets(answer):
            return sentence, ""
    return None, coordinates(tail(text))


def coordinates(text: str) -> str:
    """Write `(1,2)` as formulas: math-verify does not find them outside of dollars."""
    pieces = re.split(r"(\$[^$]*\$|\\\([^\n]*?\\\)|\\\[.*?\\\])", text, flags=re.DOTALL)
    pieces[::2] = [_COORDINATES.sub(_as_formula, piece) for piece in pieces[::2]]
    return "".join(pieces)


def _as_formula(match: re.Match) -> str:
    words = re.search(r"[^\W\d_]{2,}", match[0])
    return match[0] if words or not re.search(r"\d", match[0]) else f"${formula(match[0])}$"


def score(known: ParsedReference, response: str) -> float:
    """Return 1.0 if the response's final answer equals the reference, else 0.0."""
    response = plain(response)
    if known.letter:
        letter = letter_in(response)
        if letter or not (known.words or known.candidates):
            return float(letter == known.letter)
    if known.words:
        return float(says(response, known.words))
    return float(equals(known, *stated(response)))


def equals(known: ParsedReference, stated_answer: str | None, searched: str) -> bool:
    from math_verify import parse

    if stated_answer is None:
        return same(known.candidates, parse(searched, parsing_timeout=None))
    answer = formula(stated_answer)
    if answer and _closed_up(answer) == _closed_up(known.text):
        return True
    if {known.brackets, brackets(answer)} == {"(", "{"}:
        return False
    apart = formula(listed(stated_answer)) if _is_list(known.candidates) else answer
    beside = formula(letter_of(stated_answer)[1])  # of (B) 42
    readings = dict.fromkeys(text for text in (answer, apart, beside) if text)
    return any(same(known.candidates, read(text)) for text in readings)


def _closed_up(text: str) -> str:
    return unwrapped(text).casefold().replace(" ", "").replace("\\left", "").replace("\\right", "")


def _is_list(candidates: list) -> bool:
    from sympy import Set, Tuple

    return any(isinstance(candidate, Set | Tuple) for candidate in candidates)


def same(known: list, answer: list) -> bool:
    """Compare by math-verify.

    It compares six decimals, so compare again with more decimals if a number is small.
    """
    from math_verify import verify

    compare = functools.partial(verify, known, answer, allow_set_relation_comp=True, timeout_seconds=None)
    if not answer or not compare():
        return False
    decimals = max((decimals_of(each) for each in (*known, *answer)), default=DECIMALS)
    if decimals <= DECIMALS:
        return True
    if decimals > SMALLEST:
        return any(a == b for a in known for b in answer)
    return compare(float_rounding=decimals, numeric_precision=15 + decimals)


def decimals_of(expression: Any) -> int:
    """Return how many decimals show `DIGITS` digits of the smallest number in an expression."""
    import mpmath
    from sympy import Abs, Basic, MatrixBase, preorder_traversal

    if isinstance(expression, MatrixBase):
        return max((decimals_of(entry) for entry in expression), default=DECIMALS)
    if not isinstance(expression, Basic):
        return DECIMALS
    most, nodes = DECIMALS, preorder_traversal(expression)
    for node in nodes:
        if not node.is_number:
            continue
        nodes.skip()
        size = Abs(node).evalf(5)
        if size.is_Float and size > 0:
            most = max(most, math.floor(-mpmath.mag(size.num) * math.log10(2)) + DIGITS)
    return most


def reply(request: dict) -> dict:
    """Return the reply to a request. Without a response: score 1.0 if the reference can be read."""
    try:
        known = reference(request["gold"])
    except ValueError as cause:
        return {"error": str(cause)}
    if request["response"] is None:
        return {"score": 1.0}
    try:
        return {"score": score(known, request["response"])}
    except Exception:  # sympy raises anything on a model's text; an incomparable answer is wrong
        return {"score": 0.0}


def main() -> None:
    logging.disable(logging.WARNING)  # math-verify warns that its own (signal) timeouts are off: ours is the alarm
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    leave_requests_to_rank()  # this process ends with its standard input
    import math_verify  # noqa: F401  the slow import is not part of the first answer's time

    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
        answer = reply(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
