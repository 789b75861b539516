"""All engines of a job behind one call: requests of every rank are spread over the replicas by their expected cost.

    gather    every rank's requests to every rank
    assign    to replicas: those of their own ranks if that is even enough, else the costliest first to the least loaded
    generate  each replica its queue; one whose queue is empty takes chunks of another's (not in a deterministic run)
    return    samples to the ranks that asked

A sample depends on its prompt and its seed, so the choice of the replica changes only the rounding of other batch
sizes. Either every rank has an engine and asks, or the last ranks of a job have the engines and the others ask
(`remote.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.engines.base import require_finite
from aligner.engines.native.engine import NativeEngine
from aligner.engines.native.schedule import PromptPool, PromptRequest
from aligner.errors import EngineError
from aligner.ops.agree import raised_together
from aligner.ops.packing.balance import balance, row_costs
from aligner.ops.packing.routing import widened
from aligner.ops.reduce import gathered
from aligner.types import Generations, Progress, SamplingParams, SeedLists, Sums, TokenLists

ENOUGH = 0.98  # evenness of the replicas' costs (mean over largest) from which requests stay with their rank's replica


class SeededPrompt(NamedTuple):
    """One prompt with the seeds of its samples."""

    home: int  # the rank that asks
    number: int  # in that rank's list
    prompt: Sequence[int]
    seeds: Sequence[int]
    begun: int | None = None  # in a window (`engine.window`): tokens of `prompt` that are of the response


def expected_costs(requests: Sequence[SeededPrompt], limit: int, model: ModelConfig) -> list[float]:
    """Return the operations of each request: its samples, as if each ended half-way to the limit. Earlier lengths
    are not used: a resumed run must spread its prompts as an uninterrupted one does."""
    lengths = torch.tensor([len(r.prompt) + limit / 2 for r in requests])
    samples = torch.tensor([float(len(r.seeds)) for r in requests])
    return (row_costs(lengths, model) * samples).tolist()


def assign(costs: Sequence[float], home: Sequence[int], replicas: int) -> list[list[int]]:
    """Return the indices of each replica's requests, ascending. `home`: the replica of the rank that asks."""
    parts: list[list[int]] = [[] for _ in range(replicas)]
    for i, replica in enumerate(home):
        parts[replica].append(i)
    if not costs or balance(costs, parts) >= ENOUGH:
        return parts
    parts, loads = [[] for _ in range(replicas)], [0.0] * replicas
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):  # Graham 1969, doi:10.1137/0117039
        best = min(range(replicas), key=lambda r: (loads[r], r != home[i], r))
        parts[best].append(i)
        loads[best] += costs[i]
    return [sorted(share) for share in parts]


@dataclass
class Queues(PromptPool):
    """The requests of all replicas in chunks. Each is taken once, by the replica that increments its queue's
    counter."""

    chunks: list[list[list[SeededPrompt]]]  # by replica
    replica: int
    store: Any  # torch.distributed.Store, shared by all ranks
    call: int  # of `generate`: each has counters of its own
    group: dist.ProcessGroup | None  # of the replica's ranks: its first one takes, all get the same
    rank: int  # that asks
    taken: list[SeededPrompt] = field(default_factory=list)
    asked: list[tuple[int, int] | None] = field(default_factory=list)  # of each row taken: see `NativeEngine.generate`
    stolen: int = 0
    own_left: bool = True

    def wants(self, active: int, slots: int) -> bool:
        """Return whether to take more. A replica takes from its own queue whenever an eighth of the slots is free,
        from another's once half of them are. So it does not take the first work of a replica that has only just
        begun."""
        return active * 8 <= slots * 7 if self.own_left else active * 2 <= slots

    def take(self) -> list[PromptRequest] | None:
        claim = [self._claim() if self.group is None or self.group.rank() == 0 else None]
        if self.group is not None:
            dist.broadcast_object_list(claim, src=dist.get_global_rank(self.group, 0), group=self.group)
        if claim[0] is None:
            return None
        victim, number = claim[0]
        self.own_left = victim == self.replica
        self.stolen += victim != self.replica
        chunk = self.chunks[victim][number]
        self.taken += chunk
        self.asked += _asked(chunk, self.rank)
        return [PromptRequest(request.prompt, request.seeds) for request in chunk]

    def _claim(self) -> tuple[int, int] | None:
        """Return (replica, index of its chunk); None if every queue is empty, which it then stays."""
        number = self._count(self.replica, 1) - 1 if self.own_left else len(self.chunks[self.replica])
        if number < len(self.chunks[self.replica]):
            return self.replica, number
        while True:
            left = {r: len(c) - self._count(r, 0) for r, c in enumerate(self.chunks) if r != self.replica}
            victim = max(left, key=lambda r: (left[r], -r), default=self.replica)
            if left.get(victim, 0) <= 0:
                return None
            number = self._count(victim, 1) - 1
            if number < len(self.chunks[victim]):
                return victim, number

    def _count(self, replica: int, amount: int) -> int:
        return self.store.add(self._key(self.call, replica), amount)

    def forget_last(self) -> None:
        """Delete the counters of the call before, which are not read any more."""
        for replica in range(len(self.chunks)):
            self.store.delete_key(self._key(self.call - 1, replica))

    def _key(self, call: int, replica: int) -> str:
        return f"aligner/generate/{call}/{replica}"


