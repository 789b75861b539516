"""The prompt and answers of a row in all common forms: both strings, both messages, a string and messages, or answers
that are whole texts with the prompt in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aligner.data.messages import Messages, Text, check_learned, read_text
from aligner.errors import DataError

Row = Mapping[str, Any]


def prompt_and_answers(row: Row, names: Sequence[str], where: str) -> tuple[Text, Sequence[Text]]:
    """Return the column `prompt` and the answers in the columns `names`, all strings or all messages. Raises DataError.

    A string beside messages is a turn: of the user, or of the assistant. Answers that begin with messages of the prompt
    are whole conversations, and lose these. If the prompt is a string, common messages of two answers move to it.
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
    """Return (prompt, chosen, rejected) of two whole texts: their common beginning is the prompt, as in TRL's
    `extract_prompt`.

    Each keeps something to answer with: equal texts keep the last message, or character. Raises DataError.
    """
    chosen, rejected = read_text(row["chosen"], "chosen", where), read_text(row["rejected"], "rejected", where)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{where}: expected `chosen` and `rejected` to be both strings or both messages (data.columns)")
    same = _common(chosen, rejected)
    if isinstance(chosen, str) and same and chosen[same - 1] == " ":
        same -= 1  # for tokenizers a blank belongs to the word behind it
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if not isinstance(text, str):
            check_learned(text[same:], name, where)
    return chosen[:same], chosen[same:], rejected[same:]


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many first items are equal, leaving at least one of each."""
    most, same = min(len(one), len(other)) - 1, 0
    while same < most and one[same] == other[same]:
        same += 1
    return same


def _turns(answer: Text) -> Messages:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _opened(prompt: str, answer: Messages, name: str, where: str) -> Messages:
    """Return the prompt in these messages: up to the user's message that is `prompt`.

    If they begin with an answer, return a new user's message.
    """
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
    """Return the answer without first messages that are the end of the prompt."""
    if answer[0]["role"] == "assistant":
        return answer
    for count in range(min(len(prompt), len(answer)), 0, -1):
        if prompt[-count:] == answer[:count]:
            return answer[count:]
    return answer
