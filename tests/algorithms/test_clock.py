"""Samples that pause, and go on with newer weights (engine.window): the schedule, and that runs repeat."""

import json
import math
import shutil
from itertools import repeat

import pytest

from aligner.plan.windows import clocked
from tests import stages

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

JOB = "tests.algorithms.ahead_jobs:generations"
STEPS, LAG, WINDOW = 5, 1, 3
COMMON = [f"run.steps={STEPS}", "run.export=true", "reward.normalize=true", "batch.epochs=2", "sampling.top_p=0.9"]
COMMON += ["run.eval_every=3", "sampling.max_response_tokens=10", "sampling.stop=['1','e']"]
SAME = ("eval/", "reward/", "response/", "advantage/", "policy/", "mismatch/", "staleness/", "loss", "kl/")


def settings(data, run, *more):
    own = ["engine.ranks=1", f"engine.lag={LAG}", f"engine.window={WINDOW}", "checkpoint.every=2"]
    return stages.overrides("grpo", data, run, *COMMON, f"data.eval={data / 'eval.jsonl'}", *own, *more)


def steps(run):
    """The records of training, less the evaluation before it."""
    return stages.records(run)[1:]


@pytest.fixture(scope="module")
def whole(ranks, tiny_data, tmp_path_factory):
    """A run that nothing interrupts, and how often its engine generated."""
    run = tmp_path_factory.mktemp("clock") / "run"
    _, (_, generated, _) = ranks.run(JOB, world=2, arguments=settings(tiny_data, run))
    return run, generated


@pytest.mark.parametrize("slots", [512, 40])
def test_samples_are_those_of_the_slow_clock(ranks, tiny_data, tmp_path, whole, slots):
    """Against a run that takes turns and keeps every sample by itself: samples, versions, losses and weights, bit by
    bit; also where the engine has fewer slots than samples are in flight."""
    more = [f"data.eval={tiny_data / 'eval.jsonl'}", "mismatch.correction=tis_token", f"engine.window={WINDOW}"]
    run = whole[0]
    if slots != 512:
        run = tmp_path / "run"
        ranks.run(JOB, world=2, arguments=settings(tiny_data, run, f"engine.max_batch={slots}"))
    turns = stages.overrides("grpo", tiny_data, tmp_path / "turns", *COMMON, *more, f"engine.max_batch={slots}")
    ranks.run("tests.algorithms.clock_jobs:slowly", arguments=turns, lag=LAG, steps=STEPS)
    for one, two in zip(steps(run), steps(tmp_path / "turns"), strict=True):
        found, wanted = ({n: v for n, v in record.items() if n.startswith(SAME)} for record in (one, two))
        assert found == wanted and "staleness/q4_mean" in found
    last = steps(run)[-1]
    assert last["staleness/max"] > last["staleness/mean"] > 0 and last["window/groups_in_flight"] == 8
    assert stages.same_weights(run, tmp_path / "turns")


def test_the_plan_foresees_it(whole):
    """Nearly all samples are as long as they may be. Two steps are a period, of one window and of three."""
    planned = clocked(repeat(10), (8, 4), LAG, 512, WINDOW, float(WINDOW))
    both = steps(whole[0])[2:4]

    def mean(name: str) -> float:
        return sum(record[name] for record in both) / 2

    assert planned.step == WINDOW * (1 + mean("window/waited_for"))
    assert planned.oldest == mean("staleness/oldest_mean") / 2  # of two optimizer steps each
    assert planned.mean == pytest.approx(mean("staleness/mean") / 2, rel=0.05)


