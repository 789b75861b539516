"""The transfers of a refit: who sends which span of which tensor to whom, and when. Pure: layouts and tensors in,
transfers out; the same on every rank.

A rank of the trainer holds shards of canonical parameters, a rank of an engine shards of Hugging Face tensors. Each
span of an engine's shard comes from one trainer's shard. The source is this very rank where it holds the shard (no
wire, no bucket), else the rank of its own replica of the trainer. Failing both, it is the holder that has least to
send.

One rank's spans for another go in messages of at most `bucket_bytes`. Messages go in rounds, in which a rank sends
one and receives one, so that buffers are few and their size is known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from heapq import heapify, heapreplace

from aligner.config.sections.engine import MESSAGES, message_bytes
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.stages import LayoutSizes
from aligner.errors import LayoutError
from aligner.families.rows import ParamSpec
from aligner.models.shards import HfTensor


@dataclass(frozen=True)
class TrainerGrid:
    """Ranks of the trainer, fastest first: tensor, context, data, pipeline (as `megatron.groups.build_layout`)."""

    stage_layers: tuple[Sequence[int], ...]
    tensor: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1  # neighbours among the ranks of a stage that share the experts, each of them whole
    first: int = 0  # its lowest global rank

    @classmethod
    def of(cls, model: ModelConfig, layout: LayoutSizes, data: int) -> TrainerGrid:
        return cls(model.rank_layers(layout), layout.tensor, layout.context, data, layout.expert)

    @property
    def pipeline(self) -> int:
        return len(self.stage_layers)

    @property
    def size(self) -> int:
        return self.tensor * self.replicas * self.pipeline

    @property
    def replicas(self) -> int:
        """The number of ranks of one pipeline stage with the same tensor shard."""
        return self.context * self.data

    def rank(self, stage: int, replica: int, tensor_rank: int) -> int:
        return self.first + (stage * self.replicas + replica) * self.tensor + tensor_rank

    def replica_of(self, rank: int) -> int | None:
        inside = 0 <= rank - self.first < self.size
        return (rank - self.first) // self.tensor % self.replicas if inside else None

    def tensor_rank(self, rank: int) -> int:
        return (rank - self.first) % self.tensor

    def expert_rank(self, rank: int) -> int:
        return (rank - self.first) % (self.tensor * self.replicas) % self.expert

    def shards(self, spec: ParamSpec) -> int:
        """Return the number of tensor ranks that share a parameter; experts are whole."""
        return 1 if spec.experts else self.tensor

    def experts(self, spec: ParamSpec) -> int:
        """Return the number of experts that a rank has of a parameter; 0 if it is of none."""
        return spec.shape[0] // self.expert if spec.experts else 0

    def stages(self, tensor: HfTensor) -> tuple[int, ...]:
        """Return the stages that send a tensor: of a tied embedding the first, not the copy on the last."""
        name, last = tensor.spec.canonical, self.pipeline - 1
        if name.startswith("decoder.layers."):
            layer = int(name.split(".")[2])
            return (next(stage for stage, layers in enumerate(self.stage_layers) if layer in layers),)
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
class TensorSpan:
    """Entries [start, stop) along the axis of a tensor, within the shard of a trainer's tensor rank."""

    tensor: int  # number in the list of tensors
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Message:
    source: int
    target: int
    parts: tuple[TensorSpan, ...]
    bytes: int


@dataclass(frozen=True)
class Plan:
    tensors: tuple[HfTensor, ...]
    trainer: TrainerGrid
    engine: EngineGrid
    local: dict[int, tuple[TensorSpan, ...]]  # rank -> spans that it copies to its own engine
    rounds: tuple[tuple[Message, ...], ...]  # in each a rank sends at most one message and receives at most one
    # rank -> spans that it hashes: every element of the model once, over all ranks
    owned: dict[int, tuple[TensorSpan, ...]]

    def steps(self, rank: int) -> Iterator[tuple[Message | None, Message | None]]:
        """Yield (message to send, message to receive) of every round in which `rank` has one."""
        for messages in self.rounds:
            send = next((m for m in messages if m.source == rank), None)
            receive = next((m for m in messages if m.target == rank), None)
            if send is not None or receive is not None:
                yield send, receive

    def largest_share_bytes(self) -> int:
        """Return the most bytes that any rank receives."""
        shares: dict[int, int] = defaultdict(int)
        for message in (m for messages in self.rounds for m in messages):
            shares[message.target] += message.bytes
        return max(shares.values(), default=0)


