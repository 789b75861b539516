"""Buckets, the stream of full weights, and refits that fail on one rank."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aligner.config.sections.parallel import ParallelConfig
from aligner.models.families import family_table
from aligner.models.params import to_hf
from aligner.refit.plan import buckets
from tests.tiny import DEEPSEEK, LLAMA, MODELS, MOE, wild_source

LAYOUTS = {
    "one": (1, ParallelConfig()),
    "tp2": (2, ParallelConfig(tensor=2)),
    "pp2": (2, ParallelConfig(pipeline=2)),
    "tp2-pp2": (4, ParallelConfig(tensor=2, pipeline=2)),
    "ep2": (2, ParallelConfig(expert=2)),
    "ep2-tp2": (4, ParallelConfig(expert=2, tensor=2)),
    "ep2-pp2": (4, ParallelConfig(expert=2, pipeline=2)),
}


@given(st.lists(st.integers(0, 1000)), st.integers(1, 2000))
def test_buckets(sizes, limit):
    parts = buckets(sizes, limit)
    assert [i for part in parts for i in part] == list(range(len(sizes)))
    for part in parts:
        assert len(part) == 1 or sum(sizes[i] for i in part) <= limit
    for part, after in pairwise(parts):  # as few as the order allows
        assert sum(sizes[i] for i in part) + sizes[after[0]] > limit


def full_weights(cfg, head="lm", outputs=1):
    source = wild_source(cfg)
    return {n: t for spec in family_table(cfg, head, outputs) for n, t in to_hf(spec, source(spec), cfg).items()}


def check_stream(results, wanted, bucket_bytes):
    for result in results:
        names = [name for bucket in result["buckets"] for name, _ in bucket]
        assert sorted(names) == sorted(wanted), "every tensor once"
        assert result["repeats"], "a second pass gives the same"
        for bucket in result["buckets"]:
            assert len(bucket) == 1 or sum(t.numel() * t.element_size() for _, t in bucket) <= bucket_bytes
            for name, tensor in bucket:
                assert tensor.shape == wanted[name].shape and torch.equal(tensor, wanted[name]), name


@pytest.mark.few(4)
@pytest.mark.multirank
@pytest.mark.parametrize("bucket_bytes", [1, 7777, 1 << 30])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_gets_every_tensor_once(ranks, layout, bucket_bytes):
    world, parallel = LAYOUTS[layout]
    for cfg in (MODELS["qwen3"], replace(MODELS["qwen2"], tie_embeddings=False), MOE):
        if parallel.expert > 1 and not cfg.moe.num_experts:
            continue
        results = ranks.run(
            "tests.refit.jobs:stream", world=world, cfg=cfg, parallel=parallel, bucket_bytes=bucket_bytes
        )
        check_stream(results, full_weights(cfg), bucket_bytes)


@pytest.mark.multirank
@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "tp2-pp2"])
def test_score_heads_and_bfloat16(ranks, layout):
    world, parallel = LAYOUTS[layout]
    job = {"cfg": LLAMA, "parallel": parallel, "bucket_bytes": 5000}
    half = ranks.run("tests.refit.jobs:stream", world=world, dtype=torch.bfloat16, **job)
    check_stream(half, {n: t.bfloat16() for n, t in full_weights(LLAMA).items()}, 5000)
    mixed = replace(DEEPSEEK, num_layers=4)
    half = ranks.run("tests.refit.jobs:stream", world=world, dtype=torch.bfloat16, **job | {"cfg": mixed})
    kept = {name: spec.kept(torch.bfloat16) for spec in family_table(mixed) for name in spec.hf}
    assert set(kept.values()) == {torch.bfloat16, torch.float32}
    check_stream(half, {n: t.to(kept[n]) for n, t in full_weights(mixed).items()}, 5000)
    scores = ranks.run("tests.refit.jobs:stream", world=world, outputs=3, **job)
    check_stream(scores, full_weights(LLAMA, "score", 3), 5000)


@pytest.mark.few(4)
@pytest.mark.multirank
@pytest.mark.parametrize("moment", ["begin", "second bucket", "finish"])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_refusal_on_one_rank_stops_all(ranks, layout, moment, rank):
    world, parallel = {**LAYOUTS, "dp2": (2, ParallelConfig())}[layout]
    told = ranks.run("tests.refit.jobs:refused", world=world, cfg=LLAMA, parallel=parallel, rank=rank, moment=moment)
    assert told == [f"refit failed on rank {rank}: {moment} does not suit me"] * 2


@pytest.mark.multirank
def test_the_lowest_ranks_cause_is_told(ranks):
    wanted = ["", "refit failed on rank 1: b", "refit failed on rank 0: a"]
    assert ranks.run("tests.refit.jobs:first_cause", world=2) == [wanted] * 2
