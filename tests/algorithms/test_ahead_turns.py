"""Trajectories made while earlier ones are trained on (engine.lag): by the weights that are due, whenever tools answer,
and after kills although the world is not the same."""

import json
import shutil

import pytest

from aligner.answers import FOLDER
from tests import stages

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

JOB = "tests.algorithms.ahead_jobs:generations"
CLOCK = "environment.path=tests/assets/environments.py:Clock"
LATE = "environment.path=tests/assets/environments.py:Late"
SAME = ("eval/", "reward/", "response/", "advantage/", "policy/", "mismatch/", "loss", "stop/", "environment/")


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    return stages.make_dice(tmp_path_factory.mktemp("talker"))


def settings(data, run, *more):
    start = [f"model.init={data / 'sft'}", "reward.functions=[]", "run.export=true", "batch.epochs=2"]
    return stages.overrides("grpo", data, run, *start, *stages.DICE, "batch.group=4", *more)


def ahead(*more):
    return ["engine.ranks=1", "engine.lag=1", *more]


def windows(*more):
    return ahead("engine.window=4", *more)


def same(one, two):
    found, wanted = ([{n: v for n, v in r.items() if n.startswith(SAME)} for r in run] for run in (one, two))
    assert found == wanted and "mismatch/weight_mean" in found[-1]


@pytest.fixture(scope="module")
def late(ranks, talker, tmp_path_factory):
    """A run whose tools answer late, while the trainer trains."""
    run = tmp_path_factory.mktemp("late") / "run"
    more = [CLOCK, "+environment.args.most_s=0.2", f"data.eval={talker / 'train.jsonl'}", "run.eval_every=2"]
    _, (_, served, _) = ranks.run(JOB, world=2, arguments=settings(talker, run, *ahead(*more), "run.steps=4"))
    assert served == 4 + 3 * 3  # an evaluation goes in rounds
    return run


def test_trajectories_are_those_of_kept_weights(ranks, talker, tmp_path, late):
    """Against a run that takes turns and generates with copies of earlier weights, whose tools answer at once: bit by
    bit."""
    more = [CLOCK, f"data.eval={talker / 'train.jsonl'}", "run.eval_every=2", "mismatch.correction=tis_token"]
    arguments = settings(talker, tmp_path / "turns", *more, "run.steps=4")
    ranks.run("tests.algorithms.ahead_jobs:with_kept_weights", arguments=arguments, lag=1)
    one, two = stages.records(late), stages.records(tmp_path / "turns")
    same(one, two)
    assert [r["staleness/max"] for r in one if "staleness/max" in r] == [0, 2, 2, 2]
    assert max(r["environment/turns_mean"] for r in one if "environment/turns_mean" in r) > 1.2
    assert stages.same_weights(late, tmp_path / "turns")


@pytest.mark.parametrize("trainers, engines", [("parallel.tensor=2", 2), ("parallel.tensor=1", 1)], ids=["tp2", "dp2"])
def test_other_layouts_make_the_same_trajectories(ranks, talker, tmp_path, late, trainers, engines):
    """But for rounding: two trainer's ranks, two that generate, as one engine (in rounds) or as two."""
    more = [trainers, CLOCK, "engine.ranks=2", f"engine.tensor_parallel={engines}", "batch.micro_batch_samples=8"]
    ranks.run(JOB, world=4, arguments=settings(talker, tmp_path / "run", *ahead(*more), "run.steps=2"))
    one, two = (stages.records(run) for run in (tmp_path / "run", late))
    for found, expected in zip(one, two[1:], strict=False):
        for name in (name for name in expected if name.startswith(("reward/", "response/", "stop/", "environment/"))):
            assert found[name] == pytest.approx(expected[name], abs=1e-6), name


