"""Messages of tensor parallelism beside products: TransformerEngine's own Python over user buffers of a stand-in."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.lora import ALL_LINEAR, LoraConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import ConfigError
from aligner.megatron import groups
from aligner.megatron.model import Head
from aligner.megatron.train import ShardedModel
from aligner.megatron.user_buffers import FLAGS, make_buffers
from aligner.plan.job import PlanJob, PlannedModel, PlannedRows
from aligner.plan.shapes import Grid
from aligner.plan.sizes import user_buffers
from aligner.roles.batching import micro_batches
from aligner.types import TrainBatch
from tests.megatron import models
from tests.megatron.te_buffers import USED
from tests.megatron.test_transformer_engine import EIGHT_BITS, GENTLE, LAYOUTS, RECIPES, SEQUENCE
from tests.tiny import LLAMA, relative, wild_source

pytestmark = pytest.mark.multirank
BUDGET = 500  # the buffers of two tensor ranks have 512 tokens
OVERLAP = {"tp_comm_overlap": True, "tp_comm_bootstrap_backend": "gloo"}
LONG = replace(EIGHT_BITS, max_position=1024)
LENGTHS = {"full": [300, 195, 280, 190], "short": [300, 195, 80, 190]}  # of two micro-batches of two rows
LORA = replace(LONG, lora=LoraConfig(rank=3, alpha=6, targets=[ALL_LINEAR]))
AGAIN = replace(LONG, recompute="full")


def rows_of(cfg: ModelConfig, lengths: list[int]) -> TrainBatch:
    tokens = torch.randint(1, cfg.vocab_size, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(3))
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return TrainBatch(tokens * real, torch.tensor(lengths), (real & (torch.arange(max(lengths)) > 0)).float())


def two_steps(cfg: ModelConfig, parallel: ParallelConfig, lengths: list[int]) -> dict:
    """Metrics of each, the weights after them, the tokens of each micro-batch, and how many products used buffers."""
    layout = groups.build_layout(parallel)
    asked = cfg.megatron.get("tp_comm_overlap")
    buffers = make_buffers(cfg, layout, torch.float32, BUDGET * layout.context) if asked else None
    how = {"optim": GENTLE, "total_steps": 10, "buffers": buffers}
    model = ShardedModel(cfg, layout, Head(), torch.float32, torch.device("cpu"), wild_source(cfg), **how)
    for one in model.module.modules():  # no others may be used unwatched
        assert {name for name, value in vars(one).items() if name.startswith("ub_") and value is True} <= set(FLAGS)
    full = rows_of(cfg, [length * layout.context for length in lengths])
    parts, before = micro_batches(full, BatchConfig(micro_batch_samples=2)), dict(USED)
    metrics = [model.step(parts, models.nll_loss(model, full)) for _ in range(2)]
    used = [USED[kind] - before.get(kind, 0) for kind in ("gathered", "scattered")]
    tokens = [model._pack(rows).tokens for rows in parts]
    return {"metrics": metrics, "weights": models.weights(model), "tokens": tokens, "used": used}


CASES = {
    "two full": (LONG, "tp2-sequence", "full"),
    "one is shorter": (LONG, "tp2-sequence", "short"),
    "one is shorter, in turns, recomputed": (AGAIN, "tp2-pp2-sequence", "short"),
    "context": (LONG, "cp2-tp2-sequence", "full"),
    "adapters": (LORA, "tp2-sequence", "full"),
    "fp8": (replace(LONG, megatron=RECIPES["tensorwise"]), "tp2-sequence", "full"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_learns_what_it_learns_without_buffers(te_ranks, name):
    """Each layer gathers two inputs and two gradients, and scatters two sums; recomputed ones gather and scatter in the
    forward pass again. A micro-batch far below the buffers' size uses none, whatever others do meanwhile."""
    cfg, layout, lengths = CASES[name]
    world, parallel = LAYOUTS[layout]
    case = {"world": world, "parallel": parallel, "lengths": LENGTHS[lengths]}
    plain = te_ranks.run(two_steps, cfg=cfg, **case)[0]
    got = te_ranks.run(two_steps, cfg=replace(cfg, megatron=cfg.megatron | OVERLAP), **case)[0]
    full = 1 + (lengths == "full")
    assert got["tokens"] == [512, *([512] if full == 2 else plain["tokens"][1:])] and min(plain["tokens"]) < 512
    layers = 2 * full * cfg.num_layers // parallel.pipeline  # of both steps
    again = bool(cfg.recomputed)
    assert plain["used"] == [0, 0] and got["used"] == [layers * (4 + 2 * again), layers * (2 + 2 * again)]
    close = 0.1 if cfg.megatron else 1e-5  # in FP8 the tokens of padding change the scale of all
    for one, wanted in zip(got["metrics"], plain["metrics"], strict=True):
        assert one == {key: pytest.approx(value, rel=close, abs=1e-6) for key, value in wanted.items()}
    for key, value in plain["weights"].items():
        assert relative(got["weights"][key], value, value) < close, key


