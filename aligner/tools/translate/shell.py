"""Arguments of a trainer's command in a shell script, which is read, not executed. Variables of the script and of the
environment, arrays and here documents are expanded. Branches are not followed, but a variable that is set nowhere else
has the value of the first branch."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterator

from aligner.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"(?:export\s+|local\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"\s*([A-Za-z_]\w*)(\+?)=\((.*)", re.DOTALL)
_HERE = re.compile(r"read\s.*?([A-Za-z_]\w*)\s*<<-?\s*['\"]?(\w+)['\"]?\s*$")
_OPENS, _CLOSES = re.compile(r"\s*(if|case|for|while|until)\b"), re.compile(r"(^|.*[\s;])(fi|esac|done)\s*;?\s*$")
_END = re.compile(r"(\d?>|<|\||&|;)")  # of a command's arguments
_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
}


class UnknownVariable(Exception):
    """Its value is not in the script, or follows from a command."""


class Script:
    """A script's variables as they are at each of its lines."""

    def __init__(self, text: str):
        self.text = text
        self.variables: dict[str, str] = {**os.environ, "PWD": "."}
        self.arrays: dict[str, list[str]] = {}
        self.branched: set[str] = set()  # variables of a branch
        self.assumed: dict[str, str] = {}  # those that were read

    def commands(self, trainer: re.Pattern[str]) -> Iterator[list[str]]:
        """Yield the words of each command in which `trainer` occurs. Raises ConfigError for a variable in one whose
        value is unknown."""
        lines, depth, unknown = iter(_logical_lines(self.text)), 0, ""
        for line in lines:
            depth += bool(_OPENS.match(line)) - bool(_CLOSES.match(line))
            if self._assigned(line, lines, branch=depth > 0):
                continue
            try:
                words = self._words(line)
            except UnknownVariable as error:
                unknown = str(error) if len(line) > 100 or trainer.search(line) else unknown
                continue
            if any(trainer.search(word) for word in words):
                unknown = ""
                yield words
        if unknown:
            raise ConfigError("FILE", unknown, *_UNKNOWN)

    def _assigned(self, line: str, lines: Iterator[str], branch: bool) -> bool:
        """Take over an assignment, which may go on in the next lines; return whether the line is one."""
        if match := _HERE.search(line):
            body = []
            for inner in lines:
                if inner.strip() == match[2]:
                    break
                body.append(inner)
            self._set(match[1], " ".join(body), quoted=True)
            return True
        if match := _ARRAY.match(line):
            body = match[3]
            while not body.rstrip().endswith(")"):
                try:
                    body += "\n" + next(lines)
                except StopIteration:
                    raise ConfigError("FILE", line.strip(), "an array that ends in `)`") from None
            if branch:
                return True
            try:
                words = self._words(body.rstrip()[:-1])
            except UnknownVariable as unknown:
                raise ConfigError("FILE", str(unknown), *_UNKNOWN) from None
            self.arrays[match[1]] = (self.arrays.get(match[1], []) if match[2] else []) + words
            return True
        match = _ASSIGNED.fullmatch(line.strip())
        while match and match[3].count('"') % 2:
            try:
                match = _ASSIGNED.fullmatch(f"{match[0]} {next(lines).strip()}")
            except StopIteration:
                return True
        if match and not re.search(r"\s", _unquoted(match[3])):
            if not branch:
                self._set(match[1], match[3])
            elif not self.variables.get(match[1]):
                self.branched.add(match[1])
                self._set(match[1], match[3])
            return True
        return False

    def _set(self, name: str, text: str, quoted: bool = False) -> None:
        try:
            value = self._expanded(text)
            self.variables[name] = value if quoted else "".join(shlex.split(value, comments=True))
        except (UnknownVariable, ValueError):
            self.variables.pop(name, None)

    def _words(self, text: str) -> list[str]:
        text = text.replace('"$@"', "")  # the script's own arguments: none
        text = re.sub(r"[\"']?\$\{(\w+)\[@\]\}[\"']?", lambda m: shlex.join(self.arrays.get(m[1], [])), text)
        try:
            return shlex.split(self._expanded(text), comments=True)
        except ValueError:  # an open quote, in code that is no trainer's command
            return []

    def _expanded(self, text: str) -> str:
        """Expand variables, but not in single quotes. Raises UnknownVariable."""
        out, at, quoted = "", 0, False
        while at < len(text):
            char = text[at]
            if char == '"':
                quoted = not quoted
            if char == "'" and not quoted and (end := text.find("'", at + 1)) > 0:
                out, at = out + text[at : end + 1], end + 1
            elif text.startswith("$((", at):
                end = text.index("))", at)
                out, at = out + str(_calculated(self._expanded(_dollars(text[at + 3 : end])))), end + 2
            elif text.startswith("$(", at) and (known := _output(text[at:])):
                out, at = out + known, _closing(text, at + 2, "(", ")") + 1
            elif text.startswith("$(", at) or char == "`":
                raise UnknownVariable(text[at : at + 40])
            elif text.startswith("${", at):
                end = _closing(text, at + 2)
                out, at = out + self._parameter(text[at + 2 : end]), end + 1
            elif char == "$" and (match := _NAME.match(text, at + 1)):
                out, at = out + self._variable(match[0]), match.end()
            elif char == "$" and text[at + 1 : at + 2] in "@*#?0123456789" and at + 1 < len(text):
                at += 2
            else:
                out, at = out + char, at + 1
        return out

    def _parameter(self, text: str) -> str:
        match = _NAME.match(text)
        if match is None:
            return ""
        name, rest = match[0], text[match.end() :]
        value = self._variable(name) if name in self.variables else None
        if rest.startswith((":-", "-", ":=", "=")):
            return value if value else self._expanded(rest.lstrip(":").removeprefix("-").removeprefix("="))
        if rest.startswith((":+", "+")):
            return self._expanded(rest.lstrip(":").removeprefix("+")) if value else ""
        if rest and not rest.startswith((":?", "?")):
            raise UnknownVariable(f"${{{text}}}")
        return self._variable(name)

    def _variable(self, name: str) -> str:
        if name not in self.variables:
            raise UnknownVariable(f"${{{name}}}")
        if name in self.branched:
            self.assumed[name] = self.variables[name]
        return self.variables[name]


