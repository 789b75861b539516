"""OpenAI's chat completions as data: what a request may ask, what an answer tells, errors in their format.

Names are OpenAI's; of token ids those of vLLM: `return_token_ids` asks for `prompt_token_ids` and `token_ids`. What is
asked for and cannot be done is refused by its name, never passed over.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aligner.errors import ConfigError, DataError
from aligner.foreign import parse_json
from aligner.types import SamplingParams

MODEL = "policy"  # the name of the model that is trained
# parameters that are taken with the value that changes nothing
NEUTRAL: dict[str, Any] = {
    **{"n": 1, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "top_logprobs": 0},
    **{"parallel_tool_calls": True, "response_format": {"type": "text"}, "modalities": ["text"], "echo": False},
}
# that no answer depends on
UNREAD = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
SAMPLED = ("temperature", "top_p", "top_k", "min_p")
SWITCHES = ("stream", "logprobs", "return_token_ids")
READ = ("model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "seed")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # by the names that templates have for them
MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", *THOUGHTS)
UNSPOKEN = {"function_call": "tool_calls", "audio": "a text"}  # what a message may say and no template reads


class ApiError(Exception):
    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value", status: int = 400):
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def nowhere() -> ApiError:
    """The same for a wrong path and a wrong secret."""
    return ApiError("there is nothing at this path", code="not_found", status=404)


@dataclass
class ChatRequest:
    """`messages` and `tools` as chat templates have them. None: not asked for."""

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    calls: bool = True  # what looks like a call is one (tool_choice)
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    sampled: dict[str, float] = field(default_factory=dict)  # by names of SAMPLED
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    again: bool = field(default=False, compare=False)  # its client has asked before, and given up waiting


def read_request(body: Any) -> ChatRequest:
    """Raises ApiError."""
    if not isinstance(body, dict):
        raise ApiError(f"the request: expected a JSON object, found {body!r:.80}")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in NEUTRAL and value != NEUTRAL[name]:
            raise _unsupported(name, f"{json.dumps(NEUTRAL[name])}, or none", value)
        if name not in (*NEUTRAL, *UNREAD, *SAMPLED, *SWITCHES, *READ, "stream_options"):
            raise _unsupported(name, "a request without it", value)
    for name in SWITCHES:
        _kind(given, name, bool, "true or false")
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise _unsupported("tool_choice", "auto or none", choice)
    limits = [_count(given, name) for name in ("max_completion_tokens", "max_tokens")]
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise ApiError(f"stop={stop!r:.80}: expected a text or a list of texts", "stop")
    options = _kind(given, "stream_options", dict, "an object") or {}
    return ChatRequest(
        _kind(given, "model", str, "the name of a model", needed=True),
        _messages(given.get("messages")),
        _tools(given.get("tools", [])),
        choice == "auto",
        limits[0] or limits[1],
        stop,
        _kind(given, "seed", int, "an integer"),
        {name: _number(given, name) for name in SAMPLED if name in given},
        *(given.get("stream", False), bool(options.get("include_usage"))),
        *(given.get("logprobs", False), given.get("return_token_ids", False)),
    )


def check_model(request: ChatRequest, model: str) -> None:
    """Raises ApiError."""
    if request.model != model:
        text = f"model={request.model!r}: there is `{model}` alone"
        raise ApiError(text, "model", "model_not_found", 404)


def check_sampling(request: ChatRequest, sampling: dict[str, float]) -> None:
    """That of a run is fixed: what its policy learns from has to be sampled from it. Raises ApiError."""
    for name, value in request.sampled.items():
        if value != sampling[name]:
            expected = f"{sampling[name]:g}, which the run samples with, or none"
            raise ApiError(f"{name}={value:g}: expected {expected}", name, "unsupported_value")
    if request.seed is not None:
        raise ApiError(f"seed={request.seed}: expected none: the run has its own", "seed", "unsupported_parameter")


def _unsupported(name: str, expected: str, value: Any) -> ApiError:
    return ApiError(f"{name}={value!r:.80}: expected {expected}", name, "unsupported_parameter")


def _kind(given: dict[str, Any], name: str, kind: Any, expected: str, needed: bool = False) -> Any:
    value = given.get(name)
    good = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not good and (needed or value is not None):
        raise ApiError(f"{name}={value!r:.80}: expected {expected}", name)
    return value


def _count(given: dict[str, Any], name: str) -> int | None:
    value = _kind(given, name, int, "a number of tokens >= 1")
    if value is not None and value < 1:
        raise ApiError(f"{name}={value}: expected a number of tokens >= 1", name)
    return value


def _number(given: dict[str, Any], name: str) -> float:
    kind, expected = (int, "an integer") if name == "top_k" else (int | float, "a number")
    value = _kind(given, name, kind, f"{expected} up to 1e9")
    if abs(value) > 1e9:
        raise ApiError(f"{name}={value!r:.80}: expected {expected} up to 1e9", name)
    return float(value)


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise ApiError(f"messages={value!r:.80}: expected a list of messages", "messages")
    found = [_message(message, f"messages[{i}]") for i, message in enumerate(value)]
    names = {call["id"]: call["function"]["name"] for message in found for call in message.get("tool_calls", ())}
    for message in found:
        if message["role"] == "tool" and message.get("tool_call_id") in names:  # some templates show it
            message.setdefault("name", names[message["tool_call_id"]])
    return found


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    found = {name: message[name] for name in MESSAGE if message.get(name) is not None}
    if found.get("role") not in ("system", "developer", "user", "assistant", "tool"):
        expected = "system, developer, user, assistant or tool"
        raise ApiError(f"{where}.role={found.get('role')!r:.40}: expected {expected}", f"{where}.role")
    found["role"] = "system" if found["role"] == "developer" else found["role"]
    for name, expected in UNSPOKEN.items():
        if message.get(name):
            told = f"{where}.{name}={message[name]!r:.80}: expected {expected} instead"
            raise ApiError(told, f"{where}.{name}", "unsupported_content")
    for name in ("name", "tool_call_id", *THOUGHTS):
        if not isinstance(found.get(name, ""), str):
            raise ApiError(f"{where}.{name}={found[name]!r:.80}: expected a text", f"{where}.{name}")
    found["content"] = _text(found.get("content", ""), f"{where}.content")
    if "tool_calls" in found:
        calls = found["tool_calls"]
        if not isinstance(calls, list):
            raise ApiError(f"{where}.tool_calls={calls!r:.80}: expected a list", f"{where}.tool_calls")
        found["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
        if not calls:
            del found["tool_calls"]
    return found


def _text(value: Any, where: str) -> str:
    """A text, or the texts of parts."""
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise ApiError(f"{where}={value!r:.80}: expected a text, or a list of texts", where, "unsupported_content")
    return value


def _call(call: Any, where: str) -> dict[str, Any]:
    """Its arguments, which OpenAI has as JSON text, as templates have them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"{where}={call!r:.80}: expected a function's name and arguments", where)
    written = function.get("arguments")
    arguments = {} if written is None or not str(written).strip() else written
    if isinstance(arguments, str):
        with suppress(DataError):  # it stays a text, which is refused
            arguments = parse_json(arguments, where, DataError)
    if not isinstance(arguments, dict):
        raise ApiError(f"{where}.function.arguments={written!r:.80}: expected a JSON object, or its text", where)
    function = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": function}


