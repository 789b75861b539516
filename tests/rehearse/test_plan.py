"""The calculator against the code: memory of each phase and bytes of collectives, at full width and reduced depth."""

from collections import Counter
from dataclasses import replace

import pytest

from aligner.config.resolve import compose
from aligner.plan.devices import find_device
from aligner.plan.job import job_of
from aligner.plan.memory import stage_phases
from aligner.plan.traffic import pass_calls, step_calls
from aligner.rehearse.command import cases_of, run
from aligner.rehearse.ranks import stage_of
from aligner.rehearse.report import Rehearsal

ROWS = ["data.max_prompt_tokens=512", "data.max_tokens=4096", "batch.sequences=16", "batch.micro_batch_samples=1"]
ROLLOUT = ["data.max_prompt_tokens=2048", "sampling.max_response_tokens=16", "batch.prompts=8", "batch.group=2"]
ROLLOUT += ["batch.minibatch_samples=0", "batch.share_prompts=false", "batch.micro_batch_samples=16"]
SHARED = ["data.max_prompt_tokens=1024", "sampling.max_response_tokens=1024", "batch.prompts=16", "batch.group=8"]
APART = ["engine.ranks=4", "engine.tensor_parallel=2", "engine.lag=1", "refit.verify=checksum"]
CASES = {
    "sft": ["stage=sft", "model=llama3_8b", "parallel.tensor=2", "parallel.sequence=true", *ROWS],
    "fp8": ["stage=sft", "model=llama3_8b", "parallel.tensor=2", "parallel.sequence=true", *ROWS],
    "dpo": ["stage=dpo", "model=llama3_70b", "parallel.tensor=4", "parallel.pipeline=2", *ROWS],
    "adapters": ["stage=grpo", "model=llama3_8b", "model.lora.rank=16", "algorithm.kl.coef=0.1", *ROLLOUT],
    "apart": ["stage=grpo", "model=llama3_8b", "parallel.tensor=2", *ROLLOUT, *APART],
    "experts": ["stage=sft", "model=qwen3_30b_a3b", "parallel.expert=4", "parallel.context=2", *ROWS],
}
CASES["ahead"] = ["stage=sft", "model=glm4.5_air", "model.moe.num_experts=16", "model.mtp.layers=1", *ROWS]
CASES["ahead"] += ["parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true", "data.max_tokens=2048"]
CASES["buffers"] = [*CASES["sft"][:-1], "batch.micro_batch_tokens=4096", "model.megatron.tp_comm_overlap=true"]
CASES["fp8"].append("model.megatron={fp8: hybrid, fp8_recipe: tensorwise, first_last_layers_bf16: true}")
SHARING = {
    "group": ["stage=grpo", "model=llama3_8b", "batch.micro_batch_samples=16", *SHARED],
    "group by tokens": ["stage=grpo", "model=qwen3_1.7b", "batch.micro_batch_tokens=16384", *SHARED],
    "minibatches": [
        *("stage=grpo", "model=qwen3_1.7b", "batch.minibatch_samples=64", "batch.micro_batch_samples=8", *SHARED),
        *("parallel.tensor=2", "parallel.sequence=true", "algorithm.kl.coef=0.1"),
    ],
    "group through stages": [
        *("stage=ppo", "model=qwen3_1.7b", "parallel.pipeline=2", "batch.micro_batch_samples=4", *SHARED),
    ],
    "pairs of a prompt": [
        *("stage=dpo", "model=qwen3_1.7b", "batch.micro_batch_samples=4", "batch.sequences=16"),
        *("data.max_prompt_tokens=1024", "data.max_tokens=2048", "model.recompute=full"),
    ],
    "group of experts": [
        *("stage=grpo", "model=gpt_oss_20b", "model.moe.num_experts=8", "parallel.expert=4"),
        *("batch.micro_batch_samples=8", *SHARED),
    ],
}
KINDS = {  # as torch calls them
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "all_gather": ("allgather_base", "allgather_into_tensor_coalesced"),
    "reduce_scatter": ("reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    "all_to_all": ("alltoall_base",),
    "broadcast": ("broadcast",),
    "send": ("send",),
}
GPUS, STEPS = 8, 2


@pytest.fixture(scope="module")
def rehearsals(tmp_path_factory):
    """A Rehearsal of each job, all from one process that has imported everything."""
    folder = tmp_path_factory.mktemp("plan")
    configs = {name: compose([*overrides, "model.num_layers=4"]) for name, overrides in CASES.items()}
    configs |= {name: compose([*overrides, "model.num_layers=2"]) for name, overrides in SHARING.items()}
    jobs = {name: cases_of(cfg, GPUS, "stages", folder / name) for name, cfg in configs.items()}
    records = iter(run([case for _, cases in jobs.values() for case in cases], "h100", folder))
    return {
        name: Rehearsal(cfg, GPUS, find_device("h100"), {case["rank"]: next(records) for case in cases}, 0.0)
        for name, (cfg, cases) in jobs.items()
    }


@pytest.mark.slow
def test_a_plan_has_the_memory_and_the_messages_of_the_code(rehearsals):
    first = {}
    for name in CASES:
        rehearsal = rehearsals[name]
        cfg, own = rehearsal.cfg, rehearsal.records
        assert not rehearsal.faults, name
        for rank, record in own.items():
            phases = record["phases"]
            for phase, planned in rehearsal.planned[rank].items():
                if phase in phases:
                    assert phases[phase]["peak_bytes"] == pytest.approx(planned, rel=0.1), (name, rank, phase)
            if stage_of(rank, cfg, GPUS) is None:
                weights = phases["generate"]["held"]["engine weights"]
                assert weights == pytest.approx(phases["build"]["peak_bytes"], rel=0.01), name
                own = [ranks for key, ranks in record["groups"].items() if not key.startswith("job")]
                assert own and all(min(ranks) >= GPUS - cfg.engine.ranks for ranks in own), name
                continue
            heard, wanted = _sent(phases["update"]), _planned(rehearsal, rank)
            for kind in KINDS:  # what is smaller are metrics
                assert heard[kind] == pytest.approx(wanted[kind], rel=1e-3, abs=1e6), (name, rank, kind)
        first[name] = rehearsal.records[0]["phases"]
    for phase in ("build", "update", "save"):  # twelve buffers of a micro-batch in 16 bits
        beside, plain = (first[name][phase]["peak_bytes"] for name in ("buffers", "sft"))
        assert beside - plain == pytest.approx(12 * 2 * 4096 * 4096, rel=0.01), phase
    # the same products, of two of four layers at twice the rate
    plain, fp8 = (first[name]["update"] for name in ("sft", "fp8"))
    assert fp8["product_flops"] == pytest.approx(plain["product_flops"])
    in_layers = 6 * 16 / 4 * 4096 * 2 * 218.1e6 / 2  # of two layers, whose matrices two ranks share
    saved = STEPS * in_layers / find_device("h100").flops / 0.75 / 2
    assert plain["device_s"]["products"] - fp8["device_s"]["products"] == pytest.approx(saved, rel=0.05)


@pytest.mark.slow
def test_a_plan_counts_shared_prompts_once(rehearsals):
    for name in SHARING:
        rehearsal = rehearsals[name]
        cfg = rehearsal.cfg
        assert not rehearsal.faults and not rehearsal.one_by_one, name
        for rank, record in rehearsal.records.items():
            for phase in ("logprobs", "update"):
                if phase in record["phases"] and phase in rehearsal.planned[rank]:
                    peak, planned = record["phases"][phase]["peak_bytes"], rehearsal.planned[rank][phase]
                    assert planned == pytest.approx(peak, rel=0.05), (name, rank, phase)
            apart = stage_phases(replace(rehearsal.job, share=False), stage_of(rank, cfg, GPUS))["update"]
            assert sum(apart.values()) > 1.005 * rehearsal.planned[rank]["update"], name


def _sent(phase: dict) -> Counter:
    kinds = {word: kind for kind, words in KINDS.items() for word in words}
    results: Counter = Counter()
    for _, word, _, size in phase["collectives"]:
        results[kinds.get(word, word)] += size / STEPS
    return results


def _planned(actual: Rehearsal, rank: int) -> Counter:
    rows = job_of(actual.cfg, GPUS).rows
    job = job_of(actual.cfg, GPUS, prompt_tokens=rows.prompt_longest, response_tokens=rows.response_longest)
    stage, (number, tokens) = stage_of(rank, actual.cfg, GPUS), job.micro_batches()
    calls = pass_calls(job, job.policy, stage, tokens, backward=True) * number + step_calls(job, job.policy, stage)
    wanted: Counter = Counter()
    for call in calls * job.minibatches * job.epochs:
        wanted["send" if call.op == "send" else call.op] += call.size
    return wanted
