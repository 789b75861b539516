"""Buckets, the stream of full weights, and refits that fail on one rank."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from aligner.config.sections.engine import EngineConfig, RefitConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.engines.base import RolloutEngine
from aligner.engines.native.engine import NativeEngine
from aligner.errors import RefitError
from aligner.families.table import family_table
from aligner.megatron.model import Head
from aligner.megatron.train import ShardedModel
from aligner.models.params import dtype_of, to_hf
from aligner.refit.exchange import Exchange
from aligner.refit.export import whole_weights
from aligner.refit.plan import buckets
from aligner.refit.stream import WeightStream
from aligner.refit.transfer import Refit, fail_together
from tests.megatron.models import build, stepped, weights
from tests.operations import Listener
from tests.ranks import on_ranks
from tests.tiny import DEEPSEEK, LLAMA, MODELS, MOE, MORE, wild_source

LAYOUTS = {
    "one": (1, ParallelConfig()),
    "tp2": (2, ParallelConfig(tensor=2)),
    "pp2": (2, ParallelConfig(pipeline=2)),
    "tp2-pp2": (4, ParallelConfig(tensor=2, pipeline=2)),
    "ep2": (2, ParallelConfig(expert=2)),
    "ep2-tp2": (4, ParallelConfig(expert=2, tensor=2)),
    "ep4-tp2": (4, ParallelConfig(expert=4, tensor=2)),
    "ep2-pp2": (4, ParallelConfig(expert=2, pipeline=2)),
}


class Refusing(RolloutEngine):
    """An engine that refuses on one rank, at one moment."""

    weight_version = -1
    dtype = torch.float32

    def __init__(self, rank: int, moment: str):
        self.moment, self.calls = moment if dist.get_rank() == rank else "", 0

    def begin_update(self, version: int) -> None:
        self._maybe("begin")

    def update_weights(self, tensors) -> None:
        self.calls += 1
        if self.calls == 2:
            self._maybe("second bucket")

    def finish_update(self) -> None:
        self._maybe("finish")

    def _maybe(self, moment: str) -> None:
        if moment == self.moment:
            raise RefitError(f"{moment} does not suit me")


@given(st.lists(st.integers(0, 1000)), st.integers(1, 2000))
def test_buckets_keep_order_and_limit(sizes, limit):
    parts = buckets(sizes, limit)
    assert [i for piece in parts for i in piece] == list(range(len(sizes)))
    for piece in parts:
        assert len(piece) == 1 or sum(sizes[i] for i in piece) <= limit
    for piece, after in pairwise(parts):  # as few as the order allows
        assert sum(sizes[i] for i in piece) + sizes[after[0]] > limit


def full_weights(cfg, head="lm", outputs=1):
    source = wild_source(cfg)
    return {n: t for spec in family_table(cfg, head, outputs) for n, t in to_hf(spec, source(spec), cfg).items()}


def check_stream(model: ShardedModel, wanted: dict[str, torch.Tensor], bucket_bytes: int) -> None:
    stream = WeightStream(model, bucket_bytes)
    for _ in range(2):  # a second pass gives the same
        names = []
        for bucket in stream:
            assert len(bucket) == 1 or sum(t.numel() * t.element_size() for _, t in bucket) <= bucket_bytes
            names += [name for name, _ in bucket]
            for name, tensor in bucket:
                assert tensor.shape == wanted[name].shape and torch.equal(tensor, wanted[name]), name
        assert sorted(names) == sorted(wanted), "every tensor once"


@pytest.mark.few(4)
@pytest.mark.multirank
@pytest.mark.parametrize("bucket_bytes", [1, 7777, 1 << 30])
@pytest.mark.parametrize(("world", "parallel"), LAYOUTS.values(), ids=LAYOUTS)
@on_ranks()
def test_every_rank_gets_every_tensor_once(world, parallel, bucket_bytes):
    for cfg in (MODELS["qwen3"], replace(MODELS["qwen2"], tie_embeddings=False), MOE):
        if parallel.expert == 1 or cfg.moe.num_experts:
            check_stream(build(cfg, parallel), full_weights(cfg), bucket_bytes)


@pytest.mark.multirank
@pytest.mark.parametrize(("world", "parallel"), list(LAYOUTS.values())[:4], ids=list(LAYOUTS)[:4])
@on_ranks()
def test_score_heads_and_bfloat16(world, parallel):
    wanted = {n: t.bfloat16() for n, t in full_weights(LLAMA).items()}
    check_stream(build(LLAMA, parallel, dtype=torch.bfloat16), wanted, 5000)
    kept = {name: dtype_of(spec, torch.bfloat16) for spec in family_table(DEEPSEEK) for name in spec.hf}
    assert set(kept.values()) == {torch.bfloat16, torch.float32}
    wanted = {n: t.to(kept[n]) for n, t in full_weights(DEEPSEEK).items()}
    check_stream(build(DEEPSEEK, parallel, dtype=torch.bfloat16), wanted, 5000)
    check_stream(build(LLAMA, parallel, head=Head("score", 3)), full_weights(LLAMA, "score", 3), 5000)


def exported(name: str) -> tuple[ShardedModel, dict[str, torch.Tensor]]:
    """A model on these ranks, and the tensors of its export."""
    cfg, parallel, dtype, head = EXPORTS[name][2:]
    kept = {n: dtype_of(spec, dtype) for spec in family_table(cfg, head.kind, head.outputs) for n in spec.hf}
    wanted = {n: t.to(kept[n]) for n, t in full_weights(cfg, head.kind, head.outputs).items()}
    source, large = wild_source(cfg), 1001  # which bfloat16 has not
    wanted |= {n: t + large for n, t in wanted.items() if t.dtype == torch.int64}
    model = build(cfg, parallel, head=head, dtype=dtype, source=lambda spec: source(spec) + large * spec.integer)
    return model, wanted


EXPORTS = {  # ranks, how many send to rank 0
    "dp2": (2, 0, LLAMA, ParallelConfig(), torch.float32, Head()),
    "tp2": (2, 1, MODELS["qwen2"], ParallelConfig(tensor=2), torch.bfloat16, Head()),
    "tp2-pp2": (4, 3, MODELS["qwen3"], ParallelConfig(tensor=2, pipeline=2), torch.float32, Head()),
    "pp2, some in float32": (2, 1, DEEPSEEK, ParallelConfig(pipeline=2), torch.bfloat16, Head()),
    "pp2, integers": (
        2,
        1,
        MORE["deepseek_v4"],
        ParallelConfig(pipeline=2, stage_layers=[1, 3]),
        torch.bfloat16,
        Head(),
    ),
    "pp2, scores": (2, 1, LLAMA, ParallelConfig(pipeline=2), torch.bfloat16, Head("score", 3)),
    "ep2": (2, 1, MOE, ParallelConfig(expert=2), torch.bfloat16, Head()),
    "ep2-tp2": (4, 1, MOE, ParallelConfig(expert=2, tensor=2), torch.float32, Head()),
}


@pytest.mark.few(4)
@pytest.mark.multirank
@pytest.mark.parametrize("bucket_bytes", [7777, 1 << 30])
@pytest.mark.parametrize(("name", "world"), [(name, case[0]) for name, case in EXPORTS.items()], ids=EXPORTS)
@on_ranks()
def test_an_export_brings_all_to_the_rank_that_writes_and_nothing_to_others(name, world, bucket_bytes):
    model, wanted = exported(name)
    with Listener() as heard:
        got = {n: t for bucket in whole_weights(model, bucket_bytes) for n, t in bucket.items()}
    assert {word for _, word in heard.bytes} <= ({"send"} if dist.get_rank() else set())
    if dist.get_rank() == 0:
        assert got.keys() == wanted.keys() and all(torch.equal(t, wanted[n]) for n, t in got.items())
        assert all(t.dtype == wanted[n].dtype for n, t in got.items())
    else:
        assert not got and bool(heard.bytes) == (dist.get_rank() <= EXPORTS[name][1]), "one copy of all is sent"


@pytest.mark.multirank
@on_ranks(2)
def test_a_rank_that_cannot_send_stops_the_export():
    model, fails = build(LLAMA, ParallelConfig(pipeline=2)), RuntimeError("no memory left")
    failing = mock.patch.object(Exchange, "source", side_effect=fails) if dist.get_rank() else nullcontext()
    with failing, pytest.raises(RefitError, match=r"^weights did not arrive from rank 1: no memory left$"):
        list(whole_weights(model, 7777))
    list(whole_weights(model, 7777))  # nothing was left behind in the groups


def decays(cfg) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """How fast states are forgotten after a small step: in files, and in an engine that got it in a bucket."""
    model = stepped(cfg, 1, dtype=torch.bfloat16, optim=OptimConfig(lr=1e-5, distributed=False))
    held = weights(model)
    engine = NativeEngine(cfg, EngineConfig(), device="cpu", dtype=torch.bfloat16, pad_id=0)
    engine.begin_update(1)
    engine.update_weights(held.items())
    engine.finish_update()
    return {name: (t, engine.model.views[name].clone()) for name, t in held.items() if name.endswith("A_log")}


@pytest.mark.multirank
@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
def test_how_fast_states_are_forgotten_stays_float32(ranks, name):
    """In bfloat16 the start would be rounded, and a step of 1e-5 be none."""
    cfg = MORE[name]
    start, moved = full_weights(cfg), ranks.run(decays, cfg=cfg)[0]
    assert len(moved) == len(cfg.layers_of("linear"))
    for tensor, (ours, engines) in moved.items():
        assert ours.dtype == engines.dtype == torch.float32 and torch.equal(ours, engines)
        assert 0 < (ours - start[tensor]).abs().max() < 2e-5


@pytest.mark.few(4)
@pytest.mark.multirank
@pytest.mark.parametrize("moment", ["begin", "second bucket", "finish"])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
@pytest.mark.parametrize("rank", [0, 1])
@on_ranks(2)
def test_a_refusal_on_one_rank_stops_all(layout, moment, rank):
    _, parallel = {**LAYOUTS, "dp2": (2, ParallelConfig())}[layout]
    refit = Refit(build(LLAMA, parallel), Refusing(rank, moment), RefitConfig(bucket_bytes=3000))
    with pytest.raises(RefitError, match=f"^refit failed on rank {rank}: {moment} does not suit me$"):
        refit()
    refit.engine.moment = ""
    refit()  # nothing was left behind in the groups


@pytest.mark.multirank
@on_ranks(2)
def test_the_lowest_ranks_cause_is_reported():
    fail_together("")
    for causes, wanted in ((["", "b"], "rank 1: b"), (["a", "b"], "rank 0: a")):
        with pytest.raises(RefitError, match=f"^refit failed on {wanted}$"):
            fail_together(causes[dist.get_rank()])
