"""Conversations -> token ids through a chat template, and what a template must be able to do for that."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aligner.data.formats import Messages, Tools
from aligner.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Options = Mapping[str, Any]  # of apply_chat_template: the template's arguments, perhaps another `chat_template`
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Chat:
    messages: Messages
    where: str
    tools: Tools | None = None
    fixed: int = 0  # so many first messages get no loss

    @property
    def answers(self) -> list[int]:
        """The places of the messages to learn."""
        places = range(self.fixed, len(self.messages))
        return [k for k in places if self.messages[k]["role"] == "assistant"]

    def head(self, count: int) -> Chat:
        return Chat(self.messages[:count], self.where, self.tools)


def marks_answers(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], options: Options) -> bool:
    """Whether the template marks what the assistant says, and the tokenizer can tell the tokens of the marks."""
    return tokenizer.is_fast and all(_GENERATION.search(_template(tokenizer, chat, options)) for chat in chats)


def unread_tools(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tools | None]) -> bool:
    """Whether conversations have a column `tools` that the template leaves out."""
    there = next((value for value in tools if value), None)
    if there is None or tokenizer.chat_template is None:
        return False
    return not _reads(tokenizer.get_chat_template(tools=there), "tools")


def check_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Options) -> None:
    """Raise ConfigError for an entry of data.template_arguments that the tokenizer's template does not read."""
    for name, value in arguments.items():
        if tokenizer.chat_template is None or not _reads(tokenizer.get_chat_template(), name):
            expected = f"a variable of the chat template of {tokenizer.name_or_path!r}, which has none of this name"
            raise ConfigError(f"data.template_arguments.{name}", value, expected)


def render(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], options: Options, **more: Any) -> dict[str, list]:
    """`input_ids` of each chat, with return_assistant_tokens_mask=True also `assistant_masks`. Raises DataError that
    names the row which the template refuses."""
    found: dict[str, list] = {"input_ids": [[]] * len(chats), "assistant_masks": [[]] * len(chats)}
    for chat in chats:
        template = _template(tokenizer, chat, options)
        if any(message.get("tool_calls") for message in chat.messages) and not _reads(template, "tool_calls"):
            raise DataError(
                f"{chat.where}: the chat template of model.tokenizer={tokenizer.name_or_path!r} leaves out `tool_calls`"
                ", so that the turn would be empty: expected one that renders them (data.chat_template), or messages "
                "without"
            )
    together: dict[str, list[int]] = {}
    for i, chat in enumerate(chats):  # a call of transformers takes one list of tools
        together.setdefault(json.dumps(chat.tools, default=str) if chat.tools else "", []).append(i)
    settings = {"tokenize": True, "return_dict": True, "tokenizer_kwargs": {"verbose": False}, **options, **more}
    for places in together.values():
        part = [chats[i] for i in places]
        for name, rows in _apply(tokenizer, part, {**settings, "tools": part[0].tools}).items():
            for i, row in zip(places, rows if name in found else (), strict=False):
                found[name][i] = row
    return found


def _apply(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], settings: dict[str, Any]) -> dict[str, list]:
    import jinja2

    try:
        return tokenizer.apply_chat_template([chat.messages for chat in chats], **settings)
    except jinja2.TemplateError as batch_error:
        for chat in chats:
            try:
                tokenizer.apply_chat_template([chat.messages], **settings)
            except jinja2.TemplateError as error:
                raise DataError(
                    f"{chat.where}: the chat template of model.tokenizer={tokenizer.name_or_path!r} refuses the roles "
                    f"{[m['role'] for m in chat.messages]}: {error}"
                ) from error
        raise DataError(f"the chat template of model.tokenizer failed: {batch_error}") from batch_error


def _template(tokenizer: PreTrainedTokenizerBase, chat: Chat, options: Options) -> str:
    if tokenizer.chat_template is None and "chat_template" not in options:
        raise DataError(
            f"{chat.where}: model.tokenizer={tokenizer.name_or_path!r}: expected a chat template because the data is "
            "conversational, found none; set data.chat_template (chatml, for one), add chat_template.jinja to the "
            "folder, or use plain strings"
        )
    return tokenizer.get_chat_template(options.get("chat_template"), chat.tools)


def _reads(template: str, variable: str) -> bool:
    """Whether the name occurs in the template; one that is only in a comment passes."""
    return re.search(rf"\b{re.escape(variable)}\b", template) is not None
