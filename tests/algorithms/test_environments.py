"""GRPO over trajectories: the same bits for one turn as without, and after kills although the world is not the same."""

import json
import re
import shutil
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest

from aligner.algorithms.losses import policy_loss
from aligner.config.freeze import load_frozen
from aligner.config.resolve import compose_over
from aligner.data.tokenizer import load_tokenizer
from aligner.engines.native.engine import NativeEngine
from aligner.errors import ConfigError
from aligner.rollout.turn_pool import TurnPool
from aligner.tools.chat import main as chat
from aligner.tools.evaluate import evaluate
from aligner.types import PolicyTargets
from examples.calculator import make_data
from tests import stages
from tests.stages import PowerCut

SIZES = stages.DICE[3:]


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    return stages.make_dice(tmp_path_factory.mktemp("talker"))


@pytest.fixture
def train(talker, tmp_path):
    def run(stage, name, *more):
        start = [f"model.init={talker / 'sft'}"] + [f"critic.init={talker / 'sft'}"] * (stage == "ppo")
        return stages.stage(stage, talker, tmp_path / name, *start, *SIZES, *more)

    return run


@pytest.fixture
def grpo(train):
    return partial(train, "grpo")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["grpo", "ppo", "online_dpo"])
def test_trajectories_of_one_turn_are_trained_on_as_samples_are(train, talker, stage):
    """No answer calls a tool when the rows of both runs tell the model of it; all else is the same."""
    prompts = [{"prompt": [{"role": "user", "content": f"say {c}"}]} for c in "abcdefgh"]
    alone = stages.write_jsonl(talker / "alone.jsonl", [row | {"tools": [stages.ROLL]} for row in prompts])
    policy = ["algorithm.aggregation=seq_mean_token_mean", "mismatch.correction=tis_sequence"]
    score = "reward.functions=[{path: tests/assets/tiny_rewards.py:vowels}]"
    learns = {"grpo": [*policy, "algorithm.policy_loss=gspo"], "ppo": [*policy, "critic.warmup_steps=0", score]}
    overrides = ["run.steps=2", "sampling.temperature=3", "sampling.top_p=0.9", *learns.get(stage, [])]
    plain = train(stage, "plain", *overrides, f"data.train={alone}")
    own = ["environment.path=tests/assets/environments.py:Dice", "environment.max_tokens=6", "environment.calls=llama3"]
    turns = train(stage, "turns", *overrides, *own, "environment.weight=0")
    assert stages.same_weights(plain, turns)
    by_name = {name for _, name, _, _ in stages.differences(plain, turns)}
    assert all(name.startswith(("stop/", "environment/", "reward/environment", "engine/prefix")) for name in by_name)


@pytest.mark.slow
def test_what_an_environment_answers_is_learned_too(grpo, talker):
    """All that stands between the policy's turns is, and nothing else; with a coefficient its likelihood grows."""
    tokenizer, texts = load_tokenizer(str(talker / "tokenizer")), set()

    def watched(minibatch, *rest):
        on, other = minibatch.of(PolicyTargets).observed.bool(), minibatch.loss_mask.bool()
        assert not (on & other).any()
        for tokens, read, begun in zip(minibatch.tokens, on, other.cumsum(1) > 0, strict=True):
            texts.add(tokenizer.decode(tokens[read]) if (read & begun).equal(read) else "before a response")
        return policy_loss(minibatch, *rest)

    own = [*stages.DICE, "environment.path=tests/assets/environments.py:Clock", "run.steps=8", "optim.lr=1e-2"]
    with patch("aligner.stages.grpo.policy_loss", watched):
        learned = stages.records(grpo("learned", *own, "algorithm.observation_coef=1.0"))
    turns = texts - {""}
    assert all(re.fullmatch(r"(<\|system\|>.*<\|assistant\|>)+", text, re.S) for text in turns), turns
    assert any(re.fullmatch(r"(<\|system\|>[1-6]<\|assistant\|>)+", text) for text in turns), turns
    likely = [record["policy/observation_nll"] for record in learned]
    assert likely[-1] < 0.7 * likely[0]


def rolled(run):
    """Of each record, the answers of its trajectories."""
    return [record["environment/turns_mean"] for record in stages.records(run)]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in an update", "while tools answer"])
def test_a_killed_run_resumes_with_the_answers_that_it_was_given(grpo, tmp_path, where):
    """The dice are other ones at each start. What a resumed run is made of is in its log: a run that reads all of it
    is the same to the last bit."""
    overrides = [*stages.DICE, "run.steps=4", "checkpoint.every=2", "checkpoint.rollouts=false"]
    cut = stages.power_cut_in_update(3) if where == "in an update" else stages.power_cut_at_answer(150)
    with patch("aligner.answers.AnswerLog.drop"):  # `again` goes through all of them, which has no checkpoint
        with pytest.raises(PowerCut), cut:
            grpo("killed", *overrides)
        killed = grpo("killed", *overrides)
    assert min(rolled(killed)) > 1.2  # it does call
    shutil.copytree(killed / "answers", tmp_path / "again" / "answers")
    again = grpo("again", *overrides)
    assert stages.same_weights(killed, again) and not stages.differences(killed, again)
    other = grpo("other", *overrides)
    assert stages.differences(killed, other)
    lines = [line for path in (killed / "answers").iterdir() for line in path.read_text().splitlines() if line]
    keys = [tuple(json.loads(line.partition(" ")[2])[:3]) for line in lines if not line.startswith(" ")]
    assert len(keys) == len(set(keys))  # nothing was asked twice


