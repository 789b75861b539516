"""Checks across sections. Each row breaks one thing in a config that is otherwise fine."""

import functools
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.derived import batch_arithmetic, node_purposes
from aligner.config.resolve import compose
from aligner.config.validate import validate
from aligner.errors import ConfigError, LayoutError


@pytest.mark.few(16)
@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "kto", "distill", "grpo", "ppo", "sample", "online_dpo"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("parallel", ["single", "tp2", "pp2"])
def test_the_defaults_are_valid(make, stage, world, parallel):
    if world >= 2 or parallel == "single":
        validate(make(stage, f"parallel={parallel}"), world)


TP3 = ["model.num_heads=6", "model.num_kv_heads=6", "model.hidden_size=192"]


@pytest.mark.parametrize(
    ("stage", "overrides", "world", "key"),
    [
        ("grpo", ["engine.tensor_parallel=0"], 2, "engine.tensor_parallel"),
        ("grpo", ["engine.ranks=1", "engine.lag=1", "engine.window=-1"], 2, "engine.window"),
        ("sft", ["ptx={coef: 0.1, data: {train: /nowhere/a.jsonl}}"], 1, "ptx.data.train"),
        ("sft", ["data.train=/nowhere/a.jsonl"], 1, "data.train"),
        ("sft", ["data.eval=/nowhere/a.jsonl"], 1, "data.eval"),
        ("sft", ["model.init=/nowhere/model"], 1, "model.init"),
        ("sft", ["run.resume=/nowhere/checkpoint"], 1, "run.resume"),
        ("grpo", ["reward.model=/nowhere/rm"], 1, "reward.model"),
        ("ppo", ["critic.init=/nowhere/rm"], 1, "critic.init"),
        ("sft", ["batch.micro_batch_samples=many"], 1, "batch.micro_batch_samples"),
        ("sft", ["batch.logprob_tokens=0"], 1, "batch.logprob_tokens"),
        ("grpo", ["engine.kv_cache_bytes=-1"], 1, "engine.kv_cache_bytes"),
    ],
)
def test_what_cannot_work_is_refused(make, stage, overrides, world, key):
    with pytest.raises(ConfigError) as caught:
        validate(make(stage, *overrides), world)
    assert caught.value.key == key
    assert caught.value.exit_code == 2 and "expected" in str(caught.value)


@pytest.mark.parametrize("stage", ["grpo", "ppo", "online_dpo", "sample"])
def test_rows_that_no_rollout_reads_may_be_longer_than_the_model(make, stage):
    short = ["model.max_position=512", "data.max_prompt_tokens=64", "sampling.max_response_tokens=64"]
    short += ["eval.max_response_tokens=64"]
    validate(make(stage, "data.max_tokens=1024", *short), 1)
    with pytest.raises(ConfigError) as caught:
        validate(make(stage, *short, "data.max_prompt_tokens=500"), 1)
    assert caught.value.value == 64


def test_a_name_of_the_hub_gets_a_hint(make, tmp_path):
    for key, kind in (("model.init", ""), ("data.train", "--repo-type dataset ")):
        with pytest.raises(
            ConfigError, match=rf"a path that exists.*hf download {kind}some-org/Model-0.6B --local-dir"
        ):
            validate(make("sft", f"{key}=some-org/Model-0.6B"), 1)
        relative = re.escape(f". It is relative to {Path.cwd()}.")
        for path, where in ((f"{tmp_path}/none", ""), ("data/none.jsonl", relative), ("./some-org/x", relative)):
            with pytest.raises(ConfigError, match=rf"a path that exists{where}$"):
                validate(make("sft", f"{key}={path}"), 1)


@pytest.mark.parametrize(
    ("overrides", "world"), [(["parallel=tp2"], 3), (["parallel.pipeline=5"], 5), (["batch.sequences=9"], 2)]
)
def test_division_by_ranks_is_a_layout_error(make, overrides, world):
    with pytest.raises(LayoutError):
        validate(make("sft", *overrides), world)


