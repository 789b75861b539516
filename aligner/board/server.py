"""The board's web server: behind a path that nobody can guess, for this machine alone.

GET /<token>/ is the page, GET /<token>/assets/<name> its scripts and styles, POST /<token>/api/<name> an endpoint's
answer, JSON to JSON. No request names a file: runs are known by their names.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from aligner.board.page import asset, assets, board_page
from aligner.board.pages import Page
from aligner.board.runs import Board
from aligner.errors import AlignerError, DataError
from aligner.foreign import JsonObject, parse_json, record

MAX_BYTES = 4 << 20  # of a request
HOSTS = ["127.0.0.1", "localhost"]  # with any port: a tunnel has its own. Others are a name that was rebound to us
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


def make_app(board: Board, pages: Mapping[str, Page], token: str) -> Starlette:
    endpoints = {name: answer for page in pages.values() for name, answer in page.endpoints.items()}
    kinds = assets()

    def known(request: Request) -> None:
        if not hmac.compare_digest(request.path_params["token"].encode(), token.encode()):
            raise HTTPException(404)

    async def index(request: Request) -> Response:
        known(request)
        text, policy = board_page(pages)
        return HTMLResponse(text, headers={**HEADERS, "Content-Security-Policy": policy})

    async def file(request: Request) -> Response:
        known(request)
        name = request.path_params["name"]
        if name not in kinds:
            raise HTTPException(404)
        return Response(asset(name), media_type=kinds[name], headers=HEADERS)

    async def api(request: Request) -> Response:
        known(request)
        if (answer := endpoints.get(request.path_params["name"])) is None:
            raise HTTPException(404)
        reply = await run_in_threadpool(answer, board, await _asked(request))
        if isinstance(reply, Iterator):
            return StreamingResponse(_lines(reply), media_type="application/x-ndjson", headers=HEADERS)
        text = json.dumps(reply, allow_nan=False)  # ASCII: names of files need not be Unicode
        return Response(text, media_type="application/json", headers=HEADERS)

    def refused(_: Request, error: Exception) -> Response:
        status, text = (error.status_code, error.detail) if isinstance(error, HTTPException) else (400, str(error))
        return JSONResponse({"error": text}, status, headers=HEADERS)

    def left(_: Request, error: Exception) -> Response:
        return Response(status_code=400)  # to nobody

    return Starlette(
        routes=[
            Route("/{token}/", index),
            Route("/{token}/assets/{name}", file),
            Route("/{token}/api/{name}", api, methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)],
        exception_handlers={AlignerError: refused, HTTPException: refused, ClientDisconnect: left},
    )


async def _asked(request: Request) -> JsonObject:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BYTES:
            raise HTTPException(413, f"expected a request of at most {MAX_BYTES} bytes")
    return record(parse_json(bytes(data), "the request", DataError), "the request", DataError)


def _lines(events: Iterable[Any]) -> Iterator[str]:
    try:
        for each in events:
            yield json.dumps(each) + "\n"
    except AlignerError as error:
        yield json.dumps({"error": str(error)}) + "\n"
