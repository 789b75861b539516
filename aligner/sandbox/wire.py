"""Values as data, between a program's process and the process that judges it.

A message is JSON: a table of containers, and values that may point into it. So containers that are shared, or contain
themselves, stay so. Values are built only from types of Python and its standard library, independent of the writer.
Runs inside the sandbox: imports nothing of the package.
"""

from __future__ import annotations

import importlib
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

SMALL = 1 << 63  # larger whole numbers travel as hexadecimal digits, which are read in linear time
MUTABLE = {"list": list, "dict": dict, "set": set, "bytearray": bytearray}
# name -> module, constructor's arguments; immutable, or a copy: a change stays on its side
VALUES: dict[str, tuple[str, Callable[[Any], tuple]]] = {
    "complex": ("builtins", lambda v: (v.real, v.imag)),
    "range": ("builtins", lambda v: (v.start, v.stop, v.step)),
    "Decimal": ("decimal", lambda v: (str(v),)),
    "Fraction": ("fractions", lambda v: (v.numerator, v.denominator)),
    "date": ("datetime", lambda v: (v.year, v.month, v.day)),
    "time": ("datetime", lambda v: (v.hour, v.minute, v.second, v.microsecond)),
    "datetime": ("datetime", lambda v: (v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond)),
    "timedelta": ("datetime", lambda v: (v.days, v.seconds, v.microseconds)),
    "deque": ("collections", lambda v: (tuple(v), v.maxlen)),
    "OrderedDict": ("collections", lambda v: (tuple(v.items()),)),
    "Counter": ("collections", lambda v: (tuple(v.items()),)),
}
VIEWS: dict[str, Callable[[list], Any]] = {
    "dict_keys": lambda items: dict.fromkeys(items).keys(),
    "dict_values": lambda items: dict(enumerate(items)).values(),
    "dict_items": lambda items: dict(items).items(),
    "iterated": iter,
}
PLAIN = (str, int, float, bytes, tuple, frozenset, *MUTABLE.values())  # a derived type is sent as its base
MISSING = object()


class Corrupt(BaseException):
    """A message that breaks this module's format."""


class Channel:
    """Messages on two pipes: 8 bytes of length, then the message."""

    def __init__(self, source: int, sink: int):
        self.source, self.sink = source, sink

    def read(self) -> bytes:
        return self._exactly(int.from_bytes(self._exactly(8), "little"))

    def write(self, message: bytes) -> None:
        data = memoryview(len(message).to_bytes(8, "little") + message)
        while data:
            data = data[os.write(self.sink, data) :]

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = os.read(self.source, min(count - len(data), 1 << 20))
            if not piece:
                os._exit(0)  # the other side has closed the pipe
            data += piece
        return bytes(data)


def contents(value: Any) -> list:
    """Return the contents of a mutable container."""
    if not _is_table(value):
        return list(value)
    table = value if isinstance(value, dict) else value.__dict__
    return [*table.keys(), *table.values()]


def same(before: list, after: list) -> bool:
    return len(before) == len(after) and all(map(operator.is_, before, after))