@lru_cache(maxsize=8)
def plan_refit(
    trainer: TrainerGrid,
    engine: EngineGrid,
    tensors: tuple[HfTensor, ...],
    item_bytes: int,
    bucket_bytes: int,
    messages_of_pair: int = MESSAGES,
) -> Plan:
    """Return the plan. `item_bytes`: of one element on its way. `messages_of_pair`: the least that two ranks exchange,
    where they are large. Raises LayoutError if a layout cannot share a tensor."""
    routes = _Routes(trainer, engine)
    owned: dict[int, list[TensorSpan]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        for shard in range(trainer.shards(tensor.spec) if tensor.sharded else 1):
            low, high = tensor.interval(trainer.shards(tensor.spec), shard)
            if low == high:
                continue
            key = routes.key(tensor, shard)
            owned[routes.holders(key)[0]].append(TensorSpan(number, low, high))
            parts = {}  # engine's tensor rank -> its span of this shard
            for engine_rank in range(engine.tensor):
                start, stop = tensor.interval(engine.tensor, engine_rank)
                start, stop = max(start, low), min(stop, high)
                if start < stop:
                    parts[engine_rank] = TensorSpan(number, start, stop)
            routes.send(key, parts, tensor.entry_numel)

    @cache
    def cut(parts: tuple[TensorSpan, ...]) -> list[tuple[tuple[TensorSpan, ...], int]]:
        words = sum((span.stop - span.start) * tensors[span.tensor].entry_words(item_bytes) for span in parts)
        limit = message_bytes(words * item_bytes, bucket_bytes, messages_of_pair)
        return list(_messages(parts, tensors, item_bytes, limit))

    messages = []
    for (source, target), parts in sorted(routes.wire.items()):
        messages += enumerate(Message(source, target, *cut_parts) for cut_parts in cut(tuple(parts)))
    frozen = [{rank: tuple(spans) for rank, spans in by_rank.items()} for by_rank in (routes.local, owned)]
    return Plan(tensors, trainer, engine, frozen[0], _rounds(messages), frozen[1])


Key = tuple[tuple[int, ...], int, int]  # stages, tensor shard (-1: all alike) and share of the experts (-1: none)


class _LeastLoaded:
    """A chooser of the rank that has least to send, of equals the lowest. Loads only grow: an outdated entry of the
    heap comes too early, never too late, and is then corrected."""

    def __init__(self, ranks: Sequence[int], load: Mapping[int, int]):
        self._load, self._heap = load, [(load[rank], rank) for rank in ranks]
        heapify(self._heap)

    def __call__(self) -> int:
        while True:
            known, rank = self._heap[0]
            if known == self._load[rank]:
                return rank
            heapreplace(self._heap, (self._load[rank], rank))


class _Routes:
    """The source rank of every shard for every rank with an engine. Tensors with the same holders take the same
    routes, except for choices between ranks, which are made one by one."""

    def __init__(self, trainer: TrainerGrid, engine: EngineGrid):
        self.trainer, self.engine = trainer, engine
        self.local: dict[int, list[TensorSpan]] = defaultdict(list)
        self.wire: dict[tuple[int, int], list[TensorSpan]] = defaultdict(list)
        self._load: dict[int, int] = defaultdict(int)  # elements to send
        self._holders: dict[Key, tuple[int, ...]] = {}
        self._routes: dict[tuple[Key, tuple[int, ...]], list[tuple]] = {}

    def key(self, tensor: HfTensor, shard: int) -> Key:
        """Return a key that is the same for all tensors that the same ranks hold."""
        stages, own = self.trainer.stages(tensor), self.trainer.experts(tensor.spec)
        return (stages, -1, tensor.expert // own) if own else (stages, shard if tensor.sharded else -1, -1)

    def holders(self, key: Key) -> tuple[int, ...]:
        if key not in self._holders:
            trainer, (stages, shard, share) = self.trainer, key
            ranks = (
                trainer.rank(stage, replica, tensor_rank)
                for stage in stages
                for replica in range(trainer.replicas)
                for tensor_rank in (range(trainer.tensor) if shard < 0 else [shard])
            )
            self._holders[key] = tuple(rank for rank in ranks if share in (-1, trainer.expert_rank(rank)))
        return self._holders[key]

    def send(self, key: Key, parts: Mapping[int, TensorSpan], entry_numel: int) -> None:
        """Send `parts` of one shard, by engine's tensor rank, to all engines."""
        wanted = key, tuple(parts)
        if wanted not in self._routes:
            self._routes[wanted] = list(self._find(*wanted))
        load = self._load
        for target, engine_rank, source, choose in self._routes[wanted]:
            span = parts[engine_rank]
            if source == target:
                self.local[target].append(span)
                continue
            if choose is not None:
                source = choose()
            load[source] += (span.stop - span.start) * entry_numel
            self.wire[source, target].append(span)

    def _find(self, key: Key, engine_ranks: tuple[int, ...]) -> Iterator[tuple[int, int, int, _LeastLoaded | None]]:
        """Yield (target, its tensor rank, source or -1, the chooser then), in the order of targets. The source is
        the target itself where it holds the shard, else a rank of its own replica of the trainer, else one of all
        holders."""
        ranks, trainer, wanted = self.holders(key), self.trainer, set(engine_ranks)
        known, near = set(ranks), defaultdict(list)
        for rank in ranks:
            near[trainer.replica_of(rank)].append(rank)
        choices: dict[int | None, _LeastLoaded] = {}  # by replica; None: of all
        for number, target in enumerate(self.engine.ranks):
            engine_rank, home = number % self.engine.tensor, trainer.replica_of(target)
            if engine_rank not in wanted:
                continue
            candidates, home = (near[home], home) if home in near else (ranks, None)
            if target in known or len(candidates) == 1:
                yield target, engine_rank, target if target in known else candidates[0], None
                continue
            if home not in choices:
                choices[home] = _LeastLoaded(candidates, self._load)
            yield target, engine_rank, -1, choices[home]


def _messages(
    parts: Sequence[TensorSpan], tensors: Sequence[HfTensor], item_bytes: int, bucket_bytes: int
) -> Iterator[tuple[tuple[TensorSpan, ...], int]]:
    """Yield (parts, bytes) of each message: parts in order; one that does not fit whole is cut at its quantum. A
    quantum larger than a bucket travels alone."""
    message: list[TensorSpan] = []
    filled = 0
    for span in parts:
        tensor, start = tensors[span.tensor], span.start
        quantum, entry_bytes = tensor.quantum, tensor.entry_words(item_bytes) * item_bytes
        while start < span.stop:
            fits = (bucket_bytes - filled) // (entry_bytes * quantum) * quantum
            whole = (span.stop - start) * entry_bytes <= bucket_bytes  # not cut: it waits for the next bucket
            if fits < min(span.stop - start, quantum) or (whole and fits < span.stop - start):
                if message:
                    yield tuple(message), filled
                    message, filled = [], 0
                    continue
                fits = max(fits, quantum)
            stop = min(span.stop, start + fits)
            message.append(TensorSpan(span.tensor, start, stop))
            filled += (stop - start) * entry_bytes
            start = stop
    if message:
        yield tuple(message), filled


def _rounds(messages: list[tuple[int, Message]]) -> tuple[tuple[Message, ...], ...]:
    """Put every message into the first round in which its two ranks are free, neighbours first: with equal shares
    each round is a rotation, in which every rank sends and receives."""
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
    return tuple(tuple(messages_of_round) for messages_of_round in rounds)


def buckets(sizes_bytes: Sequence[int], limit_bytes: int) -> list[range]:
    """Return ranges of consecutive tensors whose bytes sum to at most `limit_bytes`; a larger tensor is a bucket of
    its own."""
    parts, start, total = [], 0, 0
    for i, size in enumerate(sizes_bytes):
        if i > start and total + size > limit_bytes:
            parts.append(range(start, i))
            start, total = i, 0
        total += size
    if start < len(sizes_bytes):
        parts.append(range(start, len(sizes_bytes)))
    return parts
