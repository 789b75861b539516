"""Typed rows -> token ids with a loss mask, through the tokenizer's chat template.

Special tokens are added once: a chat template writes its own; a plain text gets the tokenizer's BOS (if it adds one)
in front of the prompt and EOS behind the completion. `arguments` are the template's, data.template_arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aligner.data.answer_ends import AnswerEnds
from aligner.data.chats import Chat, Options, marks_answers, render
from aligner.data.formats import SftRow, Text, Tools
from aligner.data.opened_modes import OpenedModes
from aligner.data.rendering import USER, template_of, try_text
from aligner.data.shipped_templates import TrainingTemplate, answers_openings, shipped, training_template
from aligner.data.template_checks import check_shown, thinking
from aligner.data.tokenizer import stop_token_ids
from aligner.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = list[int]
_Texts = dict[tuple[int, int], Ids]  # by numbers of conversation and message
NO_ARGUMENTS: Mapping[str, Any] = {}


def encode_plain(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Ids]:
    """Encode texts in one call, without special tokens that the text does not spell.

    Equal texts share their list.
    """
    if not texts:
        return []
    unique = list(dict.fromkeys(texts))
    ids = tokenizer(unique, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    ids_of = dict(zip(unique, ids, strict=True))
    return [ids_of[text] for text in texts]


def encode_behind(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Ids]:
    """Encode texts that follow others, without the blank that some tokenizers (Llama 2's kind) put before every
    text."""
    anchor = _anchor(tokenizer)
    if not anchor:
        return encode_plain(tokenizer, texts)
    (head,) = encode_plain(tokenizer, [anchor])
    return [
        ids[len(head) :] if ids[: len(head)] == head else alone
        for ids, alone in zip(
            encode_plain(tokenizer, [anchor + text for text in texts]), encode_plain(tokenizer, texts), strict=True
        )
    ]


def _anchor(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text to put before others while they are tokenised; empty if the tokenizer needs none.

    It is needed if the tokenizer begins a text differently than it continues one.
    """
    apart, whole = encode_plain(tokenizer, ["0", "00"])
    joined = tokenizer.decode([*apart, *apart], clean_up_tokenization_spaces=False)
    if whole == [*apart, *apart] or joined == "00":
        return ""
    for anchor in ("\n", ":", "=", "."):
        (head,) = encode_plain(tokenizer, [anchor])
        if tokenizer.unk_token_id not in head and tokenizer.decode(head).strip(" ") == anchor:
            return anchor
    return ""


def encode_documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Ids]:
    """Encode plain texts with EOS behind them, and BOS before them if the tokenizer adds one."""
    bos, eos = _bos(tokenizer), tokenizer.eos_token_id
    return [_with_eos(_with_bos(ids, bos), eos) for ids in encode_plain(tokenizer, texts)]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Text],
    where: Sequence[str],
    tools: Sequence[Tools | None] | None = None,
    arguments: Options = NO_ARGUMENTS,
) -> list[Ids]:
    """Encode prompts to generate from. A conversation is rendered with the opening of the assistant's turn."""
    ids: list[Ids] = [[] for _ in prompts]
    tools = tools or [None] * len(prompts)
    plain = [i for i, p in enumerate(prompts) if isinstance(p, str)]
    chats = [i for i, p in enumerate(prompts) if not isinstance(p, str)]
    bos = _bos(tokenizer)
    for i, tokens in zip(plain, encode_plain(tokenizer, [prompts[i] for i in plain]), strict=True):
        ids[i] = _with_bos(tokens, bos)
    opened = [Chat(prompts[i], where[i], tools[i]) for i in chats]
    check_shown(tokenizer, opened, arguments)
    for i, tokens in zip(chats, _openings(tokenizer, opened, arguments), strict=True):
        ids[i] = tokens
    return ids


