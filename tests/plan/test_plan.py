"""Parameters against published counts, memory, times and refusals of the calculator; no torch, no ranks."""

import functools
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise
from math import comb, inf, log, prod
from pathlib import Path
from types import SimpleNamespace

import pytest

from aligner.config.resolve import compose
from aligner.config.sections.judge import JudgeConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.lora import ALL_LINEAR, LoraConfig
from aligner.config.sections.model.moe import MoeConfig
from aligner.config.sections.model.mtp import MtpConfig
from aligner.errors import ConfigError
from aligner.families.hf_config import hf_config
from aligner.families.table import family_table, parameters
from aligner.plan.activations import activation_bytes
from aligner.plan.devices import DEVICES, GIB, Assumptions, sheet_of
from aligner.plan.host import engine_host_bytes, host_items
from aligner.plan.job import Engine, PlanJob, PlannedModel, PlannedRows, job_of, shape_at
from aligner.plan.lengths import Lengths, read_lengths
from aligner.plan.linear import row_bytes
from aligner.plan.memory import (
    MemoryPlanError,
    engine_phases,
    most_of,
    plan_memory,
    refuse,
    stage_phases,
    training,
)
from aligner.plan.prediction import Prediction, predict
from aligner.plan.shapes import (
    Grid,
    active_parameters,
    attention_widths,
    decode_weight_bytes,
    kv_bytes,
    largest_parameter,
    rank_parameters,
    routing_bytes,
)
from aligner.plan.sizes import embedding_bytes, engine_bytes, engine_items, logit_bytes
from aligner.plan.sweep import candidates
from aligner.plan.times import (
    Machine,
    decode_step,
    generate_phase,
    micro_batch_seconds,
    plan_times,
    update_mfu,
    update_phase,
)
from aligner.plan.traffic import CollectiveCalls, apart_bytes, gathered_calls, pass_calls, refit_calls, step_calls
from aligner.rewards.judge import Judge
from aligner.types import Prompt, Sample

ROOT = Path(__file__).parents[2]
H100 = DEVICES["h100"]


@functools.cache
def shape(name: str) -> ModelConfig:
    return compose([f"model={name}"]).model


def grpo(model: ModelConfig, grid: Grid, engine: Engine | None = None, **changes) -> PlanJob:
    rows = PlannedRows(1024, 64, 128, 256, 512, 2048)
    engine = engine or Engine(kv_bytes=20 * GIB)
    return replace(
        PlanJob("grpo", (PlannedModel("policy", model, trained=True),), grid, rows, engine, micro_tokens=4096),
        **changes,
    )


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [  # as counted by the published checkpoints' tensors; the active ones without the embedding
        ("llama3_8b", 8_030_261_248, 8_030_261_248 - 128256 * 4096),
        ("llama3_70b", 70_553_706_496, 70_553_706_496 - 128256 * 8192),
        ("qwen2.5_7b", 7_615_616_512, None),
        ("qwen3_0.6b", 596_049_920, 596_049_920),
        ("qwen3_1.7b", 1_720_574_976, 1_720_574_976),
        ("qwen3_30b_a3b", 30_532_122_624, 3.04e9),
        ("qwen3_8b", 8_190_735_360, 8_190_735_360 - 151936 * 4096),
        ("qwen3_32b", 32_762_123_264, 32_762_123_264 - 151936 * 5120),
        ("qwen3_235b_a22b", 235_093_634_560, 21.57e9),
        ("gpt_oss_20b", 20_914_757_184, 3.61e9),
        ("gpt_oss_120b", 116_829_156_672, 5.13e9),
        ("qwen3_next_80b_a3b", 79_674_391_296, None),
        ("kimi_k2", 1_026_408_209_408 + 60 * 384, 31.7e9),
        ("glm4.5_air", 106_852_245_504 + 45 * 128, 12.8e9),  # and what is added to the scores of a choice
        # transformers' class, and what is added to the scores of a choice
        ("glm4.7_flash", 29_943_390_976 + 46 * 64, None),
        ("deepseek_v3.2", 671_877_929_216 + 58 * 256, None),
        ("glm5", 743_911_199_232 + 75 * 256, None),
        # the language model alone, as transformers' class has it
        ("qwen3.5_4b", 4_205_751_296, None),
        ("qwen3.5_35b_a3b", 34_660_610_688, None),
        ("gemma4_31b", 30_697_345_280 + 60, None),  # and a scalar of each layer
        ("gemma4_e2b", 4_628_569_344 + 35, 2.28e9),
        ("gemma4_e4b", 7_463_013_376 + 42, None),
        ("gemma4_26b_a4b", 25_233_141_760 + 30, 3.82e9),
        ("nemotron3_nano_30b_a3b", 31_577_937_344 + 23 * 128, 3.27e9),
        ("nemotron3_super_120b_a12b", 120_668_687_360 + 40 * 512, 12.38e9),
    ],
)
def test_parameters_of_published_models(name, total, active):
    model = shape(name)
    assert parameters(model) == total
    if active:
        assert active_parameters(model) == pytest.approx(active, rel=0.005)


def test_heads_of_two_kinds_count_by_their_layers():
    model = shape("gemma4_31b")
    assert active_parameters(model) == 30_696_013_824  # all its matrices: ten layers have none of values
    assert kv_bytes(model, 2) == pytest.approx(2 * (50 * 2 * 16 * 256 + 10 * 2 * 4 * 512))
    assert attention_widths(model, ("global",)) == (32 * 512, 4 * 512, 4 * 512, 32 * 512)
    counts = [rank_parameters(model, Grid(tensor=4, pipeline=2), stage) for stage in (0, 1)]
    alike = sum(len(row.shape) == 1 and prod(row.shape) for row in family_table(model))  # on all tensor ranks
    assert (
        4 * sum(each.dense + each.frozen for each in counts) - 3 * alike
        == parameters(model) + model.vocab_size * model.hidden_size
    )


@pytest.mark.parametrize("tensor", [1, 4])
def test_what_an_engines_rank_holds(tensor):
    """Of fewer heads of keys and values than ranks a whole one, and what every rank has whole: bytes of weights and of
    a position in the cache."""
    import torch

    from aligner.engines.native.model import NativeModel
    from tests.tiny import MODELS, MORE, WINDOWS

    first = SimpleNamespace(size=tensor, rank=0, group=None)
    for name, model in (MODELS | MORE | WINDOWS).items():
        if model.latent.output_groups:  # a rank has one of them at least
            model = replace(model, latent=replace(model.latent, output_groups=4))
        native = NativeModel(model, torch.device("cpu"), torch.float32, first)
        assert engine_bytes(model, tensor, 4) == sum(view.nbytes for view in native.views.values()), name
        assert kv_bytes(model, 4, tensor) == pytest.approx(4 * sum(map(prod, native.cached))), name


def test_layers_that_use_keys_of_others_have_no_cache_and_another_mlp():
    model = shape("gemma4_e2b")
    assert kv_bytes(model, 2) == pytest.approx(2 * (12 * 2 * 256 + 3 * 2 * 512))
    counts = Counter(prod(row.shape) for row in family_table(model) if row.canonical.endswith("mlp.linear_fc2.weight"))
    assert counts == {1536 * 6144: 15, 1536 * 12288: 20}
    table = model.vocab_size * 35 * 256  # what is looked up computes nothing
    norms = sum(len(row.shape) == 1 and prod(row.shape) for row in family_table(model))
    assert active_parameters(model) == parameters(model) - table - norms
    job = grpo(model, Grid(data=8))
    assert embedding_bytes(job, job.policy) == 2 * (table + model.vocab_size * 1536)
    assert largest_parameter(model, Grid(tensor=1), 0) == table


def test_ranks_together_hold_the_model_once():
    model = shape("qwen3_30b_a3b")
    from aligner.plan.shapes import layer_norms, rank_parameters

    grid = Grid(tensor=4, pipeline=3, expert=8, data=8)
    counts = [rank_parameters(model, grid, stage) for stage in range(3)]
    alike = model.num_layers * (layer_norms(model) + 128 * model.hidden_size) + model.hidden_size  # on all tensor ranks
    dense, experts = sum(c.dense for c in counts), sum(c.experts for c in counts)
    assert 4 * (dense - alike) + alike + 8 * experts == pytest.approx(parameters(model), abs=4 * model.hidden_size)


def test_a_layer_for_multi_token_prediction_is_one_more_of_the_update_alone():
    plain = shape("glm4.5_air")
    model, grid = replace(plain, mtp=MtpConfig(1)), Grid(tensor=8, expert=8, data=8)
    assert rank_parameters(model, Grid(), 0).total == parameters(model)
    deeper = parameters(replace(plain, num_layers=plain.num_layers + 1))
    assert parameters(model) - deeper == (3 + 2 * plain.hidden_size) * plain.hidden_size
    jobs = [grpo(m, grid) for m in (plain, model)]
    assert engine_items(jobs[0]) == engine_items(jobs[1])
    before, after = (plan_times(job, H100, Assumptions()) for job in jobs)
    assert {n for n in before if before[n].seconds != after[n].seconds} == {"update"}
    layers = after["update"].parts["kernels"] / before["update"].parts["kernels"]
    assert 1 + 1 / plain.num_layers < layers < 1 + 4 / plain.num_layers  # and one more pass of the output matrix


def test_the_fullest_stage_needs_the_most_memory():
    job, peaks = replace(grpo(shape("llama3_8b"), Grid(8, 4, data=2)), engine=None), []
    for sizes in ((8, 8, 8, 8), (20, 4, 4, 4)):
        one = replace(job, grid=replace(job.grid, stage_layers=sizes))
        peaks.append(plan_memory(one, H100, Assumptions()).peak_bytes)
    assert peaks[1] > 1.5 * peaks[0]


def test_stages_that_take_turns_hold_more_micro_batches_and_wait_less():
    line = ["stage=sft", "model=llama3_8b", "batch.sequences=64", "batch.micro_batch_samples=1", "parallel.pipeline=4"]
    one, two = (job_of(compose([*line, f"parallel.virtual_stages={n}"]), 4) for n in (1, 2))
    held = [activation_bytes(job, job.policy, 0) for job in (one, two)]
    assert held[1] / held[0] == pytest.approx((2 * 3 + 4 + 1) / 2 / 4)  # arXiv:2104.04473, section 2.2
    waits = [plan_times(job, H100, Assumptions())["update"].parts["bubble"] for job in (one, two)]
    assert 0.4 < waits[1] / waits[0] < 0.6