@dataclass(frozen=True)
class Fleet:
    """The ranks that ask and the ranks that generate. In `group` (None: the world) the ranks from `first` on have
    engines, of `width` ranks each. With `first` 0 every rank asks, else those before it."""

    width: int
    first: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return dist.get_world_size() if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.group is None else self.group.rank()

    @property
    def replicas(self) -> int:
        """The number of replicas that share the requests."""
        return (self.size - self.first) // self.width

    @property
    def replica(self) -> int:
        """The replica of this rank, which generates."""
        return (self.rank - self.first) // self.width

    def home(self, rank: int) -> int:
        """Return the replica that a rank's requests go to if that is even enough."""
        return rank * self.replicas // self.first if self.first else rank // self.width

    def gather(self, prompts: TokenLists, seeds: SeedLists, begun: Sequence[int] | None = None) -> list[SeededPrompt]:
        """Return all ranks' requests on every rank. Collective, as `deliver` is."""
        counts = [None] * len(prompts) if begun is None else begun
        own: list[tuple] = [(list(p), list(s), b) for p, s, b in zip(prompts, seeds, counts, strict=True)]
        everyone = gathered(own, self.group)
        return [SeededPrompt(home, i, *one) for home, rows in enumerate(everyone) for i, one in enumerate(rows)]

    def deliver(
        self, requests: list[SeededPrompt], generations: Generations, wanted: list[int], cut: bool, moved: bool = True
    ) -> Generations:
        """Send samples of `requests` (request-major) to the ranks that asked; return this rank's, in the order of
        its requests, which have `wanted` samples each. Not `moved`: every rank has its own already."""
        rank, width, routing = self.rank, self.width, generations.routing
        longest = torch.tensor([generations.tokens.shape[1], 0 if routing is None else routing.shape[1]])
        if moved:
            dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.group)
        table = _pack(requests, generations, int(longest[0]))
        routing = None if routing is None else widened(routing, int(longest[1]))
        homes = torch.tensor([r.home for r in requests for _ in r.seeds], dtype=torch.int64)
        if moved:
            # all ranks of a replica have the samples; one of them sends, to itself if it asks
            lead = self.first + (rank - self.first) // width * width
            here = (homes >= lead) & (homes < lead + width)
            sends = torch.where(here, homes, lead + homes % width) == rank
            table = _exchange(table[sends], homes[sends], self)
            routing = None if routing is None else _exchange(routing[sends], homes[sends], self)
        else:
            table = table[homes == rank]
            routing = None if routing is None else routing[homes == rank]
        starts = torch.tensor([0, *wanted], dtype=torch.int64).cumsum(0)
        order = starts[table[:, 0]] + table[:, 1]
        assert len(order) == int(starts[-1]), f"{len(order)} samples came back of {int(starts[-1])}"
        back = order.argsort()
        own = _unpack(table[back], cut, generations.weight_version)
        return replace(own, routing=None if routing is None else routing[back])


