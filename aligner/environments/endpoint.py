"""OpenAI's and Anthropic's APIs over HTTP, behind a secret path on the loopback or a unix socket, or behind a key.

POST /<secret>/v1/chat/completions, /responses and /messages, GET /<secret>/v1/models; of `aligner serve` also POST
/<secret>/v1/completions. Other paths return 404. With a key there is no secret in the path.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from aligner.environments import messages_api, responses_api
from aligner.environments.openai_api import ApiError, ChatRequest, chunk, chunks, nowhere, read_request
from aligner.errors import DataError
from aligner.foreign import parse_json

MAX_BYTES = 64 << 20  # of a request
END_S = 5  # for clients that are still connected at the end


Entered = Callable[[Request], tuple[str, str]]  # -> the secret of a request, the name of its model
Say = Callable[[str, str], None]  # (id of the answer, its next text)
ContinueText = Callable[[Any], Coroutine[Any, Any, dict[str, Any]]]  # a request's JSON -> the body of its answer


class Backend(Protocol):
    def model(self, secret: str) -> str:
        """Return the name of the model behind a path. Raises ApiError if there is none."""
        ...

    async def complete(self, secret: str, request: ChatRequest, say: Say) -> dict[str, Any]:
        """Return the `Reply.body` of an answer.

        `say` may get its text as it is generated, but only if the stream needs nothing else. Raises ApiError.
        """
        ...


def new_secret() -> str:
    return secrets.token_urlsafe(32)


def make_app(
    backend: Backend, max_bytes: int = MAX_BYTES, continue_text: ContinueText | None = None, by_key: bool = False
) -> Starlette:
    """Return the server. `by_key`: the secret is the key of a client (Authorization: Bearer), not in the path."""
    entered = partial(_by_key if by_key else _by_path, backend)
    translated = partial(_translated, backend, entered, max_bytes)

    async def complete(request: Request) -> Response:
        secret, _ = entered(request)
        asked = read_request(await _body(request, max_bytes))
        asked.again = _again(request)
        texts: asyncio.Queue[tuple[str, str] | None] = asyncio.Queue()
        answer = asyncio.create_task(_guarded(backend.complete(secret, asked, lambda *text: texts.put_nowait(text))))
        answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its client may have left
        if not asked.stream:
            return JSONResponse(await answer | {"created": int(time.time())})
        answer.add_done_callback(lambda _: texts.put_nowait(None))
        first = await texts.get()
        if first is None:
            answer.result()  # an error sets the HTTP state, which a stream sends before its first text
        return StreamingResponse(_events(asked, first, texts, answer), media_type="text/event-stream")

    async def continued(request: Request) -> Response:
        entered(request)
        body = await _guarded(continue_text(await _body(request, max_bytes)))
        return JSONResponse(body | {"created": int(time.time())})

    async def models(request: Request) -> Response:
        _, name = entered(request)
        model = {"id": name, "object": "model", "created": 0, "owned_by": "aligner"}
        return JSONResponse({"object": "list", "data": [model]})

    def refused(request: Request, error: Exception) -> Response:
        shown = error if isinstance(error, ApiError) else nowhere()
        return JSONResponse(shown.body, shown.status)

    base = "/v1" if by_key else "/{secret}/v1"
    routes = [
        Route(f"{base}/chat/completions", complete, methods=["POST"]),
        Route(f"{base}/responses", partial(translated, responses_api), methods=["POST"]),
        Route(f"{base}/messages", partial(translated, messages_api), methods=["POST"]),
        Route(f"{base}/models", models, methods=["GET"]),
    ]

    if continue_text is not None:
        routes.append(Route(f"{base}/completions", continued, methods=["POST"]))

    def left(request: Request, error: Exception) -> Response:
        return Response(status_code=400)  # its client has disconnected

    handlers = {ApiError: refused, HTTPException: refused, ClientDisconnect: left}
    return Starlette(routes=routes, exception_handlers=handlers)


async def _translated(
    backend: Backend, entered: Entered, max_bytes: int, api: ModuleType, request: Request
) -> Response:
    """Answer a request of another API than chat completions. A stream is sent whole."""
    try:
        secret, _ = entered(request)
        data = await _body(request, max_bytes)
        asked = api.read_request(data)
        asked.again = _again(request)
        body = await _guarded(backend.complete(secret, asked, lambda *text: None))
    except ApiError as error:
        return JSONResponse(api.error_body(error), error.status)
    answer = api.answer(body | {"created": int(time.time())}, data)
    if not asked.stream:
        return JSONResponse(answer)
    events = "".join(f"event: {each['type']}\n{_event(each)}" for each in api.events(answer))
    return Response(events, media_type="text/event-stream")


def _by_path(backend: Backend, request: Request) -> tuple[str, str]:
    """Return the secret, and the name of the model behind it. Raises ApiError."""
    secret = request.path_params["secret"]
    return secret, backend.model(secret)


def _by_key(backend: Backend, request: Request) -> tuple[str, str]:
    """Do the same with a client's key, as OpenAI's or Anthropic's send it."""
    kind, _, secret = request.headers.get("authorization", "").partition(" ")
    secret = secret if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
    try:
        return secret, backend.model(secret)
    except ApiError:
        text = "Authorization: expected Bearer and the server's key"
        raise ApiError(text, code="invalid_api_key", status=401) from None


