import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from aligner.config.sections.data import DataConfig
from aligner.data.collate import collate_sft
from aligner.data.dataset import SftDataset
from aligner.data.formats import SftRow
from aligner.data.tokenizer import (
    byte_tokenizer,
    check_vocab,
    decode_responses,
    load_tokenizer,
    stop_token_ids,
    train_tokenizer,
)
from aligner.errors import ConfigError, DataError

PROBLEMS = [
    f"State the final answer to the following arithmetic problem: {a} + {b} =" for a in range(10, 99) for b in (7, 42)
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_tokenizer(PROBLEMS, str(tmp_path_factory.mktemp("bpe")), 400, split_words=False)


@pytest.fixture(scope="module")
def byte_and_bpe(byte, trained):
    return byte, trained


@given(text=st.text(max_size=60))
def test_any_text_round_trips(byte_and_bpe, text):
    for tokenizer in byte_and_bpe:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text


@given(text=st.text(max_size=40))
def test_byte_tokenizer_has_one_token_per_utf8_byte(byte, text):
    if not any(special in text for special in byte.all_special_tokens):
        assert len(byte(text, add_special_tokens=False)["input_ids"]) == len(text.encode())


def test_byte_tokenizer_is_a_folder_auto_tokenizer_loads(tmp_path):
    made = byte_tokenizer(str(tmp_path))
    loaded = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert len(loaded) == 261 and loaded.eos_token == "<eos>" and loaded.pad_token == "<pad>"
    assert loaded("añ7 <eos>")["input_ids"] == made("añ7 <eos>")["input_ids"]
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert loaded.apply_chat_template(chat, tokenize=False) == "<|user|>q<|assistant|>a<eos>"
    assert loaded.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True) == "<|user|>q<|assistant|>"


def test_constant_prefix_becomes_one_token_and_digits_stay_apart(trained):
    ids = trained("State the final answer to the following arithmetic problem: 57 + 42 =")["input_ids"]
    pieces = [trained.decode([i]) for i in ids]
    assert pieces == ["State the final answer to the following arithmetic problem: ", "5", "7", " + ", "4", "2", " ="]


def test_split_words_keeps_words_apart_and_digits_can_merge(tmp_path):
    tokenizer = train_tokenizer(["one 1234"] * 9, str(tmp_path), 300, split_digits=False)
    assert tokenizer.convert_ids_to_tokens(tokenizer("one 1234")["input_ids"]) == ["one", "Ġ1234"]


@pytest.mark.parametrize("model", ["qwen2", "qwen3_5_moe_text", "llama"])
def test_text_is_split_alike_beside_a_model(tmp_path, model):
    """As its tokenizer.json says, not as published models of this kind split it."""
    made = train_tokenizer(PROBLEMS, str(tmp_path), 400, split_words=False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    assert load_tokenizer(str(tmp_path))(PROBLEMS)["input_ids"] == made(PROBLEMS)["input_ids"]


def test_vocabulary_smaller_than_the_bytes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"vocab_size=100: expected an integer >= 261"):
        train_tokenizer(["x"], str(tmp_path), 100)


@pytest.mark.parametrize("case", ["empty name", "absent", "no tokenizer", "bad json", "bad structure"])
def test_folder_that_is_no_tokenizer(tmp_path, case):
    folder = tmp_path / "t"
    if case not in ("absent", "empty name"):
        folder.mkdir()
    if case.startswith("bad"):
        (folder / "tokenizer.json").write_text('{"model": 3}' if case == "bad structure" else "{bad")
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(DataError, match=r"model.tokenizer=.*expected a folder"):
        load_tokenizer("" if case == "empty name" else str(folder))


def test_no_eos_is_refused(make_folder):
    with pytest.raises(DataError, match=r"model.tokenizer=.*expected an EOS token"):
        load_tokenizer(make_folder(eos=None))


def test_pad_may_be_eos_and_eos_is_still_learned(make_folder):
    """As in all base models of Qwen: items and batches are those of a tokenizer with another pad token, but for the
    padding."""
    same, other = load_tokenizer(make_folder(pad="<|im_end|>")), load_tokenizer(make_folder())
    assert same.pad_token_id == same.eos_token_id != other.pad_token_id
    rows = [SftRow(prompt="what", completion=text) for text in (" is", " is the answer", "")]
    batches = []
    for tokenizer in (same, other):
        data = SftDataset(rows, tokenizer, DataConfig())
        batches.append(collate_sft([data[i] for i in range(3)], tokenizer.pad_token_id))
    one, two = batches
    assert one.lengths.tolist() == two.lengths.tolist() and one.loss_mask.tolist() == two.loss_mask.tolist()
    for row, length, mask in zip(one.tokens, one.lengths.tolist(), one.loss_mask.tolist(), strict=True):
        assert row[length - 1] == same.eos_token_id and mask[length - 2 : length].count(1) and not any(mask[length:])
    for a, b, n in zip(one.tokens.tolist(), two.tokens.tolist(), one.lengths.tolist(), strict=True):
        assert a[:n] == b[:n]


@pytest.mark.parametrize(
    "names, chosen",
    [
        ({"extra": ["<|reserved_special_token_0|>"]}, "<|reserved_special_token_0|>"),
        ({"extra": ["<|reserved_special_token_0|>", "<|finetune_right_pad_id|>"]}, "<|finetune_right_pad_id|>"),
        ({"extra": ["<unk>"], "unk": "<unk>"}, "<unk>"),
    ],
)
def test_missing_pad_takes_a_reserved_token_and_says_so_once(make_folder, capsys, names, chosen):
    folder = make_folder(pad=None, **names)
    assert load_tokenizer(folder).pad_token == chosen
    assert chosen in capsys.readouterr().err
    load_tokenizer(folder)
    assert capsys.readouterr().err == ""


def test_missing_pad_without_a_candidate_is_eos(make_folder, capsys):
    tokenizer = load_tokenizer(make_folder(pad=None))
    assert tokenizer.pad_token == tokenizer.eos_token == "<|im_end|>"
    assert "no pad token, using '<|im_end|>'" in capsys.readouterr().err


def test_decode_responses_ignores_padding_and_specials(byte):
    ids = byte("né 7<eos>", add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([[*ids, 9, 9], [40, 41, 42, 9, 9, 9, 9, 9][: len(ids) + 2]])
    texts = decode_responses(byte, tokens, torch.tensor([len(ids), 3]))
    assert texts == ["né 7", byte.decode([40, 41, 42])]
    assert decode_responses(byte, torch.zeros(0, 5, dtype=torch.long), []) == []


def test_stop_tokens_come_from_eos_template_and_generation_config(byte, make_folder):
    assert stop_token_ids(byte) == (byte.eos_token_id,)
    folder = make_folder(pad="<s>", eos="<|endoftext|>")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.convert_ids_to_tokens(stop_token_ids(tokenizer)) == ["<|endoftext|>", "<|im_end|>"]
    (Path(folder) / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    assert stop_token_ids(load_tokenizer(folder)) == (0, 1, 2)


def test_vocabulary_larger_than_the_checkpoint_is_refused(byte):
    check_vocab(byte, 261)
    check_vocab(byte, 300)
    with pytest.raises(ConfigError, match=r"model.vocab_size=260: expected at least 261"):
        check_vocab(byte, 260)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3"])
def test_a_folder_without_a_tokenizer_is_reported(family, tmp_path):
    """Transformers makes one of a few tokens for Gemma, and one without special tokens for Qwen."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match=r"found none of its files \(tokenizer.json, "):
        load_tokenizer(str(tmp_path))