class Replicated:
    """A mix-in that makes `generate` a call of every rank of the world together, each with its own requests. Each
    replica, of `tensor_parallel` ranks that all stand for it, gets a share of them."""

    tensor_parallel: int
    cfg: ModelConfig
    _idle_s = _generating_s = 0.0  # since `take_sums`

    def generate(
        self, prompts: TokenLists, seeds: SeedLists, sampling: SamplingParams, progress: Progress | None = None
    ) -> Generations:
        """See `RolloutEngine.generate`. Raises its errors on every rank, but those of logits that are not finite
        only on the ranks that asked."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return super().generate(prompts, seeds, sampling, progress)  # type: ignore[misc]
        fleet = Fleet(self.tensor_parallel)
        requests = fleet.gather(prompts, seeds)
        start = time.perf_counter()
        with raised_together(EngineError):  # the others wait for this replica's samples
            served, generations, moved = self.work(fleet, requests, sampling, progress)
            end = time.perf_counter()
        self._idle_s += time.perf_counter() - end
        self._generating_s += time.perf_counter() - start
        return require_finite(fleet.deliver(served, generations, [len(s) for s in seeds], sampling.truncates, moved))

    def take_sums(self) -> Sums:
        """See `RolloutEngine.take_sums`."""
        sums = dict(super().take_sums())  # type: ignore[misc]
        if self._generating_s:
            sums["engine/idle_fraction"] = self._idle_s, self._generating_s
        self._idle_s = self._generating_s = 0.0
        return sums

    def work(
        self, fleet: Fleet, requests: list[SeededPrompt], sampling: SamplingParams, progress: Progress | None = None
    ) -> tuple[list[SeededPrompt], Generations, bool]:
        """Return this replica's share of all requests, its samples, and whether any rank's are generated elsewhere.
        Collective over the ranks with engines, which are the world."""
        costs = expected_costs(requests, sampling.max_response_tokens, self.cfg)
        homes = [fleet.home(r.home) for r in requests]
        parts = assign(costs, homes, fleet.replicas)
        own, generations, shared = self._generate_share(fleet, requests, costs, parts, sampling, progress)
        moved = fleet.first > 0 or shared or any(homes[i] != r for r, share in enumerate(parts) for i in share)
        return own, generations, moved

    def _generate_share(
        self,
        fleet: Fleet,
        requests: list[SeededPrompt],
        costs: list[float],
        parts: list[list[int]],
        sampling: SamplingParams,
        progress: Progress | None,
    ) -> tuple[list[SeededPrompt], Generations, bool]:
        """Return the requests that this replica took, its samples, and whether it may have taken another's requests."""
        own = [requests[i] for i in parts[fleet.replica]]
        prompts, seeds = [r.prompt for r in own], [r.seeds for r in own]
        begun, asked = [r.begun for r in own] if windowed(requests) else None, _asked(own, fleet.rank)
        return own, self._generated(prompts, seeds, sampling, progress, asked=asked, begun=begun), False


