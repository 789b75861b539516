"""Trajectories that pause after a window of decode steps and go on with newer weights (`rollout/clock.py`).

The ranks that generate play them: of a group always the same rank, where its environments stay as they are while it
pauses. The trainer's ranks have the rest of what they are (`rollout/bank.py`); with that any rank can go on, and makes
an environment anew out of the questions that it was asked. Turns are admitted by counts (`Turns.counted`), of decode
steps alone: what waits for its tools when a window ends waits in the next one, behind those that have waited longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist

from aligner.answers import Answer, AnswerLog
from aligner.engines.native.remote import RemoteEngine
from aligner.environments.pool import Session
from aligner.errors import EngineError
from aligner.ops.packing.rows import column
from aligner.ops.reduce import gathered
from aligner.rollout.groups import Groups
from aligner.rollout.play import Play, joined_rows
from aligner.rollout.requests import Request
from aligner.rollout.sharing import raised_together
from aligner.rollout.turns import TurnGenerator


@dataclass
class PausingGenerator(TurnGenerator):
    _paused: dict[str, tuple[Session, Future[Answer] | None]] = field(default_factory=dict)  # here, by its key
    _logs: dict[int, AnswerLog] = field(default_factory=dict)  # of rollouts under way

    def fresh(self, request: Request, number: int) -> list[Play]:
        """As `Generator.fresh`."""
        return [self._play(number, i, request) for i in range(len(request.seeds))]

    def go_on(self, plays: Sequence[Sequence[Play]]) -> Callable[[], list[Play]]:
        """As `Generator.go_on`, by `window` of ranks that only generate."""
        assert isinstance(self.engine, RemoteEngine)
        with raised_together(EngineError):
            answer = self.engine.play([play for same in self._mine(plays) for play in same])
        return partial(self._gone_on, answer)

    def _gone_on(self, answer: Callable[[], list[list[Play]]]) -> list[Play]:
        with raised_together(EngineError):
            found = [play for part in answer() for play in part]
        return [play for part in gathered(found, self.peers) for play in part]

    def ended(self, requests: Sequence[Request], plays: Sequence[Play], version: int) -> Groups:
        """As `Generator.ended`."""
        groups = self._groups(requests, plays, version)
        rows = [joined_rows(play)[0].versions for play in plays]
        return replace(groups, generations=replace(groups.generations, versions=column(rows, torch.int64)))

    def window(self, asked: Sequence[Sequence[Play]]) -> list[list[Play]]:
        """Of what each rank of the job asks for, the groups of this one by their numbers, as far as they come in
        `engine.window` decode steps. Of a rank that only generates, which waits for no other one: the trainer's ranks
        raise what any of them raises."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        mine = [[play for play in own if play.place % ranks == rank] for own in asked]
        plays = sorted((play for own in mine for play in own), key=lambda play: (play.place, not play.said, play.index))
        self._take_up(plays)
        self._begin([play for play in plays if not play.session.asked], self.sampling)
        turns = replace(self._turns(plays, self.sampling, counted=True), windowed=True)
        self._served(turns, self.sampling)
        self._heard([play for play in plays if not play.open], self.sampling)
        self._pause(plays, turns.waiting)
        return mine

    def _take_up(self, plays: Sequence[Play]) -> None:
        """Those that paused here have their environments still; of others these are made when they are needed."""
        for rollout in self._logs.keys() - {play.rollout for play in plays}:
            self._logs.pop(rollout).close()
        for play in plays:
            if play.session.key in self._paused:
                play.session, play.asked = self._paused.pop(play.session.key)
                continue
            if play.rollout not in self._logs:
                self._logs[play.rollout] = self.pool.log.of(play.rollout)
            play.session.log = self._logs[play.rollout]
            if play.waits:
                play.asked = self.pool.ask_again(play.session)

    def _pause(self, plays: Sequence[Play], waiting: Sequence[Play]) -> None:
        for play in plays:
            play.waits = 0
            if play.open:
                self._paused[play.session.key] = play.session, play.asked
            else:
                self.pool.forget(play.session)
        for place, play in enumerate(waiting, 1):
            play.waits = place
