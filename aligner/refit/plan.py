"""Who sends which part of which tensor to whom, and when. Pure: layouts and tensors in, transfers out; the same on
every rank.

A rank of the trainer holds shards of canonical parameters, a rank of an engine shards of Hugging Face tensors. Each
part of an engine's shard comes from one trainer's shard: from this very rank where it holds it (no wire, no bucket),
else from the rank of its own replica of the trainer, else from the holder that has least to send. What one rank sends
another goes in messages of at most `bucket_bytes`, and messages in rounds in which a rank sends one and receives one,
so that buffers are few and their size is known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from aligner.errors import LayoutError
from aligner.models.shards import HfTensor

MESSAGES, FLOOR_BYTES = 8, 1 << 20  # at least so many messages for a pair of ranks, if they are no smaller than that


@dataclass(frozen=True)
class TrainerGrid:
    """Ranks of the trainer, fastest first: tensor, context, data, pipeline (as `megatron.groups.build_layout`)."""

    layers: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1  # of the context x data ranks, so many neighbours share the experts
    first: int = 0  # its lowest global rank

    @property
    def size(self) -> int:
        return self.tensor * self.replicas * self.pipeline

    @property
    def replicas(self) -> int:
        """Ranks of one pipeline stage with the same tensor shard, if there are no experts."""
        return self.context * self.data

    def rank(self, stage: int, replica: int, tensor_rank: int) -> int:
        return self.first + (stage * self.replicas + replica) * self.tensor + tensor_rank

    def replica_of(self, rank: int) -> int | None:
        inside = 0 <= rank - self.first < self.size
        return (rank - self.first) // self.tensor % self.replicas if inside else None

    def tensor_rank(self, rank: int) -> int:
        return (rank - self.first) % self.tensor

    def expert_rank(self, rank: int) -> int:
        return (rank - self.first) // self.tensor % self.replicas % self.expert

    def stages(self, tensor: HfTensor) -> tuple[int, ...]:
        """Stages that send a tensor: of a tied embedding the first, not the copy on the last."""
        name, last = tensor.spec.canonical, self.pipeline - 1
        if name.startswith("decoder.layers."):
            return (int(name.split(".")[2]) // (self.layers // self.pipeline),)
        if name.startswith("embedding."):
            return (0,)
        return (last,)


@dataclass(frozen=True)
class EngineGrid:
    """Ranks with an engine, replica after replica of `tensor` ranks each. They may be the trainer's or others."""

    ranks: tuple[int, ...]
    tensor: int = 1

    def __post_init__(self) -> None:
        if len(self.ranks) % self.tensor:
            expected = f"a divisor of the {len(self.ranks)} ranks with an engine"
            raise LayoutError("engine.tensor_parallel", self.tensor, expected)


@dataclass(frozen=True, slots=True)
class Part:
    """[start, stop) along the axis of a tensor, as it lies in the shard of a trainer's tensor rank."""

    tensor: int  # number in the list of tensors
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Message:
    source: int
    target: int
    parts: tuple[Part, ...]
    bytes: int


@dataclass(frozen=True)
class Plan:
    tensors: tuple[HfTensor, ...]
    trainer: TrainerGrid
    engine: EngineGrid
    local: dict[int, tuple[Part, ...]]  # rank -> what it copies to its own engine
    rounds: tuple[tuple[Message, ...], ...]  # in each a rank sends at most one message and receives at most one
    owned: dict[int, tuple[Part, ...]]  # rank -> parts it answers for: every element of the model once, over all ranks

    def steps(self, rank: int) -> Iterator[tuple[Message | None, Message | None]]:
        """(message to send, message to receive) of every round in which `rank` has one."""
        for messages in self.rounds:
            send = next((m for m in messages if m.source == rank), None)
            receive = next((m for m in messages if m.target == rank), None)
            if send is not None or receive is not None:
                yield send, receive

    def largest_share_bytes(self) -> int:
        """The most that any rank receives."""
        shares: dict[int, int] = defaultdict(int)
        for message in (m for messages in self.rounds for m in messages):
            shares[message.target] += message.bytes
        return max(shares.values(), default=0)

    def bytes_between_ranks(self) -> int:
        return sum(message.bytes for messages in self.rounds for message in messages)


