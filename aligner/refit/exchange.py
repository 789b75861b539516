"""Run a refit plan: what a rank holds itself is copied once, straight into its engine; the rest travels in buckets.

At most two messages to send and two to receive are under way, in buffers that are emptied at the end: while one is on
the wire, the next is packed and the one before unpacked. What lies at equal distances, as the experts of a layer, is
one copy. Views are made in the first run and kept: making them takes longer than most copies.

A rank that fails continues until its peers have their messages; the commit then fails everywhere. A rank that is gone
or stuck is waited for up to the time limit.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.engines.base import RolloutEngine
from aligner.errors import RefitError
from aligner.models.shards import aligned, copy_elements, joined
from aligner.refit.plan import Message, Plan, TensorSpan

NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass
class Exchange:
    """This rank's share of `plan`, a list of steps computed once. `wire` is the dtype of the messages. Without
    `timeout_s` ranks wait as in every collective of the group."""

    factored: ClassVar[bool] = False  # it moves whole weights
    plan: Plan
    rank: int
    device: torch.device
    wire: torch.dtype
    timeout_s: float | None = None
    group: dist.ProcessGroup | None = None
    lasting: bool = field(default=True, init=False)  # parameters keep their addresses from one run to the next
    cause: str = field(default="", init=False)  # the first error of this rank
    wire_bytes: int = field(default=0, init=False)  # received from other ranks in the last run

    def __post_init__(self) -> None:
        self.steps = list(self.plan.steps(self.rank))
        self._copies: dict[
            int, list[tuple[Tensor, Tensor]]
        ] = {}  # (target, source) by the identity of a message, 0: local
        self._places: list[tuple[int, int]] = []  # of the parameters, to which the copies belong
        self._committed = False  # the last run succeeded
        self.buffers = [[NOTHING, NOTHING], [NOTHING, NOTHING]]  # to send, to receive
        trainer, rank = self.plan.trainer, self.rank
        self._inside = trainer.replica_of(rank) is not None
        self._tensor_rank = trainer.tensor_rank(rank) if self._inside else 0
        self._expert_rank = trainer.expert_rank(rank) if self._inside else 0

    @property
    def received_bytes(self) -> int:
        """The bytes of one run that other ranks write into this rank's engine."""
        return sum(message.bytes for _, message in self.steps if message is not None)

    @property
    def copied_bytes(self) -> int:
        """The bytes of one run from this rank's trainer to this rank's engine."""
        return sum(self._numel(span) for span in self.plan.local.get(self.rank, ())) * self.wire.itemsize

    @property
    def largest_share_bytes(self) -> int:
        """The most bytes of one run that others write into a rank's engine."""
        return self.plan.largest_share_bytes()

    @property
    def buffer_bytes(self) -> int:
        """The bytes held while the messages of one run travel."""
        return 2 * sum(map(self._largest_bytes, (0, 1)))

    def _largest_bytes(self, side: int) -> int:
        """Return the bytes of the largest message to send (side 0) or to receive (1)."""
        return max((step[side].bytes for step in self.steps if step[side] is not None), default=0)

    def __call__(self, parameters: Mapping[str, Tensor], engine: RolloutEngine | None, cause: str = "") -> None:
        """Exchange the weights. `parameters`: canonical name -> this rank's shard, empty on a rank without the trainer.
        With a `cause` this rank's engine is left alone, and the others get their messages. Collective.

        Failures of this rank's trainer or engine are kept in `cause`: raising here would leave the others waiting.
        Raises RefitError if the others cannot be reached.
        """
        self.cause, self.wire_bytes = cause, 0
        if self.lasting:
            self._keep_views_of(parameters)
        if local := self.plan.local.get(self.rank, ()):
            assert engine is not None, f"rank {self.rank} is to fill an engine that it does not have"
            self._write(0, local, engine, lambda span: self.source(span, parameters))
        try:
            if self.steps:
                self._travel(parameters, engine)
        except RuntimeError as error:  # of torch.distributed: a peer is gone or too late
            raise RefitError(self.cause or self._lost(error)) from error

    def commit(self) -> None:
        """Note that a run has succeeded on every rank: the next one is like it."""
        self._committed = True

    def source(self, span: TensorSpan, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return a span of a Hugging Face tensor as a view into this rank's shard."""
        trainer, tensor = self.plan.trainer, self.plan.tensors[span.tensor]
        experts, shared = trainer.experts(tensor.spec) * self._expert_rank, tensor.sharded and not tensor.spec.experts
        first, _ = tensor.interval(trainer.tensor, self._tensor_rank) if shared else (0, 0)
        return tensor.view(parameters[tensor.spec.canonical].detach(), first, experts, span.start, span.stop)

    def _numel(self, span: TensorSpan) -> int:
        return (span.stop - span.start) * self.plan.tensors[span.tensor].entry_words(self.wire.itemsize)

    def _as_words(self, span: TensorSpan, x: Tensor) -> Tensor:
        """Return a span's numbers, which a copy turns into `wire`; of tensors that keep a dtype their bits."""
        spec = self.plan.tensors[span.tensor].spec
        return x.view(self.wire) if spec.float32 or spec.integer else x

    def _note(self, error: Exception) -> None:
        self.cause = self.cause or str(error)

    def _keep_views_of(self, parameters: Mapping[str, Tensor]) -> None:
        """Forget the copies if the last run failed, or the parameters are in other memory than before."""
        places = [(t.untyped_storage()._cdata, t.storage_offset()) for t in parameters.values()]
        if places != self._places or not self._committed:
            self._copies, self._places = {}, places
        self._committed = False

    def _copy(self, key: int, pairs: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> None:
        """Copy (target, source), which are made once if they last."""
        if not self.lasting:
            for target, source in pairs():
                copy_elements(target, source)
            return
        if key not in self._copies:
            self._copies[key] = joined([aligned(*pair) for pair in pairs()])
        for target, source in self._copies[key]:
            target.copy_(source, non_blocking=True)

    def _write(
        self,
        key: int,
        spans: Sequence[TensorSpan],
        engine: RolloutEngine,
        source: Callable[[TensorSpan], Tensor],
        bits: bool = False,
    ) -> None:
        """Write spans into the engine; `bits`: as words of a message."""
        if self.cause:
            return

        def pairs() -> Iterable[tuple[Tensor, Tensor]]:
            for span in spans:
                x, view = source(span), engine.weight_view(self._name(span), span.start, span.stop, True)
                if view is not None:
                    yield self._as_words(span, view) if bits else view, x

        try:
            again = key in self._copies and [engine.rewrite(self._name(s), s.start, s.stop, True) for s in spans]
            if not again or all(again):
                self._copy(key, pairs)
        except (RefitError, RuntimeError) as error:
            self._note(error)

    # ---- messages

    def pack(self, message: Message, buffer: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the message in `buffer`, which is large enough for it."""
        words = buffer[: message.bytes // self.wire.itemsize]
        if self.cause:
            return words

        def pairs() -> Iterable[tuple[Tensor, Tensor]]:
            blocks = words.split([self._numel(span) for span in message.parts])
            for span, block in zip(message.parts, blocks, strict=True):
                yield block, self._as_words(span, self.source(span, parameters))

        try:
            self._copy(id(message), pairs)
        except RuntimeError as error:
            self._note(error)
        return words

    def unpack(self, message: Message, words: Tensor, engine: RolloutEngine | None) -> None:
        """Write a received message into the engine."""
        assert engine is not None, f"rank {self.rank} has no engine for what it receives"
        self.wire_bytes += message.bytes
        blocks = iter(words.split([self._numel(span) for span in message.parts]))
        self._write(id(message), message.parts, engine, lambda span: next(blocks), bits=True)

    def _name(self, span: TensorSpan) -> str:
        return self.plan.tensors[span.tensor].name

    # ---- the wire

    def _travel(self, parameters: Mapping[str, Tensor], engine: RolloutEngine | None) -> None:
        sending, receiving = map(self._filled, (0, 1), self.buffers)
        sent = [NOTHING, NOTHING]  # kept while it travels
        before: tuple[list[dist.Work], Message | None, Tensor] | None = None
        for turn, (send, receive) in enumerate(self.steps):
            here = turn % 2
            if send is not None:
                sent[here] = self.pack(send, sending[here], parameters)
            into = receiving[here][: 0 if receive is None else receive.bytes // self.wire.itemsize]
            works = self._post(send, sent[here], receive, into)
            if before is not None:
                self._arrive(*before, engine)
            before = works, receive, into
        if before is not None:
            self._arrive(*before, engine)
        for buffer in (*sending, *receiving):
            buffer.untyped_storage().resize_(0)

    def _post(self, send: Message | None, data: Tensor, receive: Message | None, into: Tensor) -> list[dist.Work]:
        operations = []
        if receive is not None:
            operations.append(dist.P2POp(dist.irecv, into.view(torch.uint8), receive.source, self.group))
        if send is not None:
            operations.append(dist.P2POp(dist.isend, data.view(torch.uint8), send.target, self.group))
        return dist.batch_isend_irecv(operations) if operations else []

    def _arrive(
        self, works: list[dist.Work], message: Message | None, words: Tensor, engine: RolloutEngine | None
    ) -> None:
        limit = () if self.timeout_s is None else (datetime.timedelta(seconds=self.timeout_s),)
        for work in works:
            work.wait(*limit)
        if message is not None:
            self.unpack(message, words, engine)

    def _filled(self, side: int, buffers: list[Tensor]) -> list[Tensor]:
        """Return the buffers of a side with memory. Of kept ones the copies have views."""
        numel = -(-self._largest_bytes(side) // self.wire.itemsize)
        if buffers[0].numel() != numel:
            buffers[:] = (torch.empty(numel, dtype=self.wire, device=self.device) for _ in range(2))
        for buffer in buffers:
            buffer.untyped_storage().resize_(numel * self.wire.itemsize)
        return buffers

    def _lost(self, error: Exception) -> str:
        reason = str(error).splitlines()[0]
        peers = {m.target for m, _ in self.steps if m} | {m.source for _, m in self.steps if m}
        one_of = ", ".join(map(str, sorted(peers)))
        limit = "cluster.timeout_s" if self.timeout_s is None else f"refit.timeout_s={self.timeout_s:g}"
        lost = f"a rank (one of {one_of}) has ended, or does not answer within {limit}"
        return f"weights did not arrive: {lost} ({reason})"
