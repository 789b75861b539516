"""Fenced blocks of a response, read in one pass over its lines."""

from __future__ import annotations

import re

PYTHON = re.compile(r"(python|py)[\d.]*")
_TAGS = r"(?:</?[\w|]++>[ \t]*+)*+"  # of an answer's parts, as </think> and <answer>, and special tokens
# of thoughts: Gemma 4's, Ministral 3's and gpt-oss's too
_THOUGHTS_END = re.compile(r"</think>|<channel\|>|\[/THINK\]|<\|channel\|>final<\|message\|>")
_OPENING = re.compile(rf"([ \t]*+){_TAGS}(`{{3,}}|~{{3,}})[ \t]*([\w+#.-]*)([^\n]*)")
_CLOSING = re.compile(rf"[ \t]*+(`{{3,}}|~{{3,}})\s*+{_TAGS}\s*+")


def blocks(text: str) -> list[tuple[str, str]]:
    """Return (language, text) of each block closed by a fence at least as long as its first one.

    Blocks of a list are indented: the fence's indent is removed from their lines.
    """
    closed, fence, language, indent, lines = [], "", "", "", []
    for line in text.split("\n"):
        if not fence:
            match = _OPENING.fullmatch(line)
            if match and not (match[2][0] == "`" and "`" in match[4]):
                indent, fence, language, lines = match[1], match[2], match[3].lower(), []
        elif (match := _CLOSING.fullmatch(line)) and match[1].startswith(fence):
            closed.append((language, "".join(f"{each}\n" for each in lines)))
            fence = ""
        else:
            lines.append(_without(indent, line))
    return closed


def _without(indent: str, line: str) -> str:
    blanks = len(line) - len(line.lstrip(" \t"))
    return line[min(len(indent), blanks) :]


def programs(response: str) -> list[str]:
    """Return the last block of Python, else all blocks without a language; the sandbox runs the last that is a program.

    Blocks of the thoughts, which may leave a fence open, count only if the answer has none.
    """
    answer = _THOUGHTS_END.split(response)[-1]
    return _programs(answer) or _programs(response)


def _programs(text: str) -> list[str]:
    closed = blocks(text)
    python = [block for language, block in closed if PYTHON.fullmatch(language)]
    return python[-1:] or [block for language, block in closed if not language]
