"""The prompt of a row and its answers, in any of the shapes that data sets have: both strings, both messages, a string
beside messages, or answers that are whole texts with the prompt in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aligner.data.messages import Messages, Text, check_learned, read_text
from aligner.errors import DataError

Row = Mapping[str, Any]


def prompt_and_answers(row: Row, names: Sequence[str], where: str) -> tuple[Text, Sequence[Text]]:
    """The column `prompt` and the answers in the columns `names`, all strings or all messages. Raises DataError.

    A string beside messages is a turn: of the user, or of the assistant. Answers that begin with messages of the prompt
    are whole conversations, and lose these; beside a string, what two of them share goes to the prompt.
    """
    prompt = read_text(row["prompt"], "prompt", where)
    answers = [read_text(row[name], name, where) for name in names]
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers):
        return prompt, answers
    turns = [_turns(answer) for answer in answers]
    if isinstance(prompt, str):
        opened = [_opened(prompt, turn, name, where) for turn, name in zip(turns, names, strict=True)]
        begun = opened[0]
        if any(other != begun for other in opened):
            both = " and ".join(f"`{name}`" for name in names)
            raise DataError(f"{where}: expected the same messages before the answers in {both} (data.columns)")
    else:
        begun = prompt
    turns = [_without(begun, turn) for turn in turns]
    if isinstance(prompt, str) and len(turns) == 2:
        same = _common(*turns)
        begun, turns = [*begun, *turns[0][:same]], [turn[same:] for turn in turns]
    for turn, name in zip(turns, names, strict=True):
        check_learned(turn, name, where)
    return begun, turns


def shared_prompt(row: Row, where: str) -> tuple[Text, Text, Text]:
    """(prompt, chosen, rejected) of two whole texts: what both begin with is the prompt, as in TRL's `extract_prompt`.
    Each keeps something to answer with: of equal texts the last message, or character. Raises DataError."""
    chosen, rejected = read_text(row["chosen"], "chosen", where), read_text(row["rejected"], "rejected", where)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{where}: expected `chosen` and `rejected` to be both strings or both messages (data.columns)")
    same = _common(chosen, rejected)
    if isinstance(chosen, str) and same and chosen[same - 1] == " ":
        same -= 1  # a blank is part of the word behind it, as tokenizers have it
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if not isinstance(text, str):
            check_learned(text[same:], name, where)
    return chosen[:same], chosen[same:], rejected[same:]


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many first items both have, so that one is left of each."""
    most, same = min(len(one), len(other)) - 1, 0
    while same < most and one[same] == other[same]:
        same += 1
    return same


def _turns(answer: Text) -> Messages:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _opened(prompt: str, answer: Messages, name: str, where: str) -> Messages:
    """What the model answers in these messages: up to the user's that says `prompt`. Without messages before the first
    answer, a turn of the user's that says it."""
    if answer[0]["role"] == "assistant":
        return [{"role": "user", "content": prompt}]
    for number, message in enumerate(answer):
        if message["role"] == "user" and message["content"].strip() == prompt.strip():
            return answer[: number + 1]
    raise DataError(
        f"{where}: expected the messages of `{name}` to begin with an answer, or with a user's message that is `prompt`"
        f", {prompt[:60]!r}, found {answer[0]['content'][:60]!r} by the {answer[0]['role']}. To read the prompt from "
        "the messages alone, leave out the column `prompt`"
    )


def _without(prompt: Messages, answer: Messages) -> Messages:
    """The answer without its first messages that are the end of the prompt."""
    if answer[0]["role"] == "assistant":
        return answer
    for count in range(min(len(prompt), len(answer)), 0, -1):
        if prompt[-count:] == answer[:count]:
            return answer[count:]
    return answer
