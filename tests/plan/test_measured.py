"""The calculator's bytes are those of Megatron's ranks: parameters, buffers, optimizer, collectives, activations; and
its operations those that torch counts."""

import functools
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from aligner.config.resolve import compose
from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.linear import LinearConfig
from aligner.config.sections.model.lora import ALL_LINEAR, LoraConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron.model import Head
from aligner.megatron.train import ShardedModel
from aligner.models.adapters import factor_tensors
from aligner.models.shards import hf_tensors
from aligner.plan import reads, sizes
from aligner.plan.activations import activation_bytes
from aligner.plan.adapters import held_parameters, kept_bytes, trained_parameters
from aligner.plan.devices import Assumptions, Device
from aligner.plan.job import Engine, PlanJob, PlannedModel, PlannedRows
from aligner.plan.shapes import Grid
from aligner.plan.sizes import gradient_bytes, optimizer_bytes, refit_buffers, weight_bytes
from aligner.plan.times import Machine, micro_batch_seconds
from aligner.plan.traffic import (
    apart_bytes,
    factor_calls,
    gathered_calls,
    part_calls,
    pass_calls,
    step_calls,
)
from aligner.refit.exchange import Exchange
from aligner.refit.factors import Merger
from aligner.refit.plan import EngineGrid, TrainerGrid, plan_refit
from aligner.refit.stream import WeightStream
from aligner.roles.critic import Critic
from aligner.roles.policy import Policy
from aligner.roles.reward_model import RewardModel
from aligner.stages.sft import sft_loss
from aligner.types import LabelTargets, LossOutput, TrainBatch
from tests.megatron.models import build
from tests.operations import Listener, counted
from tests.tiny import ADAM, DEEPSEEK, GPT_OSS, LLAMA, MIXTRAL, MODELS, MOE, MORE

