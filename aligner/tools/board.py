"""`aligner board [FOLDER...]`: runs in the browser, on this machine alone."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path

from aligner.board.chat import TALKS
from aligner.board.runs import Board
from aligner.board.tabs import PAGES
from aligner.environments.openai_api import require_server
from aligner.errors import ConfigError


def main(folders: Sequence[str], port: int) -> int:
    """Serve until interrupted. Raises ConfigError for a folder that does not exist and for a port in use."""
    require_server("aligner board")
    from aligner.board.server import make_app  # needs the extra `serve`
    from aligner.environments.endpoint import Listener, loopback

    board = Board([Path(folder) for folder in folders])
    try:
        socket = loopback(port)
    except OSError as error:
        raise ConfigError("--port", port, "a free port (0: any that is)", str(error)) from error
    token = secrets.token_urlsafe(32)
    print(f"http://127.0.0.1:{socket.getsockname()[1]}/{token}/", flush=True)
    try:
        asyncio.run(Listener(make_app(board, PAGES, token)).serve(sockets=[socket]))
    finally:
        TALKS.close()  # else their temporary folders, with exported models, would stay
    return 0
