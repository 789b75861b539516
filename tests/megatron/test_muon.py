"""Muon: its update by the formula, on every layout, in checkpoints, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch
import torch.distributed as dist

from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import MissingExtraError
from aligner.families.matrices import is_matrix
from aligner.families.table import family_table
from aligner.megatron.model import Head, check_optimizer
from aligner.megatron.muon import MatrixMuon
from aligner.megatron.optimizer_state import owned, parameters_and_mains
from aligner.megatron.weights import local_parameters
from aligner.models.params import from_hf, to_hf
from aligner.plan.adapters import trained_parameters
from aligner.plan.job import PlanJob, PlannedModel, PlannedRows
from aligner.plan.muon import muon_operations
from aligner.plan.shapes import Grid
from aligner.plan.sizes import moment_bytes, optimizer_bytes
from aligner.plan.traffic import step_calls
from tests.megatron.models import ONE, build, equal_shares, load_and_step, one_more, same, save_and_go_on, stepped
from tests.needs import package
from tests.operations import Listener, counted
from tests.ranks import on_ranks
from tests.tiny import LLAMA, MODELS, MOE, MORE, relative

package("emerging_optimizers")
pytestmark = pytest.mark.multirank

MUON = OptimConfig(name="muon", lr=1e-2, weight_decay=0.1, distributed=False, muon_precision="float32")
# Newton-Schulz steps of Jordan's modded-nanogpt, train_gpt_medium.py
STEPS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonal(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    x = x / x.norm()
    for a, b, c in islice(cycle(STEPS), steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


class MuonTwin:
    """Muon in float64 (Jordan et al. 2024, scaled as in arXiv:2502.16982, eq. 4), a matrix of files at a time."""

    def __init__(self, model):
        table = family_table(model.cfg, model.head.kind, model.head.outputs)
        named = local_parameters(model.module)
        specs = {id(named[s.canonical]): s for s in table if s.canonical in named}
        mains = {id(main): (param, main) for param, main in parameters_and_mains(model.optimizer)}
        self.cfg, self.state = model.cfg, []
        (self.inner,) = (o.optimizer for o in model.optimizer.chained_optimizers if isinstance(o.optimizer, MatrixMuon))
        for group in self.inner.param_groups:
            for main in group["params"]:
                x, m = main.detach().double().clone(), torch.zeros_like(main, dtype=torch.float64)
                self.state.append([specs[id(mains[id(main)][0])], main, x, m])
        self.inner.register_step_pre_hook(lambda *unused: self.step())

    def step(self) -> None:
        (lr,) = {group["lr"] for group in self.inner.param_groups}
        for entry in self.state:
            spec, main, x, m = entry
            m = 0.95 * m + 0.05 * main.grad.double()
            matrices = to_hf(spec, m, self.cfg).items()
            moves = {name: 0.2 * max(matrix.shape) ** 0.5 * orthogonal(matrix) for name, matrix in matrices}
            entry[2:] = x - lr * (from_hf(spec, moves, self.cfg) + 0.1 * x), m

    def gap(self) -> float:
        """Largest difference of a matrix, as a share of what one step moves."""
        return max(float((main - x).norm() / (1e-2 * 0.2 * x.numel() ** 0.5)) for _, main, x, _ in self.state)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@on_ranks(1)
def test_its_update_is_that_of_the_paper(name):
    """Also of a layer's matrices that Megatron keeps in one: queries, keys and values; gate and up."""
    cfg = {"llama": LLAMA, **MORE}[name]
    model = build(cfg, optim=MUON)
    twin = MuonTwin(model)
    one_more(model)
    held = {spec.canonical for spec, *_ in twin.state}
    wanted = {s.canonical for s in family_table(cfg) if is_matrix(s) and not s.experts}
    assert held == wanted and 0 < twin.gap() <= 1e-4
    one_more(model)
    assert twin.gap() <= 3e-4


LAYOUTS = {  # ranks, shape, layout
    "tp2": (2, MODELS["qwen3"], ParallelConfig(tensor=2)),
    "tp2, sequence": (2, LLAMA, ParallelConfig(tensor=2, sequence=True)),
    "dp2": (2, LLAMA, ParallelConfig()),
    "pp2": (2, LLAMA, ParallelConfig(pipeline=2)),
    "ep2": (2, MOE, ParallelConfig(expert=2)),
    "ep2, tp2, pp2": (4, MOE, ParallelConfig(expert=2, tensor=2, pipeline=2)),
}


