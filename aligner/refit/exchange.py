"""Run a refit plan: what a rank holds itself is copied once, straight into its engine; the rest travels in buckets.

Two messages to send and two to receive are on the way at most, in buffers that are given back at the end: while one is
on the wire the next is packed and the one before unpacked. A rank that fails goes on until its peers have what they
wait for (and the commit then fails everywhere); a rank that is gone or stuck is waited for no longer than the time
limit.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.engines.base import PlacingEngine
from aligner.errors import RefitError
from aligner.models.shards import aligned, copy_elements
from aligner.refit.plan import Message, Part, Plan


@dataclass
class Exchange:
    """This rank's part of `plan`, a list of steps found once. `wire` is the dtype of what travels."""

    plan: Plan
    rank: int
    device: torch.device
    wire: torch.dtype
    timeout_s: float
    group: dist.ProcessGroup | None = None
    lasting: bool = field(default=True, init=False)  # parameters stay where they are from one run to the next
    cause: str = field(default="", init=False)  # what went wrong here first

    def __post_init__(self) -> None:
        self._steps = list(self.plan.steps(self.rank))
        self._views: dict[
            Part, tuple[tuple[int, int], Tensor, Tensor]
        ] = {}  # of local parts: addresses, target, source
        trainer, rank = self.plan.trainer, self.rank
        self._inside = trainer.replica_of(rank) is not None
        self._tensor_rank = trainer.tensor_rank(rank) if self._inside else 0
        self._expert_rank = trainer.expert_rank(rank) if self._inside else 0

    @property
    def received_bytes(self) -> int:
        """Of one run, from other ranks."""
        return sum(message.bytes for _, message in self._steps if message is not None)

    @property
    def copied_bytes(self) -> int:
        """Of one run, from this rank's trainer to this rank's engine."""
        return sum(self._numel(part) for part in self.plan.local.get(self.rank, ())) * self.wire.itemsize

    @property
    def largest_share_bytes(self) -> int:
        """Of one run, the most that any rank receives."""
        return self.plan.largest_share_bytes()

    @property
    def buffer_bytes(self) -> int:
        """Held while the messages of one run travel."""
        return 2 * sum(map(self._largest_bytes, (0, 1)))

    def _largest_bytes(self, side: int) -> int:
        """Of a message to send (side 0) or to receive (1)."""
        return max((step[side].bytes for step in self._steps if step[side] is not None), default=0)

    def __call__(self, parameters: Mapping[str, Tensor], engine: PlacingEngine | None, cause: str = "") -> None:
        """`parameters`: canonical name -> this rank's shard, empty on a rank without the trainer. With a `cause` its
        engine is left alone, and the others get what they wait for. Collective.

        Failures of this rank's trainer or engine are kept in `cause`: raising here would leave the others waiting.
        Raises RefitError if the others cannot be reached.
        """
        self.cause = cause
        for part in self.plan.local.get(self.rank, ()):
            assert engine is not None, f"rank {self.rank} is to fill an engine that it does not have"
            self._copy(part, parameters, engine)
        if self._steps:
            self._travel(parameters, engine)

    def commit(self) -> None:
        """A run has succeeded on every rank, which the next one need not know."""

    def source(self, part: Part, parameters: Mapping[str, Tensor]) -> Tensor:
        """A part of a Hugging Face tensor as a view into this rank's shard."""
        trainer, tensor = self.plan.trainer, self.plan.tensors[part.tensor]
        first, _ = tensor.interval(trainer.tensor, self._tensor_rank) if tensor.sharded else (0, 0)
        experts = tensor.spec.shape[0] // trainer.expert * self._expert_rank if tensor.spec.experts else 0
        return tensor.view(parameters[tensor.spec.canonical].detach(), first, experts, part.start, part.stop)

    def _numel(self, part: Part) -> int:
        return (part.stop - part.start) * self.plan.tensors[part.tensor].entry_words(self.wire.itemsize)

    def _as_words(self, part: Part, x: Tensor) -> Tensor:
        """What travels of a part: its numbers, which a copy turns into `wire`, but of what stays float32 its bits."""
        return x.view(self.wire) if self.plan.tensors[part.tensor].spec.float32 else x

    def _note(self, error: Exception) -> None:
        self.cause = self.cause or str(error)

    def _copy(self, part: Part, parameters: Mapping[str, Tensor], engine: PlacingEngine) -> None:
        """From this rank's shard into its engine. Views are kept for as long as both stay where they are: for a small
        model, making them takes longer than the copy."""
        if self.cause:
            return
        try:
            tensor = self.plan.tensors[part.tensor]
            view = engine.place(tensor.name, part.start, part.stop)
            if view is None:
                return
            if not self.lasting:
                copy_elements(view, self.source(part, parameters))
                return
            where = view.data_ptr(), parameters[tensor.spec.canonical].data_ptr()
            known = self._views.get(part)
            if known is None or known[0] != where:
                known = self._views[part] = where, *aligned(view, self.source(part, parameters))
            known[1].copy_(known[2], non_blocking=True)
        except (RefitError, RuntimeError) as error:
            self._note(error)

    def _place(self, part: Part, engine: PlacingEngine, block: Tensor) -> None:
        if self.cause:
            return
        try:
            view = engine.place(self.plan.tensors[part.tensor].name, part.start, part.stop)
            if view is not None:
                copy_elements(self._as_words(part, view), block)
        except (RefitError, RuntimeError) as error:
            self._note(error)

    # ---- the wire

    def _travel(self, parameters: Mapping[str, Tensor], engine: PlacingEngine | None) -> None:
        sending, receiving = map(self._buffers, (0, 1))
        before: tuple[list[dist.Work], Message | None, Tensor] | None = None
        try:
            for turn, (send, receive) in enumerate(self._steps):
                out, into = sending[turn % 2], receiving[turn % 2]
                operations = []
                if receive is not None:
                    operations.append(dist.P2POp(dist.irecv, self._bytes(into, receive), receive.source, self.group))
                if send is not None:
                    self._pack(send, out, parameters)
                    operations.append(dist.P2POp(dist.isend, self._bytes(out, send), send.target, self.group))
                works = dist.batch_isend_irecv(operations)
                if before is not None:
                    self._arrive(*before, engine)
                before = works, receive, into
            if before is not None:
                self._arrive(*before, engine)
        except RuntimeError as error:  # of torch.distributed: a peer is gone or too late
            told = str(error).splitlines()[0]
            peers = {m.target for m, _ in self._steps if m} | {m.source for _, m in self._steps if m}
            one_of = ", ".join(map(str, sorted(peers)))
            lost = f"a rank (one of {one_of}) has ended, or does not answer within refit.timeout_s={self.timeout_s:g}"
            raise RefitError(self.cause or f"weights did not arrive: {lost} ({told})") from error

    def _buffers(self, side: int) -> list[Tensor]:
        numel = -(-self._largest_bytes(side) // self.wire.itemsize)
        return [torch.empty(numel, dtype=self.wire, device=self.device) for _ in range(2)]

    def _bytes(self, buffer: Tensor, message: Message) -> Tensor:
        return buffer[: message.bytes // self.wire.itemsize].view(torch.uint8)

    def _pack(self, message: Message, buffer: Tensor, parameters: Mapping[str, Tensor]) -> None:
        at = 0
        for part in message.parts:
            size = self._numel(part)
            if not self.cause:
                try:
                    copy_elements(buffer[at : at + size], self._as_words(part, self.source(part, parameters)))
                except RuntimeError as error:
                    self._note(error)
            at += size

    def _arrive(
        self, works: list[dist.Work], message: Message | None, buffer: Tensor, engine: PlacingEngine | None
    ) -> None:
        limit = datetime.timedelta(seconds=self.timeout_s)
        for work in works:
            work.wait(limit)
        if message is None:
            return
        assert engine is not None, f"rank {self.rank} has no engine for what it receives"
        at = 0
        for part in message.parts:
            size = self._numel(part)
            self._place(part, engine, buffer[at : at + size])
            at += size