def test_the_first_layers_of_each_stage_are_recomputed():
    line = ["stage=sft", "model=llama3_8b", "parallel.pipeline=4", "parallel.virtual_stages=2", "model.recompute=3"]
    job = job_of(compose(line), 4)
    assert job.recompute_text == ", recompute 3"
    none, three, four, every = (activation_bytes(replace(job, recompute=n), job.policy, 0) for n in (0, 3, 4, 8))
    assert three == pytest.approx(none + (four - none) * 3 / 4) and four == every
    uneven = replace(job, grid=replace(job.grid, stage_layers=(1, 2, 3, 2, 7, 6, 6, 5)))
    sizes = [activation_bytes(replace(uneven, recompute=n), job.policy, 0) for n in (0, 1, 3, 7)]
    steps = [a - b for a, b in pairwise(sizes)]
    assert steps == pytest.approx([steps[0], steps[0], 2 * steps[0]])  # 2 layers, 2 and 4


def test_a_sweep_cuts_61_layers_into_8_stages():
    layouts = list(candidates(shape("deepseek_v3"), 64, 8))
    assert {parallel.pipeline for parallel in layouts} == {1, 2, 4, 8, 16, 32}


@pytest.mark.parametrize("grid", [Grid(pipeline=16, data=4, expert=4), Grid(pipeline=4, data=8, virtual=3)])
def test_the_fullest_stage_is_among_those_that_are_looked_at(grid):
    job = grpo(shape("deepseek_v3"), grid, Engine(tensor=8))
    every = most_of([stage_phases(job, stage) for stage in range(grid.pipeline)], H100, Assumptions())
    assert plan_memory(job, H100, Assumptions()) == every and len(training(job)) < grid.pipeline + (grid.pipeline == 4)


def test_sharding_divides_what_it_shards():
    """70B on 64 GPUs: weights by tp x pp, optimizer state by data-parallel ranks too."""
    model = shape("llama3_70b")
    one = plan_memory(grpo(model, Grid(8, 1, data=8), micro_tokens=0, micro_rows=1), H100, Assumptions())
    two = plan_memory(grpo(model, Grid(8, 8, data=1), micro_tokens=0, micro_rows=1), H100, Assumptions())
    first, second = one.phases["update"], two.phases["update"]
    assert first["weights"] == pytest.approx(2 * 70.55e9 / 8, rel=0.01)
    assert second["weights"] == pytest.approx(2 * 70.55e9 / 64, rel=0.1)  # the first stage has the embedding
    assert first["gradients"] == 2 * first["weights"]
    assert first["optimizer"] == pytest.approx(12 * 70.55e9 / 64, rel=0.01)
    assert second["optimizer"] == pytest.approx(12 * 70.55e9 / 64, rel=0.1)
    plain = grpo(model, Grid(8, 1, data=8))
    plain = replace(plain, models=(replace(plain.policy, distributed=False),))
    assert plan_memory(plain, H100, Assumptions()).phases["update"]["optimizer"] == pytest.approx(
        12 * 70.55e9 / 8, 0.01
    )


