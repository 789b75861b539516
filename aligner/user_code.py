"""Functions and classes of the user's own, found by a path in the config:

module:name            imported as Python would
path/to/file.py:name   of the current folder, or of those that come with the package: examples/sums.py
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


def load(path: str, key: str, what: str, error: type[AlignerError], more: str = "") -> Callable[..., Any]:
    """The callable at `path`, which `key` has in the config; `what` it is to be, and `more` it could be, in a message.
    Raises `error` if it cannot be imported, whatever importing raises."""
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise error(f"{key}={path!r}: expected module:{what}, path.py:{what}{more}")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except BaseException as cause:  # importing runs the user's code, which may raise anything, or call sys.exit
        raise error(
            f"{key}={path!r}: expected an importable {what}, "
            f"but importing {place} raised {type(cause).__name__}: {cause}"
        ) from cause
    found = getattr(module, name, None)
    if not callable(found):
        kind = inspect.isclass if what == "Class" else inspect.isfunction
        names = ", ".join(n for n, v in vars(module).items() if kind(v) and not n.startswith("_"))
        raise error(f"{key}={path!r}: expected a {what} `{name}` in {place}, which has {names or 'none'}")
    return found


def _import_file(path: Path) -> ModuleType:
    path = path.expanduser()
    if not path.is_absolute() and not path.is_file():
        path = conf_dir().parent / path if (conf_dir().parent / path).is_file() else path
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # it may import its neighbours; behind all else, so that nothing is shadowed
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