def encode_sft(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[SftRow],
    loss_on: str = "assistant",
    arguments: Options = NO_ARGUMENTS,
    fix: bool = True,
    modes: OpenedModes | None = None,
) -> list[tuple[Ids, Ids]]:
    """Return (tokens, loss mask of 0 and 1, same length) of each row.

    `loss_on="all"`: loss on every token but the first. `fix`: a shipped template may replace the tokenizer's
    (`_encode_chats`). `modes`: counts conversations with thoughts and without.

    Plain: encode(prompt) + encode(completion) + [EOS], loss on completion and EOS. Conversations: loss on the assistant
    turns (of the completion, if there is a separate prompt). Raises DataError if a row has no token to learn.
    """
    out: list[tuple[Ids, Ids]] = [([], [])] * len(rows)
    chats = [i for i, row in enumerate(rows) if row.messages is not None or not isinstance(row.prompt, str)]
    plain = sorted(set(range(len(rows))) - set(chats))
    prompts = encode_prompts(tokenizer, [rows[i].prompt for i in plain], [rows[i].where for i in plain])
    answers = _completions(tokenizer, [rows[i].prompt for i in plain], [rows[i].completion for i in plain])
    eos = tokenizer.eos_token_id  # read once: the property is slow
    for i, prompt, answer in zip(plain, prompts, answers, strict=True):
        answer = _with_eos(answer, eos)
        out[i] = prompt + answer, [0] * len(prompt) + [1] * len(answer)
    encoded = _encode_chats(tokenizer, [rows[i] for i in chats], loss_on, arguments, fix, modes or OpenedModes())
    for i, pair in zip(chats, encoded, strict=True):
        out[i] = pair
    for i, (tokens, mask) in enumerate(out):
        if loss_on == "all":
            mask[:] = [1] * len(tokens)  # also of plain texts
        mask[:1] = [0]  # the first token has no logprob
        if not any(mask):
            raise DataError(f"{rows[i].where}: expected at least one token to learn, found none in {_shape(rows[i])}")
    return out


def _shape(row: SftRow) -> str:
    messages = row.messages if row.messages is not None else [*row.prompt, *row.completion]
    if any(isinstance(message, str) for message in messages):
        return f"a completion of {len(row.completion)} characters"
    roles = [message["role"] for message in messages]
    return f"a conversation of the roles {', '.join(roles):.200}: only turns of role `assistant` are learned"


def _completions(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Text], texts: Sequence[str]) -> list[Ids]:
    """Encode texts behind their prompts, or as beginnings for empty prompts."""
    if all(prompts):
        return encode_behind(tokenizer, texts)
    both = zip(prompts, encode_behind(tokenizer, texts), encode_plain(tokenizer, texts), strict=True)
    return [behind if prompt else alone for prompt, behind, alone in both]


def encode_answers(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Text],
    answers: Sequence[Text],
    where: Sequence[str],
    stop_ids: Sequence[int],
    tools: Sequence[Tools | None] | None = None,
    arguments: Options = NO_ARGUMENTS,
    fix: bool = True,
) -> list[Ids]:
    """Encode prompt + answer like a rollout: it ends with its stop token, where a reward model scores it.

    `fix`: the template for training (`training_template`) renders thoughts that the tokenizer's omits.
    """
    out: list[Ids] = [[] for _ in prompts]
    tools = tools or [None] * len(prompts)
    chats = [i for i, answer in enumerate(answers) if not isinstance(answer, str)]
    plain = sorted(set(range(len(prompts))) - set(chats))
    starts = encode_prompts(tokenizer, [prompts[i] for i in plain], [where[i] for i in plain])
    ends = _completions(tokenizer, [prompts[i] for i in plain], [answers[i] for i in plain])
    eos = tokenizer.eos_token_id
    for i, start, end in zip(plain, starts, ends, strict=True):
        out[i] = start + _with_eos(end, eos)
    whole = [Chat([*prompts[i], *answers[i]], where[i], tools[i]) for i in chats]
    check_shown(tokenizer, whole, arguments)
    rendered_ids = render(tokenizer, whole, arguments)["input_ids"]
    replaced = _with_thoughts(tokenizer, whole, arguments) if fix and whole else {}
    ends = AnswerEnds(tokenizer, stop_ids) if whole else None
    for index, i in enumerate(chats):
        out[i] = ends.cut(replaced.get(index, rendered_ids[index]), "tool_calls" in answers[i][-1])
    return out