def moved(cfg, parallel=ONE) -> dict[str, torch.Tensor]:
    """What the second step changes."""
    step = one_more(stepped(cfg, 1, equal_shares, parallel=parallel, optim=MUON), equal_shares)
    return {name: after - step["weights"][name] for name, after in step["after"].items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_have_the_same_update(ranks, name):
    """Adam's parameters move by the sign of a gradient that is nearly none: within what other layouts of Adam are."""
    world, cfg, parallel = LAYOUTS[name]
    (wanted,) = ranks.run(moved, cfg=cfg)
    matrices = {n for spec in family_table(cfg) if is_matrix(spec) for n in spec.hf}
    assert any(".experts." in n for n in matrices) == bool(cfg.moe.num_experts)
    for got in ranks.run(moved, world=world, cfg=cfg, parallel=parallel):
        gaps = {n: relative(update, wanted[n]) for n, update in got.items()}
        assert 0 < max(gaps[n] for n in matrices) <= 1e-5, gaps
        assert max(gaps.values()) <= 1e-3, gaps


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "scores"])
def test_a_checkpoint_resumes_to_the_bit(ranks, tmp_path, kind):
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    job = {"cfg": MOE, "folder": tmp_path / "c", "optim": MUON, "dtype": dtype, "share": equal_shares}
    job |= {"head": Head("score", 2)} if kind == "scores" else {}
    wanted = ranks.run(save_and_go_on, world=2, parallel=ParallelConfig(expert=2), **job)[0]
    got = ranks.run(load_and_step, world=2, parallel=ParallelConfig(expert=2), **job)[0]
    assert got["version"] == 2 and same(got["weights"], wanted["weights"]) and same(got["after"], wanted["after"])
    if kind == "float32":
        got = ranks.run(load_and_step, world=2, parallel=ParallelConfig(tensor=2), **job)[0]
        assert same(got["weights"], wanted["weights"])
        assert all(relative(got["after"][n], t) <= 1e-5 for n, t in wanted["after"].items())


def state_bytes(parallel) -> tuple[int, int]:
    model = stepped(MOE, 1, equal_shares, parallel=parallel, optim=MUON, dtype=torch.bfloat16)
    tensors = [t for shard in owned(model.optimizer) for t in (shard.main, *shard.moments.values())]
    return model.layout.pp_rank, sum(t.nbytes for t in tensors)


def test_plan_knows_its_state(ranks):
    model = PlannedModel("policy", MOE, trained=True, distributed=False, muon="float32")
    grid = Grid(tensor=2, pipeline=2, expert=2)
    for stage, size in ranks.run(state_bytes, world=4, parallel=LAYOUTS["ep2, tp2, pp2"][2]):
        count, moments = trained_parameters(model, grid, stage), moment_bytes(model, grid, stage)
        assert size == pytest.approx(optimizer_bytes(count, grid, 2, False, False, moments), rel=1e-9)


def a_step(parallel) -> tuple[int, float, int]:
    """Operations, and bytes between tensor ranks, of Muon's own step."""
    model, operations, heard = build(MOE, parallel, MUON), [], Listener()

    def step(own: Callable[[], object]) -> None:
        with heard:
            operations.append(sum(counted(own).values()))

    for inner in (o.optimizer for o in model.optimizer.chained_optimizers if isinstance(o.optimizer, MatrixMuon)):
        inner.step = lambda *unused, own=inner.step: step(own)
    one_more(model, equal_shares)
    tensor = tuple(dist.get_process_group_ranks(model.layout.pgs.tp))
    return model.layout.pp_rank, sum(operations), heard.bytes[tensor, "all_gather"]


def test_plan_knows_its_operations_and_messages(ranks):
    """All that tensor ranks gather here are matrices."""
    model = PlannedModel("policy", MOE, trained=True, distributed=False, muon="float32")
    grid = Grid(tensor=2, pipeline=2, expert=2)
    for stage, made, gathered in ranks.run(a_step, world=4, parallel=LAYOUTS["ep2, tp2, pp2"][2]):
        assert made == muon_operations(MOE, grid, stage)
        job = PlanJob("sft", (model,), grid, PlannedRows(8, 8, 4, 4, 4, 4), None)
        calls = [call for call in step_calls(job, model, stage) if (call.axis, call.op) == ("tp", "all_gather")]
        assert gathered == sum(call.size for call in calls) > 0


def test_a_missing_package_is_told(monkeypatch):
    monkeypatch.setattr("aligner.megatron.model.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"^critic.optim.name=muon needs .* pip install 'aligner\[muon\]'$"):
        check_optimizer("critic.optim", MUON)
    check_optimizer("optim", OptimConfig())


@on_ranks(1)
def test_products_in_bfloat16_give_nearly_the_same():
    updates = [one_more(build(LLAMA, optim=replace(MUON, muon_precision=p)))["after"] for p in ("float32", "bfloat16")]
    start = one_more(build(LLAMA, optim=MUON))["weights"]
    name = "model.layers.0.mlp.down_proj.weight"
    assert 1e-4 < relative(*(after[name] - start[name] for after in updates)) < 3e-2
