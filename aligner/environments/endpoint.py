"""OpenAI's chat completions over HTTP: behind a path that nobody can guess, on the loopback or a unix socket alone.

POST /<secret>/v1/chat/completions, GET /<secret>/v1/models. Whatever else is asked for is not there.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from aligner.environments.openai_api import ApiError, ChatRequest, chunks, nowhere, read_request
from aligner.errors import DataError
from aligner.foreign import parse_json

MAX_BYTES = 64 << 20  # of a request


class Backend(Protocol):
    def model(self, secret: str) -> str:
        """The name of the model behind a path. Raises ApiError where there is none."""
        ...

    async def complete(self, secret: str, request: ChatRequest) -> dict[str, Any]:
        """`Reply.body` of an answer. Raises ApiError."""
        ...


def new_secret() -> str:
    return secrets.token_urlsafe(32)


def make_app(backend: Backend) -> Starlette:
    async def complete(request: Request) -> Response:
        secret = request.path_params["secret"]
        backend.model(secret)
        asked = read_request(await _body(request))
        asked.again = request.headers.get("x-stainless-retry-count", "0") != "0"  # of OpenAI's clients
        body = await backend.complete(secret, asked) | {"created": int(time.time())}
        if not asked.stream:
            return JSONResponse(body)
        return StreamingResponse(_events(body, asked.include_usage), media_type="text/event-stream")

    async def models(request: Request) -> Response:
        name = backend.model(request.path_params["secret"])
        model = {"id": name, "object": "model", "created": 0, "owned_by": "aligner"}
        return JSONResponse({"object": "list", "data": [model]})

    def refused(request: Request, error: Exception) -> Response:
        found = error if isinstance(error, ApiError) else nowhere()
        return JSONResponse(found.body, found.status)

    routes = [
        Route("/{secret}/v1/chat/completions", complete, methods=["POST"]),
        Route("/{secret}/v1/models", models, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={ApiError: refused, HTTPException: refused})


async def _body(request: Request) -> Any:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BYTES:
            raise ApiError(f"expected a request of at most {MAX_BYTES} bytes", status=413)
    try:
        return parse_json(bytes(data), "the request", DataError)
    except DataError as error:
        raise ApiError(str(error), code="invalid_json") from None


async def _events(body: dict[str, Any], include_usage: bool) -> AsyncIterator[str]:
    for chunk in chunks(body, include_usage):
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def loopback(port: int = 0) -> socket.socket:
    """Raises OSError."""
    return socket.create_server(("127.0.0.1", port))


def unix_socket(path: Path) -> socket.socket:
    """For this user alone; one that a process has left there is replaced. Raises OSError."""
    found = socket.socket(socket.AF_UNIX)
    if path.is_socket():
        path.unlink()
    before = os.umask(0o177)
    try:
        found.bind(str(path))
    finally:
        os.umask(before)
    found.listen()
    return found


class Listener(uvicorn.Server):
    """Leaves signals to its process, and tells nobody of requests: their paths are secret."""

    def __init__(self, backend: Backend):
        super().__init__(uvicorn.Config(make_app(backend), log_config=None, access_log=False, lifespan="off"))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