def _with_thoughts(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], options: Options) -> dict[int, Ids]:
    """Return by index the tokens of conversations that end in an answer to a user, with thoughts.

    This applies if the tokenizer's template does not begin answers with the generation prompt, or omits their thoughts.
    The tokens are the generation prompt, then the answer by the template for training. Answers without thoughts are
    among them if that begins them with the prompt (Gemma 4's with an empty channel).
    """
    training = None if answers_openings(tokenizer) else training_template(tokenizer)
    if training is None:
        return {}
    fixed: Options = {**training.options, **options}
    opening = try_text(tokenizer, [USER], **options, add_generation_prompt=True)
    plain = try_text(tokenizer, [USER, {"role": "assistant", "content": "an answer"}], **fixed)
    opens = opening is not None and plain is not None and plain.startswith(opening)
    indices = [i for i, chat in enumerate(chats) if _answers_user(chat) and (opens or thinking(chat.messages[-1:]))]
    starts = _openings(tokenizer, [chats[i].head(-1) for i in indices], options)
    alone = [Chat(chats[i].messages[-2:], chats[i].where) for i in indices]  # earlier answers may have no thoughts
    heads = _openings(tokenizer, [chat.head(-1) for chat in alone], fixed)
    encoded = {}
    for i, start, head, ids in zip(indices, starts, heads, render(tokenizer, alone, fixed)["input_ids"], strict=True):
        _check_prefix(tokenizer, head, ids, chats[i].where, "the prompt")
        encoded[i] = start + ids[len(head) :]
    return encoded


def _answers_user(chat: Chat) -> bool:
    return [message["role"] for message in chat.messages[-2:]] == ["user", "assistant"]


def replacement_in_use(tokenizer: PreTrainedTokenizerBase, rows: Sequence[SftRow]) -> TrainingTemplate | None:
    """Return the template by which `encode_sft` learns conversations instead of the tokenizer's, or None.

    It replaces one that may render answers unlike they are generated.
    """
    chats = _chats([row for row in rows if row.messages is not None or not isinstance(row.prompt, str)])
    return None if tokenizer.chat_template is None else _replacement(tokenizer, chats)[0]


def _chats(rows: Sequence[SftRow]) -> list[Chat]:
    return [
        Chat(row.messages, row.where, row.tools)
        if row.messages is not None
        else Chat([*row.prompt, *row.completion], row.where, row.tools, len(row.prompt))
        for row in rows
    ]


def _openings(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], options: Options) -> list[Ids]:
    return render(tokenizer, chats, options, add_generation_prompt=True)["input_ids"]


def _in_danger(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat]) -> list[int]:
    """Return the conversations with answers that the tokenizer's template may render unlike they are generated.

    These have text behind an answer; or all, if no answer begins with its opening.
    """
    last = answers_openings(tokenizer)
    return [
        i for i, chat in enumerate(chats) if chat.answers and not (last and chat.answers == [len(chat.messages) - 1])
    ]


def _encode_chats(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[SftRow],
    loss_on: str,
    options: Options,
    fix: bool,
    modes: OpenedModes,
) -> list[tuple[Ids, Ids]]:
    """Encode conversations, with each answer's end token."""
    chats = _chats(rows)
    check_shown(tokenizer, chats, options)
    if loss_on == "all":
        encoded = [(ids, [1] * len(ids)) for ids in render(tokenizer, chats, options)["input_ids"]]
    else:
        encoded = _masked(tokenizer, chats, options, fix, modes)
    ends = AnswerEnds(tokenizer, stop_token_ids(tokenizer)) if chats else None
    for chat, (ids, mask) in zip(chats, encoded, strict=True):
        last = chat.messages[-1]
        ends.close(ids, mask, last["role"] == "assistant", "tool_calls" in last)
    return encoded


