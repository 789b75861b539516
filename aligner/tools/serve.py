"""`aligner serve RUN`: a trained model with OpenAI's chat and completions API, on this machine alone, or with a key.

python -m aligner serve runs/sft --port 8000

One thread generates. Requests are admitted between its steps, in their order, if they have the same sampling parameters
and their prompts are not too long for its room. Otherwise the next one waits until the others are done.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import create_server
from typing import TYPE_CHECKING, Any

import torch

from aligner.awaited import AwaitedThread
from aligner.cluster.mpi import host_address, join
from aligner.cluster.threads import use
from aligner.config.on_demand import imported
from aligner.config.schema import Config
from aligner.data.shipped_templates import use_chat_template
from aligner.data.tokenizer import sampled_with
from aligner.engines.native.schedule import PromptPool, PromptRequest
from aligner.environments.openai_api import ApiError, require_server
from aligner.errors import AlignerError, ConfigError
from aligner.rollout.agents import Dialogues
from aligner.rollout.served import PendingRequest, RequestDesk, ScoringRequest, Served, scored_tokens
from aligner.tools.generate import Answerer, dialogue_of, model_folder, sampling_of

if TYPE_CHECKING:
    from socket import socket as Socket

    from aligner.environments.endpoint import Listener

AT_A_TIME = 32  # requests
PERIOD = 1024  # requests whose answers the engine holds together
KEY, KEY_LENGTH = "ALIGNER_SERVE_KEY", 16  # environment variable, and its characters at least
FILES = ("serve.address", "serve.key")  # in the run's folder
ROOM = 256  # tokens of a prompt, or the next power of two behind it


class RequestQueue:
    """Queue of requests for the engine. No request waits for ever: `thread` owes each an answer."""

    def __init__(self, model: Answerer, threads: int):
        self.model, self.threads = model, threads
        self.waiting: deque[PendingRequest | ScoringRequest] = deque()
        self.changed = threading.Condition()
        self.thread = AwaitedThread("engine", self._generate)
        self.thread.start()

    def put(self, asks: Sequence[PendingRequest | ScoringRequest]) -> None:
        for ask in asks:
            self.thread.owe(ask.answer)
        with self.changed:
            self.waiting += asks
            self.changed.notify()

    def take(self) -> Any:
        """Take a request, on the engine's thread only: a client that leaves now takes nothing back."""
        ask = self.waiting.popleft()
        ask.answer.set_running_or_notify_cancel()
        return ask

    def _generate(self) -> None:
        use(self.threads, 1)
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting)
                first = self.take()
            asks, error = [first], "the engine gave no answer"
            try:
                if isinstance(first, ScoringRequest):
                    engine = self.model.engine
                    first.answer.set_result(scored_tokens(engine, first.tokens, first.top, engine.pad_id))
                    continue
                together = RequestBatch(self, first)
                asks = together.asks
                self.model.engine.serve(together, together.asked, together.finished, first.sampling)
            except torch.AcceleratorError:  # this process can no longer compute on its device
                raise
            except Exception as cause:  # an error of these requests: the next ones may succeed
                error = (
                    str(cause) if isinstance(cause, AlignerError | RuntimeError) else f"{type(cause).__name__}: {cause}"
                )
            for ask in asks or [first]:
                if not ask.answer.done():
                    ask.answer.set_exception(ApiError(error, code="engine", status=500))


class RequestBatch(PromptPool):
    """Requests that are generated with a first one."""

    def __init__(self, desk: RequestQueue, first: PendingRequest):
        limit = desk.model.engine.model.cfg.max_position - first.sampling.max_response_tokens
        room = max(ROOM, 1 << (len(first.tokens) - 1).bit_length())
        super().__init__(max(len(first.tokens), min(room, limit)), AT_A_TIME, AT_A_TIME)
        self.desk, self.first = desk, first
        self.asks: list[PendingRequest] = []
        self.asked: list[tuple[int, int] | None] = []

    def wants(self, active: int, slots: int) -> bool:
        return not self.asks or (active < slots and self._next() is not None)

    def take(self) -> list[PromptRequest]:
        new = [] if self.asks else [self.first]
        while self._next() is not None:
            new.append(self.desk.take())
        self.asked += [(len(self.asks) + i, 0) for i in range(len(new))]
        self.asks += new
        return [PromptRequest(ask.tokens, [ask.seed]) for ask in new]

    def _next(self) -> PendingRequest | None:
        """Return the request that has waited longest, if it fits. Only the engine's thread takes requests away."""
        ask = self.desk.waiting[0] if self.desk.waiting else None
        good = ask is not None and ask.sampling == self.first.sampling and len(ask.tokens) <= self.longest
        return ask if good and len(self.asks) < PERIOD else None

    def heard(self, read_tokens: Callable[[], list[tuple[int, list[int]]]]) -> None:
        if any(ask.hear is not None and not ask.answer.done() for ask in self.asks):
            for row, tokens in read_tokens():
                for token in tokens if (hear := self.asks[row].hear) is not None else ():
                    hear(token)

    def finished(self, number: int, index: int, tokens: list[int], logprobs: list[float], stopped: bool) -> None:
        if not (future := self.asks[number].answer).cancelled():
            future.set_result((tokens, logprobs, stopped))


