"""Fenced blocks of an answer, found in one pass over its lines."""

from __future__ import annotations

import re

LANGUAGES = ("python", "python3", "py", "py3")
_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<marks>`{3,}|~{3,})[ \t]*(?P<language>[\w+#.-]*)(?P<after>[^\n]*)")


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, text) of each block that is closed, by a fence at least as long as its first one. Where that one is
    indented, as in a list, its lines have as much less."""
    closed, fence, language, lines = [], "", "", []
    indent = 0
    for line in text.split("\n"):
        match = _FENCE.fullmatch(line)
        if not fence:
            if match and not (match["marks"][0] == "`" and "`" in match["after"]):
                fence, language, lines = match["marks"], match["language"].lower(), []
                indent = len(match["indent"])
        elif match and match["marks"].startswith(fence) and not match["language"] and not match["after"].strip():
            closed.append((language, "".join(f"{each}\n" for each in lines)))
            fence = ""
        else:
            blank = len(line) - len(line.lstrip(" \t"))
            lines.append(line[min(indent, blank) :])
    return closed


def programs(response: str) -> list[str]:
    """The last block of Python; else all of no language, of which the sandbox runs the last that is a program. Those
    of the thoughts, which may leave a fence open, only where the answer has none."""
    _, thought, answer = response.rpartition("</think>")
    return (thought and _programs(answer)) or _programs(response)


def _programs(text: str) -> list[str]:
    closed = blocks(text)
    python = [block for language, block in closed if language in LANGUAGES]
    return python[-1:] or [block for language, block in closed if not language]
