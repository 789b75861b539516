"""Spans of text that two tokenizers cut alike: where a student and a teacher with another tokenizer can be compared.

student   |Hel|lo wor|ld|<eos>|          spans: "Hello", " world", the end of the turn
teacher   |Hello| |world|<|im_end|>|
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aligner.data.templates import encode_behind
from aligner.data.tokenizer import stop_token_ids, turn_end, vocabulary_size
from aligner.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END = b"\xff"  # what all ends of a turn write: no text has this byte
BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # of SentencePiece
PROBE = "An answer: 1 of 2, or b."


class TokenBytes:
    """The bytes of text that each token of a tokenizer writes.

    Raises DataError if its tokens are not known as bytes, or if it changes a text that it encodes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.stops = stop_token_ids(tokenizer)
        ends = turn_end(tokenizer)
        self.end: int = tokenizer.eos_token_id if ends is None else ends  # what stands behind an answer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = backend.decoder.__getstate__().decode() if backend is not None and backend.decoder else ""
        where = f"tokenizer {tokenizer.name_or_path}"
        if '"ByteLevel"' in decoder:
            byte_of = _byte_level()
            of_piece = lambda piece: bytes(byte_of[char] for char in piece)  # noqa: E731
        elif '"Metaspace"' in decoder or '"ByteFallback"' in decoder:
            of_piece = _sentence_piece
        else:
            raise DataError(
                f"{where}: expected tokens that are bytes (ByteLevel), or pieces of text (Metaspace, ByteFallback), to "
                f"compare its text with another tokenizer's; found the decoder {decoder[:80] or None}"
            )
        self._drops_blank = '"Strip"' in decoder or ('"Metaspace"' in decoder and '"never"' not in decoder)
        added = {number: token.content.encode() for number, token in tokenizer.added_tokens_decoder.items()}
        added |= dict.fromkeys((tokenizer.pad_token_id, tokenizer.bos_token_id), b"")  # as in texts of answers
        self._bytes = [b""] * vocabulary_size(tokenizer)
        for piece, number in tokenizer.get_vocab().items():
            self._bytes[number] = added[number] if number in added else of_piece(piece)
        text = b"".join(self.pieces(tokenizer(PROBE, add_special_tokens=False)["input_ids"], begins=True))
        if text != PROBE.encode():
            raise DataError(f"{where}: expected one that keeps a text as it is, found {text!r} for {PROBE!r}")

    def pieces(self, ids: Sequence[int], begins: bool = False) -> list[bytes]:
        """Return what each token of an answer writes; a last token that ends turns, END. `begins`: without the blank
        that decoders leave out before a text. Bytes that are no UTF-8 write U+FFFD, as in the text that is decoded."""
        ended = bool(ids) and ids[-1] in self.stops
        pieces = [self._bytes[number] for number in (ids[:-1] if ended else ids)]
        if begins and self._drops_blank and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        return [*_as_text(pieces), END] if ended else _as_text(pieces)


def _byte_level() -> dict[str, int]:
    """Return the byte of each character of byte-level tokens: printable Latin-1 is itself, U+0100 and so on the
    others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _sentence_piece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(BLANK, " ").encode()


def _as_text(pieces: list[bytes]) -> list[bytes]:
    """Return the pieces with U+FFFD for each run of bytes that a decoder replaces, in the piece where it begins."""
    whole, start, runs = b"".join(pieces), 0, []
    while True:
        try:
            whole[start:].decode()
            break
        except UnicodeDecodeError as error:
            runs.append((start + error.start, start + error.end))
            start = runs[-1][1]
    if not runs:
        return pieces
    each = [whole[i : i + 1] for i in range(len(whole))]
    for first, last in runs:
        each[first:last] = ["\ufffd".encode(), *[b""] * (last - first - 1)]
    edges = list(accumulate(map(len, pieces), initial=0))
    return [b"".join(each[first:last]) for first, last in pairwise(edges)]


def text_of(pieces: Sequence[bytes]) -> str:
    """Return the text of an answer, without an END."""
    return b"".join(pieces).removesuffix(END).decode()


def common_spans(student: Sequence[bytes], teacher: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return for each token the number of its span, from 1 on, and 0 for none: int64 [tokens] of both sides.

    A span is the shortest text that begins and ends where tokens of both do. The first difference of the two texts ends
    the last span, since models that have read different texts are not compared. Without END, what is behind the last
    boundary before the end of the student's text has none: the teacher's token there may be a longer one.
    """
    ours, theirs = b"".join(student), b"".join(teacher)
    both = enumerate(zip(ours, theirs, strict=False))
    same = next((at for at, (one, two) in both if one != two), min(len(ours), len(theirs)))
    if not ours.endswith(END):
        same = min(same, len(ours) - 1)
    ends = [np.cumsum([len(piece) for piece in side], dtype=np.int64) for side in (student, teacher)]
    common = np.intersect1d(*ends)
    common = common[(common > 0) & (common <= same)]
    numbers = (np.searchsorted(common, side) + 1 for side in ends)
    return tuple(np.where(side <= len(common), side, 0) for side in numbers)


class OtherTokenizer(NamedTuple):
    """A teacher's tokenizer that is not the student's."""

    tokenizer: PreTrainedTokenizerBase
    student: TokenBytes
    teacher: TokenBytes
    longest: int  # tokens of a row of the teacher's

    def encoded(self, answers: Sequence[Sequence[int]], before: Sequence[int]) -> list[SpannedAnswer]:
        """Encode the texts of a student's answers behind so many tokens: the first tokens, as many as have room."""
        pieces = [self.student.pieces(ids, begins=True) for ids in answers]
        texts = encode_behind(self.tokenizer, [text_of(own) for own in pieces])
        spanned = []
        for own, ids, length in zip(pieces, texts, before, strict=True):
            ids = ([*ids, self.teacher.end] if own and own[-1] == END else ids)[: self.longest - length]
            spanned.append(SpannedAnswer(ids, *common_spans(own, self.teacher.pieces(ids))))
        return spanned


class SpannedAnswer(NamedTuple):
    """An answer in the teacher's tokens, and the span of each token of the student's and of the teacher's."""

    tokens: list[int]
    spans: np.ndarray
    teacher_spans: np.ndarray


def other_tokenizer(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, longest: int) -> OtherTokenizer:
    return OtherTokenizer(teacher, TokenBytes(student), TokenBytes(teacher), longest)
