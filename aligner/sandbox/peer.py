"""Calls between a program's process and the process that judges it: one asks, the other answers, in turn.

An answer brings back the changes of the containers in the call. Runs inside the sandbox: imports nothing of the
package.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Sequence
from typing import Any

from wire import MUTABLE, Channel, Corrupt, Packer, Unpacker, contents, same

BROKEN = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, ImportError)


class Peer:
    """One end of the calls.

    `serve` executes a request of the other side. `foreign` and `build` write and read objects that are not data.
    `classes` are those of the row's setup, which both sides know; their objects travel as their attributes. `mark`
    stands before each message.
    """

    def __init__(self, channel: Channel, serve: Callable, foreign: Callable, build: Callable, mark: bytes = b""):
        self.channel, self.serve, self.mark = channel, serve, mark
        self.foreign, self.build = foreign, build
        self.classes: dict[str, type] = {}

    def ask(self, *request: Any) -> Any:
        """Return the answer of the other side; raise the exception that it raised."""
        packer = Packer(self._foreign)
        self._write("call", packer, packer.pack(list(request)))
        message = self.read()
        while message["do"] == "call":
            self.answer(message)
            message = self.read()
        try:
            unpacker = Unpacker(message["nodes"], self._build, packer.objects)
            value = unpacker.value(message["value"])
            for index, node in message["changed"]:
                self._change(unpacker, packer.objects[index], node)
            raised = _exception(*value) if message["do"] == "raise" else None
        except BROKEN as cause:
            raise Corrupt(repr(cause)) from cause
        if raised:
            raise raised
        return value

    def answer(self, message: dict) -> None:
        try:
            unpacker = Unpacker(message["nodes"], self._build)
            request = unpacker.value(message["value"])
            before = [contents(value) if self._changes(value) else None for value in unpacker.objects]
        except BROKEN as cause:
            raise Corrupt(repr(cause)) from cause
        try:
            done, value = "return", self.serve(*request)
        except MemoryError:
            raise
        except Exception as error:
            done, value = "raise", [[kind.__name__ for kind in type(error).__mro__], str(error)]
        packer = Packer(self._foreign, unpacker.objects)
        packed = packer.pack(value)
        changed = [
            [index, packer.pack_contents(unpacker.objects[index])]
            for index, was in enumerate(before)
            if was is not None and not same(was, contents(unpacker.objects[index]))
        ]
        self._write(done, packer, packed, changed)

    def _write(self, do: str, packer: Packer, value: Any, changed: Sequence = ()) -> None:
        message = {"do": do, "value": value, "nodes": packer.nodes, "changed": changed}
        self.channel.write(self.mark + json.dumps(message, separators=(",", ":")).encode())

    def read(self) -> dict:
        try:
            message = json.loads(self.channel.read())
        except (ValueError, RecursionError) as cause:
            raise Corrupt(repr(cause)) from cause
        if not isinstance(message, dict) or message.keys() != {"do", "value", "nodes", "changed"}:
            raise Corrupt("no message")
        return message

    def _changes(self, value: Any) -> bool:
        return isinstance(value, tuple(MUTABLE.values())) or type(value) in self.classes.values()

    def _change(self, unpacker: Unpacker, target: Any, node: list) -> None:
        if not self._changes(target):
            raise Corrupt("a change of an immutable object")
        unpacker.fill(target, node)

    def _foreign(self, value: Any) -> list:
        name = type(value).__name__
        if self.classes.get(name) is type(value) and hasattr(value, "__dict__"):
            return ["instance", name]
        entry = self.foreign(value)
        return entry if entry[0] == "iterated" else ["foreign", entry]

    def _build(self, entry: list) -> Any:
        if entry[0] == "instance":
            return object.__new__(self.classes[entry[1]])
        return self.build(*entry)


def _exception(names: list, text: str) -> Exception:
    """Return the nearest of Python's own exceptions.

    StopIteration becomes RuntimeError, as in a generator. Raised by a function that `map` calls, it would end the loop
    of a test as if all had passed.
    """
    if {"StopIteration", "StopAsyncIteration"} & set(map(str, names)):
        names = ["RuntimeError"]
    for name in names:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(str(text))
            except TypeError:
                continue  # its constructor takes no text
    return Exception(str(text))
