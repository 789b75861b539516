"""The parts of a conversation that a chat template shows, found by rendering marked ones.

Words that it omits would be missing from the text that a model reads and learns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aligner.data.messages import THOUGHTS
from aligner.data.rendering import THOUGHT, USER, Conversation, form_of, template_of, try_text
from aligner.data.tokenizer import stop_token_ids, turn_end
from aligner.data.tool_calls import format_of
from aligner.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from aligner.data.chats import Chat

ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER = "other"
MARK = "mark00007"  # nine letters or digits, as Mistral's ids of calls
LOOK = {"id": "call00007", "type": "function", "function": {"name": "look", "arguments": {"at": "it 7"}}}
_MOST = 20_000  # shapes known to be shown whole

_whole: set[tuple[Any, ...]] = set()


def check_shown(tokenizer: PreTrainedTokenizerBase, chats: Iterable[Chat], options: Mapping[str, Any]) -> None:
    """Raise DataError for a conversation if the template omits a message's content or a call.

    One conversation of each shape is checked: omissions depend on roles and keys, not on words. Text beside calls is
    counted instead (`shows_beside`): the published templates of Llama 3.1 and Mistral omit it.
    """
    for chat in chats:
        template = template_of(tokenizer, {**options, "tools": chat.tools}, chat.where)
        shape = template, repr(options), bool(chat.tools), *(_shape(message) for message in chat.messages)
        if shape in _whole:
            continue
        marked = [_marked(message, i) for i, message in enumerate(chat.messages)]
        text = try_text(tokenizer, marked, **options, tools=chat.tools)
        if text is None:  # refused at rendering, or unknown; another of its shape may tell
            continue
        _check_marks(tokenizer, chat, marked, text.lower())
        if len(_whole) >= _MOST:
            _whole.clear()
        _whole.add(shape)


def _shape(message: Mapping[str, Any]) -> tuple[Any, ...]:
    content = message.get("content")
    words = isinstance(content, str) and bool(content.strip())
    thinks = words and "</think>" in content
    return message.get("role"), *sorted(message), words, thinks, len(message.get("tool_calls") or ())


def _marked(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the message with marks instead of its words."""
    fields, content = dict(message), message.get("content")
    if isinstance(content, str) and content.strip():
        fields["content"] = (THOUGHT if "</think>" in content else "") + f"words-{number}-said"
    if message.get("tool_calls"):
        fields["tool_calls"] = [_marked_call(call, number, i) for i, call in enumerate(message["tool_calls"])]
    return fields


def _marked_call(call: Any, number: int, index: int) -> Any:
    if not isinstance(call, Mapping):
        return call
    inner = call.get("function", call)
    inner = {**inner, "name": f"name-{number}-{index}-x", "arguments": {"at": f"value-{number}-{index}-x"}}
    return {**call, "function": inner} if "function" in call else inner


def _check_marks(tokenizer: PreTrainedTokenizerBase, chat: Chat, marked: Conversation, text: str) -> None:
    for number, message in enumerate(marked):
        role, content = chat.messages[number].get("role"), message.get("content")
        marked_content = isinstance(content, str) and content.endswith("-said")
        if marked_content and not message.get("tool_calls") and f"words-{number}-said" not in text:
            _refuse(tokenizer, chat, f"the content of messages[{number}] (role {role})")
        for index in range(len(message.get("tool_calls") or ())):
            if not all(f"{what}-{number}-{index}-x" in text for what in ("name", "value")):
                _refuse(tokenizer, chat, f"`tool_calls` of messages[{number}] (role {role}), call {index + 1}")


def _refuse(tokenizer: PreTrainedTokenizerBase, chat: Chat, what: str) -> None:
    raise DataError(
        f"{chat.where}: the chat template of model.tokenizer={tokenizer.name_or_path!r} leaves out {what}: the model "
        "would neither read nor learn it. Expected a template that renders it (data.chat_template), or a conversation "
        "without it"
    )


def shows_key(tokenizer: PreTrainedTokenizerBase, role: str, key: str, options: Mapping[str, Any]) -> bool:
    """Return whether the template shows the value of this key in a message of this role. True if unknown."""
    return _marks(try_text(tokenizer, chat, **options) for chat in _conversations(role, {key: MARK}))


def thinking(messages: Conversation) -> dict[int, str]:
    """Return by index the key of the messages' thoughts, `content` if they are in it."""
    keys = ((i, next((key for key in THOUGHTS if message.get(key)), "")) for i, message in enumerate(messages))
    inside = {i: "content" for i, message in enumerate(messages) if "</think>" in message["content"]}
    return inside | {i: key for i, key in keys if key}


