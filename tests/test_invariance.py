"""One axis at a time, the layouts of up to four ranks, and what rejection may change (see tests/invariance.py)."""

from dataclasses import replace

import pytest
import torch

from tests import invariance
from tests.needs import package

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

AXES = [
    *(name for name in invariance.layouts() if name != "one"),
    *("tp2, sequence", "cp2, over heads", "micro-batch 1", "micro-batch 2", "micro-batch 4", "micro-batch by tokens"),
    *("shared prompts", "shared prompts, tp2, sequence"),
    *("padded", "padded, cp2", "logits in parts", "recompute", "plain optimizer, dp2"),
]
EXPERT_AXES = [
    *("experts, dp2", "experts, ep2", "experts, ep2+tp2, sequence", "experts, ep2+pp2", "experts, ep2+cp2"),
    *("experts, tp2", "experts, ep2+tp2", "experts, ep4+tp2, sequence"),
    "experts, ep2+tp2+pp2, sequence",
    "experts, auxiliary loss, ep2, micro-batch 2",
    *(f"experts, replayed routing, {name}" for name in ("ep2+tp2, sequence", "ep2+pp2", "ep2+cp2", "shared prompts")),
    *(f"experts, replayed routing, {name}" for name in ("ep2+tp2+pp2, sequence", "padded, micro-batch 2")),
]


MUON_AXES = list(invariance.muon_axes())
LORA_AXES = [name for name in invariance.axes() if name.startswith("lora, ")]


@pytest.fixture(scope="module")
def matrix(ranks):
    return invariance.Matrix(ranks, rows=16)


def within(found: dict, bounds: dict) -> None:
    past = {name: value for name, value in found.items() if not value <= bounds[name]}
    assert not past, f"{past}, bounds {bounds}"


def test_the_axes_are_those_of_the_command():
    assert {*AXES, *EXPERT_AXES, *LORA_AXES, *MUON_AXES} == set(invariance.axes())
    assert len(invariance.layouts()) == 11
    assert len(dict(invariance.product())) == (11 + 4) * 24


# dpo (rows in pairs) and grpo (rows of groups) go through all of them; another stage differs from these in its loss, or
# in its head, and not in how rows, tokens and layers are shared out
HEAD_AXES = ("dp2", "pp2", "tp2+cp2", "tp2, sequence", "micro-batch 1", "shared prompts", "padded", "recompute")
FEW_AXES = {
    **dict.fromkeys(("sft", "rm", "kto", "ppo", "critic"), HEAD_AXES),
    **dict.fromkeys(("distill", "distill_top_k"), (*HEAD_AXES, "tp2+pp2", "logits in parts")),
    **dict.fromkeys(invariance.LOSSES, ("dp2", "tp2", "micro-batch 1", "shared prompts", "padded")),
    "dpo_by_rank": ["dp2", "tp2", "pp2", "cp2", "micro-batch 1", "shared prompts", "padded"],
    "grpo_proxy": ["dp2", "cp2", "micro-batch 1", "shared prompts"],
}


@pytest.mark.parametrize("stage, axis", [(s, axis) for s in invariance.STAGES for axis in FEW_AXES.get(s, AXES)])
def test_loss_and_gradient_do_not_depend_on_the_axis(matrix, stage, axis):
    case = invariance.axes()[axis]
    within(matrix.deviation(stage, case), invariance.bounds(case))


@pytest.mark.parametrize("stage, axis", [*(("grpo", axis) for axis in EXPERT_AXES[1:]), ("critic", EXPERT_AXES[3])])
def test_loss_and_gradient_do_not_depend_on_the_axis_with_experts(matrix, stage, axis):
    case = invariance.axes()[axis]
    within(matrix.deviation(stage, case), invariance.bounds(case))
    assert matrix.base(stage, case)["near_ties"] == 0  # else a layout may send a token elsewhere, and rightly so


@pytest.mark.parametrize("axis", MUON_AXES)
def test_updates_by_muon_do_not_depend_on_the_axis(matrix, axis):
    package("emerging_optimizers")
    case = invariance.axes()[axis]
    within(matrix.deviation("grpo", case), invariance.bounds(case))
    adam = matrix.base("grpo", invariance.LayoutCase(model=case.model))
    assert invariance.deviation(matrix.base("grpo", case), adam)["adam"] > 0.1  # another optimizer's


ON_TRUNK = [
    ("critic", f"lora, {axis}") for axis in ("tp2, sequence", "pp2, recompute", "dora, experts, ep2+tp2, sequence")
]


@pytest.mark.parametrize("stage, axis", [*(("grpo", axis) for axis in LORA_AXES), ("rm", LORA_AXES[2]), *ON_TRUNK])
def test_the_numbers_stay_with_adapters(matrix, stage, axis):
    case = invariance.axes()[axis]
    within(matrix.deviation(stage, case), invariance.bounds(case))


@pytest.mark.parametrize("axis", ["dp2", "tp2", "pp2", "cp2", "micro-batch 2", "padded", "recompute"])
@pytest.mark.parametrize("stage", ["grpo", "critic"])
def test_the_numbers_nearly_stay_in_bfloat16(matrix, stage, axis):
    case = replace(invariance.axes()[axis], dtype=torch.bfloat16)
    within(matrix.deviation(stage, case), invariance.bounds(case))


@pytest.mark.parametrize("axis", [None, "dp2", "cp2", "micro-batch 1"])
@pytest.mark.parametrize("stage", ["grpo", "ppo", "critic"])
def test_rejected_rows_change_nothing_but_the_denominators(matrix, stage, axis):
    """Rows that are in the batch but invalid, in any layout, against a batch on one rank that never had them."""
    one = next(iter(invariance.axes().values()))
    alone = replace(one, world=1, parallel=type(one.parallel)())
    gone = matrix.replay(stage, alone, without="gone")
    case = alone if axis is None else invariance.axes()[axis]
    within(invariance.deviation(matrix.replay(stage, case, "invalid"), gone), invariance.bounds(case))
    assert invariance.deviation(gone, matrix.base(stage, alone))["gradient"] > 1e-2  # they did count


def test_a_deviation_past_its_bound_is_found(matrix, monkeypatch):
    """The table's comparison against a replay that lacks a tenth of a percent of one tensor's gradient."""
    case = next(iter(invariance.axes().values()))
    good = matrix.base("sft", case)
    name = next(iter(good["gradient"]))
    bad = good | {"gradient": good["gradient"] | {name: good["gradient"][name] * 0.999}}
    assert invariance.deviation(good, good)["gradient"] == 0
    assert invariance.deviation(bad, good)["gradient"] == pytest.approx(1e-3, rel=1e-3)
