"""GRPO with agents: exact after kills although neither the agent nor its verdict is the same, in rounds or served."""

import shutil
from dataclasses import replace
from unittest.mock import patch

import pytest

from aligner.answers import FOLDER
from aligner.config.freeze import load_frozen
from aligner.config.resolve import compose_over
from aligner.engines.native.engine import NativeEngine
from aligner.errors import ConfigError
from aligner.tools.chat import main as chat
from aligner.tools.evaluate import evaluate
from tests import stages
from tests.stages import PowerCut

pytest.importorskip("uvicorn")
pytest.importorskip("openai")
AGENT = "environment.agent=tests/assets/agents.py:"
SMALL = ["environment.max_turns=3", "environment.max_tokens=40", "sampling.max_response_tokens=6", "batch.prompts=2"]
SMALL += ["batch.group=4", "batch.micro_batch_samples=8", "optim.lr=3e-4", "environment.workers=1"]


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    return stages.make_dice(tmp_path_factory.mktemp("talker"))


@pytest.fixture
def grpo(talker, tmp_path):
    def run(name, *more):
        start = f"model.init={talker / 'sft'}"
        return stages.stage("grpo", talker, tmp_path / name, start, "reward.functions=[]", *SMALL, *more)

    return run


def turns(run):
    return [record["environment/turns_mean"] for record in stages.records(run)]


@pytest.mark.slow
def test_a_killed_run_resumes_with_what_its_agents_did(grpo, tmp_path):
    overrides = [f"{AGENT}dice", "run.steps=3", "checkpoint.every=2", "checkpoint.rollouts=false"]
    with patch("aligner.answers.AnswerLog.drop"):  # `again` goes through all of them, which has no checkpoint
        with pytest.raises(PowerCut), stages.power_cut_at_answer(40):  # of 16 or more in a rollout
            grpo("killed", *overrides)
        killed = grpo("killed", *overrides)
    assert max(turns(killed)) > 1.2  # it does call
    shutil.copytree(killed / FOLDER, tmp_path / "again" / FOLDER)
    again = grpo("again", *overrides)
    assert stages.same_weights(killed, again) and not stages.differences(killed, again)
    assert stages.differences(killed, grpo("other", *overrides))


@pytest.mark.slow
def test_an_agent_that_does_what_an_environment_does_is_trained_on_to_the_same_bits(grpo):
    """But for the words in which they end, the sentinel's rows, which are the data's, and the mismatch: rounding, which
    depends on how many rows the engine decodes at once."""
    environment = grpo("environment", "environment.path=tests/assets/environments.py:Clock", "run.steps=2")
    agent = grpo("agent", f"{AGENT}seeded", "run.steps=2")
    assert stages.same_weights(environment, agent) and max(turns(agent)) > 1.2
    by_name = {name for _, name, _, _ in stages.differences(environment, agent)}
    assert {name for name in by_name if not name.startswith(("stop/", "refit/sentinel_", "mismatch/"))} == set()


@pytest.mark.slow
def test_requests_are_admitted_between_decode_steps_and_say_the_same(grpo):
    overrides = [f"{AGENT}seeded", "run.steps=1"]
    with patch.object(NativeEngine, "can", replace(NativeEngine.can, serves=False)):
        rounds = grpo("rounds", *overrides)
    served = grpo("served", *overrides, "run.deterministic=false")
    same = ("environment/", "stop/", "response/", "reward/")
    records = [{k: v for k, v in stages.records(run)[0].items() if k.startswith(same)} for run in (rounds, served)]
    assert records[0] == pytest.approx(records[1]) and records[0]["environment/turns_mean"] > 1.2


@pytest.mark.slow
def test_eval_asks_the_agent_of_the_run(grpo, talker):
    """As the run's own evaluation does."""
    overrides = [f"{AGENT}seeded", "run.steps=1", "eval.prompts=3", "run.eval_every=1"]
    run = grpo("seeded", *overrides, f"data.eval={talker / 'train.jsonl'}")
    cfg = compose_over(load_frozen(run), [f"run.dir={run}", "logging.samples_shown=0"])
    evaluation = evaluate(cfg)
    assert (
        evaluation["eval/reward"] == pytest.approx(stages.records(run)[-1]["eval/reward"])
        and evaluation["eval/reward"] > 0
    )
    with pytest.raises(ConfigError, match=r"environment.agent=.*seeded.*chat supports no tools.*environment.agent=''"):
        chat(cfg)
