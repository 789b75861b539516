"""Turns for an engine that admits prompts between its decode steps: nobody waits for another trajectory's tool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field

from aligner.engines.native.schedule import PromptPool, Wanted
from aligner.ops.packing.turns import Turn
from aligner.rollout.play import Play, by_prompt


@dataclass
class Turns(PromptPool):
    """`hear` takes the answer of a play's tools, `say` what the engine has said. A play is open until it has a `stop`;
    in `asked` as long as its tools work.

    `counted`: which play goes on when depends on their numbers alone, never on when an answer comes. As long as half of
    the open plays are with the engine, or as many as it takes, it goes on with these; then the play that has waited the
    longest is heard, and waited for where its tools are late. In a window, `waiting` goes on from the one before."""

    ready: list[Play]
    hear: Callable[[Play], None]
    say: Callable[[Play, list[int], list[float], bool], None]
    seed: Callable[[Play], int]
    counted: bool
    windowed: bool = False
    taken: list[tuple[Play, int]] = field(default_factory=list)  # of each row of the engine, play and turn
    asked: list[tuple[int, int] | None] = field(default_factory=list)  # of each row what `finished` is told: its number
    waiting: list[Play] = field(default_factory=list)  # for tools, in the order in which they were asked
    begun: dict[int, Turn] = field(default_factory=dict)  # what rows began with, of those that had paused

    in_turns = True

    def wants(self, active: int, slots: int) -> bool:
        """Whenever a prompt is there; with nothing else to do, when the first tool has answered."""
        if self.counted:
            while self.waiting and self._few(active + len(self.ready), slots):
                self._hear(self.waiting[:1])
            return bool(self.ready)
        self._listen()
        while not (active or self.ready) and self.waiting:
            wait([play.asked for play in self.waiting if play.asked is not None], return_when=FIRST_COMPLETED)
            self._listen()
        return bool(self.ready)

    def _few(self, busy: int, slots: int) -> bool:
        return busy < slots and busy < len(self.waiting)

    def take(self) -> list[Wanted]:
        found, self.ready = by_prompt(self.ready), []
        for play in (play for same in found for play in same):
            row = len(self.taken)
            self.asked.append((row, 0))
            self.taken.append((play, len(play.turns)))
            if play.said:
                self.begun[row] = play.begun
        return [Wanted(same[0].read, [self.seed(play) for play in same], len(same[0].said)) for same in found]

    def finished(self, number: int, index: int, tokens: list[int], logprobs: list[float], stopped: bool) -> None:
        play = self.taken[number][0]
        self.say(play, tokens, logprobs, stopped)
        if play.open:
            self.waiting.append(play)

    def may_continue(self, row: int) -> bool:
        play, turn = self.taken[row]
        return play.open and turn == len(play.turns) - 1

    def least(self, rows: Sequence[int]) -> int:
        """One that does not go on any more; else by counts the last, for those before it go on before it."""
        past = [row for row in rows if not self.may_continue(row)]
        return past[0] if past else rows[-1 if self.counted else 0]

    def _listen(self) -> None:
        self._hear([play for play in self.waiting if play.asked is not None and play.asked.done()])

    def _hear(self, plays: list[Play]) -> None:
        self.waiting = [play for play in self.waiting if play not in plays]
        for play in plays:
            self.hear(play)
            if play.open:
                self.ready.append(play)
