"""Prompts with what an environment's `reset` returns."""

from __future__ import annotations

from typing import Any

Messages = list[dict[str, Any]]


def with_opening(messages: Messages, opening: str | Messages) -> Messages:
    """Return a prompt's messages with those that an environment opens with. A text goes on with the user's last one:
    many templates refuse two of one role."""
    if not isinstance(opening, str):
        return [*messages, *opening]
    if messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": opening}]
    return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n\n{opening}"}]