@lru_cache(maxsize=8)
def plan_refit(
    trainer: TrainerGrid, engine: EngineGrid, tensors: tuple[HfTensor, ...], item_bytes: int, bucket_bytes: int
) -> Plan:
    """`item_bytes`: of one element on its way. Raises LayoutError if a layout cannot share a tensor."""
    if trainer.layers % trainer.pipeline:
        raise LayoutError("parallel.pipeline", trainer.pipeline, f"a divisor of {trainer.layers} layers")
    local: dict[int, list[Part]] = defaultdict(list)
    owned: dict[int, list[Part]] = defaultdict(list)
    wire: dict[tuple[int, int], list[Part]] = defaultdict(list)
    holders = _Holders(trainer)
    for number, tensor in enumerate(tensors):
        for shard in range(trainer.tensor if tensor.sharded else 1):
            low, high = tensor.interval(trainer.tensor, shard)
            if low == high:
                continue
            ranks = holders(tensor, shard)
            owned[ranks[0]].append(Part(number, low, high))
            for place, target in enumerate(engine.ranks):
                start, stop = tensor.interval(engine.tensor, place % engine.tensor)
                start, stop = max(start, low), min(stop, high)
                if start >= stop:
                    continue
                source = holders.choose(ranks, target, (stop - start) * tensor.entry_numel)
                (local[target] if source == target else wire[source, target]).append(Part(number, start, stop))
    messages = []
    for (source, target), parts in sorted(wire.items()):
        total = sum((part.stop - part.start) * tensors[part.tensor].entry_numel for part in parts) * item_bytes
        limit = min(bucket_bytes, max(FLOOR_BYTES, -(-total // MESSAGES)))  # one is packed while another travels
        messages += enumerate(_messages(source, target, parts, tensors, item_bytes, limit))
    frozen = [{rank: tuple(parts) for rank, parts in found.items()} for found in (local, owned)]
    return Plan(tensors, trainer, engine, frozen[0], _rounds(messages), frozen[1])


class _Holders:
    """Which ranks hold a shard, and which of them sends it."""

    def __init__(self, trainer: TrainerGrid):
        self.trainer = trainer
        self._known: dict[tuple, tuple[int, ...]] = {}
        self._load: dict[int, int] = defaultdict(int)  # elements to send

    def __call__(self, tensor: HfTensor, shard: int) -> tuple[int, ...]:
        trainer, spec = self.trainer, tensor.spec
        share = -1
        if spec.experts:
            share = tensor.expert // (spec.shape[0] // trainer.expert)
        key = (trainer.stages(tensor), shard if tensor.sharded else -1, share)
        if key not in self._known:
            shards = [shard] if tensor.sharded else range(trainer.tensor)
            self._known[key] = tuple(
                trainer.rank(stage, replica, tensor_rank)
                for stage in key[0]
                for replica in range(trainer.replicas)
                if share in (-1, replica % trainer.expert)
                for tensor_rank in shards
            )
        return self._known[key]

    def choose(self, ranks: tuple[int, ...], target: int, numel: int) -> int:
        if target in ranks:
            return target
        trainer, home = self.trainer, self.trainer.replica_of(target)
        near = [] if home is None else [r for r in ranks if trainer.replica_of(r) == home]
        source = min(near or ranks, key=lambda rank: (self._load[rank], rank))
        self._load[source] += numel
        return source


def _messages(
    source: int, target: int, parts: Sequence[Part], tensors: Sequence[HfTensor], item_bytes: int, bucket_bytes: int
) -> Iterator[Message]:
    """Parts in order; one that does not fit whole is cut at its quantum. A quantum larger than a bucket goes alone."""
    found: list[Part] = []
    filled = 0
    for part in parts:
        tensor, start = tensors[part.tensor], part.start
        quantum, entry_bytes = tensor.quantum, tensor.entry_numel * item_bytes
        while start < part.stop:
            fits = (bucket_bytes - filled) // (entry_bytes * quantum) * quantum
            whole = (part.stop - start) * entry_bytes <= bucket_bytes  # not cut: it waits for the next bucket
            if fits < min(part.stop - start, quantum) or (whole and fits < part.stop - start):
                if found:
                    yield Message(source, target, tuple(found), filled)
                    found, filled = [], 0
                    continue
                fits = max(fits, quantum)
            stop = min(part.stop, start + fits)
            found.append(Part(part.tensor, start, stop))
            filled += (stop - start) * entry_bytes
            start = stop
    if found:
        yield Message(source, target, tuple(found), filled)


def _rounds(messages: list[tuple[int, Message]]) -> tuple[tuple[Message, ...], ...]:
    """Every message in the first round in which its two ranks are free, neighbours first: with equal shares each round
    is a rotation, in which every rank sends and receives."""
    ranks = {rank for _, m in messages for rank in (m.source, m.target)}
    world = max(ranks, default=0) + 1
    sends: dict[int, int] = defaultdict(int)
    receives: dict[int, int] = defaultdict(int)
    rounds: list[list[Message]] = []
    for _, message in sorted(messages, key=lambda x: (x[0], (x[1].target - x[1].source) % world, x[1].source)):
        turn = max(sends[message.source], receives[message.target])
        sends[message.source] = receives[message.target] = turn + 1
        while len(rounds) <= turn:
            rounds.append([])
        rounds[turn].append(message)
    return tuple(tuple(found) for found in rounds)


def buckets(sizes_bytes: Sequence[int], limit_bytes: int) -> list[range]:
    """Consecutive tensors whose bytes sum to at most `limit_bytes`; a larger tensor is a bucket of its own."""
    parts, start, total = [], 0, 0
    for i, size in enumerate(sizes_bytes):
        if i > start and total + size > limit_bytes:
            parts.append(range(start, i))
            start, total = i, 0
        total += size
    if start < len(sizes_bytes):
        parts.append(range(start, len(sizes_bytes)))
    return parts