def _masked(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], options: Options, fix: bool, modes: OpenedModes
) -> list[tuple[Ids, Ids]]:
    """Encode with loss masks: by the template's marks, else by prefixes.

    Answers that a template may omit are rendered by the template for training that agrees with it.
    """
    training, replaced = _replacement(tokenizer, chats) if fix else (None, [])
    fixed: Options = {**training.options, **options} if training is not None else options
    rest = sorted(set(range(len(chats))) - set(replaced))
    encoded: dict[int, tuple[Ids, Ids]] = {}
    for indices, own in ((replaced, fixed), (rest, options)):
        group = [chats[i] for i in indices]
        if not group:  # plain rows need no template
            continue
        if marks_answers(tokenizer, group, own):
            pairs = _by_marks(tokenizer, group, own)
        else:
            pairs = _by_prefixes(tokenizer, group, own, modes)
        encoded |= dict(zip(indices, pairs, strict=True))
    return [encoded[i] for i in range(len(chats))]


def _replacement(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat]
) -> tuple[TrainingTemplate | None, list[int]]:
    """Return the template for training, and the conversations that it renders.

    A template that marks answers is not replaced by a shipped one.
    """
    indices = _in_danger(tokenizer, chats) if chats else []
    training = training_template(tokenizer) if indices else None
    if training is None or ("chat_template" in training.options and marks_answers(tokenizer, chats[:1], {})):
        return None, []
    return training, indices


def _by_marks(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], options: Options) -> list[tuple[Ids, Ids]]:
    columns = render(tokenizer, chats, options, return_assistant_tokens_mask=True)
    pairs = [(ids, list(mask)) for ids, mask in zip(columns["input_ids"], columns["assistant_masks"], strict=True)]
    split = [i for i, chat in enumerate(chats) if chat.fixed]
    prompts = _openings(tokenizer, [chats[i].head(chats[i].fixed) for i in split], options)
    for i, prompt in zip(split, prompts, strict=True):
        ids, mask = pairs[i]
        _check_prefix(tokenizer, prompt, ids, chats[i].where, f"the prompt ({chats[i].fixed} messages)")
        mask[: len(prompt)] = [0] * len(prompt)
    return pairs


def _by_prefixes(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], options: Options, modes: OpenedModes
) -> list[tuple[Ids, Ids]]:
    """Encode by prefixes, each conversation in its mode: with thoughts, as the run's, or without.

    Some templates write the mode into the system's turn (Gemma 4's, Qwen3.8's): a conversation has one mode there.
    """
    on, off = (_mode(tokenizer, options, value) for value in (True, False))
    thinks = [i for i, chat in enumerate(chats) if thinking(chat.messages)] if on != options else []
    rest = sorted(set(range(len(chats))) - set(thinks))
    encoded: dict[int, EncodedChat | DataError] = {}
    for indices, mode in ((thinks, on), (rest, options)):
        encoded |= dict(zip(indices, _prefixed(tokenizer, [chats[i] for i in indices], mode), strict=True))
    plain = [i for i in rest if isinstance(encoded[i], DataError)] if off != options else []
    for i, again in zip(plain, _prefixed(tokenizer, [chats[i] for i in plain], off), strict=True):
        encoded[i] = encoded[i] if isinstance(again, DataError) else again._replace(own=False)
    pairs = []
    for i, chat in enumerate(chats):
        one = encoded[i]
        if isinstance(one, DataError):
            raise one
        if chat.answers:
            modes.count(one.own and i not in thinks, bool(thinking(chat.messages)))
        pairs.append((one.ids, one.mask))
    return pairs


class EncodedChat(NamedTuple):
    """Tokens with their mask. `own`: an answer has the opening of the options."""

    ids: Ids
    mask: Ids
    own: bool


def _mode(tokenizer: PreTrainedTokenizerBase, options: Options, value: bool) -> Options:
    """Return options that set the mode; `options` if they open answers alike."""
    if not _switches(tokenizer, options):
        return options
    other = {**options, "enable_thinking": value}
    texts = [try_text(tokenizer, [USER], **each, add_generation_prompt=True) for each in (options, other)]
    return options if texts[0] == texts[1] else other


