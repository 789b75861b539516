"""What a run's definition has, and what a change of it means."""

import dataclasses

import pytest

from aligner.config.identity import CONTENT, KINDS, OPTIONAL, Kind, changes, definition, kind_of
from aligner.config.options import all_keys, key_type
from aligner.config.resolve import compose

CONTENTS = {"data.train": "aa", "model.init": "bb"}


def found(*overrides: str, contents=CONTENTS):
    return definition(compose(list(overrides)), contents)


@pytest.mark.parametrize("key", [key for key in all_keys() if "[]" not in key])
def test_every_key_has_its_place_in_the_table(key):
    assert isinstance(kind_of(key), Kind)


def test_the_table_names_keys_that_exist():
    for key in [*KINDS, *OPTIONAL]:
        assert key == CONTENT or key_type(key.removeprefix(CONTENT)) is not None, key


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ("optim.lr=1e-5", Kind.TOLD),
        ("optim.betas=[0.5,0.6]", Kind.TOLD),
        ("optim.schedule=cosine", Kind.TOLD),
        ("optim.clip_grad=0.5", Kind.TOLD),
        ("optim.weight_decay=0", Kind.TOLD),
        ("run.steps=400", Kind.TOLD),
        ("run.eval_every=3", Kind.TOLD),
        ("checkpoint.every=3", Kind.TOLD),
        ("logging.tensorboard=false", Kind.TOLD),
        ("eval.prompts=3", Kind.TOLD),
        ("parallel.tensor=2", Kind.TOLD),
        ("batch.micro_batch_samples=2", Kind.TOLD),
        ("seed=3", Kind.DEFINES),
        ("batch.sequences=64", Kind.DEFINES),
        ("data.max_tokens=99", Kind.DEFINES),
        ("data.columns={prompt: question}", Kind.DEFINES),
        ("stage=grpo|batch.group=4", Kind.DEFINES),
        ("stage=grpo|sampling.temperature=0.5", Kind.DEFINES),
        ("stage=grpo|algorithm.kl.coef=0.1", Kind.DEFINES),
        ("stage=grpo|engine.max_batch=3", Kind.TOLD),
        ("stage=ppo|critic.optim.lr=1", Kind.TOLD),
        ("ema.decay=0.9", Kind.TOLD),
        ("ptx.sequences=3", Kind.DEFINES),
        ("ptx.data.loss_on=all", Kind.DEFINES),
    ],
)
def test_a_change_of_one_key(change, kind):
    stage, *more = change.split("|") if "|" in change else ("stage=sft", change)
    told = changes(found(stage), found(stage, *more))
    assert [c.key for c in told] == [text.partition("=")[0] for text in more] and {c.kind for c in told} == {kind}


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
    assert (train.key, train.was, train.now, train.kind) == ("content of data.train", "aa", "cc", Kind.DEFINES)
    assert (evaluation.was, evaluation.kind) == (None, Kind.TOLD)
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
