"""Fenced blocks of an answer, found in one pass over its lines."""

from __future__ import annotations

import re

LANGUAGES = ("python", "python3", "py", "py3")
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)([^\n]*)")


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, text) of each block that is closed, by a fence at least as long as its first one."""
    closed, fence, language, lines = [], "", "", []
    for line in text.split("\n"):
        match = _FENCE.fullmatch(line)
        if not fence:
            if match and not (match[1][0] == "`" and "`" in match[3]):
                fence, language, lines = match[1], match[2].lower(), []
        elif match and match[1].startswith(fence) and not match[2] and not match[3].strip():
            closed.append((language, "".join(f"{each}\n" for each in lines)))
            fence = ""
        else:
            lines.append(line)
    return closed


def programs(response: str) -> list[str]:
    """The last block of Python; else all of no language, of which the sandbox runs the last that is a program."""
    closed = blocks(response)
    python = [text for language, text in closed if language in LANGUAGES]
    return python[-1:] or [text for language, text in closed if not language]