def loses_thoughts(
    tokenizer: PreTrainedTokenizerBase, messages: Conversation, options: Mapping[str, Any], tools: Any = None
) -> bool:
    """Return whether the template leaves out thoughts of a conversation. False if unknown."""
    marked = [dict(message) for message in messages]
    for i, key in thinking(messages).items():
        marked[i][key] = f"<think>\nthought-{i}-x\n</think>\n\nwords" if key == "content" else f"thought-{i}-x"
    text = try_text(tokenizer, marked, tools=tools, **options)
    return text is not None and any(f"thought-{i}-x" not in text for i in thinking(messages))


def shows_beside(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], tools: Any = None) -> bool:
    """Return whether the template shows the text of an answer beside its calls. True if unknown."""
    answers = [{"role": "assistant", "content": thought + MARK, "tool_calls": [LOOK]} for thought in ("", THOUGHT)]
    return _marks(try_text(tokenizer, [USER, answer], tools=tools, **options) for answer in answers)


def _marks(texts: Iterable[str | None]) -> bool:
    """Return whether one of the texts has MARK, or none was rendered."""
    rendered = [text for text in texts if text is not None]
    return not rendered or any(MARK in text for text in rendered)


def _conversations(role: str, keys: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Return small conversations with a message of this role; the template may refuse some of them."""
    message = {"role": role, "content": MARK if not keys else "words", **keys}
    if role in ("system", "developer"):
        return [[message, USER]]
    if role == "assistant":
        return [[USER, message], [USER, message | {"content": THOUGHT + message["content"]}]]
    if role == "tool":
        result = {"name": "look", "tool_call_id": "call00007"} | message
        calls = [{"role": "assistant", "content": thought, "tool_calls": [LOOK]} for thought in ("", THOUGHT)]
        return [[USER, call, result] for call in calls]
    return [[message]]


def shown_calls(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], tools: Any = None) -> str:
    """Return the format in which the template writes a call, "other" for an unknown one; empty if it writes none."""
    text: Callable[..., str | None] = partial(try_text, tokenizer, tools=tools, **options)
    openings, end = (text([USER], add_generation_prompt=True), text([USER])), turn_end(tokenizer)
    for thought in ("", THOUGHT):
        whole = text([USER, {"role": "assistant", "content": thought, "tool_calls": [LOOK]}])
        if whole is None:
            continue
        head = next((one for one in openings if one and whole.startswith(one)), None)
        turn = whole[len(head) :] if head else whole.rpartition(USER["content"])[2]
        turn = turn.partition(tokenizer.decode([end]))[0] if end is not None else turn
        kind = format_of(turn.removeprefix(thought), "look", {"at": "it 7"})
        if kind or "it 7" in turn:
            return kind or OTHER  # a format's mark is not enough: other formats contain it
    return ""


def describe(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> list[str]:
    """Describe in two lines the roles and calls that the template shows."""
    if tokenizer.chat_template is None:
        return []
    text: Callable[..., str | None] = partial(try_text, tokenizer, **options)
    form = form_of(tokenizer, template_of(tokenizer, {}, ""))
    roles = {role: [text(chat) for chat in _conversations(role, {})] for role in ROLES}
    shown = [role for role, texts in roles.items() if any(MARK in (text or "") for text in texts)]
    refused = [role for role, texts in roles.items() if all(text is None for text in texts)]
    lost = [role for role in ROLES if role not in (*shown, *refused)]
    parts = [f"shows {_list(shown)}"]
    parts += ["shows developer as system"] if form.renamed and "developer" in shown else []
    parts += [f"leaves out {_list(lost)}"] if lost else []
    parts += [f"refuses {_list(refused)}"] if refused else []
    kind = shown_calls(tokenizer, options)
    calls = f"writes tool calls as {kind}" if kind else "shows no tool calls"
    calls = "writes tool calls in no known format" if kind == OTHER else calls
    return [f"chat template: {'; '.join(parts)}", f"chat template: {calls}; ends an answer with {_ending(tokenizer)}"]


def _ending(tokenizer: PreTrainedTokenizerBase) -> str:
    end, stops = turn_end(tokenizer), stop_token_ids(tokenizer)
    if end is None:
        return f"no stop token: {tokenizer.eos_token} is learned behind the last answer of a conversation"
    names = {i: tokenizer.convert_ids_to_tokens(i) or str(i) for i in (end, *stops)}  # a folder may name unknown ids
    return f"{names[end]}; generation stops at {_list([names[i] for i in stops])}"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
