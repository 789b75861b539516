"""Typed rows -> token ids with a loss mask, through the tokenizer's own chat template.

Special tokens are added once: a chat template writes its own; a plain text gets the tokenizer's BOS (if it adds one)
in front of the prompt and EOS behind the completion.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aligner.data.formats import Messages, SftRow, Text
from aligner.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = list[int]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_plain(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Ids]:
    """Token ids of each text, in one call, without any special token that the text does not spell. Texts that are equal
    share their list."""
    if not texts:
        return []
    unique = list(dict.fromkeys(texts))
    ids = tokenizer(unique, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    found = dict(zip(unique, ids, strict=True))
    return [found[text] for text in texts]


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Text], where: Sequence[str]) -> list[Ids]:
    """What the model generates from. A conversation is rendered with the opening of the assistant's turn."""
    ids: list[Ids] = [[] for _ in prompts]
    plain = [i for i, p in enumerate(prompts) if isinstance(p, str)]
    chats = [i for i, p in enumerate(prompts) if not isinstance(p, str)]
    bos = _bos(tokenizer)
    for i, found in zip(plain, encode_plain(tokenizer, [prompts[i] for i in plain]), strict=True):
        ids[i] = _with_bos(found, bos)
    rendered = _render(tokenizer, [prompts[i] for i in chats], [where[i] for i in chats], add_generation_prompt=True)
    for i, found in zip(chats, rendered["input_ids"], strict=True):
        ids[i] = found
    return ids


def encode_sft(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[SftRow], loss_on: str = "assistant"
) -> list[tuple[Ids, Ids]]:
    """(tokens, loss mask of 0 and 1, same length) of each row. `loss_on="all"`: every token but the first.

    Plain: encode(prompt) + encode(completion) + [EOS], loss on completion and EOS. Conversations: loss on the assistant
    turns (of the completion, where there is a separate prompt). Raises DataError where a row has no token to learn.
    """
    out: list[tuple[Ids, Ids]] = [([], [])] * len(rows)
    chats = [i for i, row in enumerate(rows) if row.messages is not None or not isinstance(row.prompt, str)]
    plain = sorted(set(range(len(rows))) - set(chats))
    prompts = encode_prompts(tokenizer, [rows[i].prompt for i in plain], [rows[i].where for i in plain])
    answers = encode_plain(tokenizer, [rows[i].completion for i in plain])
    eos = tokenizer.eos_token_id  # looked up once: it is slow
    for i, prompt, answer in zip(plain, prompts, answers, strict=True):
        answer = _with_eos(answer, eos)
        out[i] = prompt + answer, [0] * len(prompt) + [1] * len(answer)
    for i, found in zip(chats, _encode_chats(tokenizer, [rows[i] for i in chats], loss_on), strict=True):
        out[i] = found
    for i, (tokens, mask) in enumerate(out):
        if loss_on == "all":
            mask[:] = [1] * len(tokens)
        mask[:1] = [0]  # the first token has no logprob
        if not any(mask):
            raise DataError(f"{rows[i].where}: expected at least one token to learn, found none in {rows[i]!r:.200}")
    return out


def encode_answers(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Text],
    answers: Sequence[Text],
    where: Sequence[str],
    stop_ids: Sequence[int],
) -> list[Ids]:
    """prompt + answer as a rollout would hold it: it ends with its stop token, where a reward model scores it."""
    out: list[Ids] = [[] for _ in prompts]
    chats = [i for i, answer in enumerate(answers) if not isinstance(answer, str)]
    plain = sorted(set(range(len(prompts))) - set(chats))
    starts = encode_prompts(tokenizer, [prompts[i] for i in plain], [where[i] for i in plain])
    ends = encode_plain(tokenizer, [answers[i] for i in plain])
    eos = tokenizer.eos_token_id
    for i, start, end in zip(plain, starts, ends, strict=True):
        out[i] = start + _with_eos(end, eos)
    whole = [[*prompts[i], *answers[i]] for i in chats]
    rendered = _render(tokenizer, whole, [where[i] for i in chats])
    for i, ids in zip(chats, rendered["input_ids"], strict=True):
        out[i] = _end_at_stop(tokenizer, ids, stop_ids)
    return out


def _end_at_stop(tokenizer: PreTrainedTokenizerBase, ids: Ids, stop_ids: Sequence[int]) -> Ids:
    """Cut white space that a template puts behind the stop token; add EOS if the template has no stop token."""
    last = len(ids) - 1
    while last >= 0 and ids[last] not in stop_ids and not tokenizer.decode(ids[last:]).strip():
        last -= 1
    if last >= 0 and ids[last] in stop_ids:
        return ids[: last + 1]
    return [*ids, tokenizer.eos_token_id]


