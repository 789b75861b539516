"""Between the ranks that train and those that only generate (`engine.ranks`). The latter are rehearsed after rank 0,
and do what it ordered. A rank that trains does not hear them: it is answered that all went well.

Patches, for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from aligner.errors import AlignerError
from aligner.rehearse.collectives import Collectives, Speech

JOB = "job"  # name of the group of all ranks


def install(collectives: Collectives) -> None:
    """After `program.install`."""
    _orders(collectives)
    _answers(collectives)
    _requests(collectives)
    _refit()


def _orders(collectives: Collectives) -> None:
    from aligner.builders import job
    from aligner.engines.bridge import CAUSE

    class Orders(dist.HashStore):
        """The job's store: what rank 0 sets is heard; whoever is waited for has come."""

        def __init__(self, speech: Speech):
            super().__init__()
            self._speech = speech

        def set(self, key: str, value: Any) -> None:
            self._speech.speak(key, value)

        def get(self, key: str) -> Any:
            return self._speech.hear(key)

        def check(self, keys: list[str]) -> bool:
            return CAUSE not in keys

    split = job.split_world

    def split_world(last: int) -> tuple[dist.ProcessGroup, dist.Store, Any]:
        everyone, _, seal = split(last)
        collectives.call(everyone, JOB)
        assert collectives.speech is not None
        return everyone, Orders(collectives.speech), seal

    job.split_world = split_world


def _answers(collectives: Collectives) -> None:
    from aligner.engines.bridge import Answer, Bridge
    from aligner.refit.transfer import Refit

    order, hashed = Bridge.order, Refit._trainer_checksums
    version, value, checksums = -1, None, {}

    def noted(self: Refit, *arguments: Any) -> dict[str, int]:
        nonlocal checksums
        checksums = hashed(self, *arguments)
        return checksums

    def ordered(self: Bridge, name: str, *arguments: Any) -> bool:
        nonlocal version, value
        if name == "refit":
            version = arguments[0]
        if name == "logprobs":
            value = torch.zeros(arguments[0].shape)
        elif name == "checksums":
            value = checksums
        return order(self, name, *arguments)

    def gather(self: Bridge, mine: Any) -> list[Any]:
        """Everybody answers what this rank does, or what this rank has to guess."""
        collectives.note(self.group, "answer", 0, "answer")
        if mine is not None and mine.error:
            raise AlignerError(f"{mine.error}: {mine.text}")
        return [mine or Answer("", "", version, 0, value)] * self.group.size()

    Bridge.begin = lambda self: None  # nobody's heart stops
    Bridge.order, Bridge._gather, Refit._trainer_checksums = ordered, gather, noted


def _requests(collectives: Collectives) -> None:
    from aligner.engines.native.fleet import Fleet, FleetEngine, Replicated, SeededPrompt
    from aligner.rollout.player import Player
    from aligner.types import STOP, Generations, SeedLists, TokenLists

    gather, deliver = Fleet.gather, Fleet.deliver
    count = 0  # of all ranks' requests, where it is known

    def counted(asks: Any) -> Any:
        """A rank asks at least one, and there may be fewer requests than ranks."""

        def asked(self: Player, requests: Sequence, *more: Any, **named: Any) -> Any:
            nonlocal count
            count = len(requests) * (dist.get_world_size() // self.peers.size())
            found = asks(self, requests, *more, **named)
            count = 0
            return found

        return asked

    def gathered(self: Fleet, prompts: TokenLists, seeds: SeedLists, begun: Any = None) -> list[SeededPrompt]:
        """To an engine: what rank 0 asks, by every rank that trains."""
        gather(self, [], [])
        speech = collectives.speech
        assert speech is not None
        if self.rank == 0:
            speech.speak("requests", (prompts, seeds, count or len(prompts) * self.first))
        if self.rank < self.first:
            return []
        prompts, seeds, every = speech.hear("requests")
        pairs = list(zip(prompts, seeds, strict=True))
        return [SeededPrompt(i * self.first // every, i, *pairs[i % len(pairs)]) for i in range(every)]

    def delivered(self: Fleet, mine: Any, generations: Generations, wanted: list[int], *more: Any) -> Generations:
        """Nothing comes; to who asks, as many rows of a token."""
        found, rows = deliver(self, mine, generations, [], *more), sum(wanted)
        one, zeros = torch.ones(rows, dtype=torch.int64), torch.zeros(rows, 1)
        full = None if found.full_logprobs is None else zeros.clone()
        return replace(
            found,
            tokens=one[:, None].clone(),  # rollouts in flight are stored
            lengths=one,
            logprobs=zeros,
            finish_reason=one * STOP,
            full_logprobs=full,
            routing=None,
        )

    Fleet.gather, Fleet.deliver = gathered, delivered
    Player.__call__, Player.go_on = counted(Player.__call__), counted(Player.go_on)
    FleetEngine._part = Replicated._part  # nobody is there to take chunks, or to take them from


def _refit() -> None:
    from aligner.refit import serve, transfer
    from aligner.refit.exchange import Exchange

    fail_together, note = transfer.fail_together, Exchange._note
    errors: list[Exception] = []

    def noted(self: Exchange, error: Exception) -> None:
        errors.append(error)
        note(self, error)

    def told(cause: str, group: dist.ProcessGroup | None = None) -> None:
        """What went wrong here is not left to other ranks, who do not hear of it, and has its source line."""
        if cause:
            raise AlignerError(cause) from next(iter(errors), None)
        fail_together(cause, group)

    Exchange._note, serve.fail_together, transfer.fail_together = noted, told, told
