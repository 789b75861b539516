"""What a run's definition has, and what a change of it means."""

import dataclasses

import pytest

from aligner.config.identity import changes, definition, effect_of
from aligner.config.key import IGNORE, REFUSE, REPORT
from aligner.config.options import leaves
from aligner.config.resolve import compose

CONTENTS = {"data.train": "aa", "model.init": "bb"}


def found(*overrides: str, contents=CONTENTS):
    return definition(compose(list(overrides)), contents)


def test_every_key_says_what_a_new_value_means():
    assert {effect_of(key) for key in leaves()} == {REFUSE, REPORT, IGNORE}


@pytest.mark.parametrize(
    ("change", "effect"),
    [
        ("optim.lr=1e-5", REPORT),
        ("optim.betas=[0.5,0.6]", REPORT),
        ("optim.schedule=cosine", REPORT),
        ("optim.clip_grad=0.5", REPORT),
        ("optim.weight_decay=0", REPORT),
        ("run.steps=400", REPORT),
        ("run.eval_every=3", REPORT),
        ("checkpoint.every=3", REPORT),
        ("logging.trackers=[]", REPORT),
        ("eval.prompts=3", REPORT),
        ("parallel.tensor=2", REPORT),
        ("batch.micro_batch_samples=2", REPORT),
        ("seed=3", REFUSE),
        ("batch.sequences=64", REFUSE),
        ("data.max_tokens=99", REFUSE),
        ("data.columns={prompt: question}", REFUSE),
        ("stage=grpo|batch.group=4", REFUSE),
        ("stage=grpo|sampling.temperature=0.5", REFUSE),
        ("stage=grpo|algorithm.kl.coef=0.1", REFUSE),
        ("stage=grpo|engine.max_batch=3", REPORT),
        ("stage=ppo|critic.optim.lr=1", REPORT),
        ("ema.decay=0.9", REPORT),
        ("ptx.sequences=3", REFUSE),
        ("ptx.data.loss_on=all", REFUSE),
    ],
)
def test_a_change_of_one_key(change, effect):
    stage, *overrides = change.split("|") if "|" in change else ("stage=sft", change)
    reported = changes(found(stage), found(stage, *overrides))
    assert [c.key for c in reported] == [text.partition("=")[0] for text in overrides] and {
        c.effect for c in reported
    } == {effect}


@pytest.mark.parametrize(
    "change",
    [
        "run.dir=x",
        "run.name=y",
        "run.accept_changes=true",
        "data.train=moved.jsonl",
        "cluster.timeout_s=9",
        "model.init=z",
        "refit.verify=checksum",
        "sampling.temperature=0.5",
        "algorithm.advantage=rloo",
        "batch.prompts=2",
    ],
)
def test_what_nobody_needs_to_know(change):
    """Of stage sft, which does not read the last three."""
    assert changes(found("stage=sft"), found("stage=sft", change)) == []


def test_contents_count_and_paths_do_not():
    was = found("stage=sft")
    other = found("stage=sft", contents=CONTENTS | {"data.train": "cc", "data.eval": "dd"})
    (train, evaluation) = changes(was, other)
    assert (train.key, train.was, train.now, train.effect) == ("content of data.train", "aa", "cc", REFUSE)
    assert (evaluation.was, evaluation.effect) == (None, REPORT)
    assert str(evaluation) == "content of data.eval nothing -> dd"
    assert [c.key for c in changes(other, was)] == ["content of data.train", "content of data.eval"]


def test_a_key_that_an_earlier_version_lacked_had_its_default():
    was, now = found("stage=sft"), found("stage=sft", "optim.clip_grad=0.5")
    del was["optim.clip_grad"], was["batch.balance"]
    assert [(c.key, c.was, c.now) for c in changes(was, now)] == [("optim.clip_grad", 1.0, 0.5)]


def test_all_of_a_run_is_plain_data():
    big = definition(compose(["stage=grpo", "reward.functions=[{path: math, args: {a: [1, 2.5]}}]"]), {})
    assert big["reward.functions"][0]["args"] == {"a": [1, 2.5]}
    assert changes(big, big) == [] and not any(dataclasses.is_dataclass(value) for value in big.values())


def test_elements_of_lists_count_by_what_defines_them():
    """Neither where something is nor what is as by default, whichever keys the version knew that wrote them."""
    here = found("stage=grpo", "reward.judges=[{question: '{response}', model: here, votes: 1}]")
    there = found("stage=grpo", "reward.judges=[{question: '{response}', model: there}]")
    earlier = {"name": "judge", "kind": "grade", "question": "{response}", "weight": 1.0, "former": 3, "scale": 10.0}
    assert changes(here, there) == changes(here | {"reward.judges": [earlier]}, there) == []
    (change,) = changes(here | {"reward.judges": [earlier | {"scale": 5.0}]}, there)
    assert (change.key, change.effect) == ("reward.judges", REFUSE)