@pytest.mark.slow
def test_answers_stay_for_the_oldest_checkpoint_and_no_longer(grpo, tmp_path):
    """A start that finds the newest checkpoint damaged goes through more rollouts, and is the same to the last bit."""
    overrides = [
        *stages.DICE,
        "run.steps=5",
        "checkpoint.every=1",
        "checkpoint.keep_last=2",
        "checkpoint.rollouts=false",
    ]
    with pytest.raises(PowerCut), stages.power_cut_in_update(5):
        grpo("killed", *overrides)
    assert {int(path.name[5:13]) for path in (tmp_path / "killed" / "answers").iterdir()} == {4, 5}
    shutil.copytree(tmp_path / "killed", tmp_path / "damaged")
    (tmp_path / "damaged" / "checkpoints" / "step-00000004" / "state.json").write_text("{}")
    whole, damaged = grpo("killed", *overrides), grpo("damaged", *overrides)
    assert stages.same_weights(whole, damaged) and not stages.differences(whole, damaged)
    assert {int(path.name[5:13]) for path in (whole / "answers").iterdir()} == {5}


@pytest.mark.slow
def test_turns_are_admitted_between_decode_steps_and_say_the_same(grpo):
    """An engine that takes each turn when its tool has answered, or when it is its turn, and then with the same bits
    however late tools are; in rounds, the same trajectories."""
    take, wants, running = TurnPool.take, TurnPool.wants, []

    def noted(self):
        running.append(len(self.taken) - sum(len(state.turns) for state in {p for p, _ in self.taken}))
        return take(self)

    def patient(self, active, slots):
        if active and not any(running):  # however fast the engine is, the first tool answers before it is done
            wait([state.asked for state in self.waiting if state.asked is not None], return_when=FIRST_COMPLETED)
        return wants(self, active, slots)

    overrides = [*stages.DICE, "environment.path=tests/assets/environments.py:Clock", "run.steps=1"]
    with patch.object(NativeEngine, "can", replace(NativeEngine.can, serves=False)):
        rounds = grpo("rounds", *overrides)
    late, prompt = (grpo(f"{most}", *overrides, f"+environment.args.most_s={most}") for most in (0.3, 0.0))
    assert stages.same_weights(late, prompt) and not stages.differences(late, prompt)
    with patch.object(TurnPool, "take", noted), patch.object(TurnPool, "wants", patient):
        served = grpo("served", *overrides, "run.deterministic=false")
    assert running[0] == 0 and max(running) > 0  # others were being generated
    same = ("environment/", "stop/", "response/", "reward/")
    runs = rounds, prompt, served
    records = [{k: v for k, v in stages.records(run)[0].items() if k.startswith(same)} for run in runs]
    assert (
        all(records[0] == pytest.approx(other) for other in records[1:]) and records[0]["environment/turns_mean"] > 1.2
    )
    rates = [stages.records(run)[0].get("engine/prefix_cache_hit_rate") for run in runs]
    assert rates[0] is None and min(rates[1:]) > 0


def test_eval_plays_the_environment_of_the_run(grpo, talker):
    """As the run's own evaluation does, and keeps the trajectories; chat refuses a run with tools."""
    overrides = [*stages.DICE, "environment.path=tests/assets/environments.py:Clock", "run.steps=1", "eval.prompts=3"]
    run = grpo("clock", *overrides, f"data.eval={talker / 'train.jsonl'}", "run.eval_every=1")
    cfg = compose_over(load_frozen(run), [f"run.dir={run}", "logging.samples_shown=0"])
    evaluation = evaluate(cfg)
    assert (
        evaluation["eval/reward"] == pytest.approx(stages.records(run)[-1]["eval/reward"])
        and evaluation["eval/reward"] > 0
    )
    rows = [json.loads(line) for line in (run / "eval_samples.jsonl").read_text().splitlines()]
    trajectory = [row["trajectory"]["turns"] for row in rows]
    assert len(trajectory) == 3 and any(turn["role"] == "tool" for turns in trajectory for turn in turns)
    with pytest.raises(ConfigError, match=r"environment.path=.*Clock.*chat supports no tools.*environment.tools=\[\]"):
        chat(cfg)


@pytest.mark.slow
def test_a_model_learns_to_call_its_calculator(tmp_path):
    """The stages of launchers/tools.sh with a model of two layers, the second one cut short: two seeds gained 0.6."""
    data, common = tmp_path / "data", ["logging=quiet", "cluster.threads=1"]
    make_data(data, seed=0)
    own = [f"run.dir={tmp_path / 'sft'}", f"model.tokenizer={data / 'tokenizer'}", f"data.train={data / 'sft.jsonl'}"]
    sft = stages.run(["experiment=tools_sft", *common, *own, "model.num_layers=2"])
    own = [f"run.dir={tmp_path / 'grpo'}", f"model.init={sft}", f"data.train={data / 'train.jsonl'}"]
    own += [f"data.eval={data / 'test.jsonl'}", "run.steps=4"]
    run = stages.run(["experiment=tools_grpo", *common, *own])
    accuracy, turns = (
        [record[name] for record in stages.records(run) if name in record]
        for name in ("eval/accuracy", "environment/turns_mean")
    )
    assert accuracy[-1] - accuracy[0] > 0.3 and turns[-1] > turns[0]
