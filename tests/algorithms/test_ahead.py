"""Rollouts generated while earlier ones are trained on (engine.lag): which weights made them, and that runs repeat."""

import json
import shutil
from pathlib import Path

import pytest

from aligner.tools.replay import compare, prepare
from tests import stages

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

JOB = "tests.algorithms.ahead_jobs:generations"
STEPS = 5
COMMON = [f"run.steps={STEPS}", "run.export=true", "reward.normalize=true", "batch.epochs=2", "sampling.top_p=0.9"]
COMMON += ["run.eval_every=2"]  # and before the first step, and after the last: four
SAME = ("eval/", "reward/", "response/", "advantage/", "policy/", "mismatch/", "loss", "kl/")


def settings(data, run, *more):
    return stages.overrides("grpo", data, run, *COMMON, f"data.eval={data / 'eval.jsonl'}", "engine.ranks=1", *more)


def steps(run):
    """The records of training, less the evaluation before it."""
    return stages.records(run)[1:]


@pytest.fixture(scope="module")
def whole(ranks, tiny_data, tmp_path_factory):
    """Runs that nothing interrupts, by lag; made once."""
    runs = {}

    def get(lag: int):
        if lag not in runs:
            runs[lag] = tmp_path_factory.mktemp(f"lag{lag}") / "run"
            arguments = settings(tiny_data, runs[lag], f"engine.lag={lag}", "checkpoint.every=2")
            _, (_, generated, _) = ranks.run(JOB, world=2, arguments=arguments)
            assert generated == STEPS + 4
        return runs[lag]

    return get


@pytest.mark.parametrize("lag", [1, 2])
def test_rollouts_are_those_of_kept_weights(ranks, tiny_data, tmp_path, whole, lag):
    """Against a run that takes turns and generates with copies of earlier weights: samples, losses and weights, bit by
    bit. An evaluation in between has the weights of its step in both."""
    more = ["mismatch.correction=tis_token", f"data.eval={tiny_data / 'eval.jsonl'}"]
    arguments = stages.overrides("grpo", tiny_data, tmp_path / "turns", *COMMON, *more)
    ranks.run("tests.algorithms.ahead_jobs:with_kept_weights", arguments=arguments, lag=lag)
    ahead, turns = steps(whole(lag)), steps(tmp_path / "turns")
    updates = [record["refit/version"] for record in ahead]
    for k, (one, two) in enumerate(zip(ahead, turns, strict=True)):
        found, wanted = ({n: v for n, v in record.items() if n.startswith(SAME)} for record in (one, two))
        assert found == wanted and "mismatch/weight_mean" in found
        behind = updates[k] - updates[max(0, k - lag)]
        assert one["staleness/mean"] == one["staleness/max"] == behind
    assert updates == [0.0, 2.0, 4.0, 6.0, 8.0] and ahead[-1]["staleness/max"] == 2 * lag
    assert ahead[-1]["mismatch/weight_mean"] != 1
    assert stages.same_weights(whole(lag), tmp_path / "turns")


@pytest.mark.parametrize("lag", [1, 2])
def test_a_run_that_was_cut_off_goes_on_bit_by_bit(ranks, tiny_data, tmp_path, whole, lag):
    """The power goes off in step 4; the checkpoint is of step 2. It names what was in flight, by the versions of
    weights that nobody has any more; nothing that landed is generated again."""
    arguments = settings(tiny_data, tmp_path / "run", f"engine.lag={lag}", "checkpoint.every=2")
    (cut, *_), _ = ranks.run(JOB, world=2, arguments=arguments, cut=4)
    assert cut and stages.checkpoints(tmp_path / "run") == [2]
    state = json.loads((tmp_path / "run/checkpoints/step-00000002/state.json").read_text())["state"]
    assert state["clock"]["rollouts"] == 2 + lag and state["data"]["cursor"] == (2 + lag) * 8
    assert state["clock"]["groups"] == list(range(2 * 8, (2 + lag) * 8))
    landed = len(list((tmp_path / "run" / "pending_rollouts").glob("step-*/*.json"))) - 1  # since the checkpoint
    _, (_, again, _) = ranks.run(JOB, world=2, arguments=arguments)
    assert again == STEPS - 2 - lag - landed + 2 and landed >= 0
    assert stages.differences(whole(lag), tmp_path / "run") == [] and stages.same_weights(whole(lag), tmp_path / "run")


