"""Trajectories made while earlier ones are trained on (engine.lag, engine.window): by the weights that are due,
whenever tools answer, and after kills although the world is not the same."""

import json
import shutil

import pytest

from aligner.answers import FOLDER
from tests import stages
from tests.algorithms.test_schedule_samples import taking_turns
from tests.run import jobs

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

ASSETS = "environment.path=tests/assets/environments.py"
MODES = {"lag": ["engine.ranks=1", "engine.lag=1"], "windows": ["engine.ranks=1", "engine.lag=1", "engine.window=4"]}
AGENT = ["environment.path=''", "environment.agent=tests/assets/agents.py:dice"]
TOOLS = {mode: [f"{ASSETS}:{name}"] for mode, name in (("lag", "Clock"), ("windows", "Late"))}
TOOLS["agents"] = [AGENT[0], "environment.agent=tests/assets/agents.py:late"]
WHO = {**MODES, "agents": MODES["windows"]}
STEPS = 4
SAMPLES = ("reward/", "response/", "stop/", "environment/")
SAME = (*SAMPLES, "eval/", "advantage/", "policy/", "mismatch/", "loss")


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    return stages.make_dice(tmp_path_factory.mktemp("talker"))


def settings(data, run, *overrides):
    start = [f"model.init={data / 'sft'}", "reward.functions=[]", "run.export=true", "batch.epochs=2"]
    start += [*stages.DICE, "batch.group=4", f"run.steps={STEPS}"]
    return stages.overrides("grpo", data, run, *start, *overrides)


def timed(data, mode, most_s):
    """Tools that answer the same, so late at most."""
    if mode == "agents":
        return [*TOOLS[mode], f"+environment.args.most_s={most_s}", "batch.prompts=2"]
    late = [*TOOLS[mode], f"+environment.args.most_s={most_s}"]
    return [*late, f"data.eval={data / 'train.jsonl'}", "run.eval_every=2"]


@pytest.fixture(scope="module")
def late(ranks, talker, tmp_path_factory):
    """late(mode): a run whose tools answer late, while the trainer trains; made once."""
    made = {}

    def get(mode):
        if mode not in made:
            made[mode] = tmp_path_factory.mktemp(mode) / "run"
            arguments = settings(talker, made[mode], *WHO[mode], *timed(talker, mode, 0.2))
            _, engine = ranks.run(jobs.played, world=2, arguments=arguments)
            assert mode != "lag" or engine.generated == STEPS + 3 * 3  # an evaluation goes in rounds
        return made[mode]

    return get


@pytest.mark.parametrize("mode", WHO)
def test_trajectories_do_not_hang_on_when_tools_answer(ranks, talker, tmp_path, late, mode):
    """Bit by bit those of a run whose tools answer at once: with a lag alone one that takes turns, and generates with
    copies of earlier weights. Agents' requests are held over the updates."""
    if mode == "agents":
        pytest.importorskip("uvicorn")
        pytest.importorskip("openai")
    run, overrides = tmp_path / "run", timed(talker, mode, 0)
    if mode == "lag":
        arguments = settings(talker, run, *overrides, "mismatch.correction=tis_token")
        ranks.run(taking_turns, arguments=arguments, lag=1, window=0)
    else:
        ranks.run(jobs.played, world=2, arguments=settings(talker, run, *WHO[mode], *overrides))
    one, two = stages.records(late(mode)), stages.records(run)
    here, there = ([{n: v for n, v in r.items() if n.startswith(SAME)} for r in records] for records in (one, two))
    assert here == there and "mismatch/weight_mean" in here[-1]
    assert stages.same_weights(late(mode), run)
    assert max(r.get("environment/turns_mean", 0) for r in one) > 1.2
    if mode == "lag":
        assert [r["staleness/max"] for r in one if "staleness/max" in r] == [0, 2, 2, 2]
    else:
        assert one[-1]["staleness/max"] > one[-1]["staleness/mean"] > 0 and "staleness/q4_mean" in one[-1]
        assert max(r.get("window/samples_paused", 0) for r in one) > 0