def _prefixed(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], options: Options
) -> list[EncodedChat | DataError]:
    """Locate assistant spans for a template without generation markers: the tokens that message k adds.

    Returns the error of a conversation with an answer that follows no opening.
    """
    spans = [(i, k) for i, chat in enumerate(chats) for k in chat.answers]
    whole = render(tokenizer, chats, options)["input_ids"]
    opened = [(i, k) for i, k in spans if k]
    before = _openings(tokenizer, [chats[i].head(k) for i, k in opened], options)
    starts = dict(zip(opened, before, strict=True))
    # many templates refuse to render no messages
    opening = _opening(tokenizer, options) if len(opened) < len(spans) else []
    after = render(tokenizer, [chats[i].head(k + 1) for i, k in spans], options)["input_ids"]
    ends = dict(zip(spans, after, strict=True))
    own = {i for i, k in spans if not k or ends[i, k][: len(starts[i, k])] == starts[i, k]}
    starts |= _other_openings(tokenizer, chats, options, starts, ends)
    masks = [[0] * len(ids) for ids in whole]
    faults: dict[int, DataError] = {}
    for (i, k), end in ends.items():
        start, where = starts[i, k] if k else _head(end, opening), chats[i].where
        try:
            _check_prefix(tokenizer, start, end, where, f"messages[:{k}] and the opening of the assistant's turn")
            _check_prefix(tokenizer, end, whole[i], where, f"messages[:{k + 1}]")
        except DataError as fault:
            faults.setdefault(i, fault)
        masks[i][len(start) : len(end)] = [1] * (len(end) - len(start))
    return [faults.get(i) or EncodedChat(whole[i], masks[i], i in own) for i in range(len(chats))]


def _other_openings(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], options: Options, starts: _Texts, ends: _Texts
) -> _Texts:
    """Return openings for answers that do not have that of `options`, with thoughts or without: the other mode's."""
    other = [at for at, start in starts.items() if ends[at][: len(start)] != start]
    openings: _Texts = {}
    for mode in (True, False) if other and _switches(tokenizer, options) else ():
        ids = _openings(tokenizer, [chats[i].head(k) for i, k in other], {**options, "enable_thinking": mode})
        openings |= {at: start for at, start in zip(other, ids, strict=True) if ends[at][: len(start)] == start}
    return openings


def _switches(tokenizer: PreTrainedTokenizerBase, options: Options) -> bool:
    return "enable_thinking" in template_of(tokenizer, options, "data.chat_template")


def _opening(tokenizer: PreTrainedTokenizerBase, options: Options) -> Ids:
    """Return the template's tokens before an answer; empty if it puts none behind a question."""
    question = [Chat([USER], "a question")]
    asked = render(tokenizer, question, options)["input_ids"][0]
    opened = _openings(tokenizer, question, options)[0]
    return opened[len(asked) :] if opened[: len(asked)] == asked else []


def _head(ids: Ids, opening: Ids) -> Ids:
    """Return the generation prompt of a conversation that begins with an answer: up to the opening, inclusive.

    A template may begin with its own words, such as a system message.
    """
    ends = (i + len(opening) for i in range(len(ids)) if ids[i : i + len(opening)] == opening)
    return ids[: next(ends, 0)] if opening else []


def _check_prefix(tokenizer: PreTrainedTokenizerBase, short: Ids, long: Ids, where: str, what: str) -> None:
    if long[: len(short)] == short:
        return
    at = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), min(len(short), len(long)))
    window = slice(max(0, at - 8), at + 12)
    opens = what.endswith(("turn", "the prompt")) and _switches(tokenizer, {})
    other = "data.template_arguments={enable_thinking: false}, or true, which changes the opening; " if opens else ""
    raise DataError(
        f"{where}: the chat template is not prefix-preserving: the tokens of {what} are not the start of the tokens of "
        f"the longer conversation. At token {at}: {tokenizer.decode(short[window])!r} became "
        f"{tokenizer.decode(long[window])!r}. Fix: {other}data.chat_template=FILE, one that marks assistant turns with "
        f"{{% generation %}} or keeps earlier turns as they are (shipped: {', '.join(shipped())}), or such a "
        "model.tokenizer; or data.loss_on=all"
    )


def _bos(tokenizer: PreTrainedTokenizerBase) -> Ids:
    """Return [BOS] if this tokenizer puts one before a text, else []."""
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
