"""Tokenizers: load a Hugging Face folder, or make a small byte-level one, offline."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aligner.config.checks import path_hint
from aligner.data.rendering import THOUGHT, USER, try_text
from aligner.data.tool_calls import READERS, format_of, written
from aligner.errors import ConfigError, DataError
from aligner.foreign import read_record

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

PAD, EOS = "<pad>", "<eos>"
ROLES = ("<|user|>", "<|assistant|>", "<|system|>")

# The end token is inside the generation block: the model has to learn to stop.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['user', 'assistant', 'system'] -%}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{%- endif -%}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{%- if message['role'] == 'assistant' -%}"
    "{% generation %}{{ message['content'] + '<eos>' }}{% endgeneration %}"
    "{%- else -%}{{ message['content'] }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)

# Names of tokens that text never contains in published tokenizers, best first.
_PAD_NAMES = ("<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "[PAD]", "<|padding|>", "<|PAD_TOKEN|>")
# without any of these files transformers invents a tokenizer of a few tokens for some families
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_announced: set[str] = set()


def load_tokenizer(folder: str, announce: bool = True) -> PreTrainedTokenizerBase:
    """Load a tokenizer folder, without any network access.

    A tokenizer without a pad token (Llama-3) gets a reserved, padding or unknown token it already has, or else its EOS;
    that is printed once if `announce`. The pad token may be EOS: rows have lengths and masks, and no code reads padding
    by its id. Raises DataError if the folder is missing or holds no tokenizer, or if that has no EOS.
    """
    if not folder or not Path(folder).expanduser().is_dir():
        hint = folder and path_hint("model.tokenizer", folder)
        expected = f"model.tokenizer={folder!r}: expected a folder with a Hugging Face tokenizer"
        raise DataError(f"{expected}. {hint}" if hint else expected)
    path = str(Path(folder).expanduser())
    if not any(file.name in VOCABULARIES or file.suffix == ".tiktoken" for file in Path(path).iterdir()):
        raise DataError(
            f"model.tokenizer={folder!r}: expected a folder with a Hugging Face tokenizer, found none of its files "
            f"({', '.join(VOCABULARIES)}): copy them there, or name the folder that has them"
        )
    from transformers import AutoTokenizer, TokenizersBackend

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        # with config.json of some models it splits text by their rules, whatever tokenizer.json says
        stored = Path(path, "tokenizer_config.json")
        if TokenizersBackend in type(tokenizer).__bases__ and stored.is_file():
            record = read_record(stored, DataError)
            if record.text("tokenizer_class", "") == TokenizersBackend.__name__:
                tokenizer = TokenizersBackend.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the Rust core of `tokenizers` raises bare Exception; always re-raised, with its cause
        raise DataError(
            f"model.tokenizer={folder!r}: expected a folder that transformers.AutoTokenizer loads offline "
            f"({type(error).__name__}: {str(error).strip()[:300]})"
        ) from error
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"model.tokenizer={folder!r}: expected an EOS token, found none; set eos_token in tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = _pad_candidate(tokenizer) or tokenizer.eos_token
        if announce and path not in _announced:
            _announced.add(path)
            name = tokenizer.pad_token
            print(f"tokenizer {folder}: no pad token, using {name!r} (id {tokenizer.pad_token_id})", file=sys.stderr)
    return tokenizer


def _pad_candidate(tokenizer: PreTrainedTokenizerBase) -> str | None:
    taken = {tokenizer.eos_token, tokenizer.bos_token}
    special = [str(t) for _, t in sorted(tokenizer.added_tokens_decoder.items()) if t.special]
    special = [name for name in special if name not in taken]
    named = [name for name in _PAD_NAMES if name in special]
    named += [name for name in special if "reserved" in name.lower()]
    if tokenizer.unk_token is not None and tokenizer.unk_token not in taken:
        named.append(tokenizer.unk_token)
    return named[0] if named else None


def train_tokenizer(
    texts: Iterable[str],
    folder: str,
    vocab_size: int,
    *,
    split_digits: bool = True,
    split_words: bool = True,
    chat_template: str | None = CHAT_TEMPLATE,
) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE on `texts` and save it as a Hugging Face folder.

    All 256 bytes are in the alphabet, so that any text round-trips. `split_digits`: each digit is its own token.
    `split_words=False` lets merges cross spaces, so that a constant task prefix becomes one token.
    The result may be smaller than `vocab_size` if the texts have no more pairs to merge. Raises ConfigError if
    `vocab_size` cannot hold the bytes and the special tokens (261).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, EOS, *ROLES]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(special) + len(alphabet)
    if vocab_size < smallest:
        raise ConfigError("vocab_size", vocab_size, f"an integer >= {smallest} (256 bytes and the special tokens)")
    core = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, split]) if split_digits else split
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=list(ROLES),
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    return load_tokenizer(folder)


def byte_tokenizer(folder: str, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerBase:
    """Make a tokenizer of 261 tokens, one per byte and the special tokens; save it in `folder`."""
    return train_tokenizer([], folder, 256 + 2 + len(ROLES), chat_template=chat_template)


def decode_responses(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Tensor,
    lengths: Sequence[int] | Tensor,
    ends: Sequence[int] | None = None,
    special: str = "keep",
) -> list[str]:
    """Decode right-padded responses `tokens` int64 [N, R] with `lengths` [N].

    Special tokens stay, except padding, BOS and a last token of `ends` (default: the stop tokens). `special="strip"`
    removes all special tokens.
    """
    rows = [row[: int(n)] for row, n in zip(tokens.tolist(), lengths, strict=True)]
    if not rows:
        return []
    if special == "strip":
        return tokenizer.batch_decode(rows, skip_special_tokens=True)
    ends = stop_token_ids(tokenizer) if ends is None else ends
    never = {tokenizer.bos_token_id, tokenizer.pad_token_id}
    rows = [row[:-1] if row and row[-1] in ends else row for row in rows]
    rows = [[token for token in row if token not in never] if never.intersection(row) else row for row in rows]
    return tokenizer.batch_decode(rows, skip_special_tokens=False)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return tokens that end a response: EOS, those of generation_config.json, and the ends of a chat turn."""
    ids = [tokenizer.eos_token_id]
    path = Path(tokenizer.name_or_path) / "generation_config.json"
    if path.is_file():
        settings = read_record(path, DataError)
        many = isinstance(settings.fields.get("eos_token_id"), list)
        ids += settings.integers("eos_token_id") if many else [settings.integer("eos_token_id", tokenizer.eos_token_id)]
    ends = [turn_end(tokenizer), turn_end(tokenizer, call=True)]
    return tuple(dict.fromkeys([*ids, *(end for end in ends if end is not None)]))


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest token id plus one: there may be gaps."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def sampled_with(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the fields of SamplingParams that the tokenizer decides."""
    return {"stop_token_ids": stop_token_ids(tokenizer), "vocabulary": vocabulary_size(tokenizer)}


