"""Conversations -> text or tokens by a chat template. No other module renders one.

A conversation is first converted to the template's form. A call's arguments are a mapping or JSON text. Ids of calls
are those that it accepts (Kimi's carry the names, Mistral's have nine letters). `developer` becomes `system` if there
is no such role. Thoughts within the content become `reasoning_content` if the template shows only those as thoughts;
they become an entry of a list of contents if it shows only those.
Any failure inside a template is a DataError that names the row, the message and the template's line.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aligner.data.messages import THOUGHTS
from aligner.errors import DataError
from aligner.foreign import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Conversation = Sequence[Mapping[str, Any]]
USER = {"role": "user", "content": "a question"}
THOUGHT = "<think>\na thought\n</think>\n\n"
# before and behind thoughts in the text of an answer; the first one may be in the prompt
THOUGHT_MARKS = (("<think>", "</think>"), ("<|channel>thought\n", "<channel|>"))
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
_SOURCE = ("<template>", "<unknown>")  # a template's file name in tracebacks
_VALUE = "a value 7"
_THOUGHTS = [{"content": thought} for thought in ("", THOUGHT)]
_NINE = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True)
class TemplateForm:
    """The form of conversations that a template reads."""

    text: bool = False  # a call's arguments are JSON text
    named_ids: bool = False  # it shows ids of calls instead of their names, as Kimi's `functions.look:0`
    nine_ids: bool = False  # it accepts only ids of calls of nine letters or digits, as Mistral's
    renamed: bool = False  # role `developer` is shown as `system`
    apart: bool = False  # thoughts are only read from a key of their own, as gpt-oss's and Qwen3.8's
    listed: bool = False  # thoughts are only read from a list of contents, as Ministral 3's


_forms: dict[tuple[str, str], TemplateForm] = {}  # by template and special tokens


def template_of(tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any], source: str) -> str:
    """Return the template. Raises DataError if there is none."""
    own = settings.get("chat_template")
    if tokenizer.chat_template is None and own is None:
        raise DataError(
            f"{source}: model.tokenizer={tokenizer.name_or_path!r}: expected a chat template because the data is "
            "conversational, found none; set data.chat_template (chatml, for one), add chat_template.jinja to the "
            "folder, or use plain strings"
        )
    try:
        return tokenizer.get_chat_template(own, settings.get("tools"))
    except ValueError:  # of several, none of which is the default
        raise DataError(
            f"{source}: model.tokenizer={tokenizer.name_or_path!r}: expected a chat template `default` among its "
            f"several, found {', '.join(tokenizer.chat_template)}; name a file with one in data.chat_template"
        ) from None


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    sources: Sequence[str],
    settings: Mapping[str, Any],
) -> Any:
    """Return the result of `apply_chat_template` for these conversations.

    `sources`: file and row of each. Raises DataError.
    """
    template = template_of(tokenizer, settings, sources[0] if sources else "")
    form = form_of(tokenizer, template)
    formed = [in_form(one, form, source) for one, source in zip(conversations, sources, strict=True)]
    try:
        return tokenizer.apply_chat_template(formed, **settings)
    except Exception as error:  # a template may raise anything; always re-raised, with its cause
        plain = {"tokenize": False} | {name: v for name, v in settings.items() if name not in _OF_TOKENS}
        for one, source in zip(formed, sources, strict=True):
            _check(tokenizer, one, source, plain)
        raise DataError(f"the chat template of model.tokenizer={tokenizer.name_or_path!r} failed: {error}") from error


_OF_TOKENS = ("tokenize", "return_dict", "tokenizer_kwargs", "return_assistant_tokens_mask")


def rendered_text(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, source: str, **settings: Any) -> str:
    """Return the text of a conversation. Raises DataError."""
    return rendered(tokenizer, [conversation], [source], {**settings, "tokenize": False})[0]


def try_text(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, **settings: Any) -> str | None:
    """Return the text of a conversation; None if the template refuses it, or fails."""
    try:
        return rendered_text(tokenizer, conversation, "", **settings)
    except DataError:
        return None


def form_of(tokenizer: PreTrainedTokenizerBase, template: str) -> TemplateForm:
    """Return the template's form, found by rendering small conversations."""
    key = template, repr(tokenizer.special_tokens_map)
    if key not in _forms:
        _forms[key] = _probed(tokenizer, template)
    return _forms[key]


