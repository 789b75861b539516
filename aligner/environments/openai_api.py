"""OpenAI's chat completions as data: requests, answers, and errors in their format.

Names are OpenAI's, for token ids vLLM's: `return_token_ids` asks for `prompt_token_ids` and `token_ids`. An unsupported
parameter is refused by its name, never ignored. Requests of the other APIs become a `ChatRequest`, too, and their
answers are made of the `Reply.body` (responses_api.py, messages_api.py).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aligner.errors import DataError, MissingExtraError
from aligner.foreign import parse_json
from aligner.types import SamplingParams

MODEL = "policy"  # the name of the model that is trained
# parameters that are accepted only with their neutral value
NEUTRAL: dict[str, Any] = {
    **{"n": 1, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "top_logprobs": 0},
    **{"parallel_tool_calls": True, "response_format": {"type": "text"}, "modalities": ["text"], "echo": False},
}
# parameters that no answer depends on
UNREAD = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
SAMPLED = ("temperature", "top_p", "top_k", "min_p")
SWITCHES = ("stream", "logprobs", "return_token_ids")
READ = ("model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "seed")
# names of the limit of an answer in the three APIs, the first that is set counts
TOKEN_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of thoughts in templates
MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", *THOUGHTS)
# keys of a message that no template reads -> the expected one
UNSPOKEN = {"function_call": "tool_calls", "audio": "a text"}


class ApiError(Exception):
    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value", status: int = 400):
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def nowhere() -> ApiError:
    """Return the error of an unknown path, the same for a wrong path and a wrong secret."""
    return ApiError("there is nothing at this path", code="not_found", status=404)


@dataclass
class ChatRequest:
    """A request, with `messages` and `tools` as chat templates read them. None: not set."""

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    calls: bool = True  # calls in the answer are parsed (tool_choice)
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    sampled: dict[str, float] = field(default_factory=dict)  # by names of SAMPLED
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    again: bool = field(default=False, compare=False)  # its client repeats a request that timed out


def read_request(body: Any) -> ChatRequest:
    """Read a request's JSON. Raises ApiError."""
    parameters = read_parameters(body, NEUTRAL, (*UNREAD, *SAMPLED, *SWITCHES, *READ, "stream_options"))
    messages = parameters.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ApiError(f"messages={messages!r:.80}: expected a list of messages", "messages")
    return chat_request(parameters, [read_message(each, f"messages[{i}]") for i, each in enumerate(messages)])