def test_a_run_that_was_cut_off_goes_on_bit_by_bit(ranks, tiny_data, tmp_path, whole):
    """The power goes off in step 4; the checkpoint is of step 2. No window that landed is generated again."""
    arguments = settings(tiny_data, tmp_path / "run")
    (off, *_), (_, first, _) = ranks.run(JOB, world=2, arguments=arguments, cut=4)
    assert off and stages.checkpoints(tmp_path / "run") == [2]
    state = json.loads((tmp_path / "run/checkpoints/step-00000002/state.json").read_text())["state"]["clock"]
    windows = sorted(int(p.name[5:]) for p in (tmp_path / "run/pending_rollouts").glob("step-*"))
    assert windows[0] == state["window"] and state["windows"] == {"2": windows[0]} and state["groups"]
    (*_, out), (_, again, _) = ranks.run(JOB, world=2, arguments=arguments)
    assert "WARNING" not in out
    assert again < whole[1] and first + again - whole[1] <= 2, "evaluations come again"
    assert stages.differences(whole[0], tmp_path / "run") == [] and stages.same_weights(whole[0], tmp_path / "run")


def test_another_clock_is_refused_and_what_is_lost_is_told(ranks, tiny_data, tmp_path):
    """With run.accept_changes or a damaged bank the samples in flight begin again; groups of another size are left out,
    and others come for them."""
    run = tmp_path / "run"
    ranks.run(JOB, world=2, arguments=settings(tiny_data, run), cut=3)
    with pytest.raises(AssertionError, match=r"engine\.window is 3 there, 4 here"):
        ranks.run(JOB, world=2, arguments=settings(tiny_data, run, "engine.window=4"))
    changed = {"window": "engine.window=4", "prompts": "batch.prompts=4"}
    for case in (*changed, "damaged", "newer"):
        again = shutil.copytree(run, tmp_path / case)
        more = [changed[case], "run.accept_changes=true"] if case in changed else []
        first = min((again / "pending_rollouts").glob("step-*"))
        if case == "damaged":
            (part,) = first.glob("*.safetensors")
            part.write_bytes(part.read_bytes()[:-1] + b"?")
        elif case == "newer":  # nothing but windows that are behind the checkpoint's
            shutil.rmtree(first)
        (_, _, out), _ = ranks.run(JOB, world=2, arguments=settings(tiny_data, again, *more))
        assert "WARNING: 16 groups were in flight at the checkpoint" in out, case
        assert ("damaged" in out) == (case == "damaged") and ("left out" in out) == (case == "prompts")
        found = stages.records(again)
        assert found[-1]["step"] == STEPS and found[-1]["window/groups_in_flight"] == (4 if case == "prompts" else 8)
        assert sum(r["window/waited_for"] for r in found[3:]) > 0 and math.isfinite(found[-1]["staleness/max"])


def test_another_layout_goes_on_with_the_bank(ranks, tiny_data, tmp_path, whole):
    """Two trainers and two engines' worth of slots are another matter; two trainers see the same samples."""
    ranks.run(JOB, world=2, arguments=settings(tiny_data, tmp_path / "run"), cut=3)
    told = ranks.run(JOB, world=3, arguments=settings(tiny_data, tmp_path / "run"))
    assert "WARNING" not in told[0][2]
    for record, expected in zip(steps(tmp_path / "run")[2:3], steps(whole[0])[2:3], strict=True):
        for name, value in expected.items():
            if name.startswith(("reward/", "response/", "staleness/", "window/")):
                assert record[name] == pytest.approx(value, abs=1e-6), name


def test_replicas_that_have_slots_for_all_make_the_same_samples(ranks, tiny_data, tmp_path, whole):
    """Two engines for one: with weights that stay, the schedule is of counts alone."""
    lines = []
    for world in (2, 3):
        run = tmp_path / str(world)
        more = [f"engine.ranks={world - 1}", "optim.lr=1e-12", "run.steps=3", "run.eval_every=0"]
        ranks.run(JOB, world=world, arguments=settings(tiny_data, run, *more))
        lines.append(stages.records(run))
    for one, two in zip(*lines, strict=True):
        for name in one:
            if name.startswith(("reward/", "response/", "staleness/", "window/")):
                assert one[name] == pytest.approx(two[name], abs=1e-6), name
