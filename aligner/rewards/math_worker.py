"""A process that compares math answers: JSON lines {gold, response or null, timeout_s} in, {score} or
{error} out.

A process, not a thread: sympy on a model's text can compute 9^(9^9) inside one C call that holds the interpreter lock
and cannot be interrupted. The kernel's alarm with its default action kills this process then, whatever it is doing,
and also when its parent is gone. Run as a file, so it imports nothing of the package, and math-verify late.

Where a response states its answer (docs/rewards.md): the last of `#### 42`, `<answer>42</answer>` and `\\boxed{42}`;
where it has none of them, math-verify searches the text.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import resource
import signal
import sys
from decimal import Decimal

MEMORY_BYTES = 4 << 30  # of address space: a huge power shall fail here, not take the node's memory
SEARCHED = 4000  # characters at the end of a response: math-verify's patterns take quadratic time
LONGEST = 500  # characters of an answer after a mark; more is a text
NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3}\b)?"
# Words after a number that make it another number. What else stands there is taken for its unit.
CHANGES = """and or not to by times over plus minus divided mod squared cubed pi sqrt hundred hundreds thousand
thousands million millions billion billions trillion trillions dozen dozens half halves third thirds
quarter quarters fifth fifths sixth sixths eighth eighths tenth tenths hundredth hundredths thousandth
thousandths"""
UNITS = "kg cm mm km ml cl dl lb lbs oz mph kwh"  # that may follow without a blank; `2xy` is a product
SHORT = "m g s h l L V W A N J ft in yd mi hr am pm sq"  # that may follow a blank; another letter is a variable
FUNCTIONS = "sin cos tan cot sec csc log ln exp sqrt pi max min gcd lcm mod arcsin arccos arctan"

_MARK = re.compile(r"(?<!#)####(?!#)[ \t]*(\S[^\n]*)")
_NUMBERED_HEADING = re.compile(r"\W*\d+[.:)]+[*_]*\s\W*[^\W\d]")
_STARTS = re.compile(r"(?:[*_`(\[{$€£¥+\-\s]|\\[(\[])*(?:\.?\d|\\[a-zA-Z]|[√π])")  # a number, or LaTeX
_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2,}")
_UNIT = r"\s*[^\W\d_](?:[^\W\d_]|[\s/.²³-]|\^[23])*"
_AMOUNT = re.compile(
    rf"[*_`]*(?P<sign>-?)\s*[$€£¥]?\s*(?P<number>{NUMBER})\$?[*_`]*(?:\s*(?P<percent>\\?%|percent))?"
    rf"(?:\s*[$€£¥°]|(?P<unit>{_UNIT}))?[*_`.]*"
)
_TEXT_NUMBER = re.compile(rf"\\(?:text|textbf|mbox|mathrm|mathbf)\{{\s*({NUMBER}|\d{{1,3}}(?:,\d{{3}})+)\s*\}}")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]+)\}")
_DOLLARS = re.compile(rf"[*_`]*(?:\$([^$]+)\$|\\\((.+?)\\\))[*_`]*(?P<unit>{_UNIT})?[*_`.]*")


def plain(text: str) -> str:
    """As math-verify reads it: ASCII minus signs, no escaped dollars (a currency), no \\text around a number."""
    text = re.sub(r"(?<!\\)\\\$", "", text.replace("\u2212", "-"))
    return _TEXT_NUMBER.sub(lambda found: found[1].replace(",", ""), text)


def is_unit(text: str) -> bool:
    """Whether what follows a number names what is counted, and leaves the number what it is."""
    first, *others = re.findall(r"[^\W\d_]+", text)
    known = first.lower() in UNITS.split() or (text[0].isspace() and (len(first) > 2 or first in SHORT.split()))
    return known and not {word.lower() for word in (first, *others)}.intersection(CHANGES.split())


def amount(text: str) -> str:
    """The number of `**$42 dollars**.`, with its `%`; the text itself where it is more than a number with a unit."""
    text = text.strip()
    found = _AMOUNT.fullmatch(text) if len(text) <= LONGEST else None
    if found is None or (found["unit"] and not is_unit(found["unit"])):
        return text
    number = found["sign"] + found["number"].lstrip("+")
    if "e" in number.lower():
        number = format(Decimal(number), "f")  # math-verify reads e as Euler's number
    return number + ("%" if found["percent"] else "")


def expression(text: str) -> str:
    """A stated answer as math-verify's input: the number, or all of it as LaTeX, so that no second answer is lost."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text).strip()
    found = _DOLLARS.fullmatch(text) if len(text) <= LONGEST else None
    if found and (not found["unit"] or is_unit(found["unit"])):
        text = found[1] or found[2]
    return f"${amount(text)}$"


