"""Unchanged environments of NeMo-Gym: `environment.agent=aligner.environments.nemo_gym:play`.

Their resources server runs elsewhere. It has a session for each trajectory, answers the calls of the model, and
verifies what the model said, as for NeMo-Gym's own `simple_agent`. No package of NeMo-Gym is needed here.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from aligner.environments.agents import Task

REFUSED = 400  # a limit of the trajectory is reached


async def play(task: Task, base_url: str, sampling: dict[str, Any], url: str) -> float:
    """Return the reward of a row of theirs. `url`: of the resources server."""
    parameters = task.row["responses_create_params"]
    tools = parameters.get("tools") or []
    asked = dict(sampling) | ({"tools": [_chat_tool(tool) for tool in tools]} if tools else {})
    messages, output = list(task.messages), []
    async with httpx.AsyncClient(base_url=url, timeout=None) as server, httpx.AsyncClient(timeout=None) as model:
        (await server.post("/seed_session", json=task.row)).raise_for_status()
        while True:
            reply = await model.post(f"{base_url}/chat/completions", json=asked | {"messages": messages})
            if reply.status_code == REFUSED:
                break
            choice = reply.raise_for_status().json()["choices"][0]
            message, calls = choice["message"], choice["message"].get("tool_calls") or []
            messages.append(message)
            output += _items(message, calls, len(output))
            for call in calls:
                text = await _called(server, call["function"], tools)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
                output.append({"type": "function_call_output", "call_id": call["id"], "output": text})
            if not calls or choice["finish_reason"] == "length":
                break
        verified = await server.post("/verify", json={**task.row, "response": _response(output, tools)})
        return float(verified.raise_for_status().json()["reward"])


async def _called(server: httpx.AsyncClient, function: dict[str, Any], tools: list[dict[str, Any]]) -> str:
    """Return the result of a call. Errors of the server are results, too; other paths of it are not called."""
    if function["name"] not in [tool["name"] for tool in tools]:
        return json.dumps({"error": f"there is no tool {function['name']!r}"})
    try:
        arguments = json.loads(function["arguments"])
    except ValueError as error:
        return json.dumps({"error": f"Invalid tool call arguments: {error}"})
    return (await server.post(f"/{function['name']}", json=arguments)).text


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool of the Responses API as one of the chat API."""
    function = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
    return {"type": "function", "function": function}


def _items(message: dict[str, Any], calls: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return a message of the chat API as output of the Responses API."""
    items: list[dict[str, Any]] = []
    if message.get("content") or not calls:
        text = {"type": "output_text", "text": message.get("content") or "", "annotations": []}
        kind = {"id": f"msg-{number}", "type": "message", "role": "assistant", "status": "completed"}
        items.append(kind | {"content": [text]})
    for call in calls:
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        items.append({"type": "function_call", "call_id": call["id"], "status": "completed"} | function)
    return items


def _response(output: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    kept = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": tools}
    return {"id": "response", "object": "response", "created_at": 0, "model": "policy", "output": output, **kept}
