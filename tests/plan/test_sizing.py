"""What `auto` becomes: the most that fits, the same for all ranks, and never what a config has set."""

from dataclasses import replace
from math import ceil

import pytest

from aligner.config.checks import AUTO
from aligner.config.derived import undecided
from aligner.config.freeze import from_yaml, to_yaml
from aligner.config.options import from_plain
from aligner.config.resolve import compose
from aligner.config.schema import Config
from aligner.plan.devices import GIB, find_device
from aligner.plan.job import job_of
from aligner.plan.memory import MemoryPlanError
from aligner.plan.prediction import check, predict
from aligner.plan.sizing import UNIT, Room, sized, taken_over, whole_cache

JOBS = {
    "rollouts": (8, ["stage=grpo", "model=llama3_8b", "parallel.tensor=2", "parallel.sequence=true", "batch.group=16"]),
    "long rows": (
        16,
        [
            "stage=grpo",
            "model=llama3_8b",
            "parallel.tensor=4",
            "sampling.max_response_tokens=30000",
            "model.recompute=full",
        ],
    ),
    "stages": (
        64,
        ["stage=sft", "model=llama3_70b", "parallel.tensor=8", "parallel.pipeline=2", "batch.sequences=256"],
    ),
    "experts": (16, ["stage=dpo", "model=qwen3_30b_a3b", "parallel.expert=8", "parallel.tensor=2"]),
    "engines apart": (16, ["stage=ppo", "model=qwen3_1.7b", "engine.ranks=8", "engine.name=vllm", "batch.prompts=64"]),
    "an awake engine": (8, ["stage=grpo", "model=qwen3_1.7b", "memory.sleep=never"]),
    "no rollouts": (1, ["stage=rm", "model=qwen3_1.7b"]),
}


def find(name, device="h100", *more):
    gpus, line = JOBS[name]
    return sized(compose([*line, *more]), gpus, Room.of(find_device(device)))


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_what_is_found_fits_and_no_more_would(name, device):
    cfg, gpu = find(name, device), find_device(device)
    assert not undecided(cfg) and cfg.batch.micro_batch_tokens > 0
    job = job_of(cfg, JOBS[name][0])
    assert predict(job, gpu).memory.fits
    if job.engine is None:
        return
    many = max(job.rows.count, ceil(job.engine.max_batch * job.replicas))  # as an evaluation may have
    job = replace(job, evaluated=replace(job.rows, count=many, prompts=many))
    assert predict(job, gpu).memory.fits
    extra = 1.25 if job.engine.reserved else 1.1  # an engine's own process has a context of its own
    larger = replace(job, engine=replace(job.engine, kv_bytes=extra * job.engine.kv_bytes + UNIT))
    everything = job.engine.kv_bytes >= whole_cache(job)
    assert everything or not predict(larger, gpu).memory.fits


def test_larger_memory_gives_a_larger_cache_and_fewer_seconds():
    small, large = (find("long rows", device) for device in ("h100", "h200"))
    assert large.engine.kv_cache_bytes > 1.3 * small.engine.kv_cache_bytes
    for cfg in (small, large):
        slots = job_of(cfg, 16).slots()[0]
        assert slots > 4 * job_of(compose([*JOBS["long rows"][1], "engine.kv_cache_bytes=4294967296"]), 16).slots()[0]


def test_an_evaluation_of_more_rows_than_a_rollout_fits():
    gpu, line = find_device("h100"), [*JOBS["rollouts"][1], "batch.group=2", "reward.functions=[{path: math}]"]
    line += ["batch.prompts=8", "sampling.max_response_tokens=8192", "data.max_prompt_tokens=2048"]
    for evaluation in ([], ["data.eval=x.jsonl"], ["data.eval=x.jsonl", "eval.prompts=0"]):
        cfg = sized(compose([*line, *evaluation]), 8, Room.of(gpu))
        memory = predict(job_of(cfg, 8), gpu).memory
        assert memory.fits and cfg.engine.kv_cache_bytes < gpu.memory_bytes
        held = memory.phases["generate"]["kv cache"]
        assert (held > 0.9 * cfg.engine.kv_cache_bytes) == bool(evaluation)
        large = replace(cfg, engine=replace(cfg.engine, kv_cache_bytes=90_000_000_000))
        assert predict(job_of(large, 8), gpu).memory.fits != bool(evaluation)


def test_what_is_set_stays():
    line = ["engine.kv_cache_bytes=123456789", "batch.micro_batch_samples=2", "batch.logprob_tokens=777"]
    cfg = compose([*JOBS["rollouts"][1], *line])
    assert sized(cfg, 8, Room.of(find_device("h100"))) is cfg
    one = find("rollouts", "h100", "batch.micro_batch_samples=2")
    assert one.batch.micro_batch_samples == 2 and not one.batch.micro_batch_tokens
    assert one.batch.logprob_tokens != AUTO != one.engine.kv_cache_bytes


def test_a_limit_of_a_phase_is_kept():
    limit = 52 * GIB
    held = find(
        "rollouts", "h100", f"memory.limit.generate_bytes={limit}", "engine.max_batch=4096", "batch.prompts=1024"
    )
    generate = predict(job_of(held, 8), find_device("h100")).memory.phases["generate"]
    assert 0.9 * limit < sum(generate.values()) <= limit


def test_ranks_that_wait_for_each_other_get_several_micro_batches():
    cfg = find("stages")
    assert job_of(cfg, 64).micro_batches()[0] >= 2 * 2


def test_without_packing_experts_are_given_rows():
    cfg = find("experts", "h100", "batch.packing=false", "batch.sequences=24")
    assert cfg.batch.micro_batch_samples == 3 and not cfg.batch.micro_batch_tokens  # 24 / 8 ranks


@pytest.mark.parametrize(("gib", "cache", "tokens"), [(64, GIB, 16384), (8, GIB, 16384), (1, GIB // 8, 1024)])
def test_a_cpu_is_given_a_modest_share(gib, cache, tokens):
    cfg = sized(compose(["stage=grpo", "model=tiny"]), 2, Room(gib * GIB, gib * GIB, cuda=False))
    assert cfg.engine.kv_cache_bytes == cache and 256 <= cfg.batch.micro_batch_tokens <= 16384
    assert cfg.batch.logprob_tokens == (16384 if gib >= 4 else 4096)
    assert cfg.batch.micro_batch_tokens >= tokens


def test_a_run_resumes_with_what_it_had():
    was, new = find("rollouts"), compose(JOBS["rollouts"][1])
    again = taken_over(new, was)
    assert again.batch == was.batch and again.engine == was.engine
    other = taken_over(compose([*JOBS["rollouts"][1], "batch.micro_batch_samples=4"]), was)
    assert other.batch.micro_batch_samples == 4 and not other.batch.micro_batch_tokens
    old = compose([*JOBS["rollouts"][1], "batch.micro_batch_samples=16", "engine.kv_cache_bytes=1073741824"])
    back = taken_over(new, old)  # as runs were before there was `auto`
    assert back.batch.micro_batch_samples == 16 and back.engine.kv_cache_bytes == 1 << 30


def test_auto_survives_a_frozen_config():
    cfg = compose(JOBS["rollouts"][1])
    assert undecided(cfg) and from_plain(Config, from_yaml(to_yaml(cfg))) == cfg


def test_submit_checks_what_would_be_found():
    gpus, line = JOBS["rollouts"]
    check(compose(line), gpus, 8, {"gpu": "h100"})
    with pytest.raises(MemoryPlanError):
        check(compose([*line, "engine.kv_cache_bytes=90000000000", "engine.name=vllm"]), gpus, 8, {"gpu": "h100"})