def open_model(cfg: Config, key: str = "") -> Served:
    model = Answerer.load(model_folder(cfg), cfg.engine, cfg.model.dtype)
    return served_model(cfg, model, RequestQueue(model, cfg.cluster.threads), key)


def served_model(cfg: Config, model: Answerer, desk: RequestDesk, key: str = "") -> Served:
    """Return the served model; `key`: its secret, a new one if empty."""
    folder = model_folder(cfg)
    use_chat_template(model.tokenizer, cfg.data)
    dialogues = Dialogues(partial(dialogue_of, cfg, model.tokenizer))
    dialogues.of([])  # a model without a chat template has none
    sampling = replace(sampling_of(cfg), **sampled_with(model.tokenizer))
    name = folder.parent.name if folder.name == "hf" else folder.name
    secret, vocabulary = key or secrets.token_urlsafe(32), model.engine.model.cfg.vocab_size
    return Served(secret, name, desk, model.tokenizer, vocabulary, model.engine.longest_row, sampling, dialogues)


def read_key() -> str:
    """Return the key that the user has set; "" if none. Raises ConfigError for one that can be guessed."""
    key = os.environ.get(KEY, "")
    if key and (len(key) < KEY_LENGTH or not key.isascii() or not key.isprintable()):
        raise ConfigError(KEY, "...", f"at least {KEY_LENGTH} printable ASCII characters", "Unset it for a random one.")
    return key


def opened(host: str, port: int) -> Socket:
    """Return a socket at an address. Raises ConfigError."""
    try:
        return create_server((host or "127.0.0.1", port))
    except OSError as error:
        name, value = ("--host", host) if host else ("--port", port)
        raise ConfigError(name, value, f"an address to listen at, with {port=}", str(error)) from error


@contextmanager
def announced(cfg: Config, served: Served, listener: Socket) -> Iterator[None]:
    """Write address and key into the run's folder, for clients elsewhere; the key can be read by this user only."""
    host, port = listener.getsockname()[:2]
    address = f"{host_address() if host == '0.0.0.0' else host}:{port}"
    places = [Path(cfg.run.dir) / name for name in FILES]
    try:
        for path, text in zip(places, (address, served.secret), strict=True):
            path.unlink(missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(f"{text}\n")
    except OSError as error:
        raise ConfigError("run.dir", cfg.run.dir, "a folder that can be written", str(error)) from error
    print(f"http://{address}/v1: model {served.name!r}, key in {places[1]}", flush=True)
    try:
        yield
    finally:
        for path in places:
            path.unlink(missing_ok=True)


def main(cfg: Config, port: int, socket: str, host: str = "") -> int:
    """Serve until interrupted, on all ranks of a job. Raises AlignerError if the engine has ended."""
    require_server("aligner serve")
    from aligner.environments.endpoint import (  # needs the extra `serve`
        END_S,
        Listener,
        loopback,
        make_app,
        unix_socket,
    )

    world = join()
    if world.env.world_size > 1:
        if socket:
            raise ConfigError("--socket", socket, "none with several ranks, which clients reach by --host and --port")
        code = imported("aligner.tools.serve_ranks:main")(cfg, world.env, host, port)
        world.leave(code == 0)
        return code
    served = open_model(cfg, read_key() if host else "")
    if host:
        listening = opened(host, port)
        with announced(cfg, served, listening):
            app = make_app(served, continue_text=served.continue_text, by_key=True)
            serve_while(served.desk, Listener(app, END_S), [listening])
        return 0
    try:
        listening = unix_socket(Path(socket)) if socket else loopback(port)
    except OSError as error:
        key, value = ("--socket", socket) if socket else ("--port", port)
        raise ConfigError(key, value, "an address to listen at", str(error)) from error
    where = "http://localhost" if socket else f"http://127.0.0.1:{listening.getsockname()[1]}"
    print(f"{where}/{served.secret}/v1{f' on {socket}' if socket else ''}: model {served.name!r}", flush=True)
    try:
        serve_while(served.desk, Listener(make_app(served, continue_text=served.continue_text), END_S), [listening])
    finally:
        if socket:
            with suppress(FileNotFoundError):
                Path(socket).unlink()
    return 0


def serve_while(desk: RequestQueue, listener: Listener, places: list[Socket]) -> None:
    """Serve as long as the engine runs. Raises AlignerError once it has ended."""
    never: Future[None] = desk.thread.owe(Future())
    never.add_done_callback(lambda _: setattr(listener, "should_exit", True))
    asyncio.run(listener.serve(sockets=places))
    if never.done():
        raise AlignerError(f"serve: {never.exception()}")
