"""Calls of a function in a process of its own, so that the caller stays small and the function's memory is freed."""

from __future__ import annotations

import os
import pickle
import pkgutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from aligner.cluster import fork_server
from aligner.cluster.threads import reserve, use
from aligner.errors import AlignerError
from aligner.loading import for_good

REQUEST, REPLY = "request.pickle", "reply.pickle"


def call_in_child(function: str, *arguments: Any) -> Any:
    """Return the result of `module:function`, run by the running fork server, if there is one. Raises the function's
    AlignerError, and one if the process ends otherwise; its output then has the reason."""
    with (
        tempfile.TemporaryDirectory() as folder,
        fork_server.lent([function.partition(":")[0]], dict(os.environ), ()) as server,
    ):
        request, reply = Path(folder) / REQUEST, Path(folder) / REPLY
        request.write_bytes(pickle.dumps((function, arguments)))
        try:
            [child] = server.children([sys.executable, "-m", __name__, folder], [(dict(os.environ), None)])
            code = child.wait()
        except (EOFError, ConnectionError):
            code = server.process.wait()
        if code:
            raise AlignerError(f"{function} ended with exit code {code}: expected a result")
        result, error = pickle.loads(reply.read_bytes())
    if error is not None:
        raise error
    return result


def main(folder: Path) -> None:
    reserve()
    function, arguments = pickle.loads((folder / REQUEST).read_bytes())
    result, error = None, None
    try:
        with for_good():
            target = pkgutil.resolve_name(function)
        use(0, 1)
        result = target(*arguments)
    except AlignerError as cause:
        error = cause
    (folder / REPLY).write_bytes(pickle.dumps((result, error)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
