"""OpenAI's responses API as data: its requests as a `ChatRequest`, and its answers of the body of chat completions.

The input of a request is the whole conversation: nothing is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from aligner.environments.openai_api import (
    SAMPLED,
    UNREAD,
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
NEUTRAL: dict[str, Any] = {
    **{"parallel_tool_calls": True, "background": False, "truncation": "disabled", "include": [], "top_logprobs": 0},
    "text": {"format": {"type": "text"}},
}
READ = ("model", "input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream", "stream_options")
SHOWN = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p")  # that an answer repeats
TEXTS = ("input_text", "output_text", "text")  # types of content


def read_request(body: Any) -> ChatRequest:
    """Read a request's JSON. Raises ApiError."""
    parameters = read_parameters(body, NEUTRAL, (*UNREAD, *SAMPLED, *READ))
    tools = read_kind(parameters, "tools", list, "a list") or []
    parameters["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    instructions = read_kind(parameters, "instructions", str, "a text")
    opening = [{"role": "system", "content": instructions}] if instructions else []
    request = chat_request(parameters, [*opening, *_messages(parameters.get("input"))])
    request.include_usage = False  # a stream always has it
    return request


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise unsupported(where, "a function", tool)
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type" and v is not None}}


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return the input's items as messages: calls belong to the text of the model before them."""
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise ApiError(f"input={value!r:.80}: expected a text or a list of items", "input")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        kind, where = item.get("type", "message"), f"input[{i}]"
        if kind == "message":
            messages.append(read_message(item | {"content": _content(item.get("content"))}, where))
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = read_call({"id": item.get("call_id"), "function": function}, where)
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            fields = {"tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
            messages.append(read_message({"role": "tool", **fields}, where))
        else:
            raise unsupported(f"{where}.type", "message, function_call or function_call_output", kind)
    return messages


def _content(value: Any) -> Any:
    """Return content whose texts have the type of those of chat completions."""
    if not isinstance(value, list):
        return value
    return [item | {"type": "text"} if isinstance(item, dict) and item.get("type") in TEXTS else item for item in value]


def answer(body: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Return an answer of the body of chat completions, with its time; `asked` is the request's JSON."""
    (choice,) = body["choices"]
    message, cut, name = choice["message"], choice["finish_reason"] == "length", body["id"].partition("-")[2]
    status, calls, output = "incomplete" if cut else "completed", message.get("tool_calls", ()), []
    if message["content"] or not calls:
        text = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        fields = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status}
        output.append(fields | {"content": [text]})
    for call in calls:
        fields = {"id": f"fc_{name}_{call['id']}", "type": "function_call", "status": "completed"}
        output.append(fields | {"call_id": call["id"], **call["function"]})
    usage = body["usage"]
    return {
        **{"id": f"resp_{name}", "object": "response", "created_at": body["created"], "model": body["model"]},
        **{"status": status, "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "error": None},
        **{"output": output, "tools": asked.get("tools") or [], "tool_choice": asked.get("tool_choice") or "auto"},
        **{"parallel_tool_calls": True, **{name: asked.get(name) for name in SHOWN}},
        "usage": {
            **{"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a whole answer's stream."""
    for number, event in enumerate(_events(body)):
        yield event | {"sequence_number": number}


def _events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begun = body | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    for kind in ("created", "in_progress"):
        yield {"type": f"response.{kind}", "response": begun}
    for i, item in enumerate(body["output"]):
        empty: dict[str, Sequence] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        added = item | {"status": "in_progress", **empty}
        yield {"type": "response.output_item.added", "output_index": i, "item": added}
        where = {"item_id": item["id"], "output_index": i}
        yield from _text_events(item, where) if item["type"] == "message" else _call_events(item, where)
        yield {"type": "response.output_item.done", "output_index": i, "item": item}
    yield {"type": f"response.{body['status']}", "response": body}


def _text_events(item: dict[str, Any], where: dict[str, Any]) -> Iterator[dict[str, Any]]:
    (content,), where = item["content"], where | {"content_index": 0}
    text = content["text"]
    yield {"type": "response.content_part.added", **where, "part": content | {"text": ""}}
    if text:
        yield {"type": "response.output_text.delta", **where, "delta": text, "logprobs": []}
    yield {"type": "response.output_text.done", **where, "text": text, "logprobs": []}
    yield {"type": "response.content_part.done", **where, "part": content}


def _call_events(item: dict[str, Any], where: dict[str, Any]) -> Iterator[dict[str, Any]]:
    arguments, name = item["arguments"], item["name"]
    yield {"type": "response.function_call_arguments.delta", **where, "delta": arguments}
    yield {"type": "response.function_call_arguments.done", **where, "arguments": arguments, "name": name}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error as the API has it."""
    return error.body