def _probed(tokenizer: PreTrainedTokenizerBase, template: str) -> TemplateForm:
    def text(chat: Conversation, tools: Any = None) -> str | None:
        try:
            return tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, chat_template=template)
        except Exception:  # as above; here the template does not accept this form
            return None

    def called(arguments: Any, own: str = "call00007", thoughts: Sequence[dict[str, Any]] = _THOUGHTS) -> str | None:
        call = {"id": own, "type": "function", "function": {"name": "look", "arguments": arguments}}
        for thought in thoughts:
            answer = {"role": "assistant", "tool_calls": [call], **thought}
            for tools in (None, TOOLS):
                if (shown := text([USER, answer], tools)) is not None:
                    return shown
        return None

    as_mapping, as_text = called({"at": _VALUE}), called(json.dumps({"at": _VALUE}))
    wants_text = as_text is not None and _VALUE in as_text
    if as_mapping is not None and _VALUE in as_mapping:  # Python's quotes: printed as it is
        wants_text &= f"'at': '{_VALUE}'" in as_mapping
    shown = as_text if wants_text else as_mapping
    other_ids = called(json.dumps({"at": _VALUE}) if wants_text else {"at": _VALUE}, "call_7")
    named_ids = shown is not None and "call00007" in shown and "look" not in shown
    developer, system = (text([{"role": role, "content": _VALUE}, USER]) or "" for role in ("developer", "system"))
    nine_ids = shown is not None and other_ids is None
    within, beside = {"content": THOUGHT + _VALUE}, {"content": _VALUE, "reasoning_content": "a thought"}
    arguments = json.dumps({"at": _VALUE}) if wants_text else {"at": _VALUE}
    answers = [[text([USER, {"role": "assistant", **fields}]) for fields in (within, beside)]]
    answers.append([called(arguments, thoughts=[fields]) for fields in (within, beside)])  # Gemma 4's of 2026-04
    another = any(
        "a thought" in (apart or "") and (inside or "").count("</think>") > apart.count("</think>")
        for inside, apart in answers
    )
    listed = text([USER, {"role": "assistant", "content": _parts("a thought", _VALUE)}]) or ""
    printed = re.search("['\"]type['\"]", listed)  # a list that is printed has its keys
    lists = "a thought" in listed and _VALUE in listed and printed is None
    renamed = _VALUE in system and _VALUE not in developer
    return TemplateForm(wants_text, named_ids, nine_ids, renamed, another, lists)


def in_form(conversation: Conversation, form: TemplateForm, source: str) -> list[dict[str, Any]]:
    """Return the messages in the template's form. Raises DataError for arguments that are not a JSON object."""
    messages = [dict(message) for message in conversation]
    for number, message in enumerate(messages):
        if form.renamed and message.get("role") == "developer":
            message["role"] = "system"
        if form.apart and message.get("role") == "assistant" and not any(message.get(key) for key in THOUGHTS):
            thoughts, content = split_thoughts(str(message.get("content") or ""))
            if thoughts is not None:
                message["reasoning_content"], message["content"] = thoughts, content
        if form.listed and message.get("role") == "assistant":
            _list_thoughts(message)
        calls = message.get("tool_calls")
        if isinstance(calls, Sequence) and not isinstance(calls, str):
            where = f"{source}: messages[{number}].tool_calls"
            message["tool_calls"] = [_call(call, form, f"{where}[{i}]") for i, call in enumerate(calls)]
    if form.named_ids or form.nine_ids:
        _fit_ids(messages, form)
    return messages