def _encode_chats(tokenizer: PreTrainedTokenizerBase, rows: Sequence[SftRow], loss_on: str) -> list[tuple[Ids, Ids]]:
    chats = [row.messages if row.messages is not None else [*row.prompt, *row.completion] for row in rows]
    fixed = [0 if row.messages is not None else len(row.prompt) for row in rows]  # messages that get no loss
    where = [row.where for row in rows]
    if not chats:
        return []
    if loss_on == "all":
        return [(ids, [0] * len(ids)) for ids in _render(tokenizer, chats, where)["input_ids"]]
    if _has_generation(tokenizer, where):
        found = _render(tokenizer, chats, where, return_assistant_tokens_mask=True)
        pairs = list(zip(found["input_ids"], found["assistant_masks"], strict=True))
        split = [i for i, n in enumerate(fixed) if n]
        prompts = encode_prompts(tokenizer, [chats[i][: fixed[i]] for i in split], [where[i] for i in split])
        for i, prompt in zip(split, prompts, strict=True):
            ids, mask = pairs[i]
            _check_prefix(tokenizer, prompt, ids, where[i], f"the prompt ({fixed[i]} messages)")
            mask[: len(prompt)] = [0] * len(prompt)
        return [(ids, list(mask)) for ids, mask in pairs]
    return _by_prefixes(tokenizer, chats, fixed, where)


def _by_prefixes(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Messages], fixed: Sequence[int], where: Sequence[str]
) -> list[tuple[Ids, Ids]]:
    """Assistant spans of a template without generation markers: what message k adds to the rendering before it."""
    spans = [
        (i, k)
        for i, chat in enumerate(chats)
        for k, message in enumerate(chat)
        if k >= fixed[i] and message["role"] == "assistant"
    ]
    names = [where[i] for i, _ in spans]
    whole = _render(tokenizer, chats, where)["input_ids"]
    # an assistant that opens the conversation has nothing before it: many templates refuse to render no messages
    opened = [(i, k) for i, k in spans if k]
    before = _render(
        tokenizer, [chats[i][:k] for i, k in opened], [where[i] for i, _ in opened], add_generation_prompt=True
    )
    starts = dict(zip(opened, before["input_ids"], strict=True))
    after = _render(tokenizer, [chats[i][: k + 1] for i, k in spans], names)["input_ids"]
    masks = [[0] * len(ids) for ids in whole]
    for (i, k), end in zip(spans, after, strict=True):
        start = starts.get((i, k), [])
        _check_prefix(tokenizer, start, end, where[i], f"messages[:{k}] and the opening of the assistant's turn")
        _check_prefix(tokenizer, end, whole[i], where[i], f"messages[:{k + 1}]")
        masks[i][len(start) : len(end)] = [1] * (len(end) - len(start))
    return list(zip(whole, masks, strict=True))


def _check_prefix(tokenizer: PreTrainedTokenizerBase, short: Ids, long: Ids, where: str, what: str) -> None:
    if long[: len(short)] == short:
        return
    at = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), min(len(short), len(long)))
    window = slice(max(0, at - 8), at + 12)
    raise DataError(
        f"{where}: the chat template is not prefix-preserving: the tokens of {what} are not the start of the tokens of "
        f"the longer conversation. At token {at}: {tokenizer.decode(short[window])!r} became "
        f"{tokenizer.decode(long[window])!r}. Fix: a tokenizer (model.tokenizer) whose chat template marks assistant "
        "turns with {% generation %}, or keeps earlier turns as they are; or data.loss_on=all"
    )


def _has_generation(tokenizer: PreTrainedTokenizerBase, where: Sequence[str]) -> bool:
    _need_template(tokenizer, where)
    return bool(_GENERATION.search(tokenizer.get_chat_template())) and tokenizer.is_fast


def _need_template(tokenizer: PreTrainedTokenizerBase, where: Sequence[str]) -> None:
    if tokenizer.chat_template is None:
        raise DataError(
            f"{where[0]}: model.tokenizer={tokenizer.name_or_path!r}: expected a chat template because the data is "
            "conversational, found none; add chat_template.jinja to the folder, or use plain strings"
        )


def _render(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Messages], where: Sequence[str], **options: Any
) -> dict[str, list]:
    import jinja2

    if not chats:
        return {"input_ids": [], "assistant_masks": []}
    _need_template(tokenizer, where)
    options = {"tokenize": True, "return_dict": True, "tokenizer_kwargs": {"verbose": False}, **options}
    try:
        return tokenizer.apply_chat_template(list(chats), **options)
    except jinja2.TemplateError as batch_error:
        for chat, name in zip(chats, where, strict=True):
            try:
                tokenizer.apply_chat_template([chat], **options)
            except jinja2.TemplateError as error:
                raise DataError(
                    f"{name}: the chat template of model.tokenizer={tokenizer.name_or_path!r} refuses the roles "
                    f"{[m['role'] for m in chat]}: {error}"
                ) from error
        raise DataError(f"the chat template of model.tokenizer failed: {batch_error}") from batch_error


def _bos(tokenizer: PreTrainedTokenizerBase) -> Ids:
    """[BOS] if this tokenizer puts one before a text, else []."""
    around = tokenizer("")["input_ids"]
    return (
        [tokenizer.bos_token_id]
        if tokenizer.bos_token_id is not None and around[:1] == [tokenizer.bos_token_id]
        else []
    )


def _with_bos(ids: Ids, bos: Ids) -> Ids:
    return ids if ids[: len(bos)] == bos else bos + ids


def _with_eos(ids: Ids, eos: int) -> Ids:
    return ids if ids[-1:] == [eos] else [*ids, eos]