pytestmark = pytest.mark.multirank
PLAIN, HALVED = replace(ADAM, distributed=False), replace(ADAM, gradient_dtype="bfloat16")
UNTIED = replace(MODELS["qwen2"], tie_embeddings=False)
SEQ = {"sequence": True}
ADAPTED = replace(LLAMA, lora=LoraConfig(rank=8, targets=[ALL_LINEAR]))
SOME = LoraConfig(rank=8, dora=True, targets=["q_proj", "o_proj", "up_proj", "down_proj"])
DORA, WIDE_DORA = (replace(cfg, hidden_size=64, lora=SOME) for cfg in (MODELS["qwen3"], MOE))
MAMBA = replace(MORE["nemotron_h"], linear=replace(MORE["nemotron_h"].linear, value_head_dim=128))
INPUTS = MORE["gemma4-inputs"]  # with more heads' norms than a message that is not compared
INPUTS = replace(INPUTS, head_dim=8, attention=replace(INPUTS.attention, global_head_dim=16), layer_input_size=24)
INDEXED = MORE["glm_moe_dsa"]
ENTRIES = MORE["deepseek_v4"]
LEARNING = replace(INDEXED, indexer=replace(INDEXED.indexer, loss=0.5))
AGAIN, QUERIES = {"recompute_modules": ["mlp"]}, LoraConfig(rank=8, targets=["q_proj"])
CASES = {
    "untied": (UNTIED, {}, 1, {}),
    "tp2": (MODELS["qwen2"], {"tensor": 2}, 2, {}),
    "tp2, sequence, recompute": (MODELS["qwen3"], {"tensor": 2, **SEQ}, 2, {"recompute": "full"}),
    "pp2": (LLAMA, {"pipeline": 2}, 2, {}),
    "tp2, MLPs recomputed": (replace(MODELS["qwen2"], megatron=AGAIN), {"tensor": 2}, 2, {}),
    "adapters, MLPs recomputed": (replace(MODELS["qwen3"], megatron=AGAIN, lora=QUERIES), {}, 1, {}),
    "dp2": (LLAMA, {}, 2, {}),
    "dp2, plain optimizer": (LLAMA, {}, 2, {"optim": PLAIN}),
    "dp2, gradients in bfloat16": (LLAMA, {}, 2, {"optim": HALVED}),
    "dp2, float32": (LLAMA, {}, 2, {"dtype": torch.float32}),
    "cp2": (LLAMA, {"context": 2}, 2, {}),
    "cp2 over heads": (LLAMA, {"context": 2, "context_mode": "alltoall"}, 2, {}),
    "ep2": (MOE, {"expert": 2}, 2, {}),
    "experts, tp2": (MIXTRAL, {"tensor": 2}, 2, {}),
    "experts, tp2, sequence": (MOE, {"tensor": 2, **SEQ}, 2, {}),
    "biased experts, ep2": (replace(GPT_OSS, num_layers=2), {"expert": 2}, 2, {}),
    "biased experts, tp2": (replace(GPT_OSS, num_layers=2), {"tensor": 2}, 2, {}),
    "experts beside an MLP, tp2, sequence": (MORE["gemma4-experts"], {"tensor": 2, **SEQ}, 2, {}),
    "experts beside an MLP, ep2 pp2": (MORE["gemma4-experts"], {"expert": 2, "pipeline": 2}, 4, {}),
    "inputs of layers, tp2": (INPUTS, {"tensor": 2}, 2, {}),
    "inputs of layers, tp2, sequence": (INPUTS, {"tensor": 2, **SEQ}, 2, {}),
    "inputs of layers, cp2": (INPUTS, {"context": 2}, 2, {}),
    "latent": (DEEPSEEK, {}, 1, {}),
    "linear attention, cp2": (MORE["qwen3_next"], {"context": 2}, 2, {}),
    # wide enough that none of its sums over tensor ranks is among the small messages that are not compared
    "linear attention, tp2": (
        replace(MORE["qwen3_next"], head_dim=32, linear=LinearConfig(4, 8, 8, 128, 4, attention_every=2)),
        {"tensor": 2},
        2,
        {},
    ),
    "Mamba-2, experts, cp2": (MORE["nemotron_h"], {"context": 2}, 2, {}),
    "Mamba-2, experts of their own width, tp2": (MAMBA, {"tensor": 2}, 2, {}),
    "Mamba-2, experts of their own width, tp2, sequence": (MAMBA, {"tensor": 2, **SEQ}, 2, {}),
    "latent, tp2": (DEEPSEEK, {"tensor": 2}, 2, {}),
    "latent, tp2, sequence": (DEEPSEEK, {"tensor": 2, **SEQ}, 2, {}),
    "latent, cp2": (DEEPSEEK, {"context": 2}, 2, {}),
    "indexed, tp2": (INDEXED, {"tensor": 2}, 2, {}),
    "indexed, tp2, sequence": (INDEXED, {"tensor": 2, **SEQ}, 2, {}),
    "indexed, cp2": (INDEXED, {"context": 2}, 2, {}),
    "indexers that learn, tp2, sequence": (LEARNING, {"tensor": 2, **SEQ}, 2, {}),
    "indexers that learn, cp2": (LEARNING, {"context": 2}, 2, {}),
    "indexers that learn, cp2 over heads": (LEARNING, {"context": 2, "context_mode": "alltoall"}, 2, {}),
    "indexed, cp2 over heads": (INDEXED, {"context": 2, "context_mode": "alltoall"}, 2, {}),
    "entries": (ENTRIES, {}, 1, {}),
    "entries, pp2, recompute": (ENTRIES, {"pipeline": 2}, 2, {"recompute": "full"}),
    "score, tp2, dp2": (LLAMA, {"tensor": 2, **SEQ}, 4, {"outputs": 3}),
    "tp2 pp2": (replace(UNTIED, num_layers=3), {"tensor": 2, "pipeline": 2, **SEQ}, 4, {}),
    # what nobody reads is left out: prompts of 2/3 of the tokens, and of a row all but the last token
    "responses": (LLAMA, {}, 1, {"prompt": 16}),
    "responses, logits in parts": (LLAMA, {}, 1, {"prompt": 16, "logits_bytes": 12 * 101 * 8}),
    "recompute a layer": (UNTIED, {}, 1, {"recompute": "1"}),
    "responses, recompute": (UNTIED, {}, 1, {"prompt": 16, "recompute": "full", "logits_bytes": 12 * 101 * 40}),
    "responses, tp2": (MODELS["qwen3"], {"tensor": 2}, 2, {"prompt": 16, "micro_rows": 8}),
    "responses, tp2, sequence": (LLAMA, {"tensor": 2, **SEQ}, 2, {"prompt": 16, "micro_rows": 8}),
    "responses, pp2": (UNTIED, {"pipeline": 2}, 2, {"prompt": 16}),
    "responses, cp2": (LLAMA, {"context": 2}, 2, {"prompt": 16}),
    "responses, experts": (MOE, {}, 1, {"prompt": 16}),
    "critic, tp2": (LLAMA, {"tensor": 2}, 2, {"prompt": 16, "outputs": 1, "critic": True}),
    "reward model, tp2": (LLAMA, {"tensor": 2}, 2, {"outputs": 2}),
    "adapters": (ADAPTED, {}, 1, {"prompt": 16}),
    "adapters, tp2": (replace(MODELS["qwen3"], lora=ADAPTED.lora), {"tensor": 2}, 2, {}),
    "adapters, tp2, sequence, recompute": (DORA, {"tensor": 2, **SEQ}, 2, {"recompute": "full"}),
    "adapters, tp2, recompute a layer": (DORA, {"tensor": 2}, 2, {"recompute": "1"}),
    "adapters, pp2": (replace(ADAPTED, tie_embeddings=False), {"pipeline": 2}, 2, {"outputs": 1}),
    "adapters of experts, tp2": (replace(MIXTRAL, lora=ADAPTED.lora), {"tensor": 2}, 2, {}),
    "adapters of experts, ep2": (replace(MOE, lora=ADAPTED.lora), {"expert": 2}, 2, {}),
    "adapters of experts, ep2 tp2, dora": (WIDE_DORA, {"expert": 2, "tensor": 2}, 4, {}),
    "adapters, latent, tp2, sequence": (replace(DEEPSEEK, lora=ADAPTED.lora), {"tensor": 2, **SEQ}, 2, {}),
    "reward model, pp2": (replace(UNTIED, num_layers=3), {"pipeline": 2, "stage_layers": [2, 1]}, 2, {"outputs": 1}),
}


