"""Chat templates: the one that `data.chat_template` names, and the shipped ones, which mark the assistant's text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aligner.config.sections.data import DataConfig
from aligner.data.rendering import template_of, try_text
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER = Path(__file__).with_name("chat_templates")
# replacements of templates that render answers unlike they are generated, at once or when the conversation grows,
# each with its arguments
FOR_TRAINING: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in ("qwen3", "qwen3_thinking", "qwen3_5", "glm4_5", "gpt_oss", "phi3", "deepseek_r1")),
    ("qwen3_5", {"enable_thinking": False}),  # of models up to 2B
    *(("gemma4", dict.fromkeys(names, True)) for names in ((), ("large",), ("older",), ("large", "older"))),
)
# arguments by which templates keep the thoughts of earlier answers: Qwen3.6's, Nemotron 3's, GLM-4.7's
KEEPING = {"preserve_thinking": True, "truncate_history_thinking": False, "clear_thinking": False}

_END = "<|im_end|>"
_USER = [{"role": "user", "content": "a question"}]
_SYSTEM = [{"role": "system", "content": "a system's words"}]
_ANSWER = [{"role": "assistant", "content": "an answer"}]
_THOUGHT = [{"role": "assistant", "content": "<think>\na thought\n</think>\n\nan answer"}]
_CALL = [
    {
        "role": "assistant",
        "content": "<think>\na thought\n</think>\n\n",
        "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}],
    }
]
_RESULT = [{"role": "tool", "content": "a result"}]
_LOOK = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _LOOK}]
# conversations that a template and its training template render alike: none continues after an answer to a user
_PROBES: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    (_USER, {"add_generation_prompt": True}),
    (_SYSTEM + _USER, {"add_generation_prompt": True}),
    (_USER, {"add_generation_prompt": True, "enable_thinking": False}),
    (_USER, {"add_generation_prompt": True, "tools": _TOOLS}),
    (_SYSTEM + _USER + _ANSWER, {"tools": _TOOLS}),
    (_USER + _ANSWER, {}),
    (_USER + _THOUGHT, {}),
    (_USER + _CALL, {}),
    (_USER + _CALL + _RESULT + _RESULT, {"add_generation_prompt": True}),
    (_USER + _CALL + _RESULT, {"add_generation_prompt": True, "enable_thinking": True}),
]


class TrainingTemplate(NamedTuple):
    """A template for training. `name`: for messages; `options`: of apply_chat_template."""

    name: str
    options: Mapping[str, Any]


_for_training: dict[tuple[str, str], TrainingTemplate | None] = {}  # by template and special tokens


def shipped() -> tuple[str, ...]:
    """Return the names that `data.chat_template` accepts."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.jinja")))


def shipped_template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def use_chat_template(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
    """Give the tokenizer the template that `data.chat_template` names, for rendering and for export with the model.

    Raises ConfigError for a name or file that does not exist.
    """
    name = data.chat_template
    if name == "auto":
        return
    if name in shipped():
        template = shipped_template(name)
        tokenizer.chat_template = _fitting(template, tokenizer) if name == "chatml" else template
        return
    try:
        tokenizer.chat_template = Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        expected = f"auto, one of {', '.join(shipped())}, or a file with a Jinja template"
        raise ConfigError("data.chat_template", name, expected, f"{error}.") from None


def _fitting(template: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return ChatML with the tokenizer's EOS at the end of turns, if it lacks ChatML's end token.

    An end of several tokens would not stop generation.
    """
    return template if _END in tokenizer.get_vocab() else template.replace(f"'{_END}\\n'", "eos_token + '\\n'")


def training_template(tokenizer: PreTrainedTokenizerBase) -> TrainingTemplate | None:
    """Return the tokenizer's own template with earlier thoughts, or the shipped one that renders like it, or None.

    The own one has an argument for that. The shipped one must agree with it on conversations that do not continue after
    an answer, and that the shipped one does not refuse.
    """
    key = template_of(tokenizer, {}, "data.chat_template"), repr(tokenizer.special_tokens_map)
    if key not in _for_training:
        _for_training[key] = _agreeing(tokenizer, key[0])
    return _for_training[key]


def _agreeing(tokenizer: PreTrainedTokenizerBase, template: str) -> TrainingTemplate | None:
    variables = set(re.findall(r"\w+", template))
    for variable, value in KEEPING.items():
        longer = _rendered(tokenizer, {variable: value}, _USER + _THOUGHT + _USER + _ANSWER, {})
        if variable in variables and (longer is None or "a thought" in longer):  # Gemma 4's keeps those of calls alone
            return TrainingTemplate(f"the argument {variable}: {str(value).lower()}", {variable: value})
    own = [_rendered(tokenizer, {}, *probe) for probe in _PROBES]
    for name, arguments in FOR_TRAINING:
        options = {**arguments, "chat_template": shipped_template(name)}
        other = [_rendered(tokenizer, {**options, "as_published": True}, *probe) for probe in _PROBES]
        if all(theirs in (text, None) for theirs, text in zip(other, own, strict=True)):
            return TrainingTemplate(f"the shipped chat template {name}", options)
    return None


def answers_openings(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a last answer, as the tokenizer's template renders it, begins with the generation prompt, and has
    its thoughts."""
    opening = _rendered(tokenizer, {}, _USER, {"add_generation_prompt": True})
    whole, thought = (_rendered(tokenizer, {}, _USER + answer, {}) for answer in (_ANSWER, _THOUGHT))
    if opening is None or whole is None:
        return True
    return whole.startswith(opening) and (thought is None or "a thought" in thought)


def _rendered(
    tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any], chat: list, options: Mapping[str, Any]
) -> str | None:
    """Return the text of a conversation; None if the template refuses it or fails."""
    return try_text(tokenizer, chat, **{**template, **options})
