"""A function's result from a process of its own: who asks stays small, and what it takes is given back."""

from __future__ import annotations

import os
import pickle
import pkgutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from aligner.cluster import nursery
from aligner.cluster.threads import reserve, use
from aligner.errors import AlignerError
from aligner.loading import for_good

ASKED, TOLD = "asked.pickle", "told.pickle"


def apart(function: str, *arguments: Any) -> Any:
    """Of `module:function`, by the nursery that is kept, if there is one. Raises the AlignerError that it raises, and
    one where the process ends otherwise: it has said why."""
    with (
        tempfile.TemporaryDirectory() as folder,
        nursery.lent([function.partition(":")[0]], dict(os.environ), ()) as place,
    ):
        asked, told = Path(folder) / ASKED, Path(folder) / TOLD
        asked.write_bytes(pickle.dumps((function, arguments)))
        try:
            [child] = place.children([sys.executable, "-m", __name__, folder], [(dict(os.environ), None)])
            code = child.wait()
        except (EOFError, ConnectionError):
            code = place.process.wait()
        if code:
            raise AlignerError(f"{function} ended with exit code {code}: expected a result")
        result, error = pickle.loads(told.read_bytes())
    if error is not None:
        raise error
    return result


def main(folder: Path) -> None:
    reserve()
    function, arguments = pickle.loads((folder / ASKED).read_bytes())
    result, error = None, None
    try:
        with for_good():
            found = pkgutil.resolve_name(function)
        use(0, 1)
        result = found(*arguments)
    except AlignerError as cause:
        error = cause
    (folder / TOLD).write_bytes(pickle.dumps((result, error)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