ROWS, WIDTH = 8, 24


def rows_of(cfg: ModelConfig, model: ShardedModel, prompt: int) -> TrainBatch:
    """This data-parallel rank's rows, all of one length: what a micro-batch holds is known. The loss reads what comes
    after `prompt` tokens."""
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, cfg.vocab_size, (ROWS, WIDTH), generator=g)
    mask = torch.ones(ROWS, WIDTH)
    mask[:, :prompt] = 0
    full = TrainBatch(tokens, torch.full((ROWS,), WIDTH), mask, [LabelTargets(torch.randn(ROWS, generator=g))])
    return full.select(torch.arange(ROWS).chunk(model.layout.data)[model.layout.dp_rank])


def measured_step(
    cfg: ModelConfig,
    parallel: ParallelConfig,
    optim: OptimConfig = ADAM,
    outputs: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    micro_rows: int = 4,
    recompute: str = "none",
    prompt: int = 1,
    logits_bytes: int = 1 << 30,
    critic: bool = False,
) -> dict:
    """One pass without gradient and one optimizer step: operations of both, and of the step bytes of buffers and
    optimizer state, and of collectives by axis. With `outputs` of a reward model, or of a critic."""
    cfg = replace(cfg, recompute=recompute)
    model = build(cfg, parallel, optim, Head("score", outputs) if outputs else Head(), dtype)
    own, layout = rows_of(cfg, model, prompt), model.layout
    batch = BatchConfig(micro_batch_samples=micro_rows, logits_bytes=logits_bytes)
    if critic:
        role = Critic(model, batch)
        forward = partial(role.values, own, own.loss_mask)
        update = partial(role.update, own, lambda values, b: LossOutput(((values - 1).square() * b.loss_mask).mean()))
    elif outputs:
        role = RewardModel(model, batch)
        forward = partial(role.raw_scores, own)
        update = partial(role.update, own, lambda scores, b: LossOutput((scores - 1).square().mean()), unit=1)
    else:
        role = Policy(model, batch)
        forward = partial(role.logprobs, own, own.loss_mask)
        update = partial(role.update, own, sft_loss(own, layout.pgs.dp))
    operations = {"forward": counted(forward)}
    with Listener() as heard:
        operations["update"] = counted(update)
    buffers = [*model.wrapped.buffers, *model.wrapped.expert_parallel_buffers]
    pgs = layout.pgs
    groups = {
        "tp": pgs.tp,
        "cp": pgs.cp,
        "pp": pgs.pp,
        "dp": pgs.dp_cp,
        "ep": pgs.ep,
        "edp": pgs.expt_dp,
        "ends": pgs.embd,
    }
    return {
        "stage": layout.pp_rank,
        "operations": operations,
        "parameters": sum(p.numel() for p in model.module.parameters()),
        "weights": sum(p.numel() * p.element_size() for p in model.module.parameters()),
        "gradients": sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
        "main_gradients": sum(p.main_grad.nbytes for p in model.module.parameters() if p.requires_grad),
        "tensors": len(list(model.module.parameters())),
        "optimizer": state_bytes(model),
        "heard": dict(heard.bytes),
        "axes": {axis: tuple(dist.get_process_group_ranks(g)) for axis, g in groups.items() if g is not None},
    }


