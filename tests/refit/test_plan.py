"""The refit plan over random layouts, against an oracle that gathers everything."""

import itertools
import math
import sys
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.resolve import compose
from aligner.config.sections.model.moe import MoeConfig
from aligner.errors import LayoutError
from aligner.families import FAMILIES
from aligner.families.table import family_table
from aligner.models.params import split_tp, to_hf
from aligner.models.shards import copy_elements, hf_tensors
from aligner.refit.plan import EngineGrid, TensorSpan, TrainerGrid, plan_refit
from tests.refit.grids import trainer_of
from tests.tiny import LLAMA, MIXTRAL, MODELS, MOE, MORE, WINDOWS, wild_source

WIDE = replace(LLAMA, num_layers=4, num_heads=8, num_kv_heads=4, tie_embeddings=False)  # tensor up to 4
SHAPES = {
    "llama": WIDE,
    "qwen2": replace(MODELS["qwen2"], num_layers=4),
    "qwen3": replace(MODELS["qwen3"], num_layers=4, vocab_size=97),
    "olmo2": replace(MORE["olmo2"], num_layers=4),
    "biases": replace(MORE["llama-biases"], num_layers=4, num_kv_heads=4),
    "qwen3_moe": replace(MOE, num_layers=4),
    "gpt_oss": replace(MORE["gpt_oss"], num_layers=4),
    "mixtral": replace(MIXTRAL, num_layers=4, num_kv_heads=4, moe=MoeConfig(4, top_k=3, ffn_hidden_size=40)),
}
BYTES = 4


def full_tensors(cfg) -> dict[str, torch.Tensor]:
    source = wild_source(cfg)
    return {name: t for spec in family_table(cfg) for name, t in to_hf(spec, source(spec), cfg).items()}


def shard_of(spec, cfg, trainer: TrainerGrid, rank: int) -> torch.Tensor:
    """What `megatron.weights.load_weights` puts there."""
    if spec.experts:
        return wild_source(cfg)(spec).chunk(trainer.expert)[trainer.expert_rank(rank)]
    return split_tp(spec, wild_source(cfg)(spec), trainer.tensor, trainer.tensor_rank(rank))