def calls(cfg: ModelConfig, budget: int) -> list[dict]:
    """The arguments with which Megatron's training script makes buffers, and we do."""
    from megatron.training import initialize
    from transformer_engine.pytorch.module import base

    layout, asked, make = groups.build_layout(SEQUENCE), [], base.initialize_ub
    own = {"seq_length": budget, "micro_batch_size": 1, "context_parallel_size": 1, "hidden_size": cfg.hidden_size}
    own |= {"tensor_model_parallel_size": 2, "tp_comm_overlap_cfg": None, "fp8": cfg.megatron.get("fp8")}
    own |= {"tp_comm_bootstrap_backend": "gloo", "first_last_layers_bf16": bool(cfg.megatron.get("fp8"))}
    initialize.get_args = lambda: SimpleNamespace(**own, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1)

    def noted(shape, tp_size, ub_cfgs=None, dtype=torch.bfloat16, **options):
        asked.append({"shape": shape, "tp_size": tp_size, "cfgs": ub_cfgs or None, "dtype": dtype} | options)

    base.initialize_ub = noted
    try:
        initialize._initialize_tp_communicators()
        make_buffers(cfg, layout, torch.bfloat16, budget)
    finally:
        base.initialize_ub = make
    return [{key: str(value) for key, value in call.items()} for call in asked]


@pytest.mark.parametrize("fp8", [{}, RECIPES["tensorwise"] | {"first_last_layers_bf16": True}], ids=["bf16", "fp8"])
def test_buffers_are_made_as_megatrons_training_script_makes_them(te_ranks, fp8):
    theirs, own = te_ranks.run(calls, world=2, cfg=replace(LONG, megatron=OVERLAP | fp8), budget=512)[0]
    assert theirs == own


def buffer_bytes(cfg: ModelConfig) -> int:
    """Of all that TransformerEngine makes."""
    from transformer_engine.pytorch.module import base

    make_buffers(cfg, groups.build_layout(SEQUENCE), torch.float32, 512)
    return sum(buffer.data.nbytes for buffer in base._ub_communicators.values())


@pytest.mark.parametrize("fp8", [{}, RECIPES["tensorwise"], RECIPES["tensorwise"] | {"first_last_layers_bf16": True}])
def test_plan_has_their_memory(te_ranks, fp8):
    cfg = replace(LONG, megatron=OVERLAP | fp8)
    rows = PlannedRows(8, 8, 64, 64, 64, 64)
    job = PlanJob("sft", (PlannedModel("policy", cfg),), Grid(2), rows, None, element=4, micro_tokens=512)
    assert te_ranks.run(buffer_bytes, world=2, cfg=cfg)[0] == user_buffers(job)


def refused(cfg: ModelConfig) -> str:
    layout = groups.build_layout(SEQUENCE)
    with pytest.raises(ConfigError) as error:
        make_buffers(cfg, layout, torch.float32, BUDGET)
    return str(error.value)


def refused_on_such_nodes(cfg: ModelConfig) -> str:
    groups.ranks_per_node[0], before = 3, groups.ranks_per_node[0]
    try:
        return refused(cfg)
    finally:
        groups.ranks_per_node[0] = before


def test_it_is_refused_where_there_are_no_buffers(ranks, te_ranks):
    cfg = replace(LLAMA, megatron=OVERLAP)
    (without,) = ranks.run("tests.megatron.test_transformer_engine:refusals", cases=[cfg])
    assert "tp_comm_overlap=True: expected false without TransformerEngine. it is not installed" in without[0]
    mpi = te_ranks.run(refused, world=2, cfg=replace(cfg, megatron=OVERLAP | {"tp_comm_bootstrap_backend": "mpi"}))[0]
    assert "no buffers here: PyTorch must be compiled with 'mpi' support" in mpi
    assert "a divisor of the 3 ranks of a node" in te_ranks.run(refused_on_such_nodes, world=2, cfg=cfg)[0]