@pytest.mark.parametrize("player", ["environment", "agent"])
def test_a_run_that_was_cut_off_goes_on_with_the_answers_that_it_was_given(ranks, talker, tmp_path, player):
    """The dice are others at each start. The power goes off in step 4, while rollout 5 is made; the checkpoint is of
    step 2. What was in flight there is read; what is made again is given the answers that it had: a run that reads all
    of them is the same to the last bit."""
    own = ["batch.prompts=2"]
    if player == "agent":
        pytest.importorskip("uvicorn")
        pytest.importorskip("openai")
        own += ["environment.path=''", "environment.agent=tests/assets/agents.py:dice"]
    more = ahead("run.steps=5", "checkpoint.every=2", *own)
    (cut, *_), _ = ranks.run(JOB, world=2, arguments=settings(talker, tmp_path / "run", *more), cut=4)
    assert cut and stages.checkpoints(tmp_path / "run") == [2]
    pending = tmp_path / "run" / "pending_rollouts"
    shutil.rmtree(pending / "step-00000004")
    assert {path.name for path in pending.iterdir()} >= {"step-00000003"}
    (_, _, out), (_, served, _) = ranks.run(JOB, world=2, arguments=settings(talker, tmp_path / "run", *more))
    assert served <= 2 and "WARNING" not in out
    shutil.copytree(tmp_path / "run" / FOLDER, tmp_path / "again" / FOLDER)
    ranks.run(JOB, world=2, arguments=settings(talker, tmp_path / "again", *more))
    assert stages.same_weights(tmp_path / "run", tmp_path / "again")
    assert not stages.differences(tmp_path / "run", tmp_path / "again")
    lines = [line for path in (tmp_path / "run" / FOLDER).iterdir() for line in path.read_text().splitlines() if line]
    keys = [tuple(json.loads(line.partition(" ")[2])[:3]) for line in lines if not line.startswith(" ")]
    assert len(keys) == len(set(keys)) > 40


@pytest.fixture(scope="module")
def paused(ranks, talker, tmp_path_factory):
    """A run by windows whose tools are late."""
    run = tmp_path_factory.mktemp("paused") / "run"
    more = [LATE, "+environment.args.most_s=0.2", f"data.eval={talker / 'train.jsonl'}", "run.eval_every=2"]
    ranks.run(JOB, world=2, arguments=settings(talker, run, *windows(*more), "run.steps=4"))
    return run


def test_windows_do_not_hang_on_when_tools_answer(ranks, talker, tmp_path, paused):
    """Tools that are late and tools that answer at once: bit by bit."""
    more = [LATE, "+environment.args.most_s=0", f"data.eval={talker / 'train.jsonl'}", "run.eval_every=2"]
    ranks.run(JOB, world=2, arguments=settings(talker, tmp_path / "run", *windows(*more), "run.steps=4"))
    one, two = stages.records(paused), stages.records(tmp_path / "run")
    same(one, two)
    assert stages.same_weights(paused, tmp_path / "run")
    last = one[-1]
    assert last["staleness/max"] > last["staleness/mean"] > 0 and "staleness/q4_mean" in last
    assert last["environment/turns_mean"] > 1.2 and max(r.get("window/samples_paused", 0) for r in one) > 0


def test_trajectories_in_flight_go_on_after_the_power_went_off(ranks, talker, tmp_path):
    """Two trainers and two engines, dice that are others at each start; what is made again is given the answers that it
    had. What the checkpoint of step 2 has in flight is read."""
    more = windows("run.steps=5", "checkpoint.every=2", "batch.prompts=2", "batch.micro_batch_samples=4")
    more += ["engine.ranks=2"]
    (cut, *_), *_ = ranks.run(JOB, world=4, arguments=settings(talker, tmp_path / "run", *more), cut=4)
    assert cut and stages.checkpoints(tmp_path / "run") == [2]
    told = ranks.run(JOB, world=4, arguments=settings(talker, tmp_path / "run", *more))
    assert "WARNING" not in told[0][2]
    shutil.copytree(tmp_path / "run" / FOLDER, tmp_path / "again" / FOLDER)
    ranks.run(JOB, world=4, arguments=settings(talker, tmp_path / "again", *more))
    assert stages.same_weights(tmp_path / "run", tmp_path / "again")
    assert not stages.differences(tmp_path / "run", tmp_path / "again")


@pytest.mark.parametrize("kind", [ahead, windows])
def test_what_failed_altogether_is_asked_again(ranks, talker, tmp_path, kind):
    """Rollouts 3 and 4 fail, of which 3 has landed and 4 is on its way when the run ends: neither is kept."""
    away, run = tmp_path / "away", tmp_path / "run"
    more = ["environment.path=tests/assets/environments.py:Absent", f"+environment.args.away={away}"]
    more += ["environment.retries=0", "batch.prompts=2"]

    def train(steps):
        arguments = settings(talker, run, *kind(*more, f"run.steps={steps}"))
        return ranks.run("tests.algorithms.ahead_jobs:reward_fails", world=2, arguments=arguments, step=99)

    assert train(2) == ["0", "0"]
    away.touch()
    (told, _) = train(4)
    assert told.startswith("EnvironmentFailedError: environment: all trajectories of a rollout failed")
    assert not list(run.glob("pending_rollouts/*"))
    away.unlink()
    assert train(4) == ["0", "0"] and stages.records(run)[-1]["stop/failed"] == 0