_UNKNOWN = (
    "variables that the script sets without commands",
    "Set it in the environment, as for bash, or convert the command that `bash -x` prints.",
)


def arguments(words: list[str], trainer: re.Pattern[str]) -> list[str]:
    """Return the words behind the trainer's name, up to a pipe or the like."""
    start = next(i for i, word in enumerate(words) if trainer.search(word))
    ends = [i for i, word in enumerate(words) if i > start and _END.match(word)]
    return words[start + 1 : ends[0] if ends else None]


def _logical_lines(text: str) -> list[str]:
    """Return the lines, without comments, in which a backslash continues the next."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return re.sub(r"[ \t]*\\[ \t]*\n[ \t]*", " ", "\n".join(lines) + "\n").splitlines()


def _unquoted(text: str) -> str:
    return re.sub(r"\"[^\"]*\"|'[^']*'|\$\{.*\}|\$\(.*\)|\s+#.*", "", text)


def _closing(text: str, at: int, opens: str = "{", closes: str = "}") -> int:
    depth = 1
    while depth:
        if at >= len(text):
            raise UnknownVariable(text)
        depth += (text[at] == opens) - (text[at] == closes)
        at += 1
    return at - 1


def _output(text: str) -> str:
    """Return what stands for the output of a command: the current folder, or a word for the time."""
    if re.match(r"\$\((cd|dirname|pwd|realpath|readlink)\b", text):
        return "."
    return "date" if text.startswith("$(date") else ""


def _dollars(text: str) -> str:
    """Return an arithmetic expression whose names are written as variables."""
    return re.sub(r"(?<![\w${])([A-Za-z_]\w*)", r"${\1}", text)


def _calculated(text: str) -> int:
    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        raise UnknownVariable(f"$(({text}))")

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        raise UnknownVariable(f"$(({text}))") from None
