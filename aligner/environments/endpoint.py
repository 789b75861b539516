"""OpenAI's chat completions over HTTP: behind a path that nobody can guess, on the loopback or a unix socket alone.

POST /<secret>/v1/chat/completions, GET /<secret>/v1/models. Whatever else is asked for is not there.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from aligner.environments.openai_api import ApiError, ChatRequest, chunk, chunks, nowhere, read_request
from aligner.errors import DataError
from aligner.foreign import parse_json

MAX_BYTES = 64 << 20  # of a request


Say = Callable[[str, str], None]  # (id of the answer, more of its text)


class Backend(Protocol):
    def model(self, secret: str) -> str:
        """The name of the model behind a path. Raises ApiError where there is none."""
        ...

    async def complete(self, secret: str, request: ChatRequest, say: Say) -> dict[str, Any]:
        """`Reply.body` of an answer. `say` may be told its text as it comes: as far as a stream needs no more, else
        nothing. Raises ApiError."""
        ...


def new_secret() -> str:
    return secrets.token_urlsafe(32)


def make_app(backend: Backend, max_bytes: int = MAX_BYTES) -> Starlette:
    async def complete(request: Request) -> Response:
        secret = request.path_params["secret"]
        backend.model(secret)
        asked = read_request(await _body(request, max_bytes))
        asked.again = request.headers.get("x-stainless-retry-count", "0") != "0"  # of OpenAI's clients
        parts: asyncio.Queue[tuple[str, str] | None] = asyncio.Queue()
        answer = asyncio.create_task(_told(backend.complete(secret, asked, lambda *part: parts.put_nowait(part))))
        answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its client may have left
        if not asked.stream:
            return JSONResponse(await answer | {"created": int(time.time())})
        answer.add_done_callback(lambda _: parts.put_nowait(None))
        first = await parts.get()
        if first is None:
            answer.result()  # what it raises is told by the state, which a stream sends before its first text
        return StreamingResponse(_events(asked, first, parts, answer), media_type="text/event-stream")

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

    def left(request: Request, error: Exception) -> Response:
        return Response(status_code=400)  # to nobody

    handlers = {ApiError: refused, HTTPException: refused, ClientDisconnect: left}
    return Starlette(routes=routes, exception_handlers=handlers)


async def _told(answer: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Raises ApiError and nothing else: what was not foreseen is printed, and its client hears of it, too."""
    try:
        return await answer
    except ApiError:
        raise
    except Exception as error:
        traceback.print_exception(error)
        raise ApiError(f"{type(error).__name__}: {error}", code="internal_error", status=500) from None


async def _body(request: Request, most: int) -> Any:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise ApiError(f"expected a request of at most {most} bytes", status=413)
    try:
        return parse_json(bytes(data), "the request", DataError)
    except DataError as error:
        raise ApiError(str(error), code="invalid_json") from None


async def _events(
    asked: ChatRequest, part: tuple[str, str] | None, parts: asyncio.Queue, answer: asyncio.Task
) -> AsyncIterator[str]:
    """`part`: the first, of which `parts` are the others; None is the last."""
    created, told = int(time.time()), ""
    while part is not None:
        name, text = part
        delta = {"content": text} if told else {"role": "assistant", "content": text}
        yield _event(chunk({"id": name, "created": created, "model": asked.model}, delta))
        told, part = told + text, await parts.get()
    try:
        body = answer.result() | {"created": created}
    except ApiError as error:
        yield _event(error.body)
        return
    for each in chunks(body, told, asked.include_usage):
        yield _event(each)
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


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

    def __init__(self, app: Starlette, end_s: int | None = None):
        """`end_s`: for requests under way when it shall end; None: as long as they take."""
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=end_s)
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
