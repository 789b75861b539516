"""The messages of a plan without sending: a rank lays what others need into host memory, and those who need it read it,
by MPI's one-sided calls (`refit.transport=mpi_window`).

Ranks that need the same read the same. All ranks meet twice: when everything is there, and when all have read it. A
rank that has failed comes too, and what it laid out is read in vain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aligner.cluster.window import Window
from aligner.engines.base import PlacingEngine
from aligner.refit.changes import Head
from aligner.refit.plan import Message, Plan

if TYPE_CHECKING:
    from aligner.refit.exchange import Exchange

LINE = 64  # bytes: slots, and the messages in them, begin at multiples of it


def slots(plan: Plan) -> tuple[dict[tuple[int, int], int], dict[int, int]]:
    """Where each message lies in its source's memory, by source and `id` of the parts, a head of LINE bytes before it;
    and how much memory each source needs. `plan_refit` makes one object of equal parts."""
    starts: dict[tuple[int, int], int] = {}
    ends: dict[int, int] = defaultdict(int)
    for message in (m for messages in plan.rounds for m in messages):
        key = message.source, id(message.parts)
        if key not in starts:
            starts[key] = ends[message.source]
            ends[message.source] += LINE + -(-message.bytes // LINE) * LINE
    return starts, ends


class Pull:
    """Called like an `Exchange`, by it. Collective over all ranks of the job, also to make."""

    def __init__(self, exchange: Exchange):
        starts, ends = slots(exchange.plan)
        own: dict[int, tuple[int, Message]] = {}
        self._reads: list[tuple[int, Message]] = []
        for number, (send, receive) in enumerate(exchange.steps):
            if send is not None:
                own.setdefault(starts[send.source, id(send.parts)], (number, send))
            if receive is not None:
                self._reads.append((starts[receive.source, id(receive.parts)], receive))
        self._own = own
        self._pinned = exchange.device.type == "cuda"
        self._memory = self._host(ends[exchange.rank])
        self._window = Window(self._memory.numpy())

    def _host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def __call__(self, exchange: Exchange, parameters: Mapping[str, Tensor], engine: PlacingEngine | None) -> None:
        """Raises RuntimeError or TimeoutError when another rank is gone or too late."""
        self._lay_out(exchange, parameters)
        self._window.meet(exchange.timeout_s)
        self._read(exchange, engine)
        self._window.meet(exchange.timeout_s)

    def _lay_out(self, exchange: Exchange, parameters: Mapping[str, Tensor]) -> None:
        largest = max((message.bytes for _, message in self._own.values()), default=0)
        room = torch.empty(largest, dtype=torch.uint8, device=exchange.device) if self._pinned else None
        for start, (number, message) in self._own.items():
            slot = self._memory[start + LINE :][: message.bytes]
            packed = slot if room is None else room[: message.bytes]
            head, data = exchange.pack(number, message, packed.view(exchange.wire), parameters)
            if data.data_ptr() != slot.data_ptr():
                slot[: head.bytes].copy_(data)
            self._memory[start:][: 8 * len(head)].view(torch.int64).copy_(torch.tensor(head))

    def _read(self, exchange: Exchange, engine: PlacingEngine | None) -> None:
        largest = max((message.bytes for _, message in self._reads), default=0)
        buffers, told = [self._host(largest) for _ in range(2)], torch.empty(len(Head._fields), dtype=torch.int64)
        before: tuple[Message, Head, Tensor] | None = None
        for turn, (start, message) in enumerate(self._reads):
            self._window.wait(self._get(message.source, start, told.view(torch.uint8)), exchange.timeout_s)
            head = Head(*told.tolist())
            into = buffers[turn % 2][: head.bytes]
            coming = self._get(message.source, start + LINE, into)
            if before is not None:
                exchange.unpack(*before, engine)
            self._window.wait(coming, exchange.timeout_s)
            before = message, head, into.to(exchange.device)
        if before is not None:
            exchange.unpack(*before, engine)

    def _get(self, rank: int, start: int, into: Tensor):
        return self._window.get(rank, start, into.numpy())