def turn_end(tokenizer: PreTrainedTokenizerBase, call: bool = False) -> int | None:
    """Return the first special token that the chat template puts behind an answer (<|im_end|>), or behind its `call`.

    None behind a call whose format is unknown. If a conversation ends with none, it is the token right behind an answer
    that the conversation continues from (GLM-4's <|user|>, and <|observation|> behind a call).
    """
    if tokenizer.chat_template is None:
        return None
    answer, reply = "an answer 7", {"role": "user", "content": "a question 8"}
    fields: dict[str, Any] = {"content": answer}
    if call:
        function = {"name": "look", "arguments": {"at": answer}}
        fields = {"content": "", "tool_calls": [{"id": "call00007", "type": "function", "function": function}]}
        reply |= {"role": "tool", "name": "look", "tool_call_id": "call00007"}
    chats = [
        [USER, {"role": "assistant", **fields, "content": thought + fields["content"]}] for thought in ("", THOUGHT)
    ]
    chat, text = next(((c, t) for c in chats if (t := try_text(tokenizer, c)) is not None), (chats[0], ""))
    tail = text.rpartition(answer)[2]
    marks = "".join(written(kind, "look", {"at": answer}) for kind in READERS) if call else ""
    special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special and t.content not in marks}
    ends = [i for i in tokenizer(tail, add_special_tokens=False)["input_ids"] if i in special]
    if call:  # special tokens of an unknown format may be within the call
        opening = try_text(tokenizer, [USER], add_generation_prompt=True) or ""
        shown = text.removesuffix(tail) + (tail.partition(tokenizer.decode(ends[:1]))[0] if ends else tail)
        turn = shown[len(opening) :] if shown.startswith(opening) else shown.rpartition(USER["content"])[2]
        if not format_of(turn, "look", {"at": answer}):
            return None
    if ends:
        return ends[0]
    longer = (try_text(tokenizer, [*chat, reply]) or "").rpartition(answer)[2]
    between = longer.removeprefix(tail if call else "").partition(reply["content"])[0].lstrip()
    following = tokenizer(between, add_special_tokens=False)["input_ids"][:1]
    never = [tokenizer.bos_token_id, tokenizer.pad_token_id]
    never += tokenizer(text, add_special_tokens=False)["input_ids"] if call else []  # these open other turns too
    return following[0] if following and following[0] in special and following[0] not in never else None


def check_vocab(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer has ids beyond a model's `vocab_size` embeddings."""
    needed = vocabulary_size(tokenizer)
    if needed > vocab_size:
        expected = f"at least {needed}, the size of the tokenizer"
        raise ConfigError("model.vocab_size", vocab_size, expected, "Do model.init and model.tokenizer match?")