def read_parameters(body: Any, neutral: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of a request that are set: those of `neutral` with this value, and any of `names`. Raises
    ApiError."""
    if not isinstance(body, dict):
        raise ApiError(f"the request: expected a JSON object, found {body!r:.80}")
    parameters = {name: value for name, value in body.items() if value is not None}
    for name, value in parameters.items():
        if name in neutral and value != neutral[name]:
            raise unsupported(name, f"{json.dumps(neutral[name])}, or none", value)
        if name not in neutral and name not in names:
            raise unsupported(name, "a request without it", value)
    return parameters


def chat_request(parameters: dict[str, Any], messages: list[dict[str, Any]]) -> ChatRequest:
    """Return the request of these parameters, by OpenAI's names, and of messages of `read_message`. Raises ApiError."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    for message in messages:
        if message["role"] == "tool" and message.get("tool_call_id") in names:  # some templates show it
            message.setdefault("name", names[message["tool_call_id"]])
    for name in SWITCHES:
        read_kind(parameters, name, bool, "true or false")
    choice = parameters.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise unsupported("tool_choice", "auto or none", choice)
    limits = [_count(parameters, name) for name in TOKEN_LIMITS]
    options = read_kind(parameters, "stream_options", dict, "an object") or {}
    return ChatRequest(
        read_kind(parameters, "model", str, "the name of a model", needed=True),
        messages,
        _tools(parameters.get("tools", [])),
        choice == "auto",
        next(filter(None, limits), None),
        read_stop(parameters),
        read_kind(parameters, "seed", int, "an integer"),
        {name: read_number(parameters, name) for name in SAMPLED if name in parameters},
        *(parameters.get("stream", False), bool(options.get("include_usage"))),
        *(parameters.get("logprobs", False), parameters.get("return_token_ids", False)),
    )


def check_model(requested: str, model: str) -> None:
    """Check the name of the model. Raises ApiError."""
    if requested != model:
        text = f"model={requested!r}: the only model is `{model}`"
        raise ApiError(text, "model", "model_not_found", 404)


def check_sampling(request: ChatRequest, sampling: dict[str, float]) -> None:
    """Check that sampling parameters equal the run's: the policy learns from samples of that distribution. Raises
    ApiError."""
    for name, value in request.sampled.items():
        if value != sampling[name]:
            expected = f"{sampling[name]:g}, the run's value, or none"
            raise ApiError(f"{name}={value:g}: expected {expected}", name, "unsupported_value")
    if request.seed is not None:
        raise ApiError(f"seed={request.seed}: expected none: the run sets it", "seed", "unsupported_parameter")


def read_stop(parameters: dict[str, Any]) -> list[str]:
    """Return the stop strings. Raises ApiError."""
    stop = parameters.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise ApiError(f"stop={stop!r:.80}: expected a text or a list of texts", "stop")
    return stop


def unsupported(name: str, expected: str, value: Any) -> ApiError:
    """Return the error of a parameter, or of its value."""
    return ApiError(f"{name}={value!r:.80}: expected {expected}", name, "unsupported_parameter")


def read_kind(parameters: dict[str, Any], name: str, kind: Any, expected: str, needed: bool = False) -> Any:
    """Return a parameter of this kind; None: not set. Raises ApiError."""
    value = parameters.get(name)
    good = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not good and (needed or value is not None):
        raise ApiError(f"{name}={value!r:.80}: expected {expected}", name)
    return value


def _count(parameters: dict[str, Any], name: str) -> int | None:
    value = read_kind(parameters, name, int, "a number of tokens >= 1")
    if value is not None and value < 1:
        raise ApiError(f"{name}={value}: expected a number of tokens >= 1", name)
    return value


def read_number(parameters: dict[str, Any], name: str) -> float:
    """Return a sampling parameter. Raises ApiError."""
    kind, expected = (int, "an integer") if name == "top_k" else (int | float, "a number")
    value = read_kind(parameters, name, kind, f"{expected} up to 1e9")
    if abs(value) > 1e9:
        raise ApiError(f"{name}={value!r:.80}: expected {expected} up to 1e9", name)
    return float(value)


def read_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message as templates read it. Raises ApiError."""
    fields = {name: message[name] for name in MESSAGE if message.get(name) is not None}
    if fields.get("role") not in ("system", "developer", "user", "assistant", "tool"):
        expected = "system, developer, user, assistant or tool"
        raise ApiError(f"{where}.role={fields.get('role')!r:.40}: expected {expected}", f"{where}.role")
    fields["role"] = "system" if fields["role"] == "developer" else fields["role"]
    for name, expected in UNSPOKEN.items():
        if message.get(name):
            error = f"{where}.{name}={message[name]!r:.80}: expected {expected} instead"
            raise ApiError(error, f"{where}.{name}", "unsupported_content")
    for name in ("name", "tool_call_id", *THOUGHTS):
        if not isinstance(fields.get(name, ""), str):
            raise ApiError(f"{where}.{name}={fields[name]!r:.80}: expected a text", f"{where}.{name}")
    fields["content"] = _text(fields.get("content", ""), f"{where}.content")
    if "tool_calls" in fields:
        calls = fields["tool_calls"]
        if not isinstance(calls, list):
            raise ApiError(f"{where}.tool_calls={calls!r:.80}: expected a list", f"{where}.tool_calls")
        fields["tool_calls"] = [read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
        if not calls:
            del fields["tool_calls"]
    return fields


def _text(value: Any, where: str) -> str:
    """Return a text, or the joined texts of content parts."""
    if isinstance(value, list) and all(
        isinstance(item, dict) and item.get("type", "text") == "text" and isinstance(item.get("text"), str)
        for item in value
    ):
        value = "".join(item["text"] for item in value)
    if not isinstance(value, str):
        error = f"{where}={value!r:.80}: expected a text, or a list of texts: images, video and audio are not read"
        raise ApiError(error, where, "unsupported_content")
    return value


def read_call(call: Any, where: str) -> dict[str, Any]:
    """Return a call with its arguments, which OpenAI sends as JSON text, as templates read them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"{where}={call!r:.80}: expected a function's name and arguments", where)
    written = function.get("arguments")
    arguments = {} if written is None or not str(written).strip() else written
    if isinstance(arguments, str):
        with suppress(DataError):  # a text is refused below
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
    """A reply of the model: `message` as chat templates read it; `reason`: stop, length or tool_calls."""

    message: dict[str, Any]
    reason: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    pieces: Sequence[str]  # the text of each token
    stop: str | None = None  # the request's stop string that ended it

    def body(self, request: ChatRequest, name: str) -> dict[str, Any]:
        """Return the body of the HTTP answer, without its time."""
        choice: dict[str, Any] = {"index": 0, "message": self._message(), "finish_reason": self.reason}
        choice["logprobs"] = {"content": self._logprobs()} if request.logprobs else None
        if self.stop is not None:
            choice["stop_reason"] = self.stop  # vLLM's name
        sizes = len(self.prompt), len(self.tokens)
        usage = {"prompt_tokens": sizes[0], "completion_tokens": sizes[1], "total_tokens": sum(sizes)}
        body = {"id": name, "object": "chat.completion", "model": request.model, "choices": [choice], "usage": usage}
        if request.return_token_ids:
            choice["token_ids"] = list(self.tokens)
            body["prompt_token_ids"] = list(self.prompt)
        return body

    def _message(self) -> dict[str, Any]:
        """Return the message with arguments of calls as JSON text, and null for empty content beside calls."""
        if "tool_calls" not in self.message:
            return self.message
        functions = [call["function"] for call in self.message["tool_calls"]]
        functions = [function | {"arguments": json.dumps(function["arguments"])} for function in functions]
        pairs = zip(self.message["tool_calls"], functions, strict=True)
        calls = [call | {"function": function} for call, function in pairs]
        return self.message | {"content": self.message["content"] or None, "tool_calls": calls}

    def _logprobs(self) -> list[dict[str, Any]]:
        return [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(self.pieces, self.logprobs, strict=True)
        ]


