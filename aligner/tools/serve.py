"""`aligner serve RUN`: a trained model with OpenAI's chat and completions API, on this machine alone.

python -m aligner serve runs/sft --port 8000

One thread generates. Requests are admitted between its steps, in their order, if they have the same sampling parameters
and their prompts are not too long for its room. Otherwise the next one waits until the others are done.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aligner.awaited import AwaitedThread
from aligner.cluster.threads import use
from aligner.config.schema import Config
from aligner.config.sections.sampling import SamplingConfig
from aligner.data.dialogue import Dialogue
from aligner.data.shipped_templates import use_chat_template
from aligner.data.tokenizer import sampled_with
from aligner.engines.native.engine import NativeEngine
from aligner.engines.native.schedule import PromptPool, PromptRequest
from aligner.environments.openai_api import SAMPLED, ApiError, ChatRequest, Reply, check_model, nowhere, require_server
from aligner.errors import AlignerError, ConfigError
from aligner.rollout.agents import Dialogues, message_of, parse_answer
from aligner.tools.completions import CompletionRequest, ScoredTokens, continued_text, read_completion
from aligner.tools.generate import Answerer, dialogue_of, model_folder, sampling_of
from aligner.types import SamplingParams

if TYPE_CHECKING:
    from socket import socket as Socket

    from aligner.environments.endpoint import Listener, Say

AT_A_TIME = 32  # requests
PERIOD = 1024  # requests whose answers the engine holds together
END_S = 5  # for clients that are still connected when the engine has ended
ROOM = 256  # tokens of a prompt, or the next power of two behind it

Generated = tuple[list[int], list[float], bool]  # tokens, their logprobs, whether the model came to its end


@dataclass
class PendingRequest:
    tokens: tuple[int, ...]
    seed: int
    sampling: SamplingParams
    answer: Future[Generated] = field(default_factory=Future)
    hear: Callable[[int], None] | None = None  # called with each token but the last, as it comes


@dataclass
class ScoringRequest:
    """Sequences whose tokens are scored, each with the `top` likeliest tokens at its positions."""

    tokens: list[list[int]]
    top: int
    answer: Future[list[ScoredTokens]] = field(default_factory=Future)
    sampling: None = None

    def score(self, engine: NativeEngine) -> list[ScoredTokens]:
        longest = max(map(len, self.tokens))
        if longest == 1:  # a first token has no logprob
            return [ScoredTokens([], [])] * len(self.tokens)
        padded = [[*row, *[engine.pad_id] * (longest - len(row))] for row in self.tokens]
        own, values, ids = (column.tolist() for column in engine.top_logprobs(torch.tensor(padded), self.top))
        scored = []
        for i, row in enumerate(self.tokens):
            n = len(row) - 1
            top = [list(zip(*pair, strict=True)) for pair in zip(ids[i][:n], values[i][:n], strict=True)]
            scored.append(ScoredTokens(own[i][:n], top))
        return scored


class RequestQueue:
    """Queue of requests for the engine. No request waits for ever: `thread` owes each an answer."""

    def __init__(self, model: Answerer, threads: int):
        self.model, self.threads = model, threads
        self.waiting: deque[PendingRequest | ScoringRequest] = deque()
        self.changed = threading.Condition()
        self.thread = AwaitedThread("engine", self._generate)
        self.thread.start()

    def put(self, ask: PendingRequest | ScoringRequest) -> None:
        self.thread.owe(ask.answer)
        with self.changed:
            self.waiting.append(ask)
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
                    first.answer.set_result(first.score(self.model.engine))
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

    def heard(self, read_tokens: Callable[[], tuple[list[int], list[int]]]) -> None:
        if any(ask.hear is not None and not ask.answer.done() for ask in self.asks):
            for row, token in zip(*read_tokens(), strict=True):
                if (hear := self.asks[row].hear) is not None:
                    hear(token)

    def finished(self, number: int, index: int, tokens: list[int], logprobs: list[float], stopped: bool) -> None:
        if not (future := self.asks[number].answer).cancelled():
            future.set_result((tokens, logprobs, stopped))


@dataclass
class TextStream:
    """Text of tokens as they come, as far as later tokens cannot change it: whole characters, without the last `held`,
    with which a stop string may begin."""

    decode: Callable[[Sequence[int]], str]
    held: int
    _tokens: list[int] = field(default_factory=list)
    _decoded: tuple[int, int] = 0, 0  # tokens from the first on are decoded again; those before the second were sent
    _text: str = ""
    _sent: int = 0

    def add(self, token: int) -> str:
        """Return the text that can be sent now."""
        self._tokens.append(token)
        first, upto = self._decoded
        before, now = self.decode(self._tokens[first:upto]), self.decode(self._tokens[first:])
        if now.endswith("\ufffd"):  # bytes of a character
            return ""
        self._text += now[len(before) :]
        self._decoded = upto, len(self._tokens)
        sent, self._sent = self._sent, max(self._sent, len(self._text) - self.held)
        return self._text[sent : self._sent]


@dataclass
class Served:
    """A served model; see `Backend`."""

    secret: str
    name: str
    desk: RequestQueue
    sampling: SamplingParams
    dialogues: Dialogues
    _answers: int = 0

    def model(self, secret: str) -> str:
        if not hmac.compare_digest(secret.encode(), self.secret.encode()):
            raise nowhere()
        return self.name

    async def complete(self, secret: str, request: ChatRequest, say: Say) -> dict[str, Any]:
        check_model(request.model, self.name)
        dialogue, tokens = self._prompt(request)
        seed = secrets.randbits(63) if request.seed is None else request.seed
        ask = PendingRequest(tokens, seed, self._sampling(request, len(tokens)))
        self._answers += 1
        number, name = self._answers, f"chatcmpl-{self._answers}"
        calls = dialogue.calls and request.calls  # a text is known to be a call only at its end
        if request.stream and not (calls or request.return_token_ids):  # logprobs come with the last message
            ask.hear = _writer(dialogue, request, partial(say, name))
        ((words, logprobs, stopped),) = await self._answered([ask])
        tokenizer = self.desk.model.tokenizer
        answer = parse_answer(dialogue, request, words, stopped, set(self.sampling.stop_token_ids))
        pieces = [tokenizer.decode([token]) for token in answer.tokens]
        shown_logprobs = logprobs[: len(answer.tokens)]
        message = message_of(answer, number * 100 % 100_000)  # ids of calls are not those of the answer before
        reply = Reply(message, answer.reason, tokens, answer.tokens, shown_logprobs, pieces)
        return reply.body(request, name)

    def _prompt(self, request: ChatRequest) -> tuple[Dialogue, tuple[int, ...]]:
        """Return the request's dialogue and prompt. Raises ApiError."""
        try:
            dialogue = self.dialogues.of(request.tools)
        except ConfigError as error:
            raise ApiError(str(error), "tools", "unsupported_parameter") from None
        prompt = dialogue.try_begin(request.messages)
        if prompt is None:
            roles = ", ".join(message["role"] for message in request.messages)
            raise ApiError(f"messages: the model's chat template refuses the roles {roles}", "messages")
        if not prompt.tokens:
            raise ApiError("messages: the model's chat template makes no token of them", "messages")
        return dialogue, prompt.tokens

    async def continue_text(self, body: Any) -> dict[str, Any]:
        """Return the body of an answer of completions: its prompts in their order. Raises ApiError."""
        request, tokenizer = read_completion(body), self.desk.model.tokenizer
        check_model(request.model, self.name)
        prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompts]
        if any(not prompt or max(prompt) >= self.desk.model.engine.model.cfg.vocab_size for prompt in prompts):
            raise ApiError("prompt: expected at least one token, and only tokens of the model", "prompt")
        sampling = [self._sampling(request, len(prompt), "prompt") for prompt in prompts]
        asks = []
        if request.max_tokens:
            seeds = [secrets.randbits(63) if request.seed is None else request.seed for _ in prompts]
            asks = [PendingRequest(tuple(p), *own) for p, *own in zip(prompts, seeds, sampling, strict=True)]
        generated = await self._answered(asks) or [([], [], False)] * len(prompts)
        rows = [[*prompt, *words] for prompt, (words, *_) in zip(prompts, generated, strict=True)]
        scored: list[ScoredTokens | None] = [None] * len(rows)
        if request.logprobs is not None:
            (scored,) = await self._answered([ScoringRequest(rows, request.logprobs)])
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        choices = []
        for i, (prompt, (words, _, stopped)) in enumerate(zip(prompts, generated, strict=True)):
            text, cut = continued_text(words, sampling[i].stop, decode)
            asked = request.prompts[i]  # a tokenizer may put a first token before a text
            echoed = "" if not request.echo else asked if isinstance(asked, str) else tokenizer.decode(prompt)
            logprobs = scored[i] and scored[i].body(rows[i], 0 if request.echo else len(prompt), tokenizer.decode)
            reason = "stop" if cut or stopped else "length"
            choices.append({"index": i, "text": echoed + text, "logprobs": logprobs, "finish_reason": reason})
        sizes = sum(map(len, prompts)), sum(len(words) for words, *_ in generated)
        usage = {"prompt_tokens": sizes[0], "completion_tokens": sizes[1], "total_tokens": sum(sizes)}
        self._answers += 1
        name = f"cmpl-{self._answers}"
        return {"id": name, "object": "text_completion", "model": self.name, "choices": choices, "usage": usage}

    async def _answered(self, asks: Sequence[PendingRequest | ScoringRequest]) -> list[Any]:
        """Put requests, and return their answers. Raises ApiError."""
        for ask in asks:
            self.desk.put(ask)
        try:
            return await asyncio.gather(*(asyncio.wrap_future(ask.answer) for ask in asks))
        except RuntimeError as error:  # of a thread that has ended
            raise ApiError(str(error), code="engine", status=503) from None

    def _sampling(
        self, request: ChatRequest | CompletionRequest, prompt: int, param: str = "messages"
    ) -> SamplingParams:
        """Return the sampling parameters of a request whose prompt, the parameter `param`, has this many tokens.
        Raises ApiError."""
        limit = self.desk.model.engine.model.cfg.max_position
        room, wanted = limit - prompt, request.max_tokens
        if wanted is None:
            wanted = max(1, min(self.sampling.max_response_tokens, room))
        if wanted > room:
            requested = f"{prompt} tokens of the {param} and max_tokens={request.max_tokens}"
            text = f"{requested}: expected at most {limit} in all, which the model reads"
            raise ApiError(text, param, "context_length_exceeded")
        own = self.sampling
        cut = {name: getattr(own, name) for name in SAMPLED} | request.sampled
        try:
            checked = SamplingConfig(cut["temperature"], cut["top_p"], int(cut["top_k"]), cut["min_p"])
        except ConfigError as error:
            raise ApiError(str(error)) from None
        cut = {name: getattr(checked, name) for name in SAMPLED}
        return replace(own, max_response_tokens=wanted, stop=(*own.stop, *request.stop), **cut)