class Simulation:
    """Runs a plan in this process. Reads only what a rank holds; counts how often each element is written."""

    def __init__(self, cfg, plan):
        self.cfg, self.plan, self.tensors = cfg, plan, plan.tensors
        self.held: dict[tuple, dict] = {}
        self.shards: dict[tuple, torch.Tensor] = {}
        width = plan.engine.tensor
        for index, rank in enumerate(plan.engine.ranks):
            for tensor in self.tensors:
                start, stop = tensor.interval(width, index % width)
                shape = list(tensor.shape)
                shape[tensor.axis] = stop - start
                self.held[rank, tensor.name] = {
                    "start": start,
                    "values": torch.full(shape, float("nan")),
                    "writes": torch.zeros(shape, dtype=torch.int32),
                }

    def source(self, rank: int, piece) -> torch.Tensor:
        trainer, tensor = self.plan.trainer, self.tensors[piece.tensor]
        stage = (rank - trainer.first) // trainer.tensor // trainer.replicas
        assert 0 <= rank - trainer.first < trainer.size and stage in trainer.stages(tensor), "it does not hold that"
        key = rank, tensor.spec.canonical
        if key not in self.shards:
            self.shards[key] = shard_of(tensor.spec, self.cfg, trainer, rank)
        first, experts = 0, 0
        if tensor.spec.experts:
            experts = trainer.expert_rank(rank) * (tensor.spec.shape[0] // trainer.expert)
        else:
            first, _ = tensor.interval(trainer.tensor, trainer.tensor_rank(rank) if tensor.sharded else 0)
        return tensor.view(self.shards[key], first, experts, piece.start, piece.stop)

    def copy(self, source: int, target: int, parts) -> int:
        moved = 0
        for piece in parts:
            tensor, held = self.tensors[piece.tensor], self.held[target, self.tensors[piece.tensor].name]
            block = self.source(source, piece)
            where = tensor.axis, piece.start - held["start"], piece.stop - piece.start
            copy_elements(held["values"].narrow(*where), block)
            held["writes"].narrow(*where).add_(1)
            moved += block.numel() * BYTES
        return moved

    def run(self) -> None:
        for rank, parts in self.plan.local.items():
            self.copy(rank, rank, parts)
        for messages in self.plan.rounds:
            for message in messages:
                assert message.source != message.target, "a rank's own bytes need no wire"
                assert self.copy(message.source, message.target, message.parts) == message.bytes


@st.composite
def layouts(draw):
    cfg = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    size = st.sampled_from([1, 2, 4])
    experts = draw(st.sampled_from([1, 2, 4])) if cfg.moe.num_experts else 1
    context, data = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    tensor = draw(size.filter(lambda tensor: cfg.num_kv_heads % tensor == 0))
    while tensor * context * data % experts:
        experts //= 2
    stages = draw(st.sampled_from([1, 2, 3, 4]))
    trainer = trainer_of(4, tensor, stages, context, data, experts, first=draw(st.sampled_from([0, 3])))
    width, replicas = draw(size), draw(st.integers(1, 3))
    pool = draw(st.permutations(range(trainer.first + trainer.size + 3)))  # its own ranks, others, or some of both
    engine = EngineGrid(tuple(pool[: width * replicas]), width) if width * replicas <= len(pool) else None
    return cfg, trainer, engine or EngineGrid((pool[0],)), draw(st.sampled_from([1, 700, 5000, 1 << 30]))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(layouts())
def test_every_engine_gets_every_element_once(layout):
    cfg, trainer, engine, bucket_bytes = layout
    plan = plan_refit(trainer, engine, hf_tensors(cfg), BYTES, bucket_bytes)
    simulation = Simulation(cfg, plan)
    simulation.run()
    wanted = full_tensors(cfg)
    for index, rank in enumerate(engine.ranks):
        for tensor in plan.tensors:
            start, stop = tensor.interval(engine.tensor, index % engine.tensor)
            held = simulation.held[rank, tensor.name]
            assert (held["writes"] == 1).all(), (rank, tensor.name)
            assert torch.equal(held["values"], wanted[tensor.name].narrow(tensor.axis, start, stop - start))
    for messages in plan.rounds:
        assert (
            max(Counter(m.source for m in messages).values()) == max(Counter(m.target for m in messages).values()) == 1
        )
        for message in messages:
            tensors = [plan.tensors[p.tensor] for p in message.parts]
            alone = len(tensors) == 1 and tensors[0].quantum >= message.parts[0].stop - message.parts[0].start
            assert message.bytes <= bucket_bytes or alone
    counted = Counter()
    for parts in plan.owned.values():
        for piece in parts:
            counted[piece.tensor] += (piece.stop - piece.start) * plan.tensors[piece.tensor].entry_numel
    assert [counted[i] for i in range(len(plan.tensors))] == [wanted[t.name].numel() for t in plan.tensors]


def sent_one_by_one(trainer: TrainerGrid, engine: EngineGrid, tensors) -> tuple[dict, dict]:
    """The rule as it reads, for every tensor, shard and engine: (what a rank copies to itself, what goes between)."""
    local, wire, load = defaultdict(list), defaultdict(list), Counter()
    for number, tensor in enumerate(tensors):
        share = tensor.expert // (tensor.spec.shape[0] // trainer.expert) if tensor.spec.experts else None
        cuts = tensor.sharded and not tensor.spec.experts
        for shard in range(trainer.tensor if cuts else 1):
            low, high = tensor.interval(trainer.tensor if cuts else 1, shard)
            ranks = [
                trainer.rank(stage, replica, tensor_rank)
                for stage in trainer.stages(tensor)
                for replica in range(trainer.replicas)
                for tensor_rank in range(trainer.tensor)
                if share in (None, (replica * trainer.tensor + tensor_rank) % trainer.expert)
                and (not cuts or tensor_rank == shard)
            ]
            for index, target in enumerate(engine.ranks):
                start, stop = tensor.interval(engine.tensor, index % engine.tensor)
                piece = TensorSpan(number, max(start, low), min(stop, high))
                if piece.start >= piece.stop:
                    continue
                if target in ranks:
                    local[target].append(piece)
                    continue
                home = trainer.replica_of(target)
                near = [rank for rank in ranks if home is not None and trainer.replica_of(rank) == home]
                source = min(near or ranks, key=lambda rank: (load[rank], rank))
                load[source] += (piece.stop - piece.start) * tensor.entry_numel
                wire[source, target].append(piece)
    return local, wire


@settings(max_examples=30, deadline=None)
@given(layouts())
def test_routes_are_those_found_one_by_one(layout):
    cfg, trainer, engine, _ = layout
    plan = plan_refit(trainer, engine, hf_tensors(cfg), BYTES, 1 << 30)
    local, wire = sent_one_by_one(trainer, engine, plan.tensors)
    assert plan.local == {rank: tuple(parts) for rank, parts in local.items()}
    assert {(m.source, m.target) for messages in plan.rounds for m in messages} == wire.keys()
    for messages in plan.rounds:  # one for a pair: buckets are large
        for message in messages:
            assert message.parts == tuple(wire[message.source, message.target])


@pytest.mark.parametrize("width, apart", [(1, False), (2, False), (2, True)])
def test_planning_grows_with_the_ranks(width, apart):
    """Four times the ranks: four times the turns of loops, not sixteen."""

    def turns(data: int) -> int:
        trainer = trainer_of(4, 2, pipeline=2, data=data)
        engine = EngineGrid(tuple(range(trainer.size * apart, trainer.size * (1 + apart))), width)
        counted, tool = 0, sys.monitoring.PROFILER_ID

        def count(*where):
            nonlocal counted
            counted += 1

        sys.monitoring.use_tool_id(tool, "turns")
        try:
            sys.monitoring.register_callback(tool, sys.monitoring.events.BRANCH, count)
            sys.monitoring.set_events(tool, sys.monitoring.events.BRANCH)
            plan_refit.__wrapped__(trainer, engine, tensors, BYTES, 1 << 30)
        finally:
            sys.monitoring.set_events(tool, 0)
            sys.monitoring.free_tool_id(tool)
        return counted

    tensors = hf_tensors(WIDE)
    assert turns(32) < 4.5 * turns(8)


@pytest.mark.parametrize("tensor, experts", [(1, 1), (2, 1), (4, 1), (2, 2), (4, 4)])
def test_what_a_rank_holds_it_keeps(tensor, experts):
    """The same ranks and the same tensor parallelism: nothing between ranks, whatever the replicas. Nor of experts
    that both share among as many ranks."""
    for name, cfg in [(name, cfg) for name, cfg in SHAPES.items() if cfg.num_kv_heads % tensor == 0]:
        trainer = trainer_of(4, tensor, 1, 1, 2, experts)
        plan = plan_refit(trainer, EngineGrid(tuple(range(2 * tensor)), tensor), hf_tensors(cfg), BYTES, 1 << 20)
        assert not plan.rounds and len(plan.local) == 2 * tensor, name


def test_bytes_between_ranks_are_what_is_missing():
    """Two ranks with halves of the layers: each receives the other's half, once."""
    cfg = SHAPES["llama"]
    sizes = {n: t.numel() * BYTES for n, t in full_tensors(cfg).items()}
    plan = plan_refit(trainer_of(4, pipeline=2), EngineGrid((0, 1)), hf_tensors(cfg), BYTES, 5000)
    assert sum(m.bytes for turn in plan.rounds for m in turn) == sum(sizes.values())
    # tensor parallel on both sides, but on other ranks: every replica receives one model in all
    moved = plan_refit(trainer_of(4, 2), EngineGrid((2, 3, 4, 5), 2), hf_tensors(cfg), BYTES, 5000)
    replicated = sum(sizes[t.name] for t in moved.tensors if not t.sharded)
    assert sum(m.bytes for turn in moved.rounds for m in turn) == 2 * (sum(sizes.values()) + replicated)
    assert not moved.local


def test_senders_share_the_work():
    """Two data-parallel ranks of the trainer, two engines elsewhere: each sends one."""
    plan = plan_refit(trainer_of(4, data=2), EngineGrid((2, 3)), hf_tensors(WIDE), BYTES, 1 << 30)
    sent = Counter()
    for messages in plan.rounds:
        for m in messages:
            sent[m.source] += m.bytes
    assert set(sent) == {0, 1} and max(sent.values()) < 1.2 * min(sent.values())


def test_planned_once():
    args = trainer_of(4, 2), EngineGrid((0, 1)), hf_tensors(WIDE), BYTES, 999
    assert plan_refit(*args) is plan_refit(trainer_of(4, 2), EngineGrid((0, 1)), hf_tensors(WIDE), BYTES, 999)


def test_layouts_that_cannot_be():
    with pytest.raises(LayoutError, match=r"engine\.tensor_parallel"):
        EngineGrid((0, 1, 2), 2)
    with pytest.raises(LayoutError, match="divisor of 4"):
        plan_refit(trainer_of(2), EngineGrid(tuple(range(8)), 8), hf_tensors(LLAMA), BYTES, 999)


@pytest.mark.parametrize("family", FAMILIES)
def test_views_are_what_to_hf_gives(family):
    """A family whose table has a transform that `HfTensor.view` does not know fails here."""
    shapes = {cfg.family: cfg for cfg in (*WINDOWS.values(), *MORE.values(), *SHAPES.values())}
    cfg, source = shapes[family], wild_source(shapes[family])
    for tensor in hf_tensors(cfg):
        full = source(tensor.spec)
        out = torch.empty(tensor.shape)
        copy_elements(out, tensor.view(full, 0, 0, 0, tensor.length))
        assert torch.equal(out, to_hf(tensor.spec, full, cfg)[tensor.name]), tensor.name


def test_an_export_moves_each_byte_once_and_only_to_the_rank_that_writes():
    cfg, trainer = compose(["model=llama3_70b"]).model, trainer_of(80, tensor=8, pipeline=4, data=2)
    tensors = hf_tensors(cfg)
    total = 2 * sum(math.prod(tensor.shape) for tensor in tensors)
    plan = plan_refit(trainer, EngineGrid((0,)), tensors, 2, 1 << 28)
    moved = Counter()
    for message in itertools.chain.from_iterable(plan.rounds):
        assert message.target == 0 and trainer.replica_of(message.source) == 0
        moved[message.source] += message.bytes
    own = 2 * sum((span.stop - span.start) * tensors[span.tensor].entry_numel for span in plan.local[0])
    assert list(plan.local) == [0] and own + moved.total() == total
    # whole tensors over tensor ranks, and from stage to stage: rank 0 sent an eighth of all to seven others, too
    assert moved.total() < 0.53 * (total - own + 7 / 8 * total)
    few = plan_refit(trainer, EngineGrid((0,)), tensors, 2, 1 << 40, messages_of_pair=1)
    assert Counter(m.source for m in itertools.chain.from_iterable(few.rounds)) == dict.fromkeys(moved, 1)
