"""Exchange between ranks that train and those that only generate (`engine.ranks`). The latter are rehearsed after rank
0, and execute its orders. A rank that trains does not hear them: it gets answers without errors.

Patches that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from aligner.errors import AlignerError
from aligner.rehearse.collectives import Collectives, MessageLog

JOB = "job"  # name of the group of all ranks


def install(collectives: Collectives) -> None:
    """Install the patches, after `program.install`."""
    _orders(collectives)
    _answers(collectives)
    _requests(collectives)
    _refit()


def _orders(collectives: Collectives) -> None:
    from aligner.builders import job
    from aligner.engines.bridge import CAUSE

    class Orders(dist.HashStore):
        """The job's store: values of rank 0 are heard, and every awaited rank has come."""

        def __init__(self, messages: MessageLog):
            super().__init__()
            self._messages = messages

        def set(self, key: str, value: Any) -> None:
            self._messages.send(key, value)

        def get(self, key: str) -> Any:
            return self._messages.receive(key)

        def check(self, keys: list[str]) -> bool:
            return CAUSE not in keys

    split = job.split_world

    def split_world(last: int) -> tuple[dist.ProcessGroup, dist.Store, Any]:
        everyone, _, seal = split(last)
        collectives.call(everyone, JOB)
        assert collectives.messages is not None
        return everyone, Orders(collectives.messages), seal

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

    def gather(self: Bridge, answer: Any) -> list[Any]:
        """Return this rank's answer, or a guess, for every rank."""
        collectives.wait(self.group, "answer")
        if answer is not None and answer.error:
            raise AlignerError(f"{answer.error}: {answer.text}")
        return [answer or Answer("", "", version, 0, value)] * self.group.size()

    Bridge.begin = lambda self: None  # no heartbeat is missed
    Bridge.order, Bridge._gather, Refit._trainer_checksums = ordered, gather, noted


def _requests(collectives: Collectives) -> None:
    from aligner.engines.native.fleet import Fleet, FleetEngine, Replicated, SeededPrompt
    from aligner.rollout.sample_generator import SampleGenerator
    from aligner.types import STOP, Generations, SeedLists, TokenLists

    gather, deliver = Fleet.gather, Fleet.deliver
    count = 0  # of all ranks' requests, if known

    def counted(asks: Any) -> Any:
        """Wrap `asks`: a rank asks at least one request, and there may be fewer requests than ranks."""

        def asked(self: SampleGenerator, requests: Sequence, *others: Any, **named: Any) -> Any:
            nonlocal count
            count = len(requests) * (dist.get_world_size() // self.peers.size())
            groups = asks(self, requests, *others, **named)
            count = 0
            return groups

        return asked

    def gathered(self: Fleet, prompts: TokenLists, seeds: SeedLists, begun: Any = None) -> list[SeededPrompt]:
        """Return to an engine the requests of rank 0, once for every rank that trains."""
        gather(self, [], [])
        messages = collectives.messages
        assert messages is not None
        if self.rank == 0:
            messages.send("requests", (prompts, seeds, count or len(prompts) * self.first))
        if self.rank < self.first:
            return []
        prompts, seeds, every = messages.receive("requests")
        pairs = list(zip(prompts, seeds, strict=True))
        return [SeededPrompt(i * self.first // every, i, *pairs[i % len(pairs)]) for i in range(every)]

    def delivered(self: Fleet, own: Any, generations: Generations, wanted: list[int], *others: Any) -> Generations:
        """Return as many rows of one token as were asked for, since nothing is delivered."""
        delivery, rows = deliver(self, own, generations, [], *others), sum(wanted)
        one, zeros = torch.ones(rows, dtype=torch.int64), torch.zeros(rows, 1)
        full = None if delivery.full_logprobs is None else zeros.clone()
        return replace(
            delivery,
            tokens=one[:, None].clone(),  # rollouts in flight are stored
            lengths=one,
            logprobs=zeros,
            finish_reason=one * STOP,
            full_logprobs=full,
            routing=None,
        )

    Fleet.gather, Fleet.deliver = gathered, delivered
    for name in ("__call__", "advance"):
        setattr(SampleGenerator, name, counted(getattr(SampleGenerator, name)))
    FleetEngine._generate_share = Replicated._generate_share  # no other rank takes or gives chunks


def _refit() -> None:
    from aligner.refit import serve, transfer
    from aligner.refit.exchange import Exchange

    fail_together, note = transfer.fail_together, Exchange._note
    errors: list[Exception] = []

    def noted(self: Exchange, error: Exception) -> None:
        errors.append(error)
        note(self, error)

    def raise_own(cause: str, group: dist.ProcessGroup | None = None) -> None:
        """Raise this rank's error here, with its source line, as other ranks do not hear of it."""
        if cause:
            raise AlignerError(cause) from next(iter(errors), None)
        fail_together(cause, group)

    Exchange._note, serve.fail_together, transfer.fail_together = noted, raise_own, raise_own
