"""The names in a row's assertions that stand for the program's objects, read from their text before anything runs.

These are the functions and classes that the tests use and do not define. The judge evaluates everything else, also
Python's own functions if the program defines the same names. Also runs inside the sandbox: imports nothing of the
package.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


def is_class(name: str) -> bool:
    return name[:1].isupper()


TYPES = set(filter(is_class, typing.__all__))  # defined for programs without an import


@dataclass(frozen=True)
class Tests:
    """The tests of a row.

    `setup` runs before each test; `tests` run separately. `entry`: the functions and classes that the program has to
    define; empty: read from the tests. `helpers`: texts that may define functions which the tests use.
    """

    setup: str
    tests: Sequence[str]
    entry: Sequence[str] = ()
    helpers: Sequence[str] = ()

    def subjects(self) -> set[str]:
        """Return the names that stand for the program's objects.

        Raises ValueError if they cannot be determined or cannot run, or if a test would pass for any program.
        """
        for test in self.tests:
            if not _can_fail(self.setup, test):
                raise ValueError(f"no assert that can fail is reached in {test[:80]!r}")
        unbound = [self._unbound(test) for test in self.tests]
        own = set(dir(builtins))
        used = set().union(*unbound) - own
        if self.entry:
            lacking = used - set(self.entry)
            if lacking:
                raise ValueError(f"the tests use {_list(lacking)}, which neither they nor test_setup_code define")
            return set(self.entry)
        functions = {name for name in used if not is_class(name)}
        if len(functions) > 1:
            raise ValueError(
                f"the tests use {_list(functions)}: name in a column entry_point those that the answer defines, and "
                "define the others in test_setup_code"
            )
        if not used:  # a function that is called as one of Python's own
            used = set.intersection(*(_called(test) & own for test in self.tests))
            if len(used) != 1:
                raise ValueError("the tests call no function of the answer; a column entry_point may name it")
        for test in self.tests:
            for call in _calls(ast.parse(test)):
                inner = {each.func.id for argument in [*call.args, *call.keywords] for each in _calls(argument)}  # type: ignore[attr-defined]
                if call.func.id in used and inner & functions - {call.func.id}:  # type: ignore[attr-defined]
                    raise ValueError(f"the tests pass a result to {call.func.id}: define it in test_setup_code")  # type: ignore[attr-defined]
        return used

    def _unbound(self, test: str) -> set[str]:
        source = "\n".join([self.prelude(), test])
        _check_imports(source)
        return _free(source)

    def prelude(self) -> str:
        """Return the code before each test: modules used without an import, functions of `helpers`, the setup."""
        source = "\n".join([self.setup, *self.tests])
        modules = [name for name in sorted(_free(source) & _bases(source)) if name in sys.stdlib_module_names]
        lines = [f"import {name}" for name in modules]
        if self.entry and _free("\n".join([*lines, source])) - set(dir(builtins)) - set(self.entry):
            lines += [line for text in self.helpers for line in _definitions(text, set(self.entry))]
        return "\n".join([*lines, self.setup])

    def defined(self) -> set[str]:
        """Return functions at the top level of setup and tests."""
        trees = [each for text in (self.setup, *self.tests) for each in ast.parse(text).body]
        return {each.name for each in trees if isinstance(each, ast.FunctionDef)}

    def shared(self) -> str:
        """Return code that the program also gets, after it has run: imports, and the classes of the setup."""
        setup = ast.parse(self.setup).body
        others = [each for test in self.tests for each in ast.parse(test).body]
        imports = [each for each in [*setup, *others] if isinstance(each, ast.Import | ast.ImportFrom)]
        return "\n".join(map(ast.unparse, [*imports, *(each for each in setup if isinstance(each, ast.ClassDef))]))


def _free(source: str) -> set[str]:
    """Return names that are read, and bound nowhere at the top level."""
    top = symtable.symtable(source, "<tests>", "exec")
    tables, used, bound = [top], set(), set()
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table is not top and not symbol.is_global():
                continue
            used |= {symbol.get_name()} if symbol.is_referenced() else set()
            bound |= {symbol.get_name()} if symbol.is_assigned() or symbol.is_imported() else set()
    return {name for name in used - bound - TYPES if not (name.startswith("__") and name.endswith("__"))}


def _bases(source: str) -> set[str]:
    """Return names with an attribute that is read."""
    owners = (each.value for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Attribute))
    return {each.id for each in owners if isinstance(each, ast.Name)}


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Return calls of plain names."""
    calls = (each for each in ast.walk(tree) if isinstance(each, ast.Call))
    return (each for each in calls if isinstance(each.func, ast.Name))


def _called(source: str) -> set[str]:
    return {each.func.id for each in _calls(ast.parse(source))}  # type: ignore[attr-defined]


def _definitions(text: str, entry: set[str]) -> list[str]:
    try:
        statements = ast.parse(text).body
    except UNREADABLE:
        return []
    kinds = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    return [
        ast.unparse(each) for each in statements if isinstance(each, kinds) and getattr(each, "name", "") not in entry
    ]


def _can_fail(setup: str, test: str) -> bool:
    """Return whether a failed check would be seen. Checks in functions that nobody calls, or that are caught, do not
    count."""
    helpers = [each for each in ast.parse(setup).body if isinstance(each, ast.FunctionDef)]
    tree = ast.Module([*helpers, *ast.parse(test).body], [])
    used = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)} | {"check"}
    return not any(map(_reports, ast.walk(tree))) and any(map(_checks, _reached(tree, used)))


def _reports(node: ast.AST) -> bool:
    """Return whether a node runs unittest so that it prints its failures and continues."""
    if isinstance(node, ast.Call):
        return _name(node.func) == "main" and any(each.arg == "exit" for each in node.keywords)
    return _name(node) == "TextTestRunner"


def _name(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _reached(tree: ast.AST, used: set[str]) -> Iterator[ast.AST]:
    for each in ast.iter_child_nodes(tree):
        function = isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        if function and each.name not in used and not isinstance(tree, ast.ClassDef):  # type: ignore[attr-defined]
            continue
        if isinstance(each, ast.Try) and any(map(_swallows, each.handlers)):
            each = ast.Try([], each.handlers, each.orelse, each.finalbody)
        yield each
        yield from _reached(each, used)


def _swallows(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches a failed assertion."""
    kinds = (
        {each.id for each in ast.walk(handler.type) if isinstance(each, ast.Name)} if handler.type else {"Exception"}
    )
    return bool(kinds & {"AssertionError", "Exception", "BaseException"})


def _checks(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):  # not of a tuple, which is never false: assert (x, "message")
        return not (isinstance(node.test, ast.Tuple) or (isinstance(node.test, ast.Constant) and node.test.value))
    return isinstance(node, ast.Raise) or _name(node).startswith(("assert", "fail", "exit", "_exit"))


def _check_imports(source: str) -> None:
    tree = ast.parse(source)
    tried = {inner for each in ast.walk(tree) if isinstance(each, ast.Try) for inner in ast.walk(each)}
    for each in ast.walk(tree):
        if isinstance(each, ast.ImportFrom) and [name.name for name in each.names] == ["*"]:
            raise ValueError(f"`{ast.unparse(each)}`: import by name what the tests use")
        names = [each.module or ""] if isinstance(each, ast.ImportFrom) else []
        names += [name.name for name in each.names] if isinstance(each, ast.Import) else []
        for name in names if each not in tried else ():
            if name.split(".")[0] not in sys.stdlib_module_names:
                raise ValueError(f"`{ast.unparse(each)}`: only Python's standard library is there")


def _list(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