class FleetEngine(Replicated, NativeEngine):
    """This rank's native engine, one of a fleet. `steal`: whether replicas take work from each other while they
    generate. Only one engine of a job may do so: the counters are the job's."""

    steal = False
    _calls = 0
    stolen = 0  # chunks of others that this replica took in the last `generate`

    @property
    def cfg(self) -> ModelConfig:
        return self.model.cfg

    def _generate_share(
        self,
        fleet: Fleet,
        requests: list[SeededPrompt],
        costs: list[float],
        parts: list[list[int]],
        sampling: SamplingParams,
        progress: Progress | None,
    ) -> tuple[list[SeededPrompt], Generations, bool]:
        self.stolen = 0
        if not self.steal or len(parts) == 1 or windowed(requests):  # a window's samples must not depend on timing
            return super()._generate_share(fleet, requests, costs, parts, sampling, progress)
        # this replica takes from the common queues; its samples are in the order in which it took them
        chunks = []
        for share in parts:
            queue = [requests[i] for i in sorted(share, key=lambda i: (-costs[i], i))]
            chunks.append(_chunks(queue, max(1, self.config.max_batch // 8)))
        replica = dist.get_rank() // self.tensor_parallel
        rows = [sum(len(requests[i].seeds) for i in share) for share in parts]
        self._calls += 1
        queues = Queues(
            longest=max((len(r.prompt) for r in requests), default=1),
            prompts=max(1, len(parts[replica])),
            rows=max(rows[replica], sum(rows) // len(rows), 1),
            chunks=chunks,
            replica=replica,
            store=dist.distributed_c10d._get_default_store(),
            call=self._calls,
            group=self.peers.group,
            rank=fleet.rank,
        )
        if dist.get_rank() == 0:
            queues.forget_last()
        generations = self._generated([], [], sampling, progress, queues, queues.asked)
        self.stolen = queues.stolen
        return queues.taken, generations, True


def _asked(requests: Sequence[SeededPrompt], rank: int) -> list[tuple[int, int] | None]:
    """Return (number of the request, sample) of each row that `rank` asked for, None for the others."""
    return [(r.number, i) if r.home == rank else None for r in requests for i in range(len(r.seeds))]


def windowed(requests: Sequence[SeededPrompt]) -> bool:
    return bool(requests) and requests[0].begun is not None


def _chunks(queue: list[SeededPrompt], rows: int) -> list[list[SeededPrompt]]:
    """Return the queue in order, in chunks of about `rows` samples each."""
    chunks: list[list[SeededPrompt]] = []
    size = rows
    for request in queue:
        if size >= rows:
            chunks.append([])
            size = 0
        chunks[-1].append(request)
        size += len(request.seeds)
    return chunks


def _pack(requests: list[SeededPrompt], g: Generations, width: int) -> Tensor:
    """Return int64 [N, 4 + k * width]: request, sample, length, reason, tokens and the bits of logprobs."""
    keys = torch.tensor([[r.number, i] for r in requests for i in range(len(r.seeds))], dtype=torch.int64).view(-1, 2)
    floats = [g.logprobs] if g.full_logprobs is None else [g.logprobs, g.full_logprobs]
    bits = [f.contiguous().view(torch.int32).long() for f in floats]
    wide = [torch.nn.functional.pad(t, (0, width - t.shape[1])) for t in (g.tokens, *bits)]
    return torch.cat([keys, g.lengths[:, None], g.finish_reason[:, None], *wide], dim=1)


def _unpack(table: Tensor, cut: bool, version: int) -> Generations:
    lengths, reasons, rest = table[:, 2], table[:, 3], table[:, 4:]
    columns = rest.unflatten(1, (2 + cut, rest.shape[1] // (2 + cut)))
    width = int(lengths.max()) if len(lengths) else 0
    tokens, *bits = (columns[:, i, :width].contiguous() for i in range(2 + cut))
    floats = [b.int().view(torch.float32) for b in bits]
    full = floats[1] if cut else None
    return Generations(tokens, lengths.clone(), floats[0], reasons.clone(), version, full)


def nothing(cut: bool, version: int, routing: Tensor | None) -> Generations:
    """Return the samples of a rank without an engine: none. `routing` of no rows, if the engines report it."""
    none = torch.zeros(0, 0)
    long = torch.zeros(0, dtype=torch.int64)
    return Generations(none.long(), long, none, long.clone(), version, none.clone() if cut else None, routing)


def _exchange(rows: Tensor, homes: Tensor, fleet: Fleet) -> Tensor:
    """Send rows [n, ...] to the ranks `homes`; return the received ones by sending rank. As bytes: gloo does not
    know every dtype."""
    table = rows.flatten(1).view(torch.uint8)
    counts = torch.bincount(homes, minlength=fleet.size)
    matrix = [torch.empty_like(counts) for _ in range(fleet.size)]
    dist.all_gather(matrix, counts, group=fleet.group)
    received = [int(row[fleet.rank]) for row in matrix]
    out = table.new_empty(sum(received), table.shape[1])
    source = table.index_select(0, homes.argsort(stable=True)).contiguous()
    dist.all_to_all_single(out, source, received, counts.tolist(), group=fleet.group)
    return out.view(rows.dtype).view(len(out), *rows.shape[1:])