def _tools(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ApiError(f"tools={value!r:.80}: expected a list", "tools")
    for i, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(f"tools[{i}]={tool!r:.80}: expected a function with a name", f"tools[{i}]")
    return value


@dataclass
class Reply:
    """What the model has said: `message` as chat templates have it; `reason`: stop, length or tool_calls."""

    message: dict[str, Any]
    reason: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    pieces: Sequence[str]  # the text of each token

    def body(self, request: ChatRequest, name: str) -> dict[str, Any]:
        """Of the HTTP answer, but for the time."""
        choice: dict[str, Any] = {"index": 0, "message": self._message(), "finish_reason": self.reason}
        choice["logprobs"] = {"content": self._logprobs()} if request.logprobs else None
        sizes = len(self.prompt), len(self.tokens)
        usage = {"prompt_tokens": sizes[0], "completion_tokens": sizes[1], "total_tokens": sum(sizes)}
        found = {"id": name, "object": "chat.completion", "model": request.model, "choices": [choice], "usage": usage}
        if request.return_token_ids:
            choice["token_ids"] = list(self.tokens)
            found["prompt_token_ids"] = list(self.prompt)
        return found

    def _message(self) -> dict[str, Any]:
        """Arguments of calls are a text, and no text beside them is null."""
        if "tool_calls" not in self.message:
            return self.message
        functions = [call["function"] for call in self.message["tool_calls"]]
        functions = [function | {"arguments": json.dumps(function["arguments"])} for function in functions]
        calls = zip(self.message["tool_calls"], functions, strict=True)
        told = [call | {"function": function} for call, function in calls]
        return self.message | {"content": self.message["content"] or None, "tool_calls": told}

    def _logprobs(self) -> list[dict[str, Any]]:
        return [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(self.pieces, self.logprobs, strict=True)
        ]


def chunk(body: dict[str, Any], delta: dict[str, Any], ended: str | None = None, **more: Any) -> dict[str, Any]:
    """Of an answer's stream; of `body` it has id, time and model."""
    return _common(body) | {"choices": [{"index": 0, "delta": delta, "finish_reason": ended, **more}]}


def _common(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}


def chunks(body: dict[str, Any], told: str, include_usage: bool) -> Iterator[dict[str, Any]]:
    """The rest of an answer whose text was `told` so far: who speaks, what is said, why it ended; and what it took, if
    that is asked for."""
    (choice,) = body["choices"]
    said = {name: value for name, value in choice["message"].items() if name != "role"}
    if "tool_calls" in said:
        said["tool_calls"] = [{"index": i, **call} for i, call in enumerate(said["tool_calls"])]
    more = {name: choice[name] for name in ("logprobs", "token_ids") if name in choice}
    first = {name: body[name] for name in ("prompt_token_ids",) if name in body}
    if told:
        said["content"] = said["content"][len(told) :]
    else:
        yield chunk(body, {"role": "assistant"}) | first
    yield chunk(body, said, **more)
    yield chunk(body, {}, choice["finish_reason"])
    if include_usage:
        yield _common(body) | {"choices": [], "usage": body["usage"]}


def require_server(key: str, value: object) -> None:
    """Raises ConfigError."""
    if importlib.util.find_spec("starlette") is None or importlib.util.find_spec("uvicorn") is None:
        raise ConfigError(key, value, "the packages starlette and uvicorn: the extra `serve` of this one")


def told_sampling(sampling: SamplingParams) -> dict[str, float]:
    """What requests may repeat."""
    return {name: float(getattr(sampling, name)) for name in SAMPLED}
