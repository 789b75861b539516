"""The symbols of a Python package: as it is installed, or by its sources, which need not be importable here.

A symbol is "module:attribute.attribute". Of several, between "|", one is enough: upstream has moved it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol


class Package(Protocol):
    version: str

    def has(self, symbol: str) -> bool: ...

    def accepts(self, symbol: str) -> set[str]:
        """Return the names that a callable, a dataclass or a pydantic model takes, or has as properties; none if it
        does not exist."""
        ...


def resolve(symbol: str) -> Any:
    """Import and return a symbol's object. Raises ImportError or AttributeError."""
    *others, last = symbol.split("|")
    for one in others:
        try:
            return resolve(one)
        except (ImportError, AttributeError):
            continue
    module, _, path = last.partition(":")
    target = importlib.import_module(module)
    for name in path.split("."):
        target = getattr(target, name)
    return target


def accepted(target: Any) -> set[str]:
    """See `Package.accepts`."""
    fields = getattr(target, "model_fields", None)
    if fields is not None:
        return set(fields)
    properties = (
        {name for name, value in vars(target).items() if isinstance(value, property)}
        if inspect.isclass(target)
        else set()
    )
    return set(inspect.signature(target).parameters) | properties


class Installed:
    """A package of this interpreter. Importing it may occupy a GPU, start MPI and take long."""

    def __init__(self, name: str):
        self.version = importlib.import_module(name).__version__

    def has(self, symbol: str) -> bool:
        try:
            resolve(symbol)
        except (ImportError, AttributeError):
            return False
        return True

    def accepts(self, symbol: str) -> set[str]:
        try:
            return accepted(resolve(symbol))
        except (ImportError, AttributeError):
            return set()


Named = tuple[str, ast.AST]  # a module, and a definition in it


class Sources:
    """A package in a folder: an unpacked wheel or a checkout. None of it is run. Names that are only made while it
    runs (attributes of `self`, `setattr`, modules of other languages) are not seen."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self.version = self._version()

    def has(self, symbol: str) -> bool:
        return self._find(symbol) is not None

    def accepts(self, symbol: str) -> set[str]:
        definition = self._find(symbol)
        return set() if definition is None else self._taken(*definition)

    def _version(self) -> str:
        for module in (f"{self.name}.version", f"{self.name}._version", self.name):
            for node in self._body(module):
                if _defines(node, "__version__") and isinstance(value := getattr(node, "value", None), ast.Constant):
                    return str(value.value)
        return ""

    @cache  # noqa: B019 (one object for one run)
    def _body(self, module: str) -> list[ast.stmt]:
        """Return the statements of a module, also those under `if` and `try`; none if it does not exist."""
        path = self.folder.joinpath(*module.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return list(_statements(ast.parse(file.read_text(encoding="utf-8", errors="replace")).body))
        return []

    def _find(self, symbol: str) -> Named | None:
        for one in symbol.split("|"):
            module, _, path = one.partition(":")
            first, *rest = path.split(".")
            definition = self._in_module(module, first)
            for name in rest:
                definition = None if definition is None else self._member(*definition, name)
            if definition is not None:
                return definition
        return None

    def _in_module(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Named | None:
        """Return the definition of `name` in a module, where it is defined."""
        if (module, name) in seen:
            return None
        seen |= {(module, name)}
        definition: Named | None = None
        for node in self._body(module):  # the last definition counts
            if isinstance(node, ast.ImportFrom):
                definition = self._imported(module, node, name, seen) or definition
            elif _defines(node, name):
                definition = self._followed(module, node, name, seen)
        return definition

    def _followed(self, module: str, node: ast.AST, name: str, seen: frozenset[tuple[str, str]]) -> Named:
        """Follow `A = B` to B, where that is known."""
        value = getattr(node, "value", None)
        if isinstance(value, ast.Name) and value.id != name:
            return self._in_module(module, value.id, seen) or (module, node)
        return module, node

    def _imported(self, module: str, node: ast.ImportFrom, name: str, seen: frozenset[tuple[str, str]]) -> Named | None:
        source = node.module or ""
        if node.level:
            is_package = (self.folder.joinpath(*module.split(".")) / "__init__.py").is_file()
            base = module.split(".")[: len(module.split(".")) - node.level + is_package]
            source = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            if alias.name == "*":
                return self._in_module(source, name, seen)
            if (alias.asname or alias.name) == name:
                return self._in_module(source, alias.name, seen)
        return None

    def _member(self, module: str, node: ast.AST, name: str) -> Named | None:
        """Return a class's member, its own or inherited."""
        if not isinstance(node, ast.ClassDef):
            return None
        for inner in reversed(list(_statements(node.body))):
            if _defines(inner, name):
                return module, inner
        for base in self._bases(module, node):
            if (member := self._member(*base, name)) is not None:
                return member
        return None

    def _bases(self, module: str, node: ast.ClassDef) -> Iterator[Named]:
        for base in node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name) and (definition := self._in_module(module, name.id)) is not None:
                yield definition

    def _taken(self, module: str, node: ast.AST) -> set[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        if not isinstance(node, ast.ClassDef):
            return set()
        names: set[str] = set()
        for inner in _statements(node.body):
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                names.add(inner.target.id)  # a field of a dataclass or a pydantic model
            elif isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                names |= self._taken(module, inner) - {"self"}
            elif isinstance(inner, ast.FunctionDef) and any(_named(d, "property") for d in inner.decorator_list):
                names.add(inner.name)
        for base in self._bases(module, node):
            names |= self._taken(*base)
        return names


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            for name in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(node, name, ()):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])
        else:
            yield node


def _named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == name
    if isinstance(node, ast.AnnAssign):
        return _named(node.target, name)
    return isinstance(node, ast.Assign) and any(
        _named(target, name) or any(_named(inner, name) for inner in getattr(target, "elts", ()))
        for target in node.targets
    )
