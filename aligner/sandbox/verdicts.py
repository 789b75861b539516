"""The process that judges: evaluates a row's tests, and calls the functions in the program's process.

It receives data (wire.py): no object in it is of a type that a program made, so comparisons are reliable. Of the
program it holds only numbers, for objects of its classes and for its iterators. Runs inside the sandbox: imports
nothing of the package.
"""

from __future__ import annotations

import ast
import builtins
import json
import random
import sys
import types
from collections.abc import Iterator
from itertools import count, islice
from typing import Any, NoReturn

from peer import Peer
from subjects import UNREADABLE, Tests, is_class
from wire import Channel, Corrupt

PASSED, WRONG, ERROR, UNJUDGED = "passed", "wrong", "error", "unjudged"
LONGEST = 1_000_000  # most elements of a tests' iterator that is handed to a program
# Methods of Python's types whose result is a verdict: no object of the program may answer them.
JUDGING = {"startswith", "endswith", "issubset", "issuperset", "isdisjoint", *filter(lambda n: n[:2] == "is", dir(str))}
ITEMS = (1, 8, 64, 512)  # elements fetched from an iterator per call


class Opaque(BaseException):
    """A value that is not data where data is needed. No test may catch it."""


def judge(spec: dict, channel: Channel, module: types.ModuleType) -> None:
    """Judge one test, and send the verdict as the last message."""
    judging = TestJudge(channel, spec)
    random.seed(0)  # tests may draw their inputs
    try:
        judging.call() if "call" in spec else judging.asserts(module)
        verdict = PASSED
    except AssertionError:
        verdict = WRONG
    except SystemExit as end:  # of unittest.main, for one
        verdict = WRONG if end.code else PASSED
    except (Opaque, MemoryError):
        verdict = UNJUDGED
    except BaseException:
        verdict = ERROR
    if verdict == PASSED and (judging.opaque or not judging.calls):
        verdict = UNJUDGED
    channel.write(b"=" + (ERROR if judging.corrupt else verdict).encode())


class TestJudge:
    """The evaluation of one test."""

    def __init__(self, channel: Channel, spec: dict):
        self.spec, self.calls = spec, 0
        self.opaque = self.corrupt = False
        self.peer = Peer(channel, self._called_back, self._foreign, self._build, mark=b"?")
        self._functions: list[Any] = []
        self._objects: dict[int, Remote] = {}
        self._accepts: tuple[str, ...] = ()  # kinds of objects that the awaited answer may have

    def call(self) -> None:
        value = self.ask("solve", self.spec["call"], self.spec["args"])
        value = json.loads(json.dumps(value, default=list))
        expected = self.spec["expected"]
        only = expected[0] if isinstance(expected, list) and len(expected) == 1 else expected
        assert value in (expected, only)  # APPS has some results in a list of one

    def asserts(self, module: types.ModuleType) -> None:
        tests = Tests(self.spec["setup"], self.spec["tests"], self.spec["entry"], self.spec["helpers"])
        names, check = module.__dict__, self.spec["check"]
        own = dir(builtins) if check else ()  # which keep their meaning in `check`
        try:
            subjects, shared, prelude = tests.subjects(), tests.shared(), tests.prelude()
        except UNREADABLE:
            self.refuse()  # an unchecked row
        names.update((name, Function(self, name)) for name in subjects if name not in own)
        self.ask("setup", shared)
        sys.modules["__main__"] = module
        exec(compile(prelude, "<setup>", "exec"), names)
        self.peer.classes = {name: names[name] for name in _classes(shared) if isinstance(names.get(name), type)}
        self.calls -= 1  # the setup does not count as a call of a test
        exec(compile(tests.tests[self.spec["place"]], "<test>", "exec"), names)
        if check and "check" not in names:
            self.refuse()
        if check:
            names["check"](Function(self, check))

    def ask(self, *request: Any, accepts: tuple[str, ...] = ()) -> Any:
        self.calls += 1
        before, self._accepts = self._accepts, accepts
        try:
            return self.peer.ask(*request)
        except Corrupt:
            self.corrupt = True
            raise
        finally:
            self._accepts = before

    def refuse(self) -> NoReturn:
        self.opaque = True
        raise Opaque

    def items(self, number: int) -> Iterator:
        """Yield the elements of a program's iterator, in growing batches."""
        for turn in count():
            size = ITEMS[min(turn, len(ITEMS) - 1)]
            elements = self.ask("next", number, size)
            yield from elements
            if len(elements) < size:
                return

    def _called_back(self, number: int, args: tuple, keywords: dict) -> Any:
        return self._functions[number](*args, **keywords)

    def _foreign(self, value: Any) -> list:
        if isinstance(value, Remote | Method):
            return ["object", value._number]
        if isinstance(value, Iterator):
            items = list(islice(value, LONGEST + 1))
            return ["iterated", items] if len(items) <= LONGEST else self.refuse()
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if callable(value) and module in sys.stdlib_module_names and name.isidentifier():
            return ["global", module, name]
        if not callable(value):
            self.refuse()
        self._functions.append(value)
        return ["function", len(self._functions) - 1]

    def _build(self, kind: str, number: int) -> Any:
        if kind == "iterator":
            return self.items(int(number))
        if kind == "callable" and "callable" in self._accepts:
            return Method(self, int(number))
        if number in self._objects and self._accepts:
            return self._objects[number]
        if kind != "object" or "object" not in self._accepts:
            self.refuse()
        return self._objects.setdefault(number, Remote(self, number))


