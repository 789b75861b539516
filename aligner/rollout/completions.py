"""OpenAI's completions as data: a text or tokens, continued, and the logprobs of both.

Names are OpenAI's. With `echo` a choice begins with its prompt; `max_tokens=0` continues nothing. Logprobs are of the
model at temperature 1, whatever distribution the tokens were sampled from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aligner.environments.openai_api import (
    SAMPLED,
    UNREAD,
    ApiError,
    read_kind,
    read_number,
    read_stop,
    unsupported,
)

MAX_TOKENS = 16  # OpenAI's default
MAX_TOP = 5  # likeliest tokens at a position, OpenAI's bound
READ = ("model", "prompt", "max_tokens", "stop", "seed", "logprobs", "echo")
# parameters that are accepted only with their neutral value
NEUTRAL: dict[str, Any] = {
    **{"n": 1, "best_of": 1, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}},
    **{"stream": False, "suffix": ""},
}
Decode = Callable[[Sequence[int]], str]


@dataclass
class CompletionRequest:
    """A request; each prompt is a text or tokens. `logprobs`: number of likeliest tokens at a position; None: none."""

    model: str
    prompts: list[str | list[int]]
    max_tokens: int = MAX_TOKENS
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    sampled: dict[str, float] = field(default_factory=dict)  # by names of SAMPLED
    logprobs: int | None = None
    echo: bool = False


def read_completion(body: Any) -> CompletionRequest:
    """Read a request's JSON. Raises ApiError."""
    if not isinstance(body, dict):
        raise ApiError(f"the request: expected a JSON object, found {body!r:.80}")
    parameters = {name: value for name, value in body.items() if value is not None}
    for name, value in parameters.items():
        if name in NEUTRAL and value != NEUTRAL[name]:
            raise unsupported(name, f"{NEUTRAL[name]!r}, or none", value)
        if name not in (*NEUTRAL, *UNREAD, *SAMPLED, *READ):
            raise unsupported(name, "a request without it", value)
    limit = read_kind(parameters, "max_tokens", int, "a number of tokens >= 0")
    top = read_kind(parameters, "logprobs", int, f"a number from 0 to {MAX_TOP}")
    for name, value, most in (("max_tokens", limit, 1 << 31), ("logprobs", top, MAX_TOP)):
        if value is not None and not 0 <= value <= most:
            raise ApiError(f"{name}={value}: expected a number from 0 to {most}", name)
    return CompletionRequest(
        read_kind(parameters, "model", str, "the name of a model", needed=True),
        _prompts(parameters.get("prompt")),
        MAX_TOKENS if limit is None else limit,
        read_stop(parameters),
        read_kind(parameters, "seed", int, "an integer"),
        {name: read_number(parameters, name) for name in SAMPLED if name in parameters},
        top,
        bool(read_kind(parameters, "echo", bool, "true or false")),
    )


def _prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts of a text, a list of texts, tokens, or a list of lists of tokens."""
    prompts = value if isinstance(value, list) and value and not _is_tokens(value) else [value]
    if not all((isinstance(prompt, str) and prompt) or _is_tokens(prompt) for prompt in prompts):
        raise ApiError(f"prompt={value!r:.80}: expected a text, tokens, or a list of them; none may be empty", "prompt")
    return prompts


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)


@dataclass
class ScoredTokens:
    """Logprobs of tokens, given those before: [T - 1], of the second token on. `top`: of the likeliest tokens at each
    position, (token, logprob), in descending order."""

    logprobs: list[float]
    top: list[list[tuple[int, float]]]

    def body(self, tokens: Sequence[int], first: int, decode: Decode) -> dict[str, Any]:
        """Return the field `logprobs` of a choice, for the tokens from `first` on. Token 0 has none. The likeliest
        tokens include the one that is there; of two with one text the likelier is named."""
        pieces = [decode([token]) for token in tokens]
        own: list[float | None] = [None, *self.logprobs]
        tops: list[dict[str, float] | None] = [None]
        for token, logprob, likeliest in zip(tokens[1:], self.logprobs, self.top, strict=True):
            named: dict[str, float] = {}
            for other, value in (*likeliest, (token, logprob)):
                named.setdefault(decode([other]), value)
            tops.append(named)
        offsets, at = [], 0
        for piece in pieces[first:]:
            offsets.append(at)
            at += len(piece)
        shown = {"tokens": pieces, "token_logprobs": own, "top_logprobs": tops}
        return {name: values[first:] for name, values in shown.items()} | {"text_offset": offsets}


def continued_text(tokens: Sequence[int], stop: Sequence[str], decode: Decode) -> tuple[str, bool]:
    """Return the text of generated tokens before the first stop string, and whether there was one."""
    text = decode(tokens)
    starts = [start for string in stop if (start := text.find(string)) >= 0]
    return (text[: min(starts)], True) if starts else (text, False)