@pytest.mark.parametrize("trainers, engines", [("parallel.tensor=2", 2), ("parallel.tensor=1", 1)], ids=["tp2", "dp2"])
def test_other_layouts_make_the_same_trajectories(ranks, talker, tmp_path, late, trainers, engines):
    """But for rounding: two trainer's ranks, two that generate, as one engine (in rounds) or as two."""
    overrides = [*MODES["lag"], f"{ASSETS}:Clock", trainers, "engine.ranks=2", f"engine.tensor_parallel={engines}"]
    overrides += ["batch.micro_batch_samples=8", "run.steps=2"]
    ranks.run(jobs.played, world=4, arguments=settings(talker, tmp_path / "run", *overrides))
    for here, there in zip(stages.records(tmp_path / "run"), stages.records(late("lag"))[1:], strict=False):
        for name in (name for name in there if name.startswith(SAMPLES)):
            assert here[name] == pytest.approx(there[name], abs=1e-6), name


TWO = ["engine.ranks=2", "batch.micro_batch_samples=4"]


@pytest.mark.parametrize(
    "mode, world, overrides",
    [("lag", 2, []), ("windows", 4, TWO), ("windows", 4, [*TWO, *AGENT])],
    ids=["lag", "windows", "windows-agent"],
)
def test_a_run_that_was_cut_off_resumes_with_the_answers_that_it_was_given(
    ranks, talker, tmp_path, mode, world, overrides
):
    """The dice are others at each start. The power goes off in step 4; the checkpoint is of step 2. What was in flight
    there is read; what is made again is given the answers that it had: a run that reads all of them is the same to the
    last bit. With a lag rollout 4 is made again, with windows two trainers and two engines go on."""
    if overrides[-2:] == AGENT:
        pytest.importorskip("uvicorn")
        pytest.importorskip("openai")
    overrides, run, again = (
        [*MODES[mode], *overrides, "checkpoint.every=2", "batch.prompts=2"],
        tmp_path / "run",
        tmp_path / "2",
    )
    first, *_ = ranks.run(jobs.played, world, arguments=settings(talker, run, *overrides), cut=4)
    assert first.end == "cut" and stages.checkpoints(run) == [2]
    if mode == "lag":
        assert (run / "pending_rollouts/step-00000003").exists()
        shutil.rmtree(run / "pending_rollouts/step-00000004")
    results = ranks.run(jobs.played, world, arguments=settings(talker, run, *overrides))
    assert "WARNING" not in results[0].out and (mode == "windows" or results[-1].generated == 1)
    shutil.copytree(run / FOLDER, again / FOLDER)
    ranks.run(jobs.played, world, arguments=settings(talker, again, *overrides))
    assert stages.same_weights(run, again) and not stages.differences(run, again)
    lines = [line for path in (run / FOLDER).iterdir() for line in path.read_text().splitlines() if line]
    keys = [tuple(json.loads(line.partition(" ")[2])[:3]) for line in lines if not line.startswith(" ")]
    assert len(keys) == len(set(keys)) > 32


@pytest.mark.parametrize("mode", MODES)
def test_what_failed_altogether_is_asked_again(ranks, talker, tmp_path, mode):
    """Rollouts 2 and 3 fail, of which 2 has landed and 3 is on its way when the run ends: neither is kept."""
    away, run = tmp_path / "away", tmp_path / "run"
    overrides = [*MODES[mode], f"{ASSETS}:Absent", f"+environment.args.away={away}", "environment.retries=0"]

    def train(steps):
        arguments = settings(talker, run, *overrides, "batch.prompts=2", f"run.steps={steps}")
        return [told.end for told in ranks.run(jobs.played, world=2, arguments=arguments)]

    assert train(1) == ["0", "0"]
    away.touch()
    error, _ = train(3)
    assert error.startswith("EnvironmentFailedError: environment: all trajectories of a rollout failed")
    assert not list(run.glob("pending_rollouts/*"))
    away.unlink()
    assert train(3) == ["0", "0"] and stages.records(run)[-1]["stop/failed"] == 0