class Foreign:
    """A stand-in for an object in the program's process. Only data decides a test, so comparisons of it are refused."""

    def _refuse(self, *rest: Any) -> NoReturn:
        self._judging.refuse()  # type: ignore[attr-defined]

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __contains__ = __instancecheck__ = _refuse
    __add__ = __radd__ = __sub__ = __mul__ = __hash__ = __index__ = __float__ = __int__ = _refuse


class Method(Foreign):
    def __init__(self, judging: TestJudge, number: int):
        self._judging, self._number = judging, number

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._judging.ask("call", self, args, keywords, accepts=("known",))


class Function(Foreign):
    """A name of the program. A class name, by its capital, makes objects."""

    def __init__(self, judging: TestJudge, name: str):
        self._judging, self.__name__ = judging, name

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        accepts = ("object",) if is_class(self.__name__) else ()
        return self._judging.ask("call", self.__name__, args, keywords, accepts=accepts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not is_class(self.__name__):
            raise AttributeError(name)
        return self._judging.ask("get", self.__name__, name, accepts=("callable",))

    __hash__ = object.__hash__


class Remote(Foreign):
    """An object of a class that the program defines.

    Its attributes and the results of its methods are data, or objects that the test has made itself.
    """

    def __init__(self, judging: TestJudge, number: int):
        self.__dict__.update(_judging=judging, _number=number)

    def __getattr__(self, name: str) -> Any:
        if name in JUDGING:
            self._refuse()
        return self._judging.ask("get", self, name, accepts=("callable",))

    def __setattr__(self, name: str, value: Any) -> None:
        self._judging.ask("set", self, name, value)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._judging.ask("call", self, args, keywords, accepts=("known",))

    def __len__(self) -> int:
        return self._judging.ask("method", self, "__len__", ())

    def __getitem__(self, key: Any) -> Any:
        return self._judging.ask("method", self, "__getitem__", (key,), accepts=("known",))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._judging.ask("method", self, "__setitem__", (key, value))

    def __iter__(self) -> Iterator:
        return iter(self._judging.ask("method", self, "__iter__", ()))

    def __str__(self) -> str:
        return self._judging.ask("method", self, "__str__", ())

    def __repr__(self) -> str:
        return self._judging.ask("method", self, "__repr__", ())

    __hash__ = object.__hash__


def _classes(source: str) -> list[str]:
    return [each.name for each in ast.parse(source).body if isinstance(each, ast.ClassDef)]
