"""Ends of answers in tokens: each is learned with the token that ends its generation, if there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from aligner.data.tokenizer import turn_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = list[int]


class AnswerEnds:
    """The stop tokens of a tokenizer; one of `closing`, by whether it calls, is added after a last answer without."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]):
        self.tokenizer, self.stops = tokenizer, frozenset(stop_ids)
        end, behind_call = turn_end(tokenizer), turn_end(tokenizer, call=True)
        ends = end, end if behind_call is None else behind_call
        self.closing = [end if end in self.stops else tokenizer.eos_token_id for end in ends]

    def cut(self, ids: Ids, calls: bool) -> Ids:
        """Return a conversation up to the stop token of its last answer, which may have `calls`.

        White space behind that is removed, or an EOS (Phi-3's), which nobody generates.
        """
        last = self._last_word(ids, 0, len(ids))
        if last >= 0 and ids[last] == self.tokenizer.eos_token_id and self.ended(ids, 0, last):
            last = self._last_word(ids, 0, last)
        if last >= 0 and ids[last] in self.stops:
            return ids[: last + 1]
        return [*ids, self.closing[calls]]

    def close(self, ids: Ids, mask: Ids, answered: bool, calls: bool) -> None:
        """Put loss on the stop token of each answer, in place.

        This is the token right behind the answer, if the template puts it there; it may open the next turn. Else it is
        `closing` behind the last answer, if the conversation ends with one (`answered`).
        """
        for start, end in list(spans(mask)):
            if self.ended(ids, start, end):
                continue
            if end < len(ids) and ids[end] in self.stops:
                mask[end] = 1
            elif answered and self._last_word(ids, end, len(ids)) < end:
                mask[end:] = [1] * (len(ids) - end + 1)
                ids.append(self.closing[calls])

    def ended(self, ids: Sequence[int], start: int, end: int) -> bool:
        """Return whether these tokens, without white space at their end, end with a stop token."""
        last = self._last_word(ids, start, end)
        return last >= start and ids[last] in self.stops

    def _last_word(self, ids: Sequence[int], start: int, end: int) -> int:
        """Return the index of the last token that is a stop token or not white space; start - 1 if there is none."""
        last = end - 1
        while last >= start and ids[last] not in self.stops and not self.tokenizer.decode([ids[last]]).strip():
            last -= 1
        return last


def spans(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each run of ones."""
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
