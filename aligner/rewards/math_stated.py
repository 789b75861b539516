r"""The place where a response states its answer.

This is the last of `#### 42`, `<answer>42</answer>` and `\boxed{42}`, else the last sentence of the form "the answer
is 42".
"""

from __future__ import annotations

import re

from aligner.rewards.math_numbers import LONGEST, spelled

SEARCHED = 4000  # characters at the end of a response: math-verify's patterns take quadratic time
BOXES = 20  # boxes at the end that are read
_FUNCTIONS = "sin cos tan cot sec csc log ln exp sqrt pi max min gcd lcm mod arcsin arccos arctan"
FUNCTIONS = set(_FUNCTIONS.split())

_MARK = re.compile(r"(?<!#)####(?!#)[ \t]*(\S[^\n]*)")
_NUMBERED_HEADING = re.compile(r"\W*\d+[.:)]+[*_]*\s\W*[^\W\d]")
_STARTS = re.compile(r"(?:[*_`(\[{$€£¥+\-\s]|\\[(\[])*(?:\.?\d|\\[a-zA-Z])")  # a number, or LaTeX
_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2,}")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BETWEEN_BOXES = re.compile(r"[\s$,;.]*(?:\\quad|\\text\{\s*(?:and|or)\s*\}|and|or)?[\s$,;.]*")
LEAD = re.compile(
    r"(?:so |thus |hence |therefore )?(?:the )?(?:(?:final|correct|right|best) )?(?:answer|choice|option|result|value)"
    r"(?: (?:is|are|equals|would be|must be|should be)\b|\s*[:=])+\s*:?\s*",
    re.IGNORECASE,
)
_SENTENCE = re.compile(
    r"\banswer\b[*_]*(?:\s+to\s+(?:the|this)\s+\w+)?[*_]*\s*(?:is|are|equals|would be|must be|should be|=|:)[*_]*"
    r"(?:\s*:|\s+therefore|\s+thus)?[*_]*\s*(?P<answer>\S[^\n]*)|答案\s*(?:是|为|:)\s*(?P<chinese>\S[^\n。]*)",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.?][*_`$]*(?=\s|$)|,?\s+(?:because|since|as)\s")


def is_answer(text: str) -> bool:
    """Return whether the text behind `####` is an answer, not a heading.

    An answer is a number or LaTeX, or mathematics without words.
    """
    if len(text) > LONGEST or _NUMBERED_HEADING.match(text):
        return False
    words = _WORD.findall(text)
    if set(words).issubset(FUNCTIONS) and re.search(r"\w", text):
        return True
    return bool(_STARTS.match(text)) or spelled(text.strip("*_`. ")) is not None


def marked(text: str) -> tuple[str, str]:
    """Return (the text after the last mark, the mark: `####`, `answer` or `boxed`); two empty texts without a mark."""
    position, inner = last_box(text)
    kind = "boxed" if inner else ""
    for mark in _MARK.finditer(text):
        content = without_lead(mark[1])
        if mark.start() > position and is_answer(content) and "\\boxed" not in content:
            position, inner, kind = mark.start(), content, "####"
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start > position:
        inner, kind = text[start + len("<answer>") : end].strip(), "answer"
    return inner, kind


def without_lead(text: str) -> str:
    """Remove a leading `The answer is`."""
    lead = LEAD.match(text.lstrip("*_ "))
    return text.lstrip("*_ ")[lead.end() :] if lead else text


def last_box(text: str) -> tuple[int, str]:
    r"""Return (start, content) of the last \boxed{}; of several side by side, all contents as a list."""
    boxes: list[tuple[int, int, str]] = []  # start, end, content; the last one first
    for box in reversed([*_BOX.finditer(text)][-BOXES:]):
        end = _closing(text, box.end())
        content = text[box.end() : end].strip()
        if end < 0 or not content or (boxes and end > boxes[-1][0]):
            continue  # cut off, empty, or around the box taken before
        if boxes and not _BETWEEN_BOXES.fullmatch(text[end + 1 : boxes[-1][0]][:LONGEST]):
            break
        boxes.append((box.start(), end, content))
    if not boxes:
        return -1, ""
    contents = dict.fromkeys(content for _, _, content in reversed(boxes))
    return boxes[0][0], ", ".join(contents)


def _closing(text: str, start: int) -> int:
    """Return the index of the brace that closes the one open at `start`, or -1."""
    depth = 1
    for index in range(start, min(len(text), start + SEARCHED)):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
            if not depth:
                return index
    return -1


def sentences(text: str) -> list[str]:
    """Return the text behind the last "the answer is": to the end of its line, and to the end of its sentence."""
    matches = [*_SENTENCE.finditer(text[-SEARCHED:])]
    if not matches:
        return []
    line = (matches[-1]["answer"] or matches[-1]["chinese"]).strip()
    return list(dict.fromkeys((line, _SENTENCE_END.split(line, maxsplit=1)[0].strip())))


def tail(text: str) -> str:
    """Return the last characters, from the beginning of a line: formulas between dollars end with their line."""
    start = len(text) - SEARCHED
    if start <= 0:
        return text
    return text[max(start, text.find("\n", start)) :]
