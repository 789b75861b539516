"""Where answers end in tokens: each is learned with the token that ends its generation, wherever there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from aligner.data.tokenizer import turn_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = list[int]


class Ends:
    """The stop tokens of a tokenizer; `closing` is put behind a last answer that has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]):
        self.tokenizer, self.stops = tokenizer, frozenset(stop_ids)
        end = turn_end(tokenizer)
        self.closing = end if end in self.stops else tokenizer.eos_token_id

    def cut(self, ids: Ids) -> Ids:
        """A conversation up to the stop token of its last answer: without white space behind that, or an EOS (Phi-3's),
        which nobody generates."""
        last = self._last_word(ids, 0, len(ids))
        if last >= 0 and ids[last] == self.tokenizer.eos_token_id and self.ended(ids, 0, last):
            last = self._last_word(ids, 0, last)
        if last >= 0 and ids[last] in self.stops:
            return ids[: last + 1]
        return [*ids, self.closing]

    def close(self, ids: Ids, mask: Ids, answered: bool) -> None:
        """Learn the stop token of each answer, in place: the one right behind it, if the template puts it there, which
        may be what opens the next turn; else `closing` behind the last answer, where the conversation ends with one
        (`answered`)."""
        for start, end in list(spans(mask)):
            if self.ended(ids, start, end):
                continue
            if end < len(ids) and ids[end] in self.stops:
                mask[end] = 1
            elif answered and self._last_word(ids, end, len(ids)) < end:
                mask[end:] = [1] * (len(ids) - end + 1)
                ids.append(self.closing)

    def ended(self, ids: Sequence[int], start: int, end: int) -> bool:
        """Whether these tokens, but for white space, end with a stop token."""
        last = self._last_word(ids, start, end)
        return last >= start and ids[last] in self.stops

    def _last_word(self, ids: Sequence[int], start: int, end: int) -> int:
        """The place of the last token that is a stop token or no white space; start - 1 if there is none."""
        last = end - 1
        while last >= start and ids[last] not in self.stops and not self.tokenizer.decode([ids[last]]).strip():
            last -= 1
        return last


def spans(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, end) of each run of ones."""
    end = 0
    while True:
        try:
            start = mask.index(1, end)
        except ValueError:
            return
        try:
            end = mask.index(0, start)
        except ValueError:
            end = len(mask)
        yield start, end