def _writer(dialogue: Dialogue, request: ChatRequest, say: Callable[[str], None]) -> Callable[[int], None]:
    """Return a function that takes tokens on any thread and sends their text in this loop."""
    loop, written = asyncio.get_running_loop(), TextStream(dialogue.decode, max(map(len, request.stop), default=1) - 1)

    def tell(token: int) -> None:
        if text := written.add(token):
            say(text)

    def hear(token: int) -> None:
        with suppress(RuntimeError):  # the loop has ended, with all clients
            loop.call_soon_threadsafe(tell, token)

    return hear


def open_model(cfg: Config) -> Served:
    folder = model_folder(cfg)
    model = Answerer.load(folder, cfg.engine, cfg.model.dtype)
    use_chat_template(model.tokenizer, cfg.data)
    dialogues = Dialogues(partial(dialogue_of, cfg, model.tokenizer))
    dialogues.of([])  # a model without a chat template has none
    sampling = replace(sampling_of(cfg), **sampled_with(model.tokenizer))
    name = folder.parent.name if folder.name == "hf" else folder.name
    return Served(secrets.token_urlsafe(32), name, RequestQueue(model, cfg.cluster.threads), sampling, dialogues)


def main(cfg: Config, port: int, socket: str) -> int:
    """Serve until interrupted. Raises AlignerError if the engine has ended."""
    require_server("aligner serve")
    from aligner.environments.endpoint import Listener, loopback, make_app, unix_socket  # needs the extra `serve`

    served = open_model(cfg)
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