def test_activations_by_mode():
    model, grid = shape("llama3_8b"), Grid(tensor=4, pipeline=2)
    job = grpo(model, grid)

    def size(**changes) -> float:
        changed = replace(job, **changes)
        return activation_bytes(changed, changed.policy, 0)

    layers = model.num_layers
    assert size(recompute=layers) == size(recompute=layers // 2) < 0.2 * size()  # a stage has no more than half
    assert size(recompute=layers // 4) == pytest.approx((size() + size(recompute=layers)) / 2)
    assert size(grid=replace(grid, sequence=True)) < 0.7 * size()
    assert size(grid=replace(grid, context=2, over_heads=True)) < 0.55 * size()
    assert size(micro_tokens=8192) == pytest.approx(2 * size(), rel=0.01)
    assert activation_bytes(job, job.policy, 1) < 0.6 * size()  # the last stage holds one micro-batch, the first two
    # rows of at most 2,304 tokens: by rows a micro-batch may hold as many as all are that long
    assert size(micro_tokens=0, micro_rows=4) == pytest.approx(size() * 4 * 2304 / 4096, rel=0.01)


def test_moments_in_bfloat16_take_half_the_memory():
    plain = ["stage=sft", "model=llama3_8b", "model.dtype=bfloat16", "data.train=x"]
    half = ["use_precision_aware_optimizer: true", "exp_avg_dtype: bfloat16", "exp_avg_sq_dtype: bfloat16"]
    sizes = {}
    for name, own in (("float32", []), ("both", half)):
        job = job_of(compose([*plain, f"optim.megatron={{{', '.join(own)}}}"]), 8)
        sizes[name] = plan_memory(job, DEVICES["h100"], Assumptions()).phases["update"]["optimizer"]
    assert sizes["both"] == sizes["float32"] * 8 / 12


def test_an_average_and_other_rows_cost_what_they_are():
    job = grpo(shape("llama3_8b"), Grid(tensor=4, data=2))
    plain = plan_memory(job, H100, Assumptions()).phases
    averaged = replace(job, models=(replace(job.policy, averaged=True), *job.models[1:]))
    extra = plan_memory(averaged, H100, Assumptions()).phases["save"]["optimizer"]
    assert extra == pytest.approx(plain["save"]["optimizer"] * 16 / 12)

    longer = replace(job, ptx_rows=64, ptx_longest=2 * job.rows.longest, micro_tokens=0, micro_rows=2)
    alone = replace(longer, ptx_rows=0)
    assert activation_bytes(longer, job.policy, 0) == pytest.approx(
        2 * activation_bytes(alone, job.policy, 0), rel=0.01
    )
    assert longer.ptx_micro_batches() == (16, 2 * job.rows.longest) and alone.ptx_micro_batches() == (0, 0.0)
    machine = Machine(H100, Assumptions(), 8)
    seconds = [sum(update_phase(j, machine).parts.values()) for j in (alone, longer)]
    tokens = job.rows.tokens + job.minibatches * job.epochs * 64 * job.rows.longest
    assert seconds[1] / seconds[0] == pytest.approx(tokens / job.rows.tokens, rel=0.1)


@pytest.mark.parametrize("page, drafts", [(0, 0), (48, 0), (48, 4), (0, 4)])
def test_the_kv_cache_is_cut_as_the_engine_cuts_it(page, drafts):
    from aligner.config.sections.engine import EngineConfig
    from aligner.engines.native.schedule import CacheUse, PromptRequest, plan_generation
    from aligner.plan.shapes import kv_bytes
    from aligner.types import SamplingParams

    model = shape("qwen3_0.6b")
    for budget, most in ((1 << 30, 512), (4 << 30, 24), (1 << 33, 512)):
        job = grpo(model, Grid(data=8), Engine(kv_bytes=float(budget), max_batch=most, page=page, drafts=drafts))
        wanted = [PromptRequest([1] * 256, [0] * 16)] * 8
        config = EngineConfig(kv_cache_bytes=budget, max_batch=most, page_tokens=page, draft_tokens=drafts)
        token = kv_bytes(model, 2)
        plan = plan_generation(wanted, SamplingParams(2048), config, CacheUse(token))
        slots, held = job.slots()
        assert held == (plan.shape.pages * plan.shape.tokens + plan.staged_tokens) * token <= budget
        rows = replace(job, engine=replace(job.engine, page=0)).slots()[0]
        assert slots == plan.slots if rows == plan.slots else rows < slots <= plan.slots


@pytest.mark.parametrize("page", [0, 48])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("budget, most", [(1 << 30, 512), (1 << 36, 24)])
def test_what_is_kept_of_trajectories_is_planned(budget, most, window, page):
    from aligner.config.sections.engine import EngineConfig
    from aligner.engines.native.schedule import CacheUse, plan_generation
    from aligner.plan.shapes import kv_bytes
    from aligner.rollout.turn_pool import TurnPool
    from aligner.types import SamplingParams

    model = shape("qwen3_0.6b")
    engine = Engine(kv_bytes=float(budget), max_batch=most, window=window, page=page)
    job = grpo(model, Grid(data=8), engine, turns=2048 - 300)
    pool = TurnPool(256 + 2048 - 300, 128, 128, [], None, None, None, True)
    config, token = EngineConfig(kv_cache_bytes=budget, max_batch=most, window=window), kv_bytes(model, 2)
    config.page_tokens = page
    plan = plan_generation([], SamplingParams(300), config, CacheUse(token), pool)
    slots, held = job.slots()
    assert held == (plan.shape.pages * plan.shape.tokens + plan.staged_tokens) * token <= budget
    assert slots <= plan.slots if page else slots == plan.slots
    if not page:
        assert plan.prefixes.slots == 128 if budget > 1 << 30 else plan.slots


def test_what_nobody_reads_costs_nothing():
    """As many tokens of which fewer are responses: fewer logits, and less of the last layer where it is narrowed."""
    model = shape("llama3_8b")
    long = grpo(model, Grid(data=8), micro_tokens=0, micro_rows=2, logits_bytes=1e15)
    assert plan_memory(long, H100, Assumptions()).phases["update"]["logits"] == 4 * 2 * 2048 * model.vocab_size
    short = replace(long, rows=replace(long.rows, prompt_mean=512, response_mean=128))
    results = {}
    products = Assumptions(message_s=0, element_wise=inf, flash_forward=inf, flash_backward=inf)  # and nothing else
    for name, context in (("narrowed", 1), ("whole", 2)):
        a, b = (replace(job, grid=Grid(context=context, data=8)) for job in (long, short))
        first, second = (plan_times(job, H100, products)["update"] for job in (a, b))
        results[name] = 1 - second.parts["kernels"] / first.parts["kernels"]
        # the share of the peak is of what is made, not of 6 N for every token
        assert update_mfu(b, H100, second) == pytest.approx(update_mfu(a, H100, first), rel=0.02)
    logits = 0.6 * model.hidden_size * model.vocab_size / active_parameters(model)  # 4 of 5 tokens to 1 of 5
    layer = 0.6 / model.num_layers * (1 - logits)  # of which a tenth makes queries, keys and values
    assert results["whole"] == pytest.approx(logits, rel=0.1)
    assert (
        results["narrowed"] == pytest.approx(logits + 0.9 * layer, rel=0.1) and results["narrowed"] > results["whole"]
    )


def test_a_step_gets_faster_with_more_of_everything():
    model = shape("llama3_8b")
    job = grpo(model, Grid(data=8))
    base = plan_times(job, H100, Assumptions())
    for device in ("h200", "b200", "gb200", "gb300"):
        actual = plan_times(job, DEVICES[device], Assumptions())
        assert actual["update"].seconds <= base["update"].seconds and actual["refit"].seconds < base["refit"].seconds
    one, half, every = (
        plan_times(replace(job, recompute=n), H100, Assumptions())["update"].parts["kernels"] for n in (0, 16, 32)
    )
    assert every > 1.2 * one and half == pytest.approx((one + every) / 2)
    extra = plan_times(replace(job, grid=Grid(data=16)), H100, Assumptions())
    assert extra["update"].seconds < base["update"].seconds and extra["logprobs"].seconds < base["logprobs"].seconds
    slow = plan_times(replace(job, gpus_per_node=1), H100, Assumptions())["update"]
    assert slow.parts["dp communication"] > 5 * base["update"].parts["dp communication"]  # by network
    assert slow.wire_bytes == base["update"].wire_bytes
    assert 0.45 < update_mfu(job, H100, base["update"]) < 0.5


def test_a_card_is_found_by_cudas_name():
    names = {"h100": "NVIDIA H100 80GB HBM3", "a100": "NVIDIA A100-SXM4-80GB", "gb200": "NVIDIA GB200"}
    assert {key: sheet_of(name) for key, name in names.items()} == {key: DEVICES[key] for key in names}
    assert sheet_of("NVIDIA GH200 480GB") is None and sheet_of("NVIDIA H100 PCIe") is None


def test_a_rack_is_one_node():
    job = grpo(shape("llama3_8b"), Grid(data=72), overlap=("dp",))  # of which all is exposed, as assumed
    dgx, rack = (plan_times(replace(job, gpus_per_node=n), DEVICES["gb200"], Assumptions()) for n in (8, 72))
    # a ring over nodes has the adapters of all its eight members there
    assert dgx["update"].parts["dp communication"] == pytest.approx(
        900 / (8 * 50) * rack["update"].parts["dp communication"], rel=0.01
    )


def test_gradients_travel_beside_the_last_backward():
    """All but the last bucket, if the micro-batch is long enough; what is longer is waited for."""

    def seconds(micro_rows: int, **kwargs) -> tuple[float, float]:
        job = grpo(shape("llama3_8b"), Grid(data=64), micro_tokens=0, micro_rows=micro_rows, **kwargs)
        times = plan_times(job, H100, Assumptions(message_s=0))["update"]
        return times.parts["dp communication"], times.wire_bytes["dp"]

    (all_of_it, wire), (short, _), (long, same) = seconds(8, overlap=("dp",)), seconds(1), seconds(8)
    bucket = 64e6 / parameters(shape("llama3_8b"))
    assert wire == same and long < short < all_of_it
    # reduced in float32, gathered in bfloat16
    assert long == pytest.approx((2 / 3 * bucket + 1 / 3) * all_of_it, rel=1e-6)


def test_the_bubble_is_stages_less_one_of_the_micro_batches():
    model = shape("llama3_8b")
    job = grpo(model, Grid(pipeline=4, data=2), micro_tokens=0, micro_rows=8)
    one = plan_times(job, H100, Assumptions(message_s=0))["update"]
    busy = sum(one.parts[name] for name in ("kernels", "pp communication"))
    count, _ = job.micro_batches()
    assert one.parts["bubble"] == pytest.approx(3 / count * busy, rel=1e-6)
    turns = plan_times(replace(job, grid=replace(job.grid, virtual=4)), H100, Assumptions(message_s=0))["update"]
    assert turns.parts["pp communication"] == pytest.approx(4 * one.parts["pp communication"])
    assert turns.parts["kernels"] == one.parts["kernels"]
    busy = sum(turns.parts[name] for name in ("kernels", "pp communication"))
    assert turns.parts["bubble"] == pytest.approx(3 / 4 / count * busy, rel=1e-6)


def test_messages_take_the_slowest_link_on_their_way():
    """900 bytes of an all-to-all over 16 ranks, 8 in each node; of a ring with 4 in each; of one in a node."""
    device = replace(H100, nvlink=1000.0, network=10.0)
    machine = Machine(device, Assumptions(link=1, message_s=0), 8)
    grid = Grid(tensor=2, expert=16, data=16)
    moe = MoeConfig(64, 8)
    sent, all_of_it = (CollectiveCalls("ep", "all_to_all", 900, 1, *of) for of in ((moe,), ()))
    assert machine.seconds(all_of_it, grid) == 900 / 2 / 10
    copies = [parts * (1 - comb(64 - 64 // parts, 8) / comb(64, 8)) for parts in (2, 16)]  # to nodes, and to ranks
    assert [moe.reached(2), moe.reached(16)] == copies
    assert machine.seconds(sent, grid) == pytest.approx(900 * copies[0] / copies[1] / 2 / 10 + 900 * 7 / 8 / 1000)
    assert machine.seconds(CollectiveCalls("dp", "all_gather", 900), grid) == pytest.approx(900 * 15 / 16 / (4 * 10))
    assert machine.seconds(CollectiveCalls("tp", "all_gather", 900), grid) == 900 / 2 / 1000
    waits = Machine(device, Assumptions(link=1, message_s=1), 8)
    assert waits.seconds(CollectiveCalls("dp", "all_reduce", 0.0, 1), grid) == 1 + 2  # and two doublings of nodes


def test_modules_that_are_recomputed_take_time():
    plain = ["stage=sft", "model=llama3_8b", "model.dtype=bfloat16", "data.train=x"]
    plain.append("parallel.tensor=2")
    jobs = [job_of(compose([*plain, *own]), 8) for own in ([], ["model.megatron.recompute_modules=[mlp]"])]
    jobs.append(replace(jobs[0], recompute=32))
    first, second, third = (
        sum(call.size for call in pass_calls(job, job.policy, 0, 4096, True) if call.axis == "tp") for job in jobs
    )
    assert second - first == (third - first) / 2  # attention has the other half of the messages
    none, mlp, full = (plan_times(job, H100, Assumptions())["update"].parts["kernels"] for job in jobs)
    assert none + 0.5 * (full - none) < mlp < none + 0.6 * (full - none)  # 0.8 of an 8B layer's products


def test_other_models_have_no_fields_of_megatron(tmp_path):
    """A dense reward model and critic beside a policy with experts."""
    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "rms_norm_eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = ["model=qwen3_30b_a3b", "model.megatron.recompute_modules=[moe]", f"reward.model={tmp_path}"]
    modules = {each.name: each.shape.recomputed_modules for each in job_of(compose(["stage=ppo", *own]), 8).models}
    assert modules == {"policy": ("moe",), "reference": ("moe",), "reward": (), "critic": ()}


def test_fp8_is_faster_where_a_device_has_it():
    plain = ["stage=sft", "model=llama3_8b", "model.dtype=bfloat16", "data.train=x"]
    exact, rounded, blocks = (
        job_of(compose([*plain, *own]), 8)
        for own in ([], *([f"model.megatron={{fp8: hybrid, fp8_recipe: {name}}}"] for name in ("tensorwise", "mxfp8")))
    )
    slow, fast = (predict(job, H100).phases["update"].parts["kernels"] for job in (exact, rounded))
    assert 1.2 * fast < slow < Assumptions().fp8_products * fast
    ends = job_of(
        compose([*plain, "model.megatron={fp8: hybrid, fp8_recipe: tensorwise, first_last_layers_bf16: true}"]), 8
    )
    assert predict(ends, H100).phases["update"].parts["kernels"] - fast == pytest.approx((slow - fast) * 2 / 32)
    predict(blocks, DEVICES["b200"])
    for job, name in ((blocks, "h100"), (rounded, "a100")):
        with pytest.raises(ConfigError, match=f"model.megatron.fp8_recipe=.* expected on {name}"):
            predict(job, DEVICES[name])


def test_layers_at_the_ends_keep_what_they_keep_without_fp8():
    """Of a stage with one of them and one that is in FP8."""
    cfg = ["stage=sft", "model=llama3_8b", "model.num_layers=4", "model.dtype=bfloat16", "data.train=x"]
    cfg += ["parallel.pipeline=2", "parallel.tensor=2", "parallel.sequence=true"]
    fp8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    jobs = [
        job_of(compose([*cfg, f"model.megatron={{{', '.join(f'{key}: {value}' for key, value in own.items())}}}"]), 8)
        for own in ({}, fp8, fp8 | {"first_last_layers_bf16": "true"})
    ]
    for stage in (0, 1):
        plain, rounded, mixed = (activation_bytes(job, job.policy, stage) for job in jobs)
        assert rounded != plain and mixed == pytest.approx((plain + rounded) / 2, rel=1e-9)
        sizes = [sum(c.size for c in pass_calls(j, j.policy, stage, 4096, True) if c.op == "all_gather") for j in jobs]
        assert sizes[1] < sizes[0] and sizes[2] == pytest.approx((sizes[0] + sizes[1]) / 2, rel=1e-9)


def test_user_buffers_hide_messages_and_take_memory():
    """A layer's two inputs, two sums and their two gradients go beside products: of its ten messages six."""
    cfg = ["stage=sft", "model=llama3_8b", "model.dtype=bfloat16", "data.train=x", "batch.micro_batch_tokens=8192"]
    cfg += ["parallel.tensor=8", "parallel.sequence=true", "batch.sequences=128", "data.max_tokens=8192"]
    plain, beside = (job_of(compose([*cfg, f"model.megatron.tp_comm_overlap={own}"]), 8) for own in ("false", "true"))
    free = Assumptions(beside=1, message_s=0)
    before, after = (plan_times(job, H100, free)["update"] for job in (plain, beside))
    hidden = before.parts["tp communication"] - after.parts["tp communication"]
    steps, tokens = plain.micro_batches()
    wire = 7 / 8 * 2 * 4096 * tokens / H100.nvlink / free.link
    assert hidden == pytest.approx(steps * 32 * 6 * wire, rel=1e-6)
    assert hidden / before.parts["tp communication"] == pytest.approx(6 / 10, rel=0.02)
    assert after.wire_bytes == before.wire_bytes
    memory = [plan_memory(job, H100, free).phases for job in (plain, beside)]
    own = {name: sum(items.values()) - sum(memory[0][name].values()) for name, items in memory[1].items()}
    assert set(own.values()) == {12 * 2 * 8192 * 4096}
    assert "no message goes beside" not in predict(beside, H100).text()
    half, other = (replace(job, micro_tokens=300_000) for job in (beside, plain))  # 262,144 are too few for them
    assert plan_times(half, H100, free)["update"].parts == plan_times(other, H100, free)["update"].parts


def test_shared_prompts_leave_user_buffers_empty():
    """A micro-batch of 64 rows of 512 + 512 tokens has 16 prompts: 40,960 of 65,536 tokens are computed."""
    cfg = ["stage=grpo", "model=llama3_8b", "batch.prompts=16", "batch.group=16", "batch.micro_batch_tokens=65536"]
    cfg += ["parallel={tensor: 8, sequence: true}", "batch.minibatch_samples=0"]
    cfg += ["data.max_prompt_tokens=1024", "sampling.max_response_tokens=1024"]
    times, texts = {}, {}
    for share in ("true", "false"):
        for own in ("true", "false"):
            job = job_of(compose([*cfg, f"batch.share_prompts={share}", f"model.megatron.tp_comm_overlap={own}"]), 8)
            prediction = predict(job, H100)
            times[share, own] = prediction.phases["update"].parts["tp communication"]
            texts[share, own] = prediction.text()
    assert times["true", "true"] == times["true", "false"] and times["false", "true"] < times["false", "false"]
    assert ["no message goes beside products" in text for text in texts.values()] == [True, False, False, False]
    assert "a micro-batch has 40960 tokens of the 65536 of user buffers, as rows share" in texts["true", "true"]


def test_experts_are_whole_and_tensor_ranks_send_their_own_tokens():
    model = replace(shape("qwen3_30b_a3b"), num_heads=1, num_kv_heads=1, head_dim=2)  # attention sends next to nothing
    alone, shared = Grid(1, 1, 1, 16, 16), Grid(2, 1, 1, 16, 8, sequence=True)
    assert rank_parameters(model, alone, 0).experts == rank_parameters(model, shared, 0).experts
    assert (alone.expert_replicas, shared.expert_replicas) == (1, 1)
    calls = [pass_calls(grpo(model, grid), PlannedModel("policy", model), 0, 4096, True) for grid in (alone, shared)]
    sent = [sum(call.size for call in of if call.axis == "ep") for of in calls]
    assert sent[1] == pytest.approx(sent[0] / 2)
    between = sum(call.size for call in calls[1] if call.axis == "tp")
    dense = replace(model, family="qwen3", moe=MoeConfig(), ffn_hidden_size=6144)
    of_dense = pass_calls(grpo(dense, shared), PlannedModel("policy", dense), 0, 4096, True)
    hidden = 4096 * 2048 * 2 * 48  # a message of each layer
    assert sum(call.size for call in of_dense if call.axis == "tp") - between == pytest.approx(5 * hidden, rel=0.01)


def test_what_published_runs_have_is_not_assumed_of_this_project():
    """Experts in FP8, messages beside products: each makes an update faster, and no config has it."""
    job = job_of(compose(["stage=grpo", "model=qwen3_30b_a3b", "parallel.tensor=2", "parallel.expert=8"]), 32)
    job = replace(job, grid=replace(job.grid, pipeline=4, data=4))
    own = plan_times(job, H100, Assumptions())["update"].seconds
    assert not job.overlap and not job.pairs
    assert plan_times(replace(job, pairs=True), H100, Assumptions())["update"].seconds > own
    beside = replace(job, overlap=("tp", "ep", "dp"))
    assert plan_times(beside, H100, Assumptions(exposed=0.3))["update"].seconds < own
    assert plan_times(job, H100, Assumptions(fp8=1.6, exposed=0.3))["update"].seconds < own
    assert (job.grid.virtual, job.policy.gradient, job.kept, Assumptions().fp8) == (1, 4, 1.0, 1.0)
    update = plan_memory(job, H100, Assumptions()).phases["update"]
    halved = replace(job, kept=0.5, models=(replace(job.policy, gradient=2), *job.models[1:]))
    less = plan_memory(halved, H100, Assumptions()).phases["update"]
    assert less["gradients"] == update["gradients"] / 2 and less["activations"] < 0.6 * update["activations"]


def test_counting_the_load_of_a_minibatch_takes_a_forward_pass():
    job = job_of(compose(["stage=sft", "model=qwen3_30b_a3b", "parallel.expert=8", "batch.sequences=512"]), 8)
    both, running = (
        replace(
            job.policy, shape=replace(job.policy.shape, moe=replace(job.policy.shape.moe, aux_coef=0.1, aux_over=over))
        )
        for over in ("minibatch", "running")
    )
    update, once, twice = (
        plan_times(replace(job, models=(model,)), H100, Assumptions())["update"].seconds
        for model in (job.policy, running, both)
    )
    assert once == update and 0.2 < twice / update - 1 < 0.35


def test_logits_and_gradients_take_the_time_of_their_bytes():
    """A micro-batch of 16,384 tokens of which 4/5 are read, and 3 bytes a parameter more than bandwidth allows."""
    model = shape("qwen3_0.6b")
    job = grpo(model, Grid(data=8), micro_tokens=16384, logits_bytes=1e15)
    seconds = [
        micro_batch_seconds(job, job.policy, 0, 16384, True, Machine(H100, Assumptions(logit_bytes=n), 8))
        for n in (0, 5)
    ]
    bandwidth = 0.46 * H100.bandwidth
    assert seconds[1] - seconds[0] == pytest.approx(5 * 3 * 0.8 * 16384 * model.vocab_size / bandwidth)
    free = replace(H100, bandwidth=inf)
    none = Assumptions(stream_passes=0, head_passes=0, mlp_passes=0, routed_passes=0, logit_bytes=0)
    both = [micro_batch_seconds(job, job.policy, 0, 16384, True, Machine(card, none, 8)) for card in (H100, free)]
    assert both[0] - both[1] == pytest.approx(10 * parameters(model) / bandwidth)


def test_shared_prompts_and_unbalanced_ranks_are_in_the_time():
    """16 of 1,024 + 1,024 tokens with one prompt compute 17/32 of the tokens; ranks of 64 rows have unequal sums."""
    model = shape("llama3_8b")
    rows = PlannedRows(1024, 64, 1024, 1024, 1024, 1024)
    job = grpo(model, Grid(data=8), rows=rows, micro_tokens=0, micro_rows=16)
    products = Assumptions(
        flash_forward=inf, flash_backward=inf, masked_forward=inf, masked_backward=inf, element_wise=inf
    )
    alone, alike = (plan_times(replace(job, share=share), H100, products)["update"] for share in (False, True))
    head = 0.5 * 128256 * 4096 / active_parameters(model) / (1 - 0.5 * 128256 * 4096 / active_parameters(model))
    assert alike.parts["kernels"] / alone.parts["kernels"] == pytest.approx((17 / 32 + head) / (1 + head), rel=0.03)
    # the share of the peak is of what is computed
    assert update_mfu(replace(job, share=True), H100, alike) == pytest.approx(update_mfu(job, H100, alone), rel=0.01)
    spread = grpo(model, Grid(data=8), minibatches=4)
    even, uneven = (plan_times(replace(spread, balanced=on), H100, products)["update"] for on in (True, False))
    deviation = spread.rows.lengths.deviation / spread.rows.mean
    assert uneven.parts["kernels"] / even.parts["kernels"] == pytest.approx(1 + deviation * (2 * log(8) / 32) ** 0.5)
    assert replace(rows, response_mean=1024).lengths.deviation == pytest.approx(0, abs=10)


def test_an_engine_in_its_own_process_has_pages_and_costs_of_its_own():
    model = shape("llama3_8b")
    token = 2 * 32 * 8 * 128 * 2
    engine = Engine(kv_bytes=token * 384.0 * 10, padded=False, launches=False)
    native, own = (grpo(model, Grid(data=8), replace(engine, reserved=reserved)) for reserved in (False, True))
    assert native.slots()[0] < own.slots()[0] == 10  # of 128 + 512 / 2 tokens each
    costs = Assumptions(engine_s=9e-3, rollout_s=16.0, tensor_s=1.3e-4)
    machine = Machine(H100, costs, 8)
    steps = [
        decode_step(replace(job, engine=replace(job.engine, reserved=on)), machine, 8, 99)[0]
        for job, on in ((native, False), (native, True))
    ]
    assert steps[1] - steps[0] == pytest.approx(9e-3)
    times = plan_times(own, H100, costs)
    assert times["score"].parts == {"host": 16.0} and "score" not in plan_times(native, H100, costs)
    assert "score" not in plan_times(own, H100, Assumptions())  # nothing of it is measured
    streamed = plan_times(replace(own, engine=replace(own.engine, placed=False)), H100, costs)["refit"]
    assert streamed.parts["tensors"] == pytest.approx(1.3e-4 * 291)  # of Llama-3-8B's files
    running = replace(own, engine=replace(own.engine, in_flight=True, lag=1, kv_bytes=1e12))
    assert running.slots()[0] == 128
    steady = generate_phase(running, machine)  # 128 rows of 512 tokens, all the time
    wanted = 512 * decode_step(running, machine, 128, 128 + 256)[0]
    assert steady.parts["decode"] == pytest.approx(wanted)


def on_h200(name: str, rows: PlannedRows | None = None, *, launches: bool) -> Prediction:
    """Plan benchmarks/gpu.py with the kernels of its measurements of 2026-11-26."""
    from benchmarks.gpu import SHAPES, Size, job_for

    job = job_for(SHAPES[name], Size(), 16384, 2)
    engine = replace(job.engine, launches=launches, padded=False)
    job = replace(job, rows=rows or job.rows, engine=engine, logits_bytes=job.logits_bytes / 3)
    return predict(job, DEVICES["h200"], Assumptions(mlp_passes=6, logit_bytes=26))


@pytest.mark.parametrize(
    ("name", "update", "logprobs", "generate"), [("8b_width", 5.10, 1.54, 2.28), ("0.6b", 2.71, 0.87, 4.58)]
)
def test_seconds_are_those_of_one_h200(name, update, logprobs, generate):
    """Of benchmarks/gpu.md, whose SwiGLU and logprobs still were several kernels with float32 numbers of each logit.
    What plan counts of the fused ones (2.7 passes, 2 bytes) is from a rehearsal and was not measured."""
    phases = on_h200(name, launches=False).phases
    seconds = [phases[phase].seconds for phase in ("update", "logprobs", "generate")]
    assert seconds == pytest.approx([update, logprobs, generate], rel=0.08)


def test_experts_on_one_h200_are_planned_within_a_quarter():
    """Likewise; every token was read. Products are faster than planned, decode steps without graphs slower."""
    every = on_h200("moe_width", PlannedRows(256, 32, 1, 1, 767, 767), launches=True)
    made = every.job.rows.tokens * active_parameters(every.job.policy.shape) / every.device.flops
    shares = [6 * made / every.phases["update"].seconds, 2 * made / every.phases["logprobs"].seconds]
    assert shares == pytest.approx([0.253, 0.31], rel=0.25)
    decoded = 256 * 512 / on_h200("moe_width", launches=True).phases["generate"].seconds
    assert decoded == pytest.approx(39_091, rel=0.25)


def test_decode_is_bound_by_bytes_then_by_operations():
    model = shape("llama3_8b")
    machine = Machine(H100, Assumptions(), 8)
    job = grpo(model, Grid(data=8), Engine(launches=False, padded=False))
    few, _ = decode_step(job, machine, 1, 100)
    kernels, sampled = 32 * 24 * 2.5e-6, 60 * model.vocab_size / H100.bandwidth / 0.46
    assert few == pytest.approx(decode_weight_bytes(model, 1, 2) / H100.bandwidth / 0.6 + kernels + sampled, rel=0.01)
    twice, _ = decode_step(job, machine, 2, 100)
    assert twice < 1.02 * few
    many, _ = decode_step(job, machine, 4096, 1)
    products = 2 * 4096 * active_parameters(model) / H100.flops / 0.75
    assert many == pytest.approx(products + kernels + 4096 * sampled, rel=0.01)
    eager, _ = decode_step(replace(job, engine=Engine(launches=True)), machine, 1, 100)
    assert eager == max(few, 32 * 24 * 14e-6 + 4e-3)
    experts = shape("qwen3_30b_a3b")
    assert decode_weight_bytes(experts, 1, 2) == pytest.approx(2 * active_parameters(experts), rel=0.01)
    assert decode_weight_bytes(experts, 1e6, 2) == pytest.approx(2 * parameters(experts), rel=0.03)


def test_a_decode_step_of_an_engine_whose_shares_have_rows_of_their_own():
    """8 ranks, 4 shares of 2: a rank has half of what is dense, 16 of 128 experts and the cache of a quarter of the
    rows."""
    m, rows = shape("qwen3_30b_a3b"), 1024
    heads = (2 * 32 + 2 * 4) * 128 * m.hidden_size // 2  # queries, keys, values and output
    experts = 16 * 3 * 768 * 2048
    layer = heads + experts + 128 * 2048 + 2 * 2048 + 2 * 128  # with its router and norms
    weights = 2 * (48 * layer + 2048 + 2048 * 151936 // 2)
    assert decode_weight_bytes(m, rows, 2, 8, shares=4) == weights  # every expert has tokens
    machine = Machine(H100, Assumptions(decode=1.0, layer_kernels=0, sampled_bytes=0, message_s=0, link=1.0), 8)
    job = grpo(m, Grid(data=8), Engine(tensor=8, shares=4, launches=False))
    seconds, wire = decode_step(job, machine, rows, 4096)
    cache = rows // 4 * 4096 * 48 * 2 * 2 * 128 * 2  # 2 of 4 heads of keys and values
    assert seconds - wire == pytest.approx((weights + cache) / H100.bandwidth, rel=1e-6)
    token = 48 * m.hidden_size * 2  # summed over 2 ranks behind attention, over 8 behind experts
    sent = 2 * token * (rows // 4 * 1 / 2 + rows * 7 / 8)
    assert wire == pytest.approx(sent / H100.nvlink, rel=1e-6)
    alone = decode_step(replace(job, engine=replace(job.engine, shares=1)), machine, rows, 4096)
    assert alone[1] == pytest.approx(2 * 2 * token * rows * 7 / 8 / H100.nvlink, rel=1e-6)


@pytest.mark.parametrize(("mean", "longest"), [(100, 1000), (500, 1000), (900, 1000), (1000, 1000)])
def test_lengths_have_the_mean_that_was_asked_for(mean, longest):
    lengths, n = Lengths(mean, longest), 10000
    total = sum(lengths.alive((i + 0.5) * longest / n) for i in range(n)) * longest / n
    capped = sum(length == longest for length in islice(lengths.drawn(), n)) / n  # those that would be longer
    assert capped == pytest.approx(lengths.alive(longest * 0.9999), abs=0.02)
    assert total == pytest.approx(mean, rel=0.01)
    assert sum(islice(lengths.drawn(), n)) / n == pytest.approx(mean, rel=0.05)


def test_lengths_of_a_file_are_drawn_as_often_as_they_are_there(tmp_path):
    (tmp_path / "lengths").write_text("7\n3 2\n3\n")
    reported = read_lengths(str(tmp_path / "lengths"))
    lengths = Lengths(4, 9, reported)
    assert reported == ((3, 3), (7, 1))
    assert [lengths.alive(t) for t in (0, 2.9, 3, 6, 7)] == [1, 1, 0.25, 0.25, 0]
    assert Counter(islice(lengths.drawn(), 4000))[7] == pytest.approx(1000, rel=0.1)


def test_refilled_batches_beat_batches_that_wait_for_their_longest():
    model = shape("llama3_8b")
    machine = Machine(H100, Assumptions(), 8)
    refilled = generate_phase(grpo(model, Grid(data=8), Engine(max_batch=16, kv_bytes=2**36)), machine).seconds
    waiting = Engine(max_batch=16, kv_bytes=2**36, refill=False)
    assert generate_phase(grpo(model, Grid(data=8), waiting), machine).seconds > 1.5 * refilled


def test_calls_of_a_layout_by_hand():
    """H = 4096, 32 layers, 4,096 tokens in bfloat16: 32 MiB a tensor."""
    model = shape("llama3_8b")
    hidden = 4096 * 4096 * 2
    job = grpo(model, Grid(tensor=2, data=4))
    forward = pass_calls(job, job.policy, 0, 4096, backward=False)
    # two sums a layer; those of the last one are of responses alone, 4 of 5 tokens
    layers = [c for c in forward if c.count == 64]
    assert layers == [CollectiveCalls("tp", "all_reduce", pytest.approx(hidden * (62 + 2 * 0.8)), 64)]
    assert (
        CollectiveCalls("tp", "all_reduce", 1.0).wire(2) == 1.0
        and CollectiveCalls("tp", "all_gather", 8.0).wire(8) == 7.0
    )
    gradients = {c.op: c for c in step_calls(job, job.policy, 0)}
    assert gradients["reduce_scatter"].size == 2 * gradients["all_gather"].size  # float32 down, bfloat16 up
    whole = sum(c.wire(2) for c in gathered_calls(job))
    assert whole == pytest.approx(parameters(model) * 2 / 2, rel=0.01)  # the other half of the weights
    apart = replace(job, engine=replace(job.engine, tensor=2))
    assert sum(c.size for c in refit_calls(job)) == pytest.approx(whole, rel=0.01) and refit_calls(apart) == []
    streamed = replace(apart, engine=replace(apart.engine, placed=False))
    assert refit_calls(streamed) == gathered_calls(job)  # of whole tensors, whatever the engine keeps of them


def test_70b_in_one_engine_per_gpu_is_refused_with_the_keys_to_change():
    job = grpo(shape("llama3_70b"), Grid(8, 1, data=2))
    with pytest.raises(MemoryPlanError) as caught:
        refuse(job, H100, plan_memory(job, H100, Assumptions()))
    text = str(caught.value)
    assert "parallel.tensor" in text and "parallel.expert" not in text  # it has no experts
    assert "131.4 GiB the engine's weights" in text and "engine.tensor_parallel" in text and "h100" in text
    wide = grpo(shape("llama3_8b"), Grid(2, data=4), micro_tokens=1 << 17)
    with pytest.raises(MemoryPlanError, match=r"activations: model.recompute=full, parallel.sequence=true, batch"):
        refuse(wide, H100, plan_memory(wide, H100, Assumptions()))
    fits = replace(job, engine=Engine(8, kv_bytes=4 * GIB), grid=Grid(8, 2, data=4, sequence=True), recompute=64)
    refuse(fits, H100, plan_memory(fits, H100, Assumptions()))


def test_an_engine_that_quantises_holds_and_reads_half_of_its_matrices():
    model = shape("llama3_8b")
    cfg = compose(["stage=grpo", "model=llama3_8b", "engine=vllm", "engine.vllm.args.quantization=fp8_per_tensor"])
    job = job_of(cfg, 8)
    ends = model.vocab_size * model.hidden_size  # of the embedding, and as many of the output layer
    layers = parameters(model) - 2 * ends
    weights = engine_bytes(model, 1, 2, job.engine.matrix)
    assert weights == pytest.approx(layers + 2 * 2 * ends, rel=1e-3)
    assert decode_weight_bytes(model, 1, 2, 1, job.engine.matrix) == pytest.approx(layers + 2 * ends, rel=1e-3)


def test_the_job_of_a_config():
    ppo = ["stage=ppo", "model=llama3_8b", "reward.model=runs/rm", "batch.prompts=64", "batch.minibatch_samples=32"]
    job = job_of(compose([*ppo, "batch.epochs=2", "parallel.tensor=2"]), 16, prompt_tokens=100)
    assert [(p.name, p.head, p.trained) for p in job.models] == [
        ("policy", "lm", True),
        ("reference", "lm", False),
        ("reward", "score", False),
        ("critic", "score", True),
    ]
    assert (job.grid, job.minibatches, job.epochs) == (Grid(2, data=8), 2, 2)
    assert (job.rows.prompt_mean, job.rows.response_mean) == (100, 32)
    sft = job_of(compose(["stage=sft", "model=llama3_8b"]), 8)
    assert sft.engine is None and list(plan_times(sft, H100, Assumptions())) == ["update"]
    pairs = job_of(compose(["stage=rm", "model=llama3_8b", "batch.sequences=16"]), 8)
    assert (pairs.rows.count, pairs.policy.head) == (32, "score")
    dpo = job_of(compose(["stage=dpo", "model=llama3_8b", "batch.sequences=16", "batch.micro_batch_samples=2"]), 8)
    assert [(p.name, p.trained) for p in dpo.models] == [("policy", True), ("reference", False)]
    assert (dpo.rows.count, dpo.rows.prompts, dpo.micro_rows) == (32, 16, 4)
    assert list(plan_times(dpo, H100, Assumptions())) == ["logprobs", "update"]
    alone = job_of(compose(["stage=dpo", "model=llama3_8b", "experiment=simpo", "batch.sequences=16"]), 8)
    assert [p.name for p in alone.models] == ["policy"]
    assert list(plan_times(alone, H100, Assumptions())) == ["update"]
    weights = [plan_memory(job, H100, Assumptions()).phases["update"]["weights"] for job in (dpo, alone)]
    assert weights[0] == 2 * weights[1]
    kto = ["stage=kto", "model=llama3_8b", "batch.sequences=16", "batch.logprob_tokens=512"]
    both, stored = (
        plan_times(job_of(compose([*kto, *overrides]), 8), H100, Assumptions())
        for overrides in ([], ["algorithm.kto={reference: stored, kl: none}"])
    )
    assert list(both) == ["logprobs", "update"] and list(stored) == ["update"]
    once = plan_times(job_of(compose([*kto, "algorithm.kto.kl=none"]), 8), H100, Assumptions())
    assert both["logprobs"].seconds == pytest.approx(
        3 * once["logprobs"].seconds
    )  # the policy too, the reference twice
    distill = ["stage=distill", "model=qwen3_0.6b", "batch.sequences=16"]
    kd = job_of(compose([*distill, "algorithm.distill.teacher=/nowhere"]), 8)
    assert [(p.name, p.trained) for p in kd.models] == [("policy", True), ("teacher", False)]
    assert list(plan_times(kd, H100, Assumptions())) == ["logprobs", "update"]
    three = job_of(compose([*distill, "algorithm.distill.teachers={a: /nowhere, b: /nowhere, c: /nowhere}"]), 8)
    assert [p.name for p in three.models] == ["policy", "teachers.a", "teachers.b", "teachers.c"]
    weights = [plan_memory(job, H100, Assumptions()).phases["logprobs"]["weights"] for job in (kd, three)]
    assert weights[1] == 2 * weights[0]  # of four models, of two
    times = [plan_times(job, H100, Assumptions())["logprobs"].parts["kernels"] for job in (kd, three)]
    assert times[1] == pytest.approx(times[0], rel=1e-6)  # each over a third of the rows
    cut = job_of(compose([*distill, "algorithm.distill.teacher=/nowhere", "algorithm.distill.tensor=2"]), 8)
    held = [plan_memory(job, H100, Assumptions()).phases["logprobs"]["weights"] for job in (kd, cut)]
    assert held[1] == pytest.approx(0.75 * held[0], rel=1e-3)  # half a teacher beside a whole student
    shared = Assumptions(stream_passes=0)  # the stream is whole on each tensor rank
    seconds = [plan_times(job, H100, shared)["logprobs"].parts["kernels"] for job in (kd, cut)]
    assert seconds[1] == pytest.approx(seconds[0], rel=1e-6)  # of twice as many rows half the columns
    assert kd.engine is None and job_of(compose([*distill, "algorithm.distill.on_policy=0.5"]), 8).engine is not None
    with pytest.raises(ConfigError, match="--prompt-tokens=999"):
        job_of(compose(ppo), 16, prompt_tokens=999)


def test_a_student_that_answers_itself_generates_as_often_as_it_does():
    """As a rollout of the same rows. A teacher that is not here counts as the model that its folder names."""
    rows = ["model=qwen3_8b", "model.recompute=full", "data.max_prompt_tokens=512", "sampling.max_response_tokens=2048"]
    line = ["stage=distill", *rows, "batch.sequences=64", "algorithm.distill.teacher=models/Qwen/Qwen3-32B"]
    always, half = (job_of(compose([*line, f"algorithm.distill.on_policy={share}"]), 8) for share in (1, 0.5))
    rollout = job_of(compose(["stage=grpo", *rows, "batch.prompts=64", "batch.group=1"]), 8)
    times = [plan_times(job, H100, Assumptions()) for job in (always, half, rollout)]
    for phase in ("refit", "generate"):
        assert times[0][phase].seconds == pytest.approx(times[2][phase].seconds, rel=0.01) and times[0][phase].seconds
    assert times[1]["refit"].seconds == pytest.approx(times[2]["refit"].seconds / 2)
    assert (always.rows.response_longest, half.rows.response_longest) == (2048, 2048)
    assert [round(parameters(model.shape) / 1e9, 1) for model in always.models] == [8.2, 32.8]


def test_a_teacher_also_reads_the_prompts_of_its_own():
    """400 characters are 100 tokens, and a column is as long as a response. Without a second model the student reads
    them."""
    rows = ["model=qwen3_8b", "data.max_prompt_tokens=512", "sampling.max_response_tokens=2048", "batch.sequences=64"]
    line = ["stage=distill", *rows, "algorithm.distill.on_policy=1"]
    prompt = f"algorithm.distill.teacher_prompt='{{prompt}}{'x' * 400}{{%s}}'"
    alone = "algorithm.distill.teacher=self", "batch.group=8", "ema.decay=0.9", "memory.offload=[optimizer]"
    alone += ("reward.functions=[{path: math}]",)
    same, other, own = (
        job_of(compose([*line, *each]), 8, prompt_tokens=300, response_tokens=600)
        for each in (
            ["algorithm.distill.teacher=/nowhere"],
            ["algorithm.distill.teacher=/nowhere", prompt % "hint"],
            [*alone, prompt % "right_answer"],
        )
    )
    for job in (other, own):
        assert (job.taught.rows.prompt_mean, job.taught.rows.prompt_longest) == (1000, 512 + 100 + 2048)
        assert (job.rows.prompt_mean, job.rows.prompts) == (300, 64 if job is other else 8)
    times = [plan_times(job, H100, Assumptions()) for job in (same, other, own)]
    products = [each["logprobs"].parts["kernels"] for each in times]
    assert 1.7 < products[1] / products[0] < 2 and products[2] == pytest.approx(products[1])  # 1600 tokens of 900
    assert times[1]["update"].seconds == times[0]["update"].seconds
    phases = [plan_memory(job, H100, Assumptions()).phases for job in (other, own)]
    assert phases[1]["logprobs"]["weights"] == phases[0]["logprobs"]["weights"] / 2
    assert phases[1]["logprobs"]["heads"] == phases[0]["logprobs"]["heads"]
    assert phases[1]["logprobs"]["optimizer"] == phases[1]["update"]["optimizer"] > 0


def test_a_student_keeps_its_teachers_matrices_and_a_tied_embedding_has_three_gradients():
    """Of 256,000 words as in a rehearsal of it, within half a hundredth."""
    line = ["stage=distill", "model=gemma2_2b", "model.num_layers=4", "batch.sequences=8", "parallel.context=2"]
    line += ["data.max_tokens=128", "data.max_prompt_tokens=48", "algorithm.distill.teacher=/nowhere"]
    whole, top = (job_of(compose([*line, *overrides]), 8) for overrides in ([], ["algorithm.distill.top_k=16"]))
    matrix = 2 * 256_000 * 2304
    phases, fewer = (plan_memory(job, H100, Assumptions()).phases for job in (whole, top))
    for phase in ("logprobs", "update", "save"):
        assert phases[phase]["heads"] == matrix and "heads" not in fewer[phase]
    sizes = {phase: sum(phases[phase].values()) / GIB for phase in ("build", "logprobs", "update", "save")}
    assert sizes == pytest.approx({"build": 10.4307, "logprobs": 9.0840, "update": 12.3688, "save": 9.0729}, rel=5e-3)
    untied = replace(
        whole, models=tuple(replace(p, shape=replace(p.shape, tie_embeddings=False)) for p in whole.models)
    )
    assert "embedding" not in plan_memory(untied, H100, Assumptions()).phases["update"]
    assert logit_bytes(whole, whole.policy, True) == 36 and logit_bytes(whole, whole.policy, False) == 20


def test_updates_that_sum_squares_of_probabilities_take_three_numbers_a_logit():
    line = ["stage=dpo", "model=qwen3_0.6b", "batch.sequences=64", "batch.logits_bytes=100000000000"]
    plain, squares = (job_of(compose([*line, *overrides]), 8) for overrides in ([], ["algorithm.preference.wpo=true"]))
    assert [logit_bytes(squares, squares.policy, trains) for trains in (True, False)] == [12, 4]
    update, wider = (plan_memory(job, H100, Assumptions()).phases["update"]["logits"] for job in (plain, squares))
    assert wider == 3 * update


def test_an_engine_in_a_process_of_its_own_takes_its_cache_whole_and_keeps_it_unless_it_sleeps():
    line = ["stage=grpo", "model=llama3_8b", "parallel.tensor=2", "engine.kv_cache_bytes=20000000000"]
    kept = {}
    for name in ("engine=native", "engine=vllm", "engine.sleep=true"):
        overrides = [name] if name.startswith("engine=") else ["engine=vllm", name]
        job = job_of(compose([line[0], line[1], *overrides, *line[2:]]), 16)
        phases = plan_memory(job, H100, Assumptions()).phases
        kept[name] = phases["generate"]["kv cache"], phases["refit"].get("kv cache", 0)
    assert kept["engine=native"][0] < 20e9 and kept["engine=native"][1] == 0
    assert kept["engine=vllm"] == (20e9, 20e9) and kept["engine.sleep=true"] == (20e9, 0)


@pytest.mark.parametrize("engine", ["engine=vllm", "engine=trtllm"])
@pytest.mark.parametrize(
    ("overrides", "gone"),
    [
        (["engine.sleep_weights=true"], True),
        (["engine.sleep_weights=false"], False),
        (["engine.sleep_weights=true", "memory.sleep=never"], False),
        # it sleeps already, and has not released them
        (["engine.sleep_weights=true", "reward.model=conf/model/llama3_8b.yaml"], False),
        (["engine.sleep_weights=true", "engine.ranks=8"], True),
    ],
)
def test_weights_of_an_engine_that_sleeps_without_them_are_in_no_update(engine, overrides, gone):
    line = ["stage=grpo", "model=llama3_8b", engine, "engine.sleep=true", "parallel.tensor=2", *overrides]
    job = job_of(compose(line), 16)
    phases = plan_memory(job, H100, Assumptions()).phases
    assert ["engine weights" in phases[name] for name in ("update", "save")] == [not gone] * 2
    if not job.engine.ranks:  # its process makes them at its start, before it has ever slept
        assert all("engine weights" in phases[name] for name in ("build", "load", "refit", "generate"))
        assert phases["load"]["kv cache"] == phases["generate"]["kv cache"] == job.engine.kv_bytes


APART = ["stage=grpo", "model=llama3_8b", "batch.prompts=64", "batch.group=16", "batch.minibatch_samples=256"]
APART += ["parallel.tensor=2"]


def test_engines_on_ranks_of_their_own_are_planned_as_a_job_beside():
    """Each side has what a job of its size has, without the other's."""
    mixed = job_of(compose([*APART, "engine.tensor_parallel=2"]), 8)
    apart = job_of(compose([*APART, "engine.tensor_parallel=2", "engine.ranks=8"]), 16)
    assert (apart.grid, apart.gpus, apart.slots()) == (mixed.grid, 16, mixed.slots())
    together, predictions = (predict(job, H100) for job in (mixed, apart))
    for phase in ("generate", "logprobs", "update"):
        assert predictions.phases[phase] == together.phases[phase]
        items = together.memory.phases[phase]
        trainers = ("weights", "gradients", "optimizer") if phase == "generate" else ("engine weights",)
        assert predictions.memory.phases[phase] == {name: size for name, size in items.items() if name not in trainers}
    assert predictions.step_s == pytest.approx(sum(phase.seconds for phase in predictions.phases.values()))
    assert predictions.tokens_per_gpu_s == pytest.approx(apart.rows.tokens / predictions.step_s / 16)
    assert "tp2 dp4, 8 that only generate (nodes: 1 for training, 1 for engines): policy" in predictions.text()
    # a cache that stays is an engine's alone
    awake = predict(job_of(compose([*APART, "engine.ranks=8", "memory.sleep=never"]), 16), H100).memory.phases
    assert "kv cache" not in awake["update"]


@pytest.mark.parametrize("cache", [1 << 30, 40_000_000_000])
def test_with_a_lag_a_step_takes_the_longer_of_both_sides(cache):
    """With few rows at a time generation, with many the rest."""
    line = [*APART, "engine.ranks=2", f"engine.kv_cache_bytes={cache}"]
    turns, at_once = (predict(job_of(compose([*line, *overrides]), 10), H100) for overrides in ([], ["engine.lag=1"]))
    assert turns.phases == at_once.phases
    seconds = {name: phase.seconds for name, phase in turns.phases.items()}
    rest = turns.step_s - seconds["refit"] - seconds["generate"]
    assert (rest > seconds["generate"]) == (cache > 1 << 30)
    assert at_once.step_s == pytest.approx(seconds["refit"] + max(rest, seconds["generate"]))
    assert "the longer of generate and the rest" in at_once.text()


def test_windows_are_planned_by_their_clock():
    """The window that is proposed is as long as what the trainer does meanwhile; a larger lag keeps both sides at work,
    and makes older tokens."""
    line = [*APART, "engine.ranks=2", "engine.kv_cache_bytes=40_000_000_000", "batch.micro_batch_samples=8"]
    line.append("sampling.max_response_tokens=768")

    def planned(*more):
        return predict(job_of(compose([*line, "engine.lag=1", *more]), 10), H100)

    one = planned()
    step_s, actual = one.windows
    refit, generate, *rest = (phase.seconds for phase in one.phases.values())
    assert list(one.phases)[:2] == ["refit", "generate"] and sum(rest) < generate
    assert actual.window * (step_s - refit) / actual.step == pytest.approx(sum(rest), rel=0.01)
    assert one.at_work == pytest.approx((1, 1 - (generate - sum(rest)) / one.step_s))
    _, three = planned("engine.lag=3").windows
    assert three.mean > actual.mean > 0 and three.step <= 1.02 * actual.step
    inputs = planned(f"engine.window={actual.window}")
    assert inputs.windows == one.windows and inputs.overlapped == (
        step_s,
        actual.window,
        actual.engines,
        actual.trainer,
    )
    assert "engine.window=64: step about" in planned("engine.window=64").text()


def test_no_window_is_proposed_to_a_trainer_that_is_the_slower_side():
    """Nobody waits for a long response there."""
    line = [*APART, "engine.ranks=2", "engine.kv_cache_bytes=40_000_000_000", "engine.lag=1"]
    predictions = predict(job_of(compose(line), 10), H100)
    engines, trainer = predictions.at_work
    assert predictions.windows is None and trainer == 1 > engines and "windows would gain nothing" in predictions.text()
    assert predictions.overlapped == (predictions.step_s, 0, engines, trainer)


def test_memory_of_ranks_that_only_generate_is_reported():
    """With a cache that fills them, beside trainers that hold less."""
    line = [*APART, "engine.ranks=2", "engine.kv_cache_bytes=40_000_000_000", "parallel.pipeline=4"]
    predictions = predict(job_of(compose(line), 10), H100)
    needed = (
        max(sum(items.values()) for items in engine_phases(predictions.job).values()) + predictions.memory.context_bytes
    )
    assert f", {needed / GIB:.1f} on ranks that only generate" in predictions.text() and needed > 16 * GIB


def write_config(model, folder):
    folder.mkdir(parents=True, exist_ok=True)
    raw = hf_config(model, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    (folder / "config.json").write_text(json.dumps(raw))


def test_judges_without_a_model_are_asked_where_the_engine_is(tmp_path):
    own = BETTER.replace("N", "1").replace("llama", str(tmp_path))
    write_config(replace(judged().policy.shape, num_layers=56), tmp_path)
    for judge, trainer in ((GRADE, False), (own, True)):
        mixed, apart = judged(judge), judged(judge, overrides=("engine.ranks=8",), gpus=16)
        items = [plan_memory(job, H100, Assumptions()).phases["score"] for job in (mixed, apart)]
        assert ("weights" in items[1]) == trainer and ("engine weights" in items[1]) == (not trainer)
        assert items[1]["kv cache"] == items[0]["kv cache"]
        seconds = [plan_times(job, H100, Assumptions())["score"].seconds for job in (mixed, apart)]
        assert seconds[0] == seconds[1]


def test_shapes_come_from_the_folder_that_weights_come_from(tmp_path):
    from math import prod

    from aligner.models.params import expected_hf_shapes
    from tests.tiny import MORE, WINDOWS

    tiny = WINDOWS | MORE

    for name in ("llama3_8b", "qwen3_30b_a3b", "qwen2.5_7b", *tiny):
        wanted = tiny.get(name) or shape(name)
        assert parameters(wanted) == sum(prod(size) for size in expected_hf_shapes(wanted).values())
        write_config(wanted, tmp_path / name / "hf")
        cfg = shape_at(compose([]).model, str(tmp_path / name))
        assert parameters(cfg) == parameters(wanted)
        assert cfg.scales.logits_softcap == wanted.scales.logits_softcap  # more memory for each logit
    assert any(model.scales.logits_softcap for model in tiny.values())
    assert shape_at(wanted, str(tmp_path / "none")) == wanted


def test_a_prediction_as_data_adds_up():
    prediction = predict(grpo(shape("llama3_8b"), Grid(tensor=2, data=4)), H100)
    data = prediction.data()
    assert sum(phase["seconds"] for phase in data["time"].values()) == pytest.approx(data["step_s"])
    for phase in data["memory"].values():
        assert sum(phase["items"].values()) + Assumptions().context_bytes == pytest.approx(phase["total_bytes"])
    assert data["tokens_per_gpu_s"] == pytest.approx(1024 * 640 / data["step_s"] / 8)


def test_the_calculator_imports_no_torch():
    code = "import sys\nimport aligner.plan.command, aligner.cluster.submit\n"
    code += "print([m for m in ('torch', 'megatron', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.strip() == "[]"


def test_models_are_built_and_loaded_before_anything_is_sent_away():
    """Buffers of weights and of float32 gradients stand beside the weights whose place they take (8 bytes a number,
    more than the rest of the step where state is shared out); a held base is whole first."""
    model = shape("llama3_8b")
    job = grpo(model, Grid(data=64), offload=("gradients", "optimizer", "weights"))
    reference = PlannedModel("reference", model)
    phases = plan_memory(replace(job, models=(*job.models, reference)), H100, Assumptions()).phases
    numbers = parameters(model)
    assert sum(phases["build"].values()) == (2 + 4 + 4 / 64 + 2 + 2) * numbers  # both models, then the engine
    alone = plan_memory(replace(job, engine=None), H100, Assumptions()).phases
    assert sum(alone["build"].values()) == (2 + 2 + 4) * numbers
    assert sum(phases["load"].values()) == (2 + 4 + 12 / 64 + 2) * numbers  # the engine's weights come with a refit
    sparse = plan_memory(grpo(shape("qwen3_30b_a3b"), Grid(expert=8, data=8)), H100, Assumptions()).phases
    assert sparse["build"]["engine weights"] < sparse["refit"]["engine weights"] / 8  # of one layer's experts at once
    lora = LoraConfig(rank=16, targets=[ALL_LINEAR], quantize_base="nf4")
    held = replace(job, models=(PlannedModel("policy", replace(model, lora=lora), trained=True),), engine=None)
    phases = plan_memory(held, H100, Assumptions()).phases
    assert sum(phases["build"].values()) > 2 * numbers > 2 * sum(phases["save"].values())


def test_a_copy_of_the_largest_parameter_is_made_before_its_float32_weights():
    model = shape("llama3_8b")
    job = replace(grpo(model, Grid(data=2)), engine=None)
    build = plan_memory(job, H100, Assumptions()).phases["build"]
    assert sum(build.values()) == (2 + 4 + 4 / 2) * parameters(model) + 2 * model.vocab_size * model.hidden_size


def test_a_save_takes_nothing_on_the_device_and_its_share_on_the_host():
    """8B in bfloat16 is 16.06 GB of weights and 96.36 of state. As run/phases.py has it, a save finds what an update
    leaves."""
    job = grpo(shape("llama3_8b"), Grid(data=8), micro_tokens=8192)
    for changes in ({}, {"offload": ("gradients", "optimizer", "weights")}, {"sleeps": False}):
        phases = plan_memory(replace(job, **changes), H100, Assumptions()).phases
        activations = {"activations": phases["update"]["activations"], "logits": phases["update"]["logits"]}
        assert phases["save"] | activations == phases["update"] and not phases["save"].keys() & activations.keys()
    numbers = parameters(job.policy.shape)
    assert host_items(job) == {"checkpoint": 14 * numbers / 8, "offloaded": 0}
    assert host_items(replace(job, element=4))["checkpoint"] == 12 * numbers / 8
    plain = replace(job, models=(replace(job.policy, distributed=False),))
    assert host_items(plain)["checkpoint"] == 14 * numbers  # of the first data-parallel rank
    reference = PlannedModel("reference", job.policy.shape)
    away = replace(job, models=(*job.models, reference), offload=("gradients", "optimizer", "weights"))
    assert host_items(away) == {"checkpoint": 14 * numbers / 8, "offloaded": (2 + 2 + 12 / 8) * numbers}
    assert predict(job, H100).data()["host_bytes"] == host_items(job)
    assert "\nhost memory 13.1 GiB a GPU, 104.7 a node" in predict(job, H100).text()


@pytest.mark.parametrize(
    ("engine", "width", "ranks", "share"),
    [("vllm", 4, 8, 4), ("vllm", 16, 16, 8), ("vllm", 1, 8, 1), ("native", 4, 8, 0), ("vllm", 4, 0, 0)],
)
def test_an_engine_of_its_own_process_reads_the_model_from_host_memory(engine, width, ranks, share):
    """On ranks of its own: 70B in bfloat16 are 141 GB, of which each of four ranks writes a quarter, each of 16 on two
    nodes an eighth, which it receives; on the trainer's ranks a bucket goes from device to device."""
    line = ["stage=grpo", "model=llama3_70b", f"engine={engine}", f"engine.tensor_parallel={width}"]
    line += [f"engine.ranks={ranks}", "parallel.tensor=8", "parallel.pipeline=4"]
    job = job_of(compose(line), 32 + ranks)
    wanted = 2 * parameters(job.policy.shape) / share if share else 0
    assert engine_host_bytes(job) == predict(job, H100).data()["engine_host_bytes"] == wanted
    text = predict(job, H100).text()
    assert (f"; {wanted / GIB:.1f} GiB a GPU on ranks that only generate: weights" in text) == bool(share)
    assert not share or apart_bytes(job) >= 0.99 * wanted
    actual, device = (plan_times(job, H100, Assumptions(**link))["refit"] for link in ({}, {"host_link": inf}))
    shard = engine_bytes(job.policy.shape, width, 2)
    by_host = (wanted + shard) / Assumptions().host_link if share else 0.0
    assert actual.seconds - device.seconds == pytest.approx(by_host)


def test_shares_of_a_replica_have_attention_and_rows_of_their_own():
    """Of 16 ranks four times four: experts on all of them, a cache of four heads on each rank, not of one."""
    line = ["stage=grpo", "model=qwen3_235b_a22b", "engine=vllm", "engine.tensor_parallel=16", "engine.max_batch=8"]
    line += ["engine.kv_cache_bytes=8589934592"]
    jobs = [job_of(compose([*line, f"engine.vllm.args.data_parallel_size={d}"]), 16) for d in (1, 4)]
    shape = jobs[0].policy.shape
    attention = shape.num_layers * 2 * shape.hidden_size * shape.kv_channels * shape.num_heads
    shared = 2 * (attention + 2 * shape.vocab_size * shape.hidden_size)  # heads of keys and values are one on each
    first, second = (engine_items(job)[0]["engine weights"] for job in jobs)
    assert second - first == pytest.approx(shared * (1 / 4 - 1 / 16), rel=0.001)
    assert [job.slots()[0] for job in jobs] == [8, 32]
    with pytest.raises(ConfigError, match=r"data_parallel_size=3: expected a divisor of engine.tensor_parallel=16"):
        job_of(compose([*line, "engine.vllm.args.data_parallel_size=3"]), 16)


def test_replayed_routing_is_on_the_host_and_in_the_budget_of_the_cache():
    """384 bytes of a token of Qwen3-30B-A3B, twice that with two bytes for an expert."""
    from aligner.ops.packing.routing import no_routing

    line = ["stage=grpo", "model=qwen3_30b_a3b", "batch.group=16", "sampling.max_response_tokens=4096"]
    plain, job = (job_of(compose([*line, *overrides]), 8) for overrides in ([], ["mismatch.replay_routing=true"]))
    rows, longest = 32 * 16 // 8, 512 + 4096
    row = no_routing(job.policy.shape)
    whole = row.new_empty((rows, longest, *row.shape[2:]), device="meta")
    assert host_items(job) == host_items(plain) | {"routing": whole.nbytes}
    assert job.routing == 384 and job.slots()[0] <= plain.slots()[0]
    for settings, in_flight in ((["engine.lag=2"], 2 * rows), (["engine.lag=1", "engine.window=64"], 2 * 8 * rows)):
        ahead = job_of(compose([*line, "mismatch.replay_routing=true", "engine.ranks=2", *settings]), 10)
        assert host_items(ahead)["routing"] == (rows + in_flight) * whole[0].nbytes
    wide = replace(job.policy.shape, moe=replace(job.policy.shape.moe, num_experts=512, dense_layers=[0]))
    assert routing_bytes(wide) == no_routing(wide).new_empty(47, 8).nbytes


def test_what_leaves_the_device_is_counted_where_it_is_needed():
    """As run/phases.py moves it."""
    job = grpo(shape("llama3_8b"), Grid(2, data=4))

    def items(**changes) -> dict:
        return plan_memory(replace(job, **changes), H100, Assumptions()).phases

    asleep, awake = items(), items(sleeps=False)
    assert "kv cache" in asleep["generate"] and not any(
        "kv cache" in asleep[p] for p in ("refit", "logprobs", "update")
    )
    assert awake["update"]["kv cache"] == awake["generate"]["kv cache"] == asleep["generate"]["kv cache"]
    away = items(offload=("gradients", "optimizer", "weights"))
    kinds = ("weights", "gradients", "optimizer")
    assert [away["generate"][kind] for kind in kinds] == [0, 0, 0]
    assert [away["logprobs"][kind] for kind in kinds] == [asleep["logprobs"]["weights"], 0, 0]
    assert away["update"] == asleep["update"]
    tight = replace(job, grid=Grid(data=8), sleeps=False)
    with pytest.raises(MemoryPlanError, match=r"KV cache: memory.sleep=auto"):
        refuse(tight, H100, plan_memory(tight, H100, Assumptions()))


def judged(*judges: str, overrides: tuple[str, ...] = (), gpus: int = 8) -> PlanJob:
    start = [
        "stage=grpo",
        "model=qwen3_0.6b",
        "batch.prompts=64",
        "batch.group=8",
        f"reward.judges=[{','.join(judges)}]",
    ]
    return job_of(compose([*start, *overrides]), gpus)


GRADE = "{question: '0123{response}'}"
BETTER = "{name: better, model: llama, max_tokens: 64, kind: pairwise, question: '{first}{second}', opponents: N}"


@pytest.mark.parametrize("opponents", [0, 1, 3, 4, 5, 7, 9])
def test_judges_are_asked_as_often_as_they_ask(opponents):
    job = judged(GRADE, BETTER.replace("N", str(opponents)))
    config = JudgeConfig(kind="pairwise", question="{first}{second}", opponents=opponents)
    samples = [Sample(Prompt(0, (1,), ""), i, "", (1,), True) for i in range(8)]
    grades, pairs = job.judges
    assert (grades.rows.count, grades.rows.prompt_longest) == (64 * 8, job.rows.longest + 4)
    assert pairs.rows.count == 64 * 2 * len(Judge(config, None)._pairs(samples))
    assert pairs.rows.prompt_longest == job.rows.prompt_longest + 2 * job.rows.response_longest + 4
    assert pairs.rows.response_longest == 64


def test_a_rubric_asks_about_each_criterion():
    """Ten of 32 tokens, or as many as are stated."""
    job = judged("{kind: rubric, question: '0123{response}{criterion}'}")
    rows = job.judges[0].rows
    assert (rows.count, rows.prompt_longest) == (64 * 8 * 10, job.rows.longest + 7 + 32)
    cfg = compose(["stage=grpo", "model=qwen3_0.6b", "batch.prompts=64", "reward.judges=[{kind: rubric}]"])
    few, many = (plan_times(job_of(cfg, 8, criteria=number), H100, Assumptions())["score"] for number in (2.5, 20))
    assert 4 < many.seconds / few.seconds < 8


def test_what_judges_cost(tmp_path):
    """Of their own weights one copy for all that name the folder, in every phase or, offloaded, where it is asked."""
    own = BETTER.replace("N", "1").replace("llama", str(tmp_path))
    write_config(replace(judged().policy.shape, num_layers=56), tmp_path)
    none, grade, better = judged(), judged(GRADE), judged(GRADE, own, own.replace("better", "same"))
    predictions = [predict(job, H100) for job in (none, grade, better)]
    assert "score" not in predictions[0].phases and "score" not in predictions[0].memory.phases
    seconds = [one.phases["score"].seconds for one in predictions[1:]]
    assert predictions[1].step_s == pytest.approx(predictions[0].step_s + seconds[0]) and seconds[1] > 3 * seconds[0]
    deeper = better.judges[1].shape
    assert deeper.num_layers == 56 and better.judges[0].shape == none.policy.shape
    for phase, items in predictions[2].memory.phases.items():
        assert phase == "build" or items["judges"] == 2 * parameters(deeper), phase  # they are read after the models
    assert "judges" not in predictions[1].memory.phases["score"]
    asleep = predict(judged(own, overrides=("memory.offload=[weights]",)), H100)
    where = {phase: items["judges"] for phase, items in asleep.memory.phases.items() if "judges" in items}
    assert where == dict.fromkeys(("load", "score"), 2 * parameters(deeper))
    assert asleep.host["offloaded"] >= 2 * parameters(deeper)
    caches = [one.memory.phases["score"]["kv cache"] for one in (asleep, predict(judged(own, GRADE), H100))]
    assert caches[0] < caches[1]  # asked itself, the policy's engine is awake


def test_a_critics_pretraining_is_reported_beside_the_step():
    start = ["stage=ppo", "model=qwen3_0.6b", "critic.init=x", "reward.functions=[{path: math}]", "batch.epochs=2"]
    none, ten, twenty = (
        predict(job_of(compose([*start, f"critic.pretrain_steps={steps}"]), 8), H100) for steps in (0, 10, 20)
    )
    assert none.pretrain_s == 0 and none.step_s == ten.step_s and "pretrain" not in none.text()
    policy, critic = (replace(ten.job, models=(p,)) for p in (ten.job.models[0], ten.job.models[-1]))
    machine = Machine(H100, Assumptions(), 8)
    both, own = ten.phases["update"].seconds, update_phase(critic, machine).seconds
    assert both == pytest.approx(own + update_phase(policy, machine).seconds)
    steps = ten.job.minibatches * ten.job.epochs
    assert twenty.pretrain_s - ten.pretrain_s == pytest.approx(10 * own / steps)
    assert f"critic.pretrain_steps {ten.pretrain_s:.1f} s, once" in ten.text()


def test_transformer_engine_shares_prompts_without_masks():
    line = ["stage=grpo", "model=qwen3_0.6b", "batch.group=16", "batch.prompts=4", "data.max_prompt_tokens=4096"]
    line += ["batch.micro_batch_samples=16", "model.varlen_attention=false"]
    extra = [["model.kernels=own"], ["model.kernels=te"], ["model.kernels=own", "model.varlen_attention=auto"]]
    extra += [["model.kernels=te", "batch.share_prompts=false"]]
    own, te, varlen, alone = (job_of(compose([*line, *one]), 1) for one in extra)
    sizes = [activation_bytes(job, job.policy, 0) for job in (own, te, varlen, alone)]
    assert sizes[1] == sizes[2] < sizes[0] and sizes[3] > 3 * sizes[1]


def test_linear_attention_is_counted_with_and_without_its_package():
    model = shape("qwen3_next_80b_a3b")
    linear = model.linear
    states = linear.value_heads * linear.key_head_dim * linear.value_head_dim
    inputs = 3 * linear.key_heads * linear.mixed_width
    assert row_bytes(model) == 36 * 4 * (states + inputs)
    fed = linear.key_heads * linear.mixed_width + 2 * linear.value_heads
    assert row_bytes(model, 3) == row_bytes(model) + 36 * 4 * 4 * fed
    job = grpo(model, Grid(2, 1, expert=8, data=8, sequence=True))
    plain, package = (predict(replace(job, package=which), H100) for which in (False, True))
    assert package.phases["update"].seconds < plain.phases["update"].seconds
    assert package.phases["generate"].seconds < plain.phases["generate"].seconds
    activations = [p.memory.phases["update"]["activations"] for p in (package, plain)]
    assert activations[0] < 0.6 * activations[1]
    engine = replace(job.engine, max_batch=1024, drafts=3, accepted=3.0)
    fast, slow = (predict(replace(job, package=which, engine=engine), H100) for which in (True, False))
    assert fast.phases["generate"].seconds < min(p.phases["generate"].seconds for p in (package, slow))
    held, slots = row_bytes(model) / job.engine.tensor, job.slots()[0]
    line = f"linear attention remembers on an engine's GPU {held / 1e6:.1f} MB of a row of any length, "
    assert f"{line}{held * slots / 2**30:.1f} GiB of {slots} rows\n" in plain.text()
    assert "linear attention remembers" not in predict(grpo(shape("llama3_8b"), Grid(8, data=8)), H100).text()
