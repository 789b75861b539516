"""The process of a program: runs it, then serves calls of the process that judges it, with data as results.

Nothing in this process is secret, and nothing that a program changes in it decides a verdict: its results are compared
elsewhere. Runs inside the sandbox: imports nothing of the package.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import random
import types
from collections.abc import Sequence
from typing import Any

from peer import Peer
from wire import Channel

Names = dict[str, Any]


def run(texts: Sequence[str], names: Names) -> None:
    random.seed(0)
    exec(compile(_chosen(texts), "<program>", "exec"), names)


def _chosen(texts: Sequence[str]) -> str:
    """Return of several blocks the last that is Python and does something: an output may follow the program."""
    readable = []
    for text in texts if len(texts) > 1 else ():
        try:
            statements = ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        idle = all(map(_idle, statements))
        readable.append((not idle, text))
    return max(enumerate(readable), key=lambda each: (each[1][0], each[0]))[1][1] if readable else texts[-1]


def _idle(statement: ast.stmt) -> bool:
    """Return whether a statement does nothing, as an output that parses as Python: `7`, `Result: 7`."""
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None
    return isinstance(statement, ast.Expr) and not any(isinstance(each, ast.Call) for each in ast.walk(statement))


def serve(texts: Sequence[str], names: Names, channel: Channel) -> None:
    """Run the program and serve calls until the process ends."""
    try:
        run(texts, names)
    except SystemExit as end:
        if end.code:
            raise
    channel.write(b"")  # ready
    ServedObjects(names, channel).serve_all()


class ServedObjects:
    def __init__(self, names: Names, channel: Channel):
        self.names = names
        self.peer = Peer(channel, self._serve, self._foreign, self._build)
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def serve_all(self) -> None:
        while True:
            self.peer.answer(self.peer.read())

    def _serve(self, what: str, *rest: Any) -> Any:
        return getattr(self, f"do_{what}")(*rest)

    def do_setup(self, text: str) -> None:
        """Execute imports and classes that the row's tests share with the program."""
        exec(compile(text, "<setup>", "exec"), self.names)
        classes = [each.name for each in ast.parse(text).body if isinstance(each, ast.ClassDef)]
        self.peer.classes = {name: self.names[name] for name in classes}

    def do_call(self, target: Any, args: Sequence, keywords: Names) -> Any:
        return self._target(target)(*args, **keywords)

    def do_solve(self, name: str, args: Sequence) -> Any:
        """Call the function, or a method of the class Solution."""
        owner = self.names["Solution"]() if "Solution" in self.names else types.SimpleNamespace(**self.names)
        return getattr(owner, name)(*args)

    def do_get(self, target: Any, name: str) -> Any:
        return getattr(self._target(target), name)

    def do_set(self, target: Any, name: str, value: Any) -> None:
        setattr(self._target(target), name, value)

    def do_method(self, target: Any, name: str, args: Sequence) -> Any:
        """Call a method that Python looks up at the type."""
        target = self._target(target)
        return getattr(type(target), name)(target, *args)

    def do_next(self, number: int, count: int) -> list:
        return list(itertools.islice(self._objects[number], count))

    def _target(self, target: Any) -> Any:
        if not isinstance(target, str):
            return target
        if target not in self.names:
            return eval(target, self.names)  # one of Python's own, or a NameError
        return self.names[target]

    def _foreign(self, value: Any) -> list:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        kind = "iterator" if hasattr(value, "__next__") else "callable" if callable(value) else "object"
        return [kind, number]

    def _build(self, kind: str, *rest: Any) -> Any:
        if kind == "object":
            return self._objects[rest[0]]
        if kind == "global":
            return getattr(importlib.import_module(rest[0]), rest[1])
        return lambda *args, **keywords: self.peer.ask(rest[0], args, keywords)  # a function of the tests