def state_bytes(model: ShardedModel) -> int:
    """Moments, and main parameters that are not the model's own storage."""
    total, own = 0, {p.untyped_storage().data_ptr() for p in model.module.parameters()}
    for optimizer in getattr(model.optimizer, "chained_optimizers", [model.optimizer]):
        for group in optimizer.optimizer.param_groups:
            for p in group["params"]:
                tensors = [optimizer.optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq")]
                tensors += [p] if p.untyped_storage().data_ptr() not in own else []
                total += sum(t.numel() * t.element_size() for t in tensors)
    return total


def bytes_of_a_refit(cfg: ModelConfig, parallel: ParallelConfig) -> dict:
    """Bytes of the collectives that bring all weights to this rank, by axis."""
    model = build(cfg, parallel, dtype=torch.bfloat16)
    stream, pgs = WeightStream(model, 1 << 20), model.layout.pgs
    with Listener() as heard:
        for _ in stream:
            pass
    groups = {"tp": pgs.tp, "pp": pgs.pp, "ep": pgs.ep}
    return {
        "stage": model.layout.pp_rank,
        "heard": dict(heard.bytes),
        "axes": {axis: tuple(dist.get_process_group_ranks(g)) for axis, g in groups.items()},
    }


def grid_of(parallel: ParallelConfig, world: int) -> Grid:
    p = parallel
    over_heads, sizes = p.context_mode == "alltoall", tuple(p.stage_layers)
    return Grid(p.tensor, p.pipeline, p.context, p.expert, world // p.model_size, p.sequence, over_heads, sizes)


def job_of(cfg: ModelConfig, grid: Grid, options: dict) -> PlanJob:
    outputs, optim, prompt = options.get("outputs", 0), options.get("optim", ADAM), options.get("prompt", 1)
    head, gradient = "score" if outputs else "lm", 2 if optim is HALVED else 4
    planned = PlannedModel("policy", cfg, head, True, max(1, outputs), optim.distributed, gradient)
    scored = outputs and not options.get("critic")
    # torch counts attention in full: every query sees the whole row, or up to the token before the last one
    seen = (WIDTH, WIDTH if scored else WIDTH - 1)
    return PlanJob(
        "rm" if scored else "ppo" if outputs else "sft",
        (planned,),
        grid,
        PlannedRows(ROWS, ROWS, prompt, prompt, WIDTH - prompt, WIDTH - prompt, *seen),
        None,
        element=4 if options.get("dtype") is torch.float32 else 2,
        micro_rows=options.get("micro_rows", 4),
        recompute=replace(cfg, recompute=options.get("recompute", "none")).recomputed,
        logits_bytes=options.get("logits_bytes", 1 << 30),
    )


# with a rate of one a second; torch counts two passes for attention's backward, flash kernels make two and a half
OPERATIONS = Assumptions(products=1, experts=1, flash_forward=1, flash_backward=1.25)
COUNTING = Machine(Device("seconds are operations", 1.0, 1.0, float("inf"), 1.0, 1.0), OPERATIONS, 1)


def operations(job: PlanJob, stage: int) -> dict[tuple[str, str], float]:
    """By phase and kind, as `tests.operations` tells them: of all rows in one pass, and of an optimizer step."""
    results, (number, tokens) = {}, job.micro_batches()
    alone = replace(job, rows=replace(job.rows, seen=1e-9, read_seen=1e-9))  # without attention
    for phase, often, size, backward in (("forward", 1, number * tokens, False), ("update", number, tokens, True)):
        whole, linear = (
            often * micro_batch_seconds(j, job.policy, stage, size, backward, COUNTING) for j in (job, alone)
        )
        results |= {(phase, "linear"): linear, (phase, "attention"): whole - linear}
    return results


@functools.cache
def published(name: str) -> ModelConfig:
    """Its sizes; with experts 12 of its layers: what a plan says of one it says of each."""
    cfg = compose([f"model={name}"]).model
    return replace(cfg, num_layers=12) if cfg.moe.num_experts else cfg


def by_group(calls: list, axes: dict) -> Counter:
    """Axes with the same ranks are one group to torch."""
    results: Counter = Counter()
    for call in calls:
        results["send" if call.op == "send" else axes[call.axis], call.op] += call.size
    return results


def _of_phases(found: Counter) -> Counter:
    """Operations of all kinds together."""
    return Counter({(p, "all"): sum(n for (q, _), n in found.items() if q == p) for p in ("forward", "update")})


@pytest.mark.few(5)
@pytest.mark.parametrize("case", CASES)
def test_a_step_of_real_ranks_has_the_bytes_and_operations_of_the_formulas(ranks, case):
    cfg, layout, world, options = CASES[case]
    parallel = ParallelConfig(**layout)
    grid = grid_of(parallel, world)
    job = job_of(cfg, grid, options)
    (planned,) = job.models
    results = ranks.run(measured_step, world=world, cfg=cfg, parallel=parallel, **options)
    state, wanted_state, all_heard, all_wanted = 0, 0.0, Counter(), Counter()
    counted, wanted_operations = Counter(), Counter()
    for result in results:
        held, count = (of(planned, grid, result["stage"]) for of in (held_parameters, trained_parameters))
        assert result["parameters"] == held.total
        assert result["weights"] == weight_bytes(held, job.element)
        gradients = gradient_bytes(count, planned.gradient)
        assert result["main_gradients"] == gradients
        # Megatron lets tensors begin at multiples of 64 numbers, and shares of a buffer at multiples of 128
        padding = 4 * (64 * result["tensors"] + 2 * 128 * world)
        assert 0 <= result["gradients"] - gradients <= padding
        state += result["optimizer"]
        wanted_state += optimizer_bytes(count, grid, job.element, planned.distributed)
        number, tokens = job.micro_batches()
        calls = pass_calls(job, planned, result["stage"], tokens, backward=True) * number
        calls += step_calls(job, planned, result["stage"])
        counted += Counter({(p, kind): n for p, kinds in result["operations"].items() for kind, n in kinds.items()})
        wanted_operations += Counter(operations(job, result["stage"]))
        all_heard += Counter(result["heard"])
        all_wanted += by_group(calls, result["axes"])
    if cfg.lora.dora and cfg.moe.num_experts:  # torch counts the batch of their B A with attention
        counted, wanted_operations = (_of_phases(result) for result in (counted, wanted_operations))
    assert counted.keys() == wanted_operations.keys()
    for key, wanted in wanted_operations.items():
        experts, gathered = cfg.moe.num_experts, grid.context > 1 and not grid.over_heads
        if cfg.linear.key_heads:
            continue  # rows of these sizes fill no chunk of its rule
        if key[1] == "attention" and (experts or gathered):
            continue  # with it go the weighted sums of experts' outputs; of gathered keys each half of a row sees fewer
        # torch counts products of groups of heads with attention
        rel = 0.05 if cfg.traits.entries else 0.03 if experts else 1e-9
        # of a router every tensor rank has the whole, and its loss has a product too
        assert counted[key] == pytest.approx(wanted, rel=rel), key
    assert state == wanted_state  # shares of ranks differ by some parameters, their sum does not
    assert all_heard.keys() == all_wanted.keys()
    whole = [axes[axis] for axes in (result["axes"] for result in results) for axis in ("dp", "edp")]
    for (group, word), size in all_wanted.items():
        if word == "all_to_all" and cfg.moe.num_experts:  # these tokens do not choose all experts as often
            assert all_heard[group, word] == pytest.approx(size, rel=0.05)
            continue
        # of whole buffers, with what Megatron pads; all else to the byte
        slack = padding * world if group in whole else 0
        assert size <= all_heard[group, word] <= size + slack, (group, word)


@pytest.mark.parametrize(
    ("cfg", "layout", "world"),
    [
        (UNTIED, {"tensor": 2, "pipeline": 2}, 4),
        (MOE, {"expert": 2, "pipeline": 2}, 4),
        (INDEXED, {"tensor": 2, "pipeline": 2}, 4),
    ],
)
def test_a_refit_of_real_ranks_has_the_bytes_of_the_formulas(ranks, cfg, layout, world):
    parallel = ParallelConfig(**layout)
    job = job_of(cfg, grid_of(parallel, world), {})
    results = ranks.run(bytes_of_a_refit, world=world, cfg=cfg, parallel=parallel)
    for result in results:
        heard, wanted = Counter(result["heard"]), by_group(gathered_calls(job, result["stage"]), result["axes"])
        assert heard.keys() == wanted.keys()
        for key, size in wanted.items():
            assert heard[key] == pytest.approx(size, rel=0.02), (key, size)


@pytest.mark.parametrize(
    ("name", "grid", "tensor", "most"),
    [
        ("llama3_8b", Grid(2, data=4), 2, 1.0),  # nothing on the wire
        ("llama3_8b", Grid(2, data=4), 1, 1.01),
        ("llama3_8b", Grid(2, 2, data=2), 2, 1.01),
        ("qwen3_0.6b", Grid(1, 4, data=2), 2, 1.1),
        ("qwen3_0.6b", Grid(2, 2, data=2), 4, 1.5),  # a rank may hold a part of what its engine needs
        ("qwen3_30b_a3b", Grid(1, 2, expert=4, data=4), 4, 1.01),
    ],
)
@pytest.mark.parametrize("bucket_bytes", [1 << 28, 1 << 34])
def test_buffers_of_a_refit_are_those_of_its_plan(name, grid, tensor, most, bucket_bytes):
    cfg = published(name)
    job = replace(job_of(cfg, grid, {}), engine=Engine(tensor), element=2, bucket_bytes=bucket_bytes)
    trainer = TrainerGrid.of(cfg, grid, grid.data)
    plan = plan_refit(trainer, EngineGrid(tuple(range(grid.gpus)), tensor), hf_tensors(cfg), 2, bucket_bytes)
    exchanges = [Exchange(plan, rank, torch.device("cpu"), torch.bfloat16, 1.0) for rank in range(grid.gpus)]
    each = grid.gpus // grid.pipeline
    for stage in range(grid.pipeline):
        used = max(exchange.buffer_bytes for exchange in exchanges[stage * each : (stage + 1) * each])
        assert 0.99 * used <= refit_buffers(job, stage) <= most * used


@pytest.mark.parametrize(
    ("name", "grid", "tensor"),
    [
        ("llama3_8b", Grid(2, data=4), 2),  # nothing on the wire
        ("llama3_8b", Grid(2, data=4), 1),
        ("llama3_8b", Grid(data=4), 2),
        ("llama3_8b", Grid(2, 2, data=2), 2),
        ("qwen3_0.6b", Grid(1, 4, data=2), 2),
        ("qwen3_0.6b", Grid(2, 2, data=2), 4),  # a rank may hold a part of what its engine needs
        ("qwen3_30b_a3b", Grid(1, 2, expert=4, data=4), 4),
        ("qwen3_30b_a3b", Grid(2, 1, expert=2, data=4), 1),
    ],
)
def test_a_refit_in_parts_has_the_bytes_of_its_plan(name, grid, tensor):
    """Of the rank of each stage that receives most: dense tensors and experts of its stage, all of other stages."""
    cfg = published(name)
    job = replace(job_of(cfg, grid, {}), engine=Engine(tensor), element=2)
    trainer = TrainerGrid.of(cfg, grid, grid.data)
    plan = plan_refit(trainer, EngineGrid(tuple(range(grid.gpus)), tensor), hf_tensors(cfg), 2, 1 << 28)
    each = grid.gpus // grid.pipeline
    received = [Counter() for _ in range(grid.gpus)]
    for message in (message for messages in plan.rounds for message in messages):
        near = message.source // each == message.target // each
        for span in message.parts:
            tensor = plan.tensors[span.tensor]
            axis = "pp" if not near else "ep" if tensor.spec.experts else "tp"
            received[message.target][axis] += (span.stop - span.start) * tensor.entry_words(2) * 2
    for stage in range(grid.pipeline):
        most = max(received[stage * each : (stage + 1) * each], key=lambda by_axis: by_axis.total())
        assert {call.axis: call.size for call in part_calls(job, stage)} == pytest.approx(dict(most), rel=0.01)


@pytest.mark.parametrize(
    ("name", "grid", "ranks", "tensor", "most"),
    [
        ("llama3_8b", Grid(2, data=4), 2, 1, 1.01),
        ("llama3_8b", Grid(2, 2, data=2), 4, 4, 1.01),
        ("llama3_8b", Grid(2), 6, 1, 1.01),  # who trains sends more than an engine receives
        ("qwen3_0.6b", Grid(1, 4, data=2), 8, 2, 1.1),
        ("qwen3_30b_a3b", Grid(2, 1, expert=2, data=4), 2, 1, 1.01),
    ],
)
def test_a_refit_of_engines_on_ranks_of_their_own_is_that_of_its_plan(name, grid, ranks, tensor, most):
    cfg = published(name)
    job = replace(job_of(cfg, grid, {}), engine=Engine(tensor, ranks=ranks), element=2)
    trainer = TrainerGrid.of(cfg, grid, grid.data)
    engines = EngineGrid(tuple(range(grid.gpus, job.gpus)), tensor)
    plan = plan_refit(trainer, engines, hf_tensors(cfg), 2, 1 << 28)
    moved: Counter = Counter()
    for message in (message for messages in plan.rounds for message in messages):
        moved[message.source] += message.bytes
        moved[message.target] += message.bytes
    assert apart_bytes(job) == pytest.approx(max(moved.values()), rel=0.01)
    used = [Exchange(plan, rank, torch.device("cpu"), torch.bfloat16, 1.0).buffer_bytes for rank in range(job.gpus)]
    each = grid.gpus // grid.pipeline
    for stage in range(grid.pipeline):
        sends = max(used[stage * each : (stage + 1) * each])
        assert 0.99 * sends <= refit_buffers(job, stage) <= most * sends
    receives = max(used[grid.gpus :])
    assert 0.99 * receives <= refit_buffers(job, None) <= most * receives


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "grid", "tensor"),
    [
        ("llama3_8b", Grid(2, data=4), 2),
        ("llama3_8b", Grid(2, 2, data=2), 2),
        ("qwen3_30b_a3b", Grid(2, 1, expert=2, data=4), 4),
    ],
)
def test_engines_that_merge_get_and_keep_the_bytes_of_their_plan(name, grid, tensor):
    """Of the rank of each stage that receives most; what ranks keep, of tensors without numbers."""
    cfg = replace(published(name), lora=LoraConfig(rank=16, dora=grid.expert == 1))
    job = replace(job_of(cfg, grid, {}), engine=Engine(tensor, factors=True), element=2)
    trainer = TrainerGrid.of(cfg, grid, grid.data)
    ranks = tuple(range(grid.gpus))
    plan = plan_refit(trainer, EngineGrid(ranks), factor_tensors(cfg), 2, 1 << 28)
    received = [0] * grid.gpus
    for message in (message for messages in plan.rounds for message in messages):
        received[message.target] += message.bytes
    apart = plan_refit(trainer, EngineGrid((grid.gpus,)), factor_tensors(cfg), 2, 1 << 28)
    alone = replace(job, engine=Engine(1, factors=True, ranks=1))
    assert apart_bytes(alone) == pytest.approx(apart.largest_share_bytes(), rel=0.01)
    each = grid.gpus // grid.pipeline
    for stage in range(grid.pipeline):
        wanted = sum(call.size for call in factor_calls(job, stage))
        assert max(received[stage * each : (stage + 1) * each]) == pytest.approx(wanted, rel=0.01)
    whole = plan_refit(trainer, EngineGrid(ranks, tensor), hf_tensors(cfg), 2, 1 << 28)
    exchanges = [Exchange(p, 0, torch.device("meta"), torch.bfloat16, 1.0) for p in (whole, plan)]
    merger = Merger(*exchanges, cfg)
    kept = sum(t.nbytes for share in (merger.base, merger.factors) for t in share.held.values())
    assert kept_bytes(cfg, 2, tensor) == pytest.approx(kept, rel=1e-6)