def chunk(body: dict[str, Any], delta: dict[str, Any], ended: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return a chunk of an answer's stream; `body` provides id, time and model."""
    return _common(body) | {"choices": [{"index": 0, "delta": delta, "finish_reason": ended, **fields}]}


def _common(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}


def chunks(body: dict[str, Any], sent: str, include_usage: bool) -> Iterator[dict[str, Any]]:
    """Yield the rest of an answer's stream, after its text `sent` so far: role, message, reason, and usage if
    requested."""
    (choice,) = body["choices"]
    delta = {name: value for name, value in choice["message"].items() if name != "role"}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    fields = {name: choice[name] for name in ("logprobs", "token_ids") if name in choice}
    first = {name: body[name] for name in ("prompt_token_ids",) if name in body}
    if sent:
        delta["content"] = delta["content"][len(sent) :]
    else:
        yield chunk(body, {"role": "assistant"}) | first
    yield chunk(body, delta, **fields)
    yield chunk(body, {}, choice["finish_reason"])
    if include_usage:
        yield _common(body) | {"choices": [], "usage": body["usage"]}


def require_server(why: str) -> None:
    """Check that the server's packages are installed. Raises MissingExtraError."""
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "serve", why)


def request_sampling(sampling: SamplingParams) -> dict[str, float]:
    """Return the run's sampling parameters, which requests may repeat."""
    return {name: float(getattr(sampling, name)) for name in SAMPLED}