class Packer:
    """A writer of one message.

    `known`: the objects of the message that it answers, to which it can point. `foreign`: returns a table's entry for
    an object that is not data, or raises.
    """

    def __init__(self, foreign: Callable[[Any], list], known: Sequence[Any] = ()):
        self.foreign, self.nodes = foreign, []
        self.objects: list[Any] = []
        self._indices = {id(value): -1 - index for index, value in enumerate(known)}
        self._kept: list[Any] = [known]  # an id is valid only while its object lives
        self._open: list[int] = []

    def pack(self, value: Any) -> Any:
        packed = self._put(value)
        self._fill()
        return packed

    def pack_contents(self, value: Any) -> list:
        """Return the entry of a container that the previous message brought."""
        entry = self._entry(value)
        self._fill()
        return entry

    def _fill(self) -> None:
        while self._open:
            index = self._open.pop()
            self.nodes[index] = self._entry(self.objects[index])

    def _put(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str, float) or (kind is int and -SMALL < value < SMALL):
            return value
        index = self._indices.get(id(value))
        if index is not None:
            return [index]
        entry = None if kind in MUTABLE.values() else self._closed(value, kind)
        index = len(self.nodes)
        self.nodes.append(entry)
        self.objects.append(value)
        if entry is None:
            self._open.append(index)
        self._indices[id(value)] = index
        return [index]

    def _closed(self, value: Any, kind: type) -> list | None:
        """Return the entry of a value whose elements precede it in the table; None if it is filled later."""
        name = kind.__name__
        if kind is int:
            return ["int", hex(value)]
        if kind is bytes:
            return ["bytes", value.decode("latin-1")]
        if kind in (tuple, frozenset):
            return [name, [self._put(element) for element in self._keep(list(value))]]
        if VALUES.get(name, ("", None))[0] == kind.__module__ and getattr(value, "tzinfo", None) is None:
            return [name, [self._put(argument) for argument in self._keep(VALUES[name][1](value))]]
        if name in VIEWS and kind.__module__ == "builtins":
            return [name, [self._put(element) for element in self._keep(list(value))]]
        plain = next((each for each in PLAIN if isinstance(value, each)), None)
        if plain is None:
            entry = self.foreign(value)
            if entry[0] == "iterated":
                return [entry[0], [self._put(element) for element in self._keep(entry[1])]]
            return None if entry[0] == "instance" else entry
        if plain in MUTABLE.values():
            return None
        return ["same", [self._put(self._keep(_plain(plain, value)))]]

    def _entry(self, value: Any) -> list:
        name = next((name for name, kind in MUTABLE.items() if isinstance(value, kind)), None)
        if name == "bytearray":
            return [name, value.decode("latin-1")]
        return [name or self.foreign(value), [self._put(element) for element in self._keep(contents(value))]]

    def _keep(self, value: Any) -> Any:
        self._kept.append(value)
        return value


def _plain(kind: type, value: Any) -> Any:
    """Return a value without its derived type, by the base type's own methods."""
    own = {str: str.__str__, int: int.__int__, float: float.__float__}.get(kind)
    return own(value) if own else kind(value)


class Unpacker:
    """A reader of one message.

    `known`: the objects of the message that it answers. `build`: makes objects that are not data.
    """

    def __init__(self, nodes: list, build: Callable[[list], Any], known: Sequence[Any] = ()):
        self.nodes, self.build, self.known = nodes, build, known
        self.objects: list[Any] = [self._empty(node) for node in nodes]
        for index, node in enumerate(nodes):
            if self.objects[index] is MISSING:
                self.objects[index] = self._closed(*node)
        for index, node in enumerate(nodes):
            if _tag(node) in (*MUTABLE, "instance"):
                self.fill(self.objects[index], node)

    def value(self, packed: Any) -> Any:
        if not isinstance(packed, list):
            if packed is None or isinstance(packed, bool | int | float | str):
                return packed
            raise Corrupt("neither a value nor an index")
        (index,) = packed
        value = self.objects[index] if index >= 0 else self.known[-1 - index]
        if value is MISSING:
            raise Corrupt("an index of a later entry")
        return value

    def fill(self, target: Any, node: list) -> None:
        """Replace the contents of a container, also of one from an earlier message."""
        elements = node[1] if isinstance(target, bytearray) else [self.value(element) for element in node[1]]
        if isinstance(target, bytearray):
            target[:] = elements.encode("latin-1")
        elif isinstance(target, list):
            target[:] = elements
        elif isinstance(target, set):
            target.clear()
            target.update(elements)
        else:
            table, half = target if isinstance(target, dict) else target.__dict__, len(elements) // 2
            table.clear()
            table.update(zip(elements[:half], elements[half:], strict=True))

    def _empty(self, node: list) -> Any:
        tag = _tag(node)
        if tag == "instance":
            return self.build(node[0])
        return MUTABLE[tag]() if tag in MUTABLE else MISSING

    def _closed(self, tag: Any, arguments: Any) -> Any:
        if tag == "int":
            return int(arguments, 16)
        if tag == "bytes":
            return arguments.encode("latin-1")
        if tag == "foreign":
            return self.build(arguments)
        values = [self.value(argument) for argument in arguments]
        if tag in ("tuple", "frozenset"):
            return (tuple if tag == "tuple" else frozenset)(values)
        if tag == "same":
            return values[0]
        if tag in VIEWS:
            return VIEWS[tag](values)
        if tag == "Counter":
            values = [dict(values[0])]
        return getattr(importlib.import_module(VALUES[tag][0]), tag)(*values)


def _tag(node: list) -> Any:
    """Return the tag of a node.

    No list is a tag but that of an instance: another one would fill an object of the judge.
    """
    return "instance" if isinstance(node[0], list) and node[0][0] == "instance" else node[0]


def _is_table(target: Any) -> bool:
    return not isinstance(target, bytearray | list | set)
