"""A run is the same whenever it was cut off, over (engine.lag, engine.window): what is in flight at a checkpoint, what
is stored of it, and what is told where it is lost. Which weights made it: test_schedule_samples.py."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from aligner.tools.replay import compare, prepare
from tests import stages
from tests.algorithms.schedules import MODES, SAMPLES, STEPS, steps
from tests.run import jobs

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

TIGHT = ("advantage/std", "loss", "policy/entropy", "policy/grad_norm")


@pytest.fixture
def go_on(ranks, tmp_path, settings, runs):
    """go_on(mode, *settings, before=, world=) -> (folder, Told of each rank): a copy of the run of this mode that was
    cut off, to its end; first, `before(folder)`."""

    def go(name: str, *overrides: str, before=lambda run: None, world: int = 0, cut_on: int = 0):
        run = shutil.copytree(runs(name, 4, cut_on)[0], tmp_path / "run")
        before(run)
        return run, ranks.run(jobs.played, world or MODES[name].world, arguments=settings(name, run, *overrides))

    return go


def stored(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "pending_rollouts").glob("step-*"))


def of(run: Path, number: int) -> Path:
    return run / "pending_rollouts" / f"step-{number:08d}"


def damage(run: Path, number: int) -> None:
    (part,) = of(run, number).glob("*.safetensors")
    part.write_bytes(part.read_bytes()[:-1] + b"?")


def state_of(run: Path) -> dict:
    return json.loads((run / "checkpoints/step-00000002/state.json").read_text())["state"]


def equal(one: Path, two: Path) -> bool:
    return stages.differences(one, two) == [] and stages.same_weights(one, two)


@pytest.mark.parametrize("name", MODES)
def test_a_run_that_was_cut_off_resumes_bit_for_bit(runs, go_on, name):
    """The checkpoint names what was in flight, by the versions of weights that nobody has any more; nothing that landed
    is generated again."""
    (whole, (*_, all_of_it)), (cut, (*_, first)), lag = runs(name), runs(name, 4), MODES[name].lag
    clock, data, numbers = state_of(cut)["clock"], state_of(cut)["data"], stored(cut)
    if lag:
        assert numbers[0] == clock["window"] and clock["windows"] == {"2": numbers[0]} and clock["groups"]
    else:
        assert numbers[0] == clock["window"] + 1 and not clock["groups"]
    if lag and not MODES[name].window:
        assert clock["rollouts"] == 2 + lag and data["cursor"] == (2 + lag) * 8
        assert clock["groups"] == list(range(2 * 8, (2 + lag) * 8))
    run, results = go_on(name)
    assert "WARNING" not in results[0].out
    assert first.generated + results[-1].generated - all_of_it.generated in (
        (0, 1) if lag else (0,)
    )  # one was under way
    assert equal(whole, run)
    assert lag or stored(run) == []


@pytest.mark.parametrize(
    "name, cut_on, world, overrides",
    [
        ("sync", 1, 2, []),
        ("sync", 1, 2, ["parallel.tensor=2"]),
        ("sync", 2, 1, []),
        ("lag1", 2, 3, []),
        ("windows", 2, 3, []),
    ],
    ids=["dp2", "tp2", "from dp2", "lag1", "windows"],
)
def test_another_layout_resumes_with_what_is_in_flight(runs, go_on, name, cut_on, world, overrides):
    """Two trainers where there was one, or one for two: the samples of step 3 are those that are stored, those of later
    ones have the same prompts and seeds. With a lag, step 4 has those of the same weights, too."""
    mode, (whole, wanted) = MODES[name], runs(name)

    def before(run: Path) -> None:
        parts = cut_on if name == "sync" else 1  # one for each of the trainer's ranks
        assert len(list(of(run, stored(run)[0]).glob("*.json"))) == parts
        for number in stored(run):
            if number > 3 and not mode.window:
                shutil.rmtree(of(run, number))

    run, results = go_on(name, *overrides, before=before, world=world, cut_on=cut_on)
    assert "WARNING" not in results[0].out
    assert mode.window or results[-1].generated == 2 + 2
    later = [{r for one in of_ranks for r in one.requests if r[0] > 3} for of_ranks in (results, wanted)]
    assert later[0] and later[0] == later[1]
    last = 4 if mode.lag and not mode.window else 3
    for here, there in zip(steps(run)[2:last], steps(whole)[2:last], strict=True):
        for metric, value in there.items():
            if metric.startswith(SAMPLES):
                assert here[metric] == pytest.approx(value, abs=1e-6), metric
            elif metric in TIGHT and here["step"] == 3:
                assert here[metric] == pytest.approx(value, abs=1e-5, rel=1e-5), metric


@pytest.mark.parametrize("name, number", [("sync", 3), ("lag1", 4), ("windows", 0)])
def test_what_is_damaged_behind_the_checkpoint_is_generated_again(runs, go_on, name, number):
    """With the weights that it had: bit by bit. What follows was cut off while it was written."""
    number = number or stored(runs(name, 4)[0])[1]

    def before(run: Path) -> None:
        damage(run, number)
        if number + 1 in stored(run):
            (of(run, number + 1) / "part-00000-of-00001.json").unlink()

    run, results = go_on(name, before=before)
    assert f"WARNING: order {number} is generated again" in results[0].out and "damaged" in results[0].out
    assert name != "sync" or results[0].generated == 3 + 2
    assert equal(runs(name)[0], run)


@pytest.mark.parametrize("name, change", [("lag1", "engine.lag=2"), ("windows", "engine.window=4")])
def test_another_schedule_is_refused(go_on, name, change):
    _, (results, _) = go_on(name, change)
    key, value = change.split("=")
    assert re.search(rf"AnotherRunError: .*{re.escape(key)} is \d there, {value} here", results.end, re.DOTALL)


@pytest.mark.parametrize(
    "name, change",
    [
        ("sync", "sampling.temperature=0.9"),
        ("sync", "run.resume=never"),
        ("sync", "checkpoint.rollouts=false"),
        *[("lag1", "engine.lag=2"), ("lag1", "engine.lag=0"), ("lag1", "damaged")],
        *[("windows", "engine.window=4"), ("windows", "batch.prompts=4"), ("windows", "damaged"), ("windows", "lost")],
    ],
)
def test_a_run_resumes_without_what_is_not_its_own_and_tells_what_is_lost(go_on, name, change):
    """What the engines make of the weights of now comes for it; groups of another size are left out."""
    mode, own = MODES[name], "=" in change

    def before(run: Path) -> None:
        if change == "damaged":
            damage(run, stored(run)[0])
        elif change == "lost":  # nothing but windows that are behind the checkpoint's
            shutil.rmtree(of(run, stored(run)[0]))

    overrides = [change, "run.accept_changes=true"] if own else []
    run, results = go_on(name, *overrides, before=before)
    lost = {"sync": 0, "lag1": 8, "windows": 16}[name]
    assert (f"WARNING: {lost} groups were in flight at the checkpoint" in results[0].out) == bool(lost)
    assert ("damaged" in results[0].out) == (change == "damaged")
    assert ("left out" in results[0].out) == (change == "batch.prompts=4")
    after, last = steps(run)[2:], steps(run)[-1]
    assert last["step"] == STEPS
    if mode.window:
        assert last["window/groups_in_flight"] == (4 if change == "batch.prompts=4" else 8)
        assert sum(r["window/waited_for"] for r in after) > 0 and math.isfinite(last["staleness/max"])
    else:
        assert results[-1].generated == (STEPS + 4 if change == "run.resume=never" else 3 + 2)
        lag = int(change[-1]) if "lag" in change else mode.lag
        assert [record["staleness/max"] for record in after] == [2.0 * min(lag, i) for i in range(3)]


def test_strange_names_in_a_run_folder_refuse_no_start(runs, go_on):
    """Each folder is told in a line, and goes on to the same result."""

    def before(run: Path) -> None:
        for folder in ("pending_rollouts", "answers", "rollouts", "checkpoints"):
            for name in ("step-1.bak", "step-\u00b2", "step-1.bak.safetensors"):
                (run / folder).mkdir(exist_ok=True)
                (run / folder / name).write_bytes(bytes(range(256)))
        (run / "metrics.joined.jsonl").write_bytes(b"garbage\n" * 3)

    run, (results,) = go_on("sync", "debug.record=2", before=before)
    assert results.out.count("that are no rollout") == 1 and "metrics.joined.jsonl" in results.out
    assert equal(runs("sync")[0], run)


def test_a_step_is_executed_again(ranks, runs, tmp_path):
    """Of the rollout that was in flight at the checkpoint before it."""
    run = shutil.copytree(runs("lag2")[0], tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    replay = prepare(run, STEPS)
    assert (replay.before, replay.ranks) == (STEPS - 1, 2)
    ranks.run(jobs.run_config, world=2, cfg=replay.cfg)
    assert compare(run, Path(replay.cfg.run.dir), STEPS) == 0


@pytest.mark.parametrize(
    "fails, end, saved",
    [
        ({"reward_fails": 4}, "RewardError: no answer from the service", [3]),
        ({"engine_fails": 6}, "EngineError: rollout 4: on rank 1: no answer from the device", [2]),
    ],
    ids=["reward", "engine"],
)
def test_what_fails_ends_the_run_with_its_cause_and_costs_no_step(ranks, tmp_path, settings, runs, fails, end, saved):
    """A reward in step 4, while rollout 5 is generated: step 3 is saved with what was in flight behind it. An engine in
    rollout 4, while step 3 is trained on, which would need it to be resumed exactly: the checkpoint of step 2 stays the
    last."""
    arguments = settings("lag1", tmp_path / "run")
    every = "checkpoint.every=0" if "reward_fails" in fails else "checkpoint.every=2"
    results = ranks.run(jobs.played, 2, arguments=[*arguments, every], **fails)
    assert [one.end for one in results] == [end, "1"] and stages.checkpoints(tmp_path / "run") == saved
    ranks.run(jobs.played, 2, arguments=[*arguments, every])
    assert equal(runs("lag1")[0], tmp_path / "run")


@pytest.mark.parametrize("name", ["lag1", "windows"])
def test_without_checkpoints_what_was_trained_on_is_deleted(ranks, tmp_path, settings, name):
    """A save at the end keeps nothing of long ago; of step 3 the rollout is still there, in case that it fails."""
    overrides = ["checkpoint.every=0", "run.eval_every=0", *(["engine.window=10"] if name == "windows" else [])]
    arguments = settings(name, tmp_path / "run", *overrides)
    results, _ = ranks.run(jobs.played, 2, arguments=arguments, cut=3)
    assert results.end == "cut" and stored(tmp_path / "run") == [3]
