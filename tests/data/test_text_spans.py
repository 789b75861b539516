"""Spans of text that two tokenizers cut alike, for every kind of tokenizer whose tokens are known as bytes."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from aligner.data.text_spans import END, OtherTokenizer, TokenBytes, common_spans, text_of
from aligner.data.tokenizer import train_tokenizer
from aligner.errors import DataError

TEXTS = [
    "the answer to the question is 42, or not",
    "naïve café, Straße",
    "漢字とかな 漢字",
    "🙂🙂 👍🏽 x = 'é'\n\n\tdone",
] * 3
HEX = [f"<0x{byte:02X}>" for byte in range(256)]


def sentence_piece(folder, old: bool):
    """As Llama 2's (`old`: a normalizer writes the blanks, a decoder of several steps reads them), or Mistral's."""
    core = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if old:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        last = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), *last])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    special = ["<unk>", "<s>", "</s>", *HEX]
    core.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    stored = json.loads(core.to_str())
    stored["added_tokens"] = [token for token in stored["added_tokens"] if token["content"] not in HEX]
    core = Tokenizer.from_str(json.dumps(stored))
    whole = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    whole.pad_token = "<unk>"
    whole.save_pretrained(folder)
    return whole


@pytest.fixture(scope="module")
def kinds(byte, chatml, tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds")
    tokenizers = {
        "byte": byte,
        "chatml": chatml,
        "bpe": train_tokenizer(TEXTS, str(root / "bpe"), 420),
        "across words": train_tokenizer(TEXTS, str(root / "across"), 330, split_words=False),
        "old": sentence_piece(str(root / "old"), True),
        "new": sentence_piece(str(root / "new"), False),
    }
    return {name: (tokenizer, TokenBytes(tokenizer)) for name, tokenizer in tokenizers.items()}


KINDS = ("byte", "chatml", "bpe", "across words", "old", "new")
SOME = st.text(
    st.sampled_from("ab  the12,\n éß漢字🙂👍\U0001f3fd") | st.characters(exclude_categories=("Cs",)), max_size=30
)
SETTINGS = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def numbers_by_prefixes(student, teacher):
    """The spans of both sides' tokens: boundaries are the texts that some tokens of both sides write from the start."""
    sides = [[b"".join(side[: i + 1]) for i in range(len(side))] for side in (student, teacher)]
    common = set(sides[0]) & set(sides[1]) - {b""}
    whole = b"".join(student)
    common -= set() if whole.endswith(END) else {whole}
    numbers = [[1 + sum(len(text) < len(end) for text in common) for end in side] for side in sides]
    return [[n if n <= len(common) else 0 for n in side] for side in numbers]


def check(student, teacher):
    ours, theirs = common_spans(student, teacher)
    assert [ours.tolist(), theirs.tolist()] == numbers_by_prefixes(student, teacher)
    count = max(ours.max(initial=0), theirs.max(initial=0))
    sides = [
        [b"".join(piece for piece, n in zip(side, of, strict=True) if n == k) for k in range(1, count + 1)]
        for side, of in ((student, ours), (teacher, theirs))
    ]
    assert sides[0] == sides[1] and all(sides[0])  # each byte of a span once on both sides, and none is empty
    assert b"".join(student).startswith(b"".join(sides[0]))
    return ours, theirs


@SETTINGS
@given(own=st.sampled_from(KINDS), other=st.sampled_from(KINDS), text=SOME)
@example("old", "new", "é🙂 漢x\n")
@example("new", "byte", "é🙂 漢x\n")
@example("chatml", "old", " é🙂 漢x\n")
def test_texts_that_both_encode_are_in_spans_from_end_to_end(kinds, own, other, text):
    """And the end of the turn is a span of its own, whatever its token is called."""
    (tokenizer, written), (theirs, reads) = kinds[own], kinds[other]
    between = OtherTokenizer(theirs, written, reads, 999)
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    (answer,) = between.encoded([ids], [0])
    pieces = written.pieces(ids, begins=True)
    ours, theirs = check(pieces, between.teacher.pieces(answer.tokens))
    assert np.array_equal(ours, answer.spans) and np.array_equal(theirs, answer.teacher_spans)
    assert ours[-1] == theirs[-1] == max(ours) and 0 not in ours and 0 not in theirs
    assert list(ours).count(ours[-1]) == list(theirs).count(theirs[-1]) == 1
    if own == other:  # any one-to-one encoding has each token for itself
        assert ours.tolist() == sorted(set(ours)) or not all(pieces)


