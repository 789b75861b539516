"""Import of the user's own functions and classes by a path in the config.

`module:name` is imported as Python would. `path/to/file.py:name` is a file from the current folder, or one of the
package's own: `examples/sums.py:score`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from aligner.errors import AlignerError
from aligner.files import conf_dir


def is_source(name: str) -> bool:
    """Return whether a name is the path of a Python file, or that of a module within a package: my_lab.my_stage."""
    return name.endswith(".py") or bool(re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name))


def is_path(value: str) -> bool:
    """Return whether a key's value is the path of something of the user's own, `module:name`."""
    source, _, name = value.rpartition(":")
    return bool(source) and name.isidentifier()


def load(path: str, key: str, expected: str, error: type[AlignerError], others: str = "") -> Callable[..., Any]:
    """Import the callable at `path`, the value of `key` in the config. The message names `expected`, and in `others`
    other accepted forms. Raises `error` if it cannot be imported, for any error of the import."""
    kind = inspect.isclass if expected == "Class" else inspect.isfunction
    return _named(path, key, expected, error, callable, kind, others)


def load_instance[T](path: str, key: str, kind: type[T], error: type[AlignerError]) -> T:
    """Import the object of this class at `path`, as `load` does."""
    is_one = lambda value: isinstance(value, kind)  # noqa: E731
    return _named(path, key, kind.__name__, error, is_one, is_one)


def _named(
    path: str,
    key: str,
    expected: str,
    error: type[AlignerError],
    fits: Callable[[Any], bool],
    shown: Callable[[Any], bool],
    others: str = "",
) -> Any:
    source, colon, name = path.rpartition(":")
    if not colon or not source or not name:
        raise error(f"{key}={path!r}: expected module:{expected}, path.py:{expected}{others}")
    module = _imported(source, f"{key}={path!r}: expected an importable {expected}", error)
    target = getattr(module, name, None)
    if not fits(target):
        names = ", ".join(n for n, v in vars(module).items() if shown(v) and not n.startswith("_"))
        raise error(f"{key}={path!r}: expected a {expected} `{name}` in {source}, which has {names or 'none'}")
    return target


def load_module(path: str, key: str, error: type[AlignerError]) -> ModuleType:
    """Import the file at `path`, the value of `key` in the config. Raises `error` as `load`."""
    return _imported(path, f"{key}={path!r}: expected an importable file", error)


def _imported(source: str, expected: str, error: type[AlignerError]) -> ModuleType:
    try:
        return _import_file(source) if source.endswith(".py") else importlib.import_module(source)
    except BaseException as cause:  # importing runs the user's code, which may raise anything, or call sys.exit
        raise error(f"{expected}, but importing {source} raised {type(cause).__name__}: {cause}") from cause


def find_file(path: str) -> Path:
    """Return where a file is: in the current folder or among the package's own. There may be none."""
    own, shipped = Path(path).expanduser(), conf_dir().parent / path
    return shipped if shipped.is_file() and not own.is_file() else own


def source_files(path: str) -> list[Path]:
    """Return the file at `path`, and those beside it that it imports, directly or not; nothing if it is no file."""
    first, files = find_file(path), dict[Path, None]()
    new = [first]
    while new:
        file = new.pop()
        if file not in files and file.is_file():
            files[file] = None
            new += [first.parent.joinpath(*name.split(".")).with_suffix(".py") for name in _imports(file)]
    return list(files)


def _imports(file: Path) -> Iterator[str]:
    """Yield the names of modules that a file of Python may import."""
    with suppress(SyntaxError, ValueError):  # its import will say so
        for node in ast.walk(ast.parse(file.read_bytes())) if file.suffix == ".py" else ():
            if isinstance(node, ast.Import):
                yield from (name.name for name in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from (node.module, *(f"{node.module}.{name.name}" for name in node.names))


def _import_file(source: str) -> ModuleType:
    path = find_file(source).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # the file may import its neighbours; last, so that none is shadowed
    name = f"aligner_user_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look the module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
