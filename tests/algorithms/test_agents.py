"""GRPO with agents: exact after kills although neither the agent nor its verdict is the same, in rounds or served."""

import shutil
from unittest.mock import patch

import pytest
from aligner.environments.log import AnswerLog

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


def test_a_killed_run_goes_on_with_what_its_agents_did(grpo, tmp_path):
    more = [f"{AGENT}dice", "run.steps=3", "checkpoint.every=2", "checkpoint.rollouts=false"]
    write, left = AnswerLog.write, [60]  # of about 20 in a rollout

    def cut(self, *answer):
        left[0] -= 1
        if not left[0]:
            raise PowerCut
        return write(self, *answer)

    with pytest.raises(PowerCut), patch.object(AnswerLog, "write", cut):
        grpo("killed", *more)
    killed = grpo("killed", *more)
    assert min(turns(killed)) > 1.2  # it does call
    shutil.copytree(killed / "environment", tmp_path / "again" / "environment")
    again = grpo("again", *more)
    assert stages.same_weights(killed, again) and not stages.differences(killed, again)
    assert stages.differences(killed, grpo("other", *more))


def test_requests_are_admitted_between_decode_steps_and_say_the_same(grpo):
    more = [f"{AGENT}seeded", "run.steps=1"]
    rounds, served = grpo("rounds", *more), grpo("served", *more, "run.deterministic=false")
    same = ("environment/", "stop/", "response/", "reward/")
    found = [{k: v for k, v in stages.records(run)[0].items() if k.startswith(same)} for run in (rounds, served)]
    assert found[0] == pytest.approx(found[1]) and found[0]["environment/turns_mean"] > 1.2