@SETTINGS
@given(own=st.sampled_from(KINDS), data=st.data())
def test_what_tokens_write_is_what_the_tokenizer_decodes(kinds, own, data):
    """Any tokens, also those in which no tokenizer encodes a text."""
    tokenizer, written = kinds[own]
    never = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
    some = st.sampled_from(sorted(set(tokenizer.get_vocab().values()) - never))
    ids = data.draw(st.lists(some, max_size=12))
    pieces = written.pieces(ids, begins=True)
    whole, text = tokenizer.decode(ids, clean_up_tokenization_spaces=False), text_of(pieces)
    if "\ufffd" in whole:  # the valid bytes before such a one are U+FFFD, too, with SentencePiece's decoder
        assert "\ufffd" in text and text.startswith(whole.partition("\ufffd")[0])
    else:
        assert text == whole
    (answer,) = OtherTokenizer(kinds["bpe"][0], written, kinds["bpe"][1], 999).encoded([ids], [0])
    check(pieces, kinds["bpe"][1].pieces(answer.tokens))


PIECES = st.lists(st.sampled_from([b"", b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b"a\xc3"]), max_size=8)


@SETTINGS
@given(PIECES, PIECES, st.booleans(), st.booleans())
def test_spans_are_of_what_both_have_read(one, two, ends, other_ends):
    check([*one, *[END] * ends], [*two, *[END] * other_ends])


def test_a_text_without_an_end_and_a_teacher_without_room():
    """The last span of both is what is certain: a token of the student's may go on, and tokens cut off say nothing."""
    words = [b"so", b" be", b" it"]
    assert [x.tolist() for x in common_spans(words, words)] == [[1, 2, 0], [1, 2, 0]]
    assert [x.tolist() for x in common_spans([*words, END], words[:2])] == [[1, 2, 0, 0], [1, 2]]
    assert [x.tolist() for x in common_spans([*words, END], [])] == [[0, 0, 0, 0], []]
    assert [x.tolist() for x in common_spans([b"so", b"X", b"x", END], [b"so", b"x", b"x", END])] == [[1, 0, 0, 0]] * 2


def test_bytes_that_are_no_text_are_what_the_teacher_reads_for_them(kinds):
    """A run of such bytes is a span with the teacher's tokens of U+FFFD: a student cannot hide in them."""
    (tokenizer, written), other = kinds["byte"], kinds["chatml"]
    number = {value: key for key, value in enumerate(written._bytes)}
    ids = [number[bytes([byte])] for byte in b"a\xe6\xbc\xffb\xc3"] + [tokenizer.eos_token_id]
    assert written.pieces(ids) == [b"a", "\ufffd".encode(), b"", "\ufffd".encode(), b"b", "\ufffd".encode(), END]
    (answer,) = OtherTokenizer(other[0], written, other[1], 99).encoded([ids], [0])
    assert other[0].decode(answer.tokens) == "a\ufffd\ufffdb\ufffd<|im_end|>"
    assert answer.spans.tolist() == [1, 2, 2, 3, 4, 5, 6] and answer.teacher_spans[-1] == 6


def test_tokenizers_whose_tokens_are_not_their_text_are_refused(byte):
    core = Tokenizer(models.WordPiece({"[UNK]": 0, "an": 1, "</s>": 2}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()
    words = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    with pytest.raises(DataError, match=r"expected tokens that are bytes.*found the decoder"):
        TokenBytes(words)
    lower = Tokenizer.from_str(byte.backend_tokenizer.to_str())
    lower.normalizer = normalizers.Lowercase()
    with pytest.raises(DataError, match="keeps a text as it is, found b'an answer"):
        TokenBytes(PreTrainedTokenizerFast(tokenizer_object=lower, eos_token="<eos>"))
