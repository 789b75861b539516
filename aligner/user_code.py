"""Import of the user's own functions and classes by a path in the config.

module:name imported as Python would path/to/file.py:name from the current folder, or from the package's own files:
examples/sums.py
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from aligner.errors import AlignerError
from aligner.files import conf_dir


def load(path: str, key: str, expected: str, error: type[AlignerError], others: str = "") -> Callable[..., Any]:
    """Import the callable at `path`, the value of `key` in the config. The message names `expected`, and in `others`
    other accepted forms. Raises `error` if it cannot be imported, for any error of the import."""
    source, colon, name = path.rpartition(":")
    if not colon or not source or not name:
        raise error(f"{key}={path!r}: expected module:{expected}, path.py:{expected}{others}")
    module = _imported(source, f"{key}={path!r}: expected an importable {expected}", error)
    target = getattr(module, name, None)
    if not callable(target):
        kind = inspect.isclass if expected == "Class" else inspect.isfunction
        names = ", ".join(n for n, v in vars(module).items() if kind(v) and not n.startswith("_"))
        raise error(f"{key}={path!r}: expected a {expected} `{name}` in {source}, which has {names or 'none'}")
    return target


def load_module(path: str, key: str, error: type[AlignerError]) -> ModuleType:
    """Import the file at `path`, the value of `key` in the config. Raises `error` as `load`."""
    return _imported(path, f"{key}={path!r}: expected an importable file", error)


def _imported(source: str, expected: str, error: type[AlignerError]) -> ModuleType:
    try:
        return _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except BaseException as cause:  # importing runs the user's code, which may raise anything, or call sys.exit
        raise error(f"{expected}, but importing {source} raised {type(cause).__name__}: {cause}") from cause


def _import_file(path: Path) -> ModuleType:
    path = path.expanduser()
    if not path.is_absolute() and not path.is_file():
        path = conf_dir().parent / path if (conf_dir().parent / path).is_file() else path
    path = path.resolve()
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
