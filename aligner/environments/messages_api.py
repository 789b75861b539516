"""Anthropic's messages API as data: its requests as a `ChatRequest`, its answers of the body of chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from aligner.environments.openai_api import (
    ApiError,
    ChatRequest,
    chat_request,
    read_call,
    read_kind,
    read_message,
    read_parameters,
    unsupported,
)

# parameters that are accepted only with their neutral value
NEUTRAL: dict[str, Any] = {"thinking": {"type": "disabled"}, "mcp_servers": []}
UNREAD = ("metadata", "service_tier", "cache_control", "inference_geo")  # parameters that no answer depends on
READ = ("model", "messages", "system", "max_tokens", "stop_sequences", "stream", "tools", "tool_choice")
SAMPLED = ("temperature", "top_p", "top_k")
# keys of a tool -> OpenAI's; and those that no answer depends on
TOOL = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
UNREAD_OF_TOOL = ("type", "cache_control", "eager_input_streaming")
SIZES = {"input_tokens": "prompt", "output_tokens": "completion"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# an HTTP status -> the type of the error
ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}


def read_request(body: Any) -> ChatRequest:
    """Read a request's JSON. Raises ApiError."""
    parameters = read_parameters(body, NEUTRAL, (*UNREAD, *SAMPLED, *READ))
    stop = read_kind(parameters, "stop_sequences", list, "a list of texts") or []
    if not all(isinstance(text, str) and text for text in stop):
        raise ApiError(f"stop_sequences={stop!r:.80}: expected a list of texts", "stop_sequences")
    tools = read_kind(parameters, "tools", list, "a list") or []
    chat = parameters | {
        "stop": stop,
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)],
        "tool_choice": _choice(parameters.get("tool_choice", {"type": "auto"})),
    }
    return chat_request(chat, _messages(parameters))


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """Return a tool as OpenAI has it, so that a template shows the same."""
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
        raise unsupported(where, "a tool of yours, with a name and an input_schema", tool)
    for name, value in tool.items():
        if name not in (*TOOL, *UNREAD_OF_TOOL) and value is not None:
            raise unsupported(f"{where}.{name}", "a tool without it", value)
    return {"type": "function", "function": {own: tool[name] for name, own in TOOL.items() if name in tool}}


def _choice(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else value
    if kind not in ("auto", "none") or value.get("disable_parallel_tool_use"):
        raise unsupported("tool_choice", "auto or none, with parallel calls", value)
    return kind


def _messages(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    value, messages = parameters.get("messages"), []
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise ApiError(f"messages={value!r:.80}: expected a list of messages", "messages")
    if parameters.get("system"):
        messages.append(read_message({"role": "system", "content": parameters["system"]}, "system"))
    for i, message in enumerate(value):
        role, where = message.get("role"), f"messages[{i}]"
        if role not in ("user", "assistant", "system"):
            raise ApiError(f"{where}.role={role!r:.40}: expected user or assistant", f"{where}.role")
        messages += _split(role, message.get("content"), where)
    return messages


def _split(role: str, content: Any, where: str) -> Iterator[dict[str, Any]]:
    """Yield a message, with results of tools as messages before and after its texts."""
    if not isinstance(content, list):
        yield read_message({"role": role, "content": content}, where)
        return
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        kind, at = block.get("type") if isinstance(block, dict) else None, f"{where}.content[{i}]"
        allowed = "text", "tool_use" if role == "assistant" else "tool_result"
        if kind not in allowed:
            raise unsupported(f"{at}.type", f"{' or '.join(allowed)}: images, files and thoughts are not read", kind)
        if kind == "text":
            texts.append(block)
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append(read_call({"id": block.get("id"), "function": function}, at))
        else:
            if texts:
                yield read_message({"role": role, "content": texts}, where)
                texts = []
            fields = {"tool_call_id": block.get("tool_use_id"), "content": block.get("content", "")}
            yield read_message({"role": "tool", **fields}, at)
    if texts or calls or role == "assistant":
        message = read_message({"role": role, "content": texts}, where)
        yield message | {"tool_calls": calls} if calls else message


def answer(body: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Return an answer of the body of chat completions."""
    (choice,) = body["choices"]
    message, stop = choice["message"], choice.get("stop_reason")
    content = [{"type": "text", "text": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    by_text = stop is not None and choice["finish_reason"] == "stop"
    return {
        **{"id": f"msg_{body['id'].partition('-')[2]}", "type": "message", "role": "assistant"},
        **{"model": body["model"], "content": content},
        "stop_reason": "stop_sequence" if by_text else REASONS[choice["finish_reason"]],
        "stop_sequence": stop if by_text else None,
        "usage": {name: body["usage"][f"{own}_tokens"] for name, own in SIZES.items()},
    }


def events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a whole answer's stream."""
    begun = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": body["usage"] | {"output_tokens": 0}}
    yield {"type": "message_start", "message": body | begun}
    for i, block in enumerate(body["content"]):
        name, text = ("text", block["text"]) if block["type"] == "text" else ("input", json.dumps(block["input"]))
        delta = {"type": "text_delta", "text": text}
        if name == "input":
            delta = {"type": "input_json_delta", "partial_json": text}
        empty = block | {name: "" if name == "text" else {}}
        yield {"type": "content_block_start", "index": i, "content_block": empty}
        yield {"type": "content_block_delta", "index": i, "delta": delta}
        yield {"type": "content_block_stop", "index": i}
    ended = {name: body[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": body["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error as the API has it."""
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