def is_answer(text: str) -> bool:
    """Whether what follows `####` is an answer: a number or LaTeX, or mathematics without words; else a heading."""
    if len(text) > LONGEST or _NUMBERED_HEADING.match(text):
        return False
    words = _WORD.findall(text)
    return bool(_STARTS.match(text)) or (set(words).issubset(FUNCTIONS.split()) and bool(re.search(r"\w", text)))


def stated(text: str) -> str:
    """The part of a response that math-verify shall read: see the module."""
    place, inner = text.rfind("\\boxed"), ""
    for mark in _MARK.finditer(text):
        if mark.start() > place and is_answer(mark[1]):
            place, inner = mark.start(), mark[1]
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start > place:
        inner = text[start + len("<answer>") : end].strip()
        if "\n" in inner or not is_answer(inner):
            return _tail(inner)
    if inner:
        return expression(inner)
    return _tail(_BOXED.sub(lambda found: f"\\boxed{{{amount(found[1]).rstrip('%')}}}", text))


def _tail(text: str) -> str:
    """Its last characters, from the beginning of a line; from the last \\boxed on where that lies before."""
    start, boxed = len(text) - SEARCHED, text.rfind("\\boxed")
    if start <= 0:
        return text
    if 0 <= boxed < start:
        return text[boxed : boxed + SEARCHED]
    line = text.find("\n", start, boxed if boxed >= 0 else len(text))  # formulas between dollars end with their line
    return text[max(start, line) :]


def gold_answer(text: str) -> str:
    """Of a reference: what follows its last `####`, or all of it."""
    text = plain(text)
    marked = _MARK.findall(text)
    return expression(marked[-1]) if marked else amount(text)


def is_number(text: str) -> bool:
    """Whether a reference is one, with a unit or without: then math-verify can read it."""
    return re.fullmatch(rf"\$?{NUMBER}%?\$?", gold_answer(text)) is not None


def parse_gold(text: str) -> list:
    """A reference as math-verify's candidates."""
    from math_verify import parse

    text = gold_answer(text)
    if "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text:
        return parse(text, parsing_timeout=None)
    return parse(f"${text}$", parsing_timeout=None) or parse(text, parsing_timeout=None)


@functools.lru_cache(maxsize=1024)  # the samples of a group have one reference
def reference(gold: str) -> list:
    """ValueError if there is no mathematical expression in it."""
    try:
        found = parse_gold(gold)
    except (MemoryError, RecursionError, OverflowError) as cause:
        raise ValueError(f"the reference answer {gold[:200]!r} is too large: {cause}") from cause
    if all(isinstance(candidate, str) for candidate in found):  # only the text itself: nothing was understood
        raise ValueError(f"no mathematical expression found in the reference answer {gold[:200]!r}")
    return found


def score(known: list, response: str) -> float:
    """1.0 where the response's final answer equals the reference, else 0.0."""
    from math_verify import parse, verify

    answer = parse(stated(plain(response)), parsing_timeout=None)
    return float(verify(known, answer, timeout_seconds=None)) if answer else 0.0


def reply(request: dict) -> dict:
    """Without a response: whether the reference can be read, score 1.0."""
    try:
        known = reference(request["gold"])
    except ValueError as cause:
        return {"error": str(cause)}
    if request["response"] is None:
        return {"score": 1.0}
    try:
        return {"score": score(known, request["response"])}
    except Exception:  # sympy raises anything on a model's text, and what cannot be compared is no right answer
        return {"score": 0.0}


def main() -> None:
    logging.disable(logging.WARNING)  # math-verify warns that its own (signal) timeouts are off: ours is the alarm
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; this process ends with its standard input
    import math_verify  # noqa: F401  the slow import is not part of the first answer's time

    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
        answer = reply(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