def test_exactly_full_context_is_allowed(make):
    validate(make("grpo", "data.max_prompt_tokens=4000", "sampling.max_response_tokens=96"), 1)
    validate(make("grpo", "engine.ranks=1", "engine.lag=2"), 2)
    validate(make("grpo", "engine.ranks=1", "engine.lag=1", "algorithm.policy_loss=dppo"), 2)
    validate(make("grpo", "engine.ranks=1", "engine.lag=2", "algorithm.old_logprobs=engine"), 2)
    validate(make("grpo", "engine.ranks=1", "engine.lag=2", "algorithm.old_logprobs=proxy"), 2)
    validate(make("grpo", "engine.ranks=1", "engine.lag=1", "engine.window=64"), 2)
    validate(make("grpo", "engine.ranks=1", "engine.lag=1", "engine.window=64", "environment.tools=[a:b]"), 2)
    validate(make("ppo", "critic.init=.", "reward.model=''", "reward.functions=[{path:math}]"), 1)
    trunk = ["critic.trunk=policy", "model.lora.rank=2"]
    validate(make("ppo", *trunk, "reward.model=''", "reward.functions=[{path:math}]"), 1)
    validate(
        make("grpo", "batch.minibatch_samples=64", "batch.micro_batch_samples=24", "batch.micro_batch_tokens=99"), 1
    )


@pytest.mark.parametrize(
    ("trainers", "engines", "per_node", "engine_nodes", "text"),
    [
        (12, 4, 4, 0, "nodes: 3 for training, 1 for engines"),
        (10, 6, 4, 0, "nodes: 2 for training, 1 for engines, 1 for both (engine.ranks=6 is no multiple of 4)"),
        (5, 2, 4, 0, "nodes: 1 for training, 1 for both (engine.ranks=2 is no multiple of 4)"),
        (1, 1, 4, 0, ""),
        (8, 0, 4, 0, ""),
        (8, 2, 4, 1, "nodes: 2 for training, 1 for engines"),
        (2, 8, 2, 4, "nodes: 1 for training, 4 for engines"),
    ],
)
def test_node_purposes_name_every_kind_of_node(trainers, engines, per_node, engine_nodes, text):
    assert node_purposes(trainers, engines, per_node, engine_nodes) == text


def test_arithmetic_is_printed_with_numbers(make):
    cfg = make(
        "grpo", "batch.prompts=32", "batch.group=8", "batch.minibatch_samples=64", "batch.micro_batch_samples=16"
    )
    assert batch_arithmetic(cfg, 2).splitlines() == [
        "32 prompts x 8 group = 256 samples = 4 minibatches x 64 minibatch_samples",
        "64 minibatch_samples = 2 micro-batches x 16 micro_batch_samples x 2 data-parallel ranks",
    ]
    assert (
        batch_arithmetic(make("sft", "parallel=tp2", "batch.micro_batch_samples=8"), 4)
        == "32 sequences = 2 micro-batches x 8 micro_batch_samples x 2 data-parallel ranks"
    )
    assert "(batch.micro_batch_samples=auto) x 2 data-parallel ranks" in batch_arithmetic(
        make("sft", "batch.sequences=12"), 2
    )
    assert batch_arithmetic(make("grpo", "engine.ranks=2"), 4).endswith("x 2 data-parallel ranks")
    assert "at most 512 micro_batch_tokens x 1 data-parallel rank" in batch_arithmetic(
        make("rm", "batch.micro_batch_tokens=512"), 1
    )


@functools.cache
def valid_grpo():
    return compose(["stage=grpo", "data.train=.", "reward.functions=[{path:math}]"])


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.integers(1, 24),
    group=st.integers(2, 6),
    minibatch=st.integers(0, 48),
    micro=st.integers(1, 12),
    world=st.sampled_from([1, 2, 3, 4]),
)
def test_what_passes_adds_up(prompts, group, minibatch, micro, world):
    """Accepted configs are exactly those in which every product of the printed arithmetic holds in integers."""
    cfg = valid_grpo()
    b = cfg.batch
    b.prompts, b.group, b.minibatch_samples, b.micro_batch_samples = prompts, group, minibatch, micro
    step = minibatch or prompts * group
    share, rest = divmod(step, world)
    fits = prompts % world == 0 and prompts * group % step == 0 and rest == 0
    fits = fits and share % min(micro, share) == 0
    try:
        validate(cfg, world)
    except ConfigError:
        assert not fits
    else:
        assert fits
        size = min(micro, share)
        count, ranks = f"micro-batch{'es' * (share > size)}", f"data-parallel rank{'s' * (world > 1)}"
        assert f"{share // size} {count} x {size} micro_batch_samples x {world} {ranks}" in batch_arithmetic(cfg, world)