def _list_thoughts(message: dict[str, Any]) -> None:
    """Move the thoughts of a key, or those within <think>, into a list of contents."""
    thoughts, content = next((message[key] for key in THOUGHTS if message.get(key)), None), message.get("content")
    if thoughts is None and isinstance(content, str) and THOUGHT_MARKS[0][1] in content:
        thoughts, content = split_thoughts(content)
    if thoughts is not None and not isinstance(content, list):
        message["content"] = _parts(thoughts, content or "")


def _parts(thoughts: str, content: str) -> list[dict[str, str]]:
    parts = [{"type": "thinking", "thinking": thoughts}]
    return [*parts, {"type": "text", "text": content}] if content else parts


def split_thoughts(text: str) -> tuple[str | None, str]:
    """Return (the thoughts of an answer, the rest of its text); None for no thoughts."""
    for opens, closes in THOUGHT_MARKS:
        thoughts, end, answer = text.partition(closes)
        if end:
            words, _, thoughts = thoughts.rpartition(opens)
            return thoughts.strip("\n"), words + answer.lstrip("\n")
    return None, text


def _call(call: Any, form: TemplateForm, where: str) -> Any:
    if not isinstance(call, Mapping):
        return call
    inner = call.get("function", call)
    if not isinstance(inner, Mapping) or inner.get("arguments") is None:
        return call
    arguments = inner["arguments"]
    if form.text:
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        arguments = _object(arguments, f"{where}.function.arguments")
    inner = {**inner, "arguments": arguments}
    return {**call, "function": inner} if "function" in call else inner


def _object(text: str, where: str) -> dict[str, Any]:
    value = parse_json(text, where, DataError) if text.strip() else {}
    if isinstance(value, str):  # encoded twice
        value = parse_json(value, where, DataError)
    if not isinstance(value, dict):
        raise DataError(f"{where}={text[:80]!r}: expected a JSON object, as the chat template needs")
    return value


def _fit_ids(messages: list[dict[str, Any]], form: TemplateForm) -> None:
    """Give calls ids that the template accepts, numbered through the conversation; results follow them."""
    names: dict[str, str] = {}
    waiting: list[str] = []
    count = 0
    for message in messages:
        for i, call in enumerate(message.get("tool_calls") or ()):
            if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
                continue
            name, own = str(call["function"].get("name")), str(call.get("id") or "")
            fits = name in own if form.named_ids else _NINE.fullmatch(own)
            new = own if fits else f"functions.{name}:{count}" if form.named_ids else f"call{count:05d}"
            names[own] = new
            waiting.append(new)
            message["tool_calls"][i] = {**call, "id": new}
            count += 1
        if message.get("role") == "tool":
            own = message.get("tool_call_id")
            known = names.get(own, own) if own else next(iter(waiting), None)
            if known is not None:
                message["tool_call_id"] = known
            if known in waiting:
                waiting.remove(known)


def _check(
    tokenizer: PreTrainedTokenizerBase, conversation: list[dict[str, Any]], source: str, settings: Mapping[str, Any]
) -> None:
    """Raise DataError if the template fails on this conversation."""

    def failure(messages: list[dict[str, Any]]) -> Exception | None:
        try:
            tokenizer.apply_chat_template([messages], **settings)
        except Exception as error:
            return error
        return None

    error = failure(conversation)
    if error is None:
        return
    same = lambda other: (type(other), str(other)) == (type(error), str(error))  # noqa: E731
    failing = (k for k in range(1, len(conversation) + 1) if same(failure(conversation[:k])))
    number = next(failing, len(conversation)) - 1
    at = [f"line {line} of the template"] if (line := _line(error)) else []
    if conversation:
        at.append(f"messages[{number}] ({conversation[number].get('role')})")
    kind = "" if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: "
    roles = [message.get("role") for message in conversation]
    raise DataError(
        f"{source}: the chat template of model.tokenizer={tokenizer.name_or_path!r} refuses the roles "
        f"{roles!r:.200}, at {', '.join(at)}: {kind}{error!s:.300}"
    ) from error


def _line(error: Exception) -> int | None:
    """Return the line of the template where an exception was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename in _SOURCE]
    return getattr(error, "lineno", None) or (lines[-1] if lines else None)
