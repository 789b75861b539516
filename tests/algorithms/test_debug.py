"""The debug modes in whole runs: record, train on recordings, generate only, checks of the first step."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from aligner.errors import AlignerError, ConfigError, DataError
from aligner.rollout.record import FOLDER, TRAINED, read_recording
from tests import stages

NOT_SAVED = ["run.export=false", "checkpoint.final=false"]


def differing(original, replay) -> list:
    """(step, metric, there, here) of what the replay measured otherwise; an engine's own numbers are left out."""
    pairs = zip(stages.timeless(original), stages.timeless(replay), strict=True)
    return [
        (a["step"], name, a.get(name), b.get(name))
        for a, b in pairs
        for name in {**a, **b}
        if a.get(name) != b.get(name) and not name.startswith("refit/")
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", ["grpo", "ppo"])
def test_a_replay_gives_the_weights_of_the_original(tiny_data, tiny_runs, tmp_path, stage):
    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=3", "algorithm.kl.coef=0.05", "batch.epochs=2"]
    overrides += ["batch.minibatch_samples=8", "debug.first_step_checks=true"]
    if stage == "ppo":
        overrides += [f"reward.model={tiny_runs['rm']}", "sampling={top_p: 0.9}"]
    original = stages.stage(
        stage, tiny_data, tmp_path / "original", *overrides, "debug.record=3", "checkpoint.final=false"
    )
    assert len(list((original / FOLDER).iterdir())) == 3
    replay = stages.stage(stage, tiny_data, tmp_path / "replay", *overrides, f"debug.train_only={original}")
    assert stages.same_weights(original, replay)
    assert differing(original, replay) == []
    assert stages.checkpoints(replay) == [3] and not (replay / FOLDER).exists()
    assert not any(name.startswith("refit/") for record in stages.records(replay) for name in record)
    # and after an interruption
    again = stages.stage(
        stage, tiny_data, tmp_path / "two", *overrides, f"debug.train_only={original / FOLDER}", "run.steps=2"
    )
    again = stages.stage(stage, tiny_data, tmp_path / "two", *overrides, f"debug.train_only={original / FOLDER}")
    assert stages.same_weights(original, again)


def test_a_refilled_rollout_and_its_greedy_rewards_are_recorded(tiny_data, tiny_runs, tmp_path):
    """What came in several rounds of generation, and what ReMax generates beside it, is replayed in the same order."""
    overrides = [
        f"model.init={tiny_runs['sft']}",
        "run.steps=2",
        "algorithm.advantage=remax",
        "algorithm.filter_groups=true",
    ]
    original = stages.stage(
        "grpo", tiny_data, tmp_path / "original", *overrides, "debug.record=2", "checkpoint.final=false"
    )
    replay = stages.stage("grpo", tiny_data, tmp_path / "replay", *overrides, f"debug.train_only={original}")
    assert stages.same_weights(original, replay) and not stages.same_weights(original, tiny_runs["sft"])


def test_training_on_a_recording_needs_neither_prompts_nor_rewards(tiny_data, tiny_runs, tmp_path, monkeypatch):
    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=1"]
    original = stages.stage("grpo", tiny_data, tmp_path / "original", *overrides, "debug.record=1")
    for name in ("engines._engine", "rollouts.make_prompts", "rollouts.make_rewards"):
        monkeypatch.setattr(f"aligner.builders.{name}", None)
    overrides += [f"debug.train_only={original}", "data.train=''", "reward.functions=[]"]
    assert stages.same_weights(original, stages.stage("grpo", tiny_data, tmp_path / "replay", *overrides))


@pytest.mark.slow
@pytest.mark.multirank
def test_one_recording_for_any_number_of_ranks(tiny_data, tiny_runs, tmp_path, ranks):
    overrides = [
        f"model.init={tiny_runs['sft']}",
        "run.steps=2",
        "checkpoint.final=false",
        "batch.minibatch_samples=16",
    ]

    def on(world, name, *extra):
        arguments = stages.overrides("grpo", tiny_data, tmp_path / name, *overrides, *extra)
        ranks.run("tests.run.jobs:run_stage", world=world, arguments=arguments)
        return tmp_path / name

    one, two = (on(world, f"original{world}", "debug.record=2") for world in (1, 2))
    # the first rollout is by the same weights: the files differ at most in the rounding of logprobs
    a, b = (read_recording(run / FOLDER / "step-00000001.safetensors") for run in (one, two))
    assert a.rollout.samples == b.rollout.samples and a.scores == b.scores and a.header == b.header
    torch.testing.assert_close(a.rollout.rollout_logprobs, b.rollout.rollout_logprobs)
    assert stages.same_weights(two, on(2, "replay2", f"debug.train_only={two}"))
    crossed = stages.weights(on(2, "replay12", f"debug.train_only={one}"))
    start = stages.weights(tiny_runs["sft"])
    # Adam makes steps of equal size of gradients that nearly cancel, and so of their rounding
    for name, w in stages.weights(one).items():
        assert float((crossed[name] - w).norm()) <= 3e-3 * float((w - start[name]).norm()), name
    tensor = on(2, "replay_tp", f"debug.train_only={one}", "parallel.tensor=2")
    for name, w in stages.weights(tensor).items():
        assert float((crossed[name] - w).norm()) <= 3e-3 * float((w - start[name]).norm()), name


@pytest.mark.slow
def test_a_recording_that_does_not_fit_is_refused_before_training(tiny_data, tiny_runs, tmp_path):
    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=1", *NOT_SAVED]
    original = stages.stage("grpo", tiny_data, tmp_path / "original", *overrides, "debug.record=1")
    replay = [*overrides, f"debug.train_only={original}"]
    wrong = {
        "batch.group=2": (DataError, "8 prompts x 4 samples: expected batch.prompts=8 x batch.group=2"),
        "model={init: random, vocab_size: 300}": (DataError, "another tokenizer or vocabulary"),
        "run.steps=2": (ConfigError, "at most the 1 recorded rollouts"),
        f"data.eval={tiny_data / 'eval.jsonl'}": (
            ConfigError,
            "eval.generate=True: expected false with debug.train_only",
        ),
        "debug.record=1": (ConfigError, "debug.record=1: expected off with debug.train_only"),
    }
    for change, (kind, message) in wrong.items():
        with pytest.raises(kind) as caught:
            stages.stage("grpo", tiny_data, tmp_path / "replay", *replay, change)
        assert message in str(caught.value)
    assert not (tmp_path / "replay" / "metrics.jsonl").exists()


def test_a_checkpoint_of_a_replay_is_no_start_for_generating(tiny_data, tiny_runs, tmp_path):
    from aligner.errors import CheckpointError

    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=1"]
    original = stages.stage("grpo", tiny_data, tmp_path / "original", *overrides, "debug.record=1")
    stages.stage("grpo", tiny_data, tmp_path / "replay", *overrides, f"debug.train_only={original}")
    generating = ["grpo", tiny_data, tmp_path / "replay", *overrides[:1], "run.steps=2"]
    with pytest.raises(CheckpointError, match=r"content of debug\.train_only is .* there, None here"):
        stages.stage(*generating)
    with pytest.raises(CheckpointError, match=r"lacks the state of data, rewards: .*debug\.train_only"):
        stages.stage(*generating, "run.accept_changes=true")


def test_the_last_rollouts_are_kept_with_what_was_learned_of_them(tiny_data, tiny_runs, tmp_path):
    """As they came: the control experiment gives their rewards to others later."""
    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=3", "algorithm.kl.coef=0.1", "debug.shuffle_rewards=true"]
    overrides += ["mismatch.correction=tis_token+veto"]
    original = stages.stage("grpo", tiny_data, tmp_path / "original", *overrides, "debug.record=2", *NOT_SAVED)
    files = sorted((original / FOLDER).iterdir())
    assert [path.name for path in files] == ["step-00000002.safetensors", "step-00000003.safetensors"]
    tensors = load_file(files[-1])
    names = ("old_logprobs", "ref_logprobs", "token_rewards", "advantages", "loss_mask", "token_weights")
    assert {TRAINED + name for name in (*names, "rejected")} == {name for name in tensors if name.startswith(TRAINED)}
    assert all(tensors[TRAINED + name].shape == tensors["tokens"].shape for name in names)
    assert tensors["rewards"].equal(tensors["scores/total"].float()) and tensors["valid"].equal(tensors["scores/valid"])
    plain = stages.stage("grpo", tiny_data, tmp_path / "plain", *overrides, *NOT_SAVED)
    assert (plain / "steps.jsonl").read_bytes() == (original / "steps.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["grpo", "ppo"])
def test_rollout_only_builds_no_optimizer(tiny_data, tiny_runs, tmp_path, monkeypatch, stage):
    from aligner.builders.models import make_model

    built = []

    def spy(job, initial, head, optim, *more):
        built.append(optim)
        return make_model(job, initial, head, optim, *more)

    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=2", "run.samples_every=1", "logging.samples_shown=2"]
    overrides += ["algorithm.kl.coef=0.1"]
    overrides += [f"reward.model={tiny_runs['rm']}"] if stage == "ppo" else []
    trained = stages.stage(stage, tiny_data, tmp_path / "trained", *overrides, "debug.record=2", *NOT_SAVED)
    monkeypatch.setattr("aligner.builders.models.make_model", spy)
    run = stages.stage(stage, tiny_data, tmp_path / "run", *overrides, "debug.rollout_only=true")
    assert built == [None] * (2 if stage == "ppo" else 1)  # the policy and what scores, without optimizers
    assert sorted(p.name for p in (run / FOLDER).iterdir()) == [f"step-0000000{i}.safetensors" for i in (1, 2)]
    there, here = (load_file(folder / FOLDER / "step-00000001.safetensors") for folder in (trained, run))
    came = {name for name in there if not name.startswith(TRAINED)}
    assert came == {name for name in here if not name.startswith(TRAINED)}
    assert all(there[name].equal(here[name]) for name in came)
    assert not (run / "hf").exists() and not (run / "checkpoints").exists()
    records = stages.records(run)
    assert [r["step"] for r in records] == [1, 2] and all(r["refit/version"] == 0 for r in records)
    assert all(r["mismatch/logprob_abs_max"] < 1e-4 and "reward/mean" in r for r in records)
    assert not any(name.startswith(("policy/", "critic/", "advantage/")) for r in records for name in r)
    assert {json.loads(line)["step"] for line in (run / "samples.jsonl").read_text().splitlines()} == {1, 2}
    # a second start begins with the first rollout again
    again = stages.stage(stage, tiny_data, run, *overrides, "debug.rollout_only=true")
    assert [r["step"] for r in stages.records(again)] == [1, 2]


def test_a_folder_with_checkpoints_is_not_for_rollouts_only(tiny_data, tiny_runs, tmp_path):
    used = shutil.copytree(tiny_runs["sft"], tmp_path / "used")
    with pytest.raises(ConfigError, match=r"a folder without checkpoints with debug\.rollout_only"):
        stages.stage("grpo", tiny_data, used, "debug.rollout_only=true")


# --- checks of the first step


def checked(stage, tiny_data, folder, *more):
    return stages.stage(stage, tiny_data, folder, "run.steps=1", "debug.first_step_checks=true", *NOT_SAVED, *more)


def test_a_policy_that_is_not_itself(tiny_data, tmp_path, monkeypatch):
    from aligner.roles.policy import Policy

    logprobs, calls = Policy.logprobs, []

    def drifting(self, rows, mask=None):
        calls.append(len(rows.lengths))
        return logprobs(self, rows, mask) + (0.01 if calls.count(32) == 2 else 0.0)  # the sentinel has fewer rows

    monkeypatch.setattr(Policy, "logprobs", drifting)
    with pytest.raises(
        AlignerError, match=r"computed twice, differ by up to 0\.01 nats \(KL -0\.01\): .*Worst: prompt slot"
    ):
        checked("grpo", tiny_data, tmp_path / "run")


def test_a_reference_of_other_weights(tiny_data, tiny_runs, tmp_path, monkeypatch):
    import dataclasses

    from aligner.builders.models import make_reference

    def other(job, policy):
        return make_reference(dataclasses.replace(job, initial=dataclasses.replace(job.initial, seed=1)), policy)

    monkeypatch.setattr("aligner.stages.grpo.make_reference", other)
    with pytest.raises(
        AlignerError, match="logprobs of reference and policy, which start from the same weights, differ"
    ):
        checked("grpo", tiny_data, tmp_path / "run", "algorithm.kl.coef=0.1")
    checked("grpo", tiny_data, tmp_path / "run", "algorithm.kl.coef=0")  # none is loaded


@pytest.mark.parametrize("shift, name", [(0.02, "ratio_max"), (-0.02, "ratio_mean")])
def test_a_ratio_that_is_not_one(tiny_data, tmp_path, monkeypatch, shift, name):
    """Training mode computes something else than the pass before (dropout left on, say)."""
    from aligner.roles.policy import Policy

    outputs = Policy._outputs

    def other(self, logits, batch, update):
        found = outputs(self, logits, batch, update)
        return found._replace(logprobs=found.logprobs + shift) if update else found

    monkeypatch.setattr(Policy, "_outputs", other)
    with pytest.raises(AlignerError, match=r"policy/ratio_\w+=(1\.0202|0\.980199) at the first update: expected 1"):
        checked("grpo", tiny_data, tmp_path / "run")


@pytest.mark.parametrize("margin", [False, True])
def test_a_reward_model_loses_ln_2_at_first(tiny_data, tiny_runs, tmp_path, monkeypatch, margin):
    import aligner.stages.rm as recipe

    overrides = [f"model.init={tiny_runs['sft']}", f"algorithm.reward_loss.margin={margin}"]
    checked("rm", tiny_data, tmp_path / "run", *overrides)
    exact = recipe.bradley_terry
    monkeypatch.setattr(recipe, "bradley_terry", lambda *a: (exact(*a)[0] * 2, exact(*a)[1]))
    with pytest.raises(
        AlignerError, match=r"rm/loss=\d\.\d+ at the first update of a zero score head: expected [01]\.\d+"
    ):
        checked("rm", tiny_data, tmp_path / "twice", *overrides)


def test_a_trained_head_is_not_held_to_ln_2(tiny_data, tiny_runs, tmp_path):
    run = checked("rm", tiny_data, tmp_path / "run", f"model.init={tiny_runs['rm']}")
    assert stages.records(run)[0]["rm/loss"] < 0.6
