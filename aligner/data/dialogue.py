"""A conversation as the engine reads it, turn by turn: its own tokens are kept, and only new text is tokenised.

A template renders the whole conversation again, and may render earlier answers differently. As long as the text begins
with the engine's prompt and output, their tokens stand for it, even if the tokenizer would split that text differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from aligner.data.chats import Chat
from aligner.data.formats import Messages, Tools
from aligner.data.rendering import THOUGHT, form_of, rendered_text, template_of
from aligner.data.template_checks import OTHER, check_shown, shown_calls
from aligner.data.templates import encode_behind, encode_plain
from aligner.data.tool_calls import MARKS, Call, read_calls, spoken, written
from aligner.errors import ConfigError, DataError
from aligner.ops.packing.turns import TAIL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_USER = {"role": "user", "content": "a question"}
_RESULT = "a result 7"


class EnginePrompt(NamedTuple):
    """A prompt of the engine: the text of the template, and its tokens."""

    text: str
    tokens: tuple[int, ...]


@dataclass
class Dialogue:
    """A renderer of conversations with `tools`.

    `calls`: the resolved `environment.calls`; empty without tools.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: Tools
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the template
    calls: str = "auto"
    verbatim: bool = True  # calls are the model's text, else `tool_calls`

    def __post_init__(self) -> None:
        """Resolve `calls`. Raises ConfigError for a template that omits the tools, or renders neither calls nor
        results."""
        if self.tokenizer.chat_template is None:
            raise self._no("a tokenizer with a chat template, which renders conversations")
        if not self.tools:
            self.calls = ""
            return
        names = [tool["function"]["name"] for tool in self.tools]
        if missing := [name for name in names if name not in (self._try([_USER]) or "")]:
            raise self._no(f"a chat template that shows the tools: this one leaves out {missing[0]}")
        call = Call("a_tool", {"an_argument": 7})
        if self.calls == "auto":
            self.calls = shown_calls(self.tokenizer, self.arguments, self.tools) or self._by_words()
            if self.calls in ("", OTHER):
                shows = "writes calls in another format" if self.calls else "shows none"
                raise ConfigError("environment.calls", "auto", f"one of {', '.join(MARKS)}: the template {shows}")
        form = form_of(self.tokenizer, template_of(self.tokenizer, {"tools": self.tools}, ""))
        self.verbatim = not form.named_ids and self._renders(call)
        if not self.verbatim and not self._renders(call):
            raise self._no("a chat template that renders tool calls and messages of role `tool`")

    def _by_words(self) -> str:
        """Return the format that a template without calls of its own describes to the model; empty if it describes
        none."""
        text = (self._try([_USER]) or "").replace("parameters", "")
        return next((kind for kind, mark in MARKS.items() if mark in text), "")

    def _renders(self, call: Call) -> bool:
        """Return whether a conversation's text has two calls and their results, with or without thoughts."""
        texts = []
        for thought in ("", THOUGHT):
            answer = thought + written(self.calls, call.name, call.arguments or {})
            message = self.answer_message(answer, thought, [call])
            turns = [(message, self.result(call, number, _RESULT)) for number in range(2)]
            texts.append(self._try([_USER, *(message for turn in turns for message in turn)]) or "")
        return any(text.count(_RESULT) == 2 == text.count("an_argument") for text in texts)

    def _no(self, expected: str) -> ConfigError:
        hint = "Another one: data.chat_template."
        return ConfigError("model.tokenizer", self.tokenizer.name_or_path, expected, hint)

    def read(self, text: str) -> tuple[str, list[Call]]:
        """Return (the text of an answer without its calls, the calls)."""
        return read_calls(text, self.calls, self.tools)

    def answer_message(self, text: str, beside: str, calls: Sequence[Call], first: int = 0) -> dict[str, Any]:
        """Return the message of an answer.

        `text` has no stop token; its calls are numbered from `first`; `beside` is its text without the calls.
        """
        readable = [call.message(first + i) for i, call in enumerate(calls) if call.name]
        if self.verbatim or not readable:
            return {"role": "assistant", "content": spoken(text)}
        return {"role": "assistant", "content": beside, "tool_calls": readable}

    def result(self, call: Call, number: int, text: str) -> dict[str, Any]:
        """Return the message with the result `text` of the `number`-th call of an answer."""
        if not call.name and not self.verbatim:  # the template shows no call that it answers
            return {"role": "user", "content": text}
        return {"role": "tool", "name": call.name, "content": text, "tool_call_id": call.message(number)["id"]}

    def begin(self, messages: Messages) -> EnginePrompt:
        """Render a new conversation. Raises DataError if the template refuses it, or omits content of a message."""
        check_shown(self.tokenizer, [Chat(messages, "a conversation", self.tools)], self.arguments)
        text = self._render(messages)
        return EnginePrompt(text, tuple(self._tokens(text)))

    def try_begin(self, messages: Messages) -> EnginePrompt | None:
        """Render a program's request, which may have any form; None if the template refuses it."""
        text = self._try(messages)
        return None if text is None else EnginePrompt(text, tuple(self._tokens(text)))

    def resume(self, messages: Messages, tokens: Sequence[int]) -> EnginePrompt:
        """Return the prompt of messages whose tokens are known, or those of their end."""
        return EnginePrompt(self._render(messages), tuple(tokens))

    def follow(self, previous: EnginePrompt, output: Sequence[int], messages: Messages) -> EnginePrompt | None:
        """Return the next prompt after `output`, when the conversation has grown to `messages`.

        The prompt is the previous tokens and the rest; without the end of `output` if the template renders that
        differently; or all of it tokenised again. None if the template refuses.
        """
        text, kept = self._try(messages), len(output)
        if text is None:
            return None
        if text.startswith(previous.text):
            rest = text[len(previous.text) :]
            while len(output) - kept < min(TAIL, len(output)):
                decoded = self.decode(output[:kept])
                if rest.startswith(decoded):
                    held = (*previous.tokens, *output[:kept])
                    return EnginePrompt(text, (*held, *self._behind(held[-1], rest[len(decoded) :])))
                kept -= 1
        return EnginePrompt(text, tuple(self._tokens(text)))

    def _behind(self, last: int, text: str) -> list[int]:
        """Return the tokens of a text behind this token: some tokenizers begin a new text differently."""
        if last in self.tokenizer.all_special_ids:
            tokens = self._tokens(self.decode([last]) + text)
            if tokens[:1] == [last]:
                return tokens[1:]
        return list(encode_behind(self.tokenizer, [text])[0])

    def _tokens(self, text: str) -> list[int]:
        return list(encode_plain(self.tokenizer, [text])[0])

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _render(self, messages: Messages) -> str:
        settings = {"add_generation_prompt": True, "tools": self.tools, **self.arguments}
        return rendered_text(self.tokenizer, messages, "a conversation", **settings)

    def _try(self, messages: Messages) -> str | None:
        try:
            return self._render(messages)
        except DataError:
            return None
