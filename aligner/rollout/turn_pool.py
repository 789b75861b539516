"""Turns for an engine that admits prompts between its decode steps: no trajectory waits for another one's tool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field

from aligner.engines.native.schedule import PromptPool, PromptRequest
from aligner.ops.packing.turns import Turn
from aligner.rollout.sample_state import SampleState, by_prompt


@dataclass
class TurnPool(PromptPool):
    """A pool of turns. `take_result` takes the answer of a sample's tools, `take_response` the engine's response. A
    sample is open until it has a `stop`, and has `asked` while its tools work.

    `counted`: the order of samples depends on their numbers alone, never on the time of an answer. While half of the
    open samples, or a full batch of them, are with the engine, it continues these. Otherwise the sample that has
    waited longest continues, and its tools are waited for if necessary. In a window, `waiting` continues from the
    window before.
    """

    ready: list[SampleState]
    take_result: Callable[[SampleState], None]
    take_response: Callable[[SampleState, list[int], list[float], bool], None]
    seed: Callable[[SampleState], int]
    counted: bool
    windowed: bool = False
    taken: list[tuple[SampleState, int]] = field(default_factory=list)  # sample and turn of each row of the engine
    asked: list[tuple[int, int] | None] = field(default_factory=list)  # what each row gives `finished`: its number
    waiting: list[SampleState] = field(default_factory=list)  # for tools, in the order in which they were asked
    begun: dict[int, Turn] = field(default_factory=dict)  # the turns so far of rows that had paused

    in_turns = True

    def wants(self, active: int, slots: int) -> bool:
        """Return whether a prompt is ready. If there is nothing else to do, wait for the first tool's answer."""
        if self.counted:
            while self.waiting and self._few(active + len(self.ready), slots):
                self._take_results(self.waiting[:1])
            return bool(self.ready)
        self._listen()
        while not (active or self.ready) and self.waiting:
            wait([state.asked for state in self.waiting if state.asked is not None], return_when=FIRST_COMPLETED)
            self._listen()
        return bool(self.ready)

    def _few(self, busy: int, slots: int) -> bool:
        return busy < slots and busy < len(self.waiting)

    def take(self) -> list[PromptRequest]:
        together, self.ready = by_prompt(self.ready), []
        for state in (state for same in together for state in same):
            row = len(self.taken)
            self.asked.append((row, 0))
            self.taken.append((state, len(state.turns)))
            if state.paused_tokens:
                self.begun[row] = state.begun
        firsts = [same[0] for same in together]
        seeds = [[self.seed(state) for state in same] for same in together]
        return [PromptRequest(p.input_tokens, own, len(p.paused_tokens)) for p, own in zip(firsts, seeds, strict=True)]

    def finished(self, number: int, index: int, tokens: list[int], logprobs: list[float], stopped: bool) -> None:
        state = self.taken[number][0]
        self.take_response(state, tokens, logprobs, stopped)
        if state.open:
            self.waiting.append(state)

    def may_continue(self, row: int) -> bool:
        state, turn = self.taken[row]
        return state.open and turn == len(state.turns) - 1

    def least(self, rows: Sequence[int]) -> int:
        """Return a row that does not continue; else by counts the last one, because those before it continue before
        it."""
        past = [row for row in rows if not self.may_continue(row)]
        return past[0] if past else rows[-1 if self.counted else 0]

    def _listen(self) -> None:
        self._take_results([state for state in self.waiting if state.asked is not None and state.asked.done()])

    def _take_results(self, states: list[SampleState]) -> None:
        self.waiting = [state for state in self.waiting if state not in states]
        for state in states:
            self.take_result(state)
            if state.open:
                self.ready.append(state)
