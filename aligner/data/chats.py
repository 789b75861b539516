"""Conversations -> token ids through a chat template, and checks of the template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aligner.data.formats import Messages, Tools
from aligner.data.rendering import rendered, template_of
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Options = Mapping[str, Any]  # of apply_chat_template: the template's arguments, optionally another `chat_template`
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Chat:
    messages: Messages
    where: str
    tools: Tools | None = None
    fixed: int = 0  # number of first messages without loss

    @property
    def answers(self) -> list[int]:
        """Indices of the messages to learn."""
        return [k for k in range(self.fixed, len(self.messages)) if self.messages[k]["role"] == "assistant"]

    def head(self, count: int) -> Chat:
        return Chat(self.messages[:count], self.where, self.tools)


def marks_answers(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], options: Options) -> bool:
    """Return whether the template marks the assistant's text, and the tokenizer can locate the marked tokens."""
    return tokenizer.is_fast and all(
        _GENERATION.search(template_of(tokenizer, {**options, "tools": chat.tools}, chat.where)) for chat in chats
    )


def unread_tools(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tools | None]) -> bool:
    """Return whether conversations have a column `tools` that the template does not read."""
    schemas = next((value for value in tools if value), None)
    if schemas is None or tokenizer.chat_template is None:
        return False
    return not _reads(template_of(tokenizer, {"tools": schemas}, "the column `tools`"), "tools")


def check_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Options) -> None:
    """Raise ConfigError for an entry of data.template_arguments that the tokenizer's template does not read."""
    for name, value in arguments.items():
        if tokenizer.chat_template is None or not _reads(template_of(tokenizer, {}, "data.template_arguments"), name):
            expected = f"a variable of the chat template of {tokenizer.name_or_path!r}, which has no such variable"
            raise ConfigError(f"data.template_arguments.{name}", value, expected)


def render(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], options: Options, **args: Any) -> dict[str, list]:
    """Return `input_ids` of each chat, with return_assistant_tokens_mask=True also `assistant_masks`. Raises DataError
    that names the row which the template refuses."""
    columns: dict[str, list] = {"input_ids": [[]] * len(chats), "assistant_masks": [[]] * len(chats)}
    together: dict[str, list[int]] = {}
    for i, chat in enumerate(chats):  # a call of transformers takes one list of tools
        together.setdefault(json.dumps(chat.tools, default=str) if chat.tools else "", []).append(i)
    settings = {"tokenize": True, "return_dict": True, "tokenizer_kwargs": {"verbose": False}, **options, **args}
    for places in together.values():
        batch = [chats[i] for i in places]
        messages, where = [chat.messages for chat in batch], [chat.where for chat in batch]
        for name, rows in rendered(tokenizer, messages, where, {**settings, "tools": batch[0].tools}).items():
            for i, row in zip(places, rows if name in columns else (), strict=False):
                columns[name][i] = row
    return columns


def _reads(template: str, variable: str) -> bool:
    """Return whether the name occurs in the template; one that is only in a comment passes."""
    return re.search(rf"\b{re.escape(variable)}\b", template) is not None
