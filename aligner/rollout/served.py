"""A model behind OpenAI's API: requests as its engine reads them, and the answers' texts.

request -> prompts and sampling parameters -> a queue, which the engine answers -> text, logprobs
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from aligner.config.sections.sampling import SamplingConfig
from aligner.data.dialogue import Dialogue
from aligner.engines.base import RolloutEngine
from aligner.environments.openai_api import SAMPLED, ApiError, ChatRequest, Reply, check_model, nowhere
from aligner.errors import ConfigError
from aligner.rollout.agents import Dialogues, message_of, parse_answer
from aligner.rollout.completions import CompletionRequest, ScoredTokens, continued_text, read_completion
from aligner.types import SamplingParams

if TYPE_CHECKING:
    from aligner.environments.endpoint import Say

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


class RequestDesk(Protocol):
    def put(self, asks: Sequence[PendingRequest | ScoringRequest]) -> None:
        """Put requests; each `answer` is set once. Called on the server's thread."""
        ...


def scored_tokens(engine: RolloutEngine, tokens: Sequence[Sequence[int]], top: int, pad_id: int) -> list[ScoredTokens]:
    """Return the scores of the tokens of each row, by this rank's engine."""
    longest = max(map(len, tokens), default=1)
    if longest == 1:  # a first token has no logprob
        return [ScoredTokens([], [])] * len(tokens)
    padded = torch.tensor([[*row, *[pad_id] * (longest - len(row))] for row in tokens])
    own, values, ids = (column.tolist() for column in engine.top_logprobs(padded, top))
    scored = []
    for i, row in enumerate(tokens):
        n = len(row) - 1
        likeliest = [list(zip(*pair, strict=True)) for pair in zip(ids[i][:n], values[i][:n], strict=True)]
        scored.append(ScoredTokens(own[i][:n], likeliest))
    return scored


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
    """A served model; see `Backend`. `scores`: the engine scores given tokens."""

    secret: str
    name: str
    desk: RequestDesk
    tokenizer: Any
    vocab_size: int
    limit: int  # tokens of a row
    sampling: SamplingParams
    dialogues: Dialogues
    scores: bool = True
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
        answer = parse_answer(dialogue, request, words, stopped, set(self.sampling.stop_token_ids))
        pieces = [self.tokenizer.decode([token]) for token in answer.tokens]
        shown_logprobs = logprobs[: len(answer.tokens)]
        message = message_of(answer, number * 100 % 100_000)  # ids of calls are not those of the answer before
        reply = Reply(message, answer.reason, tokens, answer.tokens, shown_logprobs, pieces, answer.stop)
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
        request, tokenizer = read_completion(body), self.tokenizer
        check_model(request.model, self.name)
        prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompts]
        if any(not prompt or max(prompt) >= self.vocab_size for prompt in prompts):
            raise ApiError("prompt: expected at least one token, and only tokens of the model", "prompt")
        if request.logprobs is not None and not self.scores:
            raise ApiError("logprobs: expected none: the run's engine does not score tokens", "logprobs")
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
        self.desk.put(asks)
        try:
            return await asyncio.gather(*(asyncio.wrap_future(ask.answer) for ask in asks))
        except RuntimeError as error:  # of a thread that has ended
            raise ApiError(str(error), code="engine", status=503) from None

    def _sampling(
        self, request: ChatRequest | CompletionRequest, prompt: int, param: str = "messages"
    ) -> SamplingParams:
        """Return the sampling parameters of a request whose prompt, the parameter `param`, has this many tokens.
        Raises ApiError."""
        room, wanted = self.limit - prompt, request.max_tokens
        if wanted is None:
            wanted = max(1, min(self.sampling.max_response_tokens, room))
        if wanted > room:
            requested = f"{prompt} tokens of the {param} and max_tokens={request.max_tokens}"
            text = f"{requested}: expected at most {self.limit} in all, which the model reads"
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