WIDE = ModelConfig(num_layers=4, hidden_size=64, ffn_hidden_size=192, num_heads=8, num_kv_heads=4, vocab_size=64)


@pytest.mark.parametrize(
    ("cfg", "layout", "recompute"),
    [
        (WIDE, {}, "none"),
        (WIDE, {}, "full"),
        (WIDE, {}, "3"),
        (WIDE, {"tensor": 2}, "none"),
        (WIDE, {"tensor": 2, **SEQ}, "none"),
        (WIDE, {"tensor": 2, **SEQ}, "full"),
        (replace(WIDE, family="qwen3", qk_norm=True, head_dim=128), {}, "none"),
        (replace(MOE, hidden_size=64, num_heads=4), {}, "none"),
        (replace(WIDE, megatron={"recompute_modules": ["mlp"]}), {}, "none"),
        (replace(MOE, hidden_size=64, num_heads=4, megatron={"recompute_modules": ["moe"]}), {}, "none"),
    ],
)
def test_activations_are_what_autograd_keeps(ranks, cfg, layout, recompute):
    parallel, tokens, cfg = ParallelConfig(**layout), 512, replace(cfg, recompute=recompute)
    grid = grid_of(parallel, parallel.tensor)
    job = PlanJob(
        "rm",
        (PlannedModel("policy", cfg, "score", True),),
        grid,
        PlannedRows(1, 1, tokens / 2, tokens // 2, tokens / 2, tokens // 2),
        None,
        element=4,
        micro_rows=1,
        recompute=cfg.recomputed,
    )
    wanted = activation_bytes(job, job.policy, 0)
    kept = ranks.run(
        "benchmarks.context_memory:kept_activations",
        world=parallel.tensor,
        cfg=replace(cfg, max_position=tokens),
        parallel=parallel,
        tokens=tokens,
    )
    assert max(kept) == pytest.approx(wanted, rel=0.15)


def test_the_limits_of_leaving_out_are_those_of_the_trainer():
    from aligner.ops.packing import needed

    assert (reads.WORTH, reads.LAST_LAYER_MASK) == (needed.WORTH, needed.LAST_LAYER_MASK)


def test_the_logits_of_a_student_are_counted_as_the_trainer_counts_them():
    from aligner.roles import teacher

    assert sizes.COMPARED == teacher.WIDE


def test_optimizer_config_default_is_distributed():
    """The calculator's default is the schema's."""
    assert PlannedModel("policy", LLAMA).distributed == OptimConfig().distributed