def test_a_step_is_executed_again(ranks, whole, tmp_path):
    """Of the rollout that was in flight at the checkpoint before it."""
    run = shutil.copytree(whole(2), tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    replay = prepare(run, STEPS)
    assert (replay.before, replay.ranks) == (STEPS - 1, 2)
    ranks.run("tests.run.jobs:run_config", world=2, cfg=replay.cfg)
    assert compare(run, Path(replay.cfg.run.dir), STEPS) == 0


def test_another_lag_is_refused_and_what_is_lost_is_told(ranks, tiny_data, tmp_path):
    """With run.accept_changes it goes on, with what the engines make of the weights of now; so does a run whose stored
    rollout is damaged."""
    run, lag1 = tmp_path / "run", ["engine.lag=1", "checkpoint.every=2"]
    ranks.run(JOB, world=2, arguments=settings(tiny_data, run, *lag1), cut=3)
    assert stages.checkpoints(run) == [2]
    with pytest.raises(AssertionError, match=r"engine\.lag is 1 there, 2 here"):
        ranks.run(JOB, world=2, arguments=settings(tiny_data, run, "engine.lag=2", "checkpoint.every=2"))
    lost = "WARNING: 8 groups were in flight at the checkpoint"
    for lag, told in ((2, True), (0, True), (1, True)):
        again = shutil.copytree(run, tmp_path / f"lag{lag}")
        if lag == 1:
            (part,) = (again / "pending_rollouts" / "step-00000003").glob("*.safetensors")
            part.write_bytes(part.read_bytes()[:-1] + b"?")
        more = [f"engine.lag={lag}", "checkpoint.every=2", "run.accept_changes=true"]
        (_, _, out), (_, generated, _) = ranks.run(JOB, world=2, arguments=settings(tiny_data, again, *more))
        assert generated == 3 + 2 and (lost in out) == told and ("damaged" in out) == (lag == 1)
        behind = [record["staleness/max"] for record in steps(again)[2:]]
        assert behind == [2.0 * min(lag, i) for i in range(3)]


def test_another_layout_goes_on_with_what_is_in_flight(ranks, tiny_data, tmp_path, whole):
    """Two trainers where there was one: the samples of step 3 are those in flight, of step 4 those of the same weights,
    prompts and seeds."""
    more = ["engine.lag=1", "checkpoint.every=2"]
    ranks.run(JOB, world=2, arguments=settings(tiny_data, tmp_path / "run", *more), cut=3)
    told = ranks.run(JOB, world=3, arguments=settings(tiny_data, tmp_path / "run", *more))
    assert [generated for _, generated, _ in told] == [0, 0, 2 + 2] and "WARNING" not in told[0][2]
    both = zip(steps(tmp_path / "run")[2:4], steps(whole(1))[2:4], strict=True)
    for record, expected in both:
        for name, value in expected.items():
            if name.startswith(("reward/", "response/", "staleness/")):
                assert record[name] == pytest.approx(value, abs=1e-6), name


def test_a_reward_that_fails_costs_no_step(ranks, tiny_data, tmp_path, whole):
    """In step 4, while rollout 5 is generated: step 3 is saved with what was in flight behind it."""
    arguments = settings(tiny_data, tmp_path / "run", "engine.lag=1", "checkpoint.every=0")
    told = ranks.run("tests.algorithms.ahead_jobs:reward_fails", world=2, arguments=arguments, step=4)
    assert told == ["RewardError: no answer from the service", "1"]
    assert stages.checkpoints(tmp_path / "run") == [3]
    ranks.run(JOB, world=2, arguments=arguments)
    assert stages.differences(whole(1), tmp_path / "run") == []
    assert stages.same_weights(whole(1), tmp_path / "run")


@pytest.mark.parametrize("window", [0, 8])
def test_without_checkpoints_what_was_trained_on_is_deleted(ranks, tiny_data, tmp_path, window):
    """A save at the end keeps nothing of long ago; of step 3 the rollout is still there, in case that it fails."""
    more = ["engine.lag=1", f"engine.window={window}", "checkpoint.every=0", "run.eval_every=0"]
    (off, *_), _ = ranks.run(JOB, world=2, arguments=settings(tiny_data, tmp_path / "run", *more), cut=3)
    stored = sorted(int(path.name[5:]) for path in (tmp_path / "run" / "pending_rollouts").glob("step-*"))
    assert off and stored == [3]


def test_an_engine_that_fails_ends_the_run_with_its_cause(ranks, tiny_data, tmp_path):
    """It fails in rollout 4, while step 3 is trained on. What step 3 would need to be resumed exactly is not there: the
    checkpoint of step 2 stays the last, and the run goes on from it bit by bit."""
    arguments = settings(tiny_data, tmp_path / "run", "engine.lag=1", "checkpoint.every=2", "run.eval_every=0")
    plain = [*arguments[:1], f"run.dir={tmp_path / 'whole'}", *arguments[2:]]
    assert arguments[1].startswith("run.dir=")
    told = ranks.run("tests.algorithms.apart_jobs:refuses", world=2, arguments=arguments, at=4)
    assert told == ["EngineError: rollout 4: on rank 1: no answer from the device", "1"]
    assert stages.checkpoints(tmp_path / "run") == [2]
    for line in (arguments, plain):
        ranks.run(JOB, world=2, arguments=line)
    assert stages.differences(tmp_path / "whole", tmp_path / "run") == []
    assert stages.same_weights(tmp_path / "whole", tmp_path / "run")