def _again(request: Request) -> bool:
    """Return whether a client of OpenAI or Anthropic repeats a request that timed out."""
    return request.headers.get("x-stainless-retry-count", "0") != "0"


async def _guarded(answer: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Await an answer. Raises only ApiError: other exceptions are printed, and sent to the client as one."""
    try:
        return await answer
    except ApiError:
        raise
    except Exception as error:
        traceback.print_exception(error)
        raise ApiError(f"{type(error).__name__}: {error}", code="internal_error", status=500) from None


async def _body(request: Request, limit: int) -> Any:
    data = bytearray()
    async for received in request.stream():
        data += received
        if len(data) > limit:
            raise ApiError(f"expected a request of at most {limit} bytes", status=413)
    try:
        return parse_json(bytes(data), "the request", DataError)
    except DataError as error:
        raise ApiError(str(error), code="invalid_json") from None


async def _events(
    asked: ChatRequest, text: tuple[str, str] | None, texts: asyncio.Queue, answer: asyncio.Task
) -> AsyncIterator[str]:
    """Yield the events of a stream: `text` is the first, `texts` has the others; None is the last."""
    created, sent = int(time.time()), ""
    while text is not None:
        name, delta_text = text
        delta = {"content": delta_text} if sent else {"role": "assistant", "content": delta_text}
        yield _event(chunk({"id": name, "created": created, "model": asked.model}, delta))
        sent, text = sent + delta_text, await texts.get()
    try:
        body = answer.result() | {"created": created}
    except ApiError as error:
        yield _event(error.body)
        return
    for each in chunks(body, sent, asked.include_usage):
        yield _event(each)
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def loopback(port: int = 0) -> socket.socket:
    """Return a socket on the loopback; port 0: any free one. Raises OSError."""
    return socket.create_server(("127.0.0.1", port))


def unix_socket(path: Path) -> socket.socket:
    """Return a unix socket for this user only, in place of one that a process left there. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX)
    if path.is_socket():
        path.unlink()
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen()
    return listener


class Listener(uvicorn.Server):
    """A server that leaves signals to its process, and logs no requests: their paths are secret."""

    def __init__(self, app: Starlette, end_s: int | None = None):
        """Set the time limit `end_s` for open requests at the end; None: no limit."""
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=end_s)
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def listening(app: Starlette, listener: socket.socket) -> Iterator[None]:
    """Serve at a socket, in a thread."""
    server = Listener(app, END_S)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), name="server", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
