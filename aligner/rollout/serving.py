"""Turns for an engine that admits prompts between its decode steps: nobody waits for another trajectory's tool."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field

from aligner.engines.native.schedule import Pool
from aligner.rollout.play import Play


@dataclass
class Turns(Pool):
    """`hear` takes the answer of a play's tools, `say` what the engine has said. A play is open until it has a `stop`;
    in `asked` as long as its tools work."""

    ready: list[Play]
    hear: Callable[[Play], None]
    say: Callable[[Play, list[int], list[float], bool], None]
    seed: Callable[[Play], int]
    taken: list[tuple[Play, int]] = field(default_factory=list)  # of each row of the engine, play and turn
    asked: list[tuple[int, int] | None] = field(default_factory=list)  # of each row what `finished` is told: its number
    waiting: list[Play] = field(default_factory=list)

    def wants(self, active: int, slots: int) -> bool:
        """Whenever a prompt is there; with nothing else to do, when the first tool has answered."""
        self._listen()
        while not (active or self.ready) and self.waiting:
            wait([play.asked for play in self.waiting if play.asked is not None], return_when=FIRST_COMPLETED)
            self._listen()
        return bool(self.ready)

    def take(self) -> list[tuple[tuple[int, ...], list[int]]]:
        found: dict[tuple[int, ...], list[Play]] = {}
        for play in self.ready:  # a prompt that samples share is read once
            found.setdefault(play.given.tokens, []).append(play)
        plays, self.ready = [play for same in found.values() for play in same], []
        self.asked += [(len(self.taken) + i, 0) for i in range(len(plays))]
        self.taken += [(play, len(play.turns)) for play in plays]
        return [(tokens, [self.seed(play) for play in same]) for tokens, same in found.items()]

    def finished(self, number: int, index: int, tokens: list[int], logprobs: list[float], stopped: bool) -> None:
        play = self.taken[number][0]
        self.say(play, tokens, logprobs, stopped)
        if play.asked is not None:
            self.waiting.append(play)

    def _listen(self) -> None:
        """In the order in which answers were asked for."""
        there = [play for play in self.waiting if play.asked is not None and play.asked.done()]
        self.waiting = [play for play in self.waiting if play not in there]
        for play in there:
            self.hear(play)
            if play.asked is not None:  # its score
                self.waiting.append(play)
            elif play.open:
                self.ready.append(play)
