"""The four stages end to end at toy size: what they learn, measure and leave behind."""

import gc
import json
import math
import time
from pathlib import Path

import pytest
import torch

from aligner.config.freeze import load_frozen
from aligner.config.sections.data import DataConfig
from aligner.megatron.train import ShardedModel
from tests import stages

ROLLOUT = (
    ["reward/mean", "reward/std", "reward/min", "reward/max", "reward/clip_fraction", "reward/invalid"]
    + ["response/tokens_mean", "response/tokens_max", "response/eos_fraction", "response/truncated_fraction"]
    + ["advantage/mean", "advantage/std", "kl/coef", "policy/loss", "policy/entropy", "policy/clip_fraction"]
    + ["policy/clip_fraction_low", "policy/clip_fraction_high", "policy/ratio_mean", "policy/ratio_max"]
    + ["policy/grad_norm", "policy/lr", "policy/approx_kl", "mismatch/token_mult_prob_error", "mismatch/gen_kl"]
    + ["mismatch/logprob_abs_mean", "mismatch/logprob_abs_max", "refit/seconds", "refit/bytes", "refit/version"]
    + [f"time/{phase}_s" for phase in ("generate", "score", "logprobs", "advantages", "update", "refit", "step")]
    + [
        "throughput/tokens_per_s",
        "throughput/samples_per_s",
        "staleness/mean",
        "staleness/max",
        "batch/padding_fraction",
    ]
    + ["memory/peak_rss_bytes"]
)
METRICS = {
    "sft": ["sft/loss", "sft/token_accuracy", "time/update_s", "throughput/tokens_per_s", "throughput/samples_per_s"],
    "rm": [f"rm/{name}" for name in ("loss", "accuracy", "margin", "chosen_mean", "rejected_mean")] + ["time/update_s"],
    "grpo": [*ROLLOUT, "reward/vowels/mean", "reward/vowels/std", "reward/degenerate_groups", "kl/ref_k1", "kl/ref_k3"],
    "ppo": [
        *ROLLOUT,
        *("reward/model/mean", "reward/model/std", "kl/ref_k1", "kl/ref_k3"),
        *(
            f"critic/{n}"
            for n in ("loss", "explained_variance", "value_mean", "return_mean", "clip_fraction", "grad_norm")
        ),
    ],
}


@pytest.fixture(scope="module")
def runs(tiny_data, tiny_runs, tmp_path_factory):
    """The four stages, each finished once."""
    root, sft, rm = tmp_path_factory.mktemp("stages"), tiny_runs["sft"], tiny_runs["rm"]
    shown = ["run.samples_every=1", "logging.samples_shown=4"]
    grpo = [f"model.init={sft}", "run.steps=4", "algorithm.kl.coef=0.05", *shown]
    ppo = [f"model.init={sft}", f"reward.model={rm}", "run.steps=4", "optim.lr=1e-3", *shown]
    ppo += [f"data.eval={tiny_data / 'eval.jsonl'}", "run.eval_every=2"]
    return dict(tiny_runs) | {
        "grpo": stages.stage("grpo", tiny_data, root / "grpo", *grpo),
        "ppo": stages.stage("ppo", tiny_data, root / "ppo", *ppo),
    }


def stop_before_training(monkeypatch, recipe: str) -> dict:
    """Build the stage; in place of its recipe run `told["check"]` on what the recipe would get."""
    home, message = f"aligner.stages.{recipe}", {}
    monkeypatch.setattr(f"{home}.{recipe}", lambda *arguments: message.update(result=message["check"](*arguments)))
    monkeypatch.setattr(f"{home}.finish", lambda *arguments: None)
    return message


@pytest.mark.parametrize("name", METRICS)
def test_every_named_metric_is_there_and_finite(runs, name):
    steps = [record for record in stages.records(runs[name]) if record["step"] > 0]
    last = {metric: value for record in steps for metric, value in record.items()}
    missing = [metric for metric in METRICS[name] if metric not in last]
    assert not missing
    for record in steps:
        unknown = [metric for metric in METRICS[name] if metric in record and record[metric] is None]
        assert not unknown, (record["step"], unknown)


@pytest.mark.parametrize("name", METRICS)
def test_a_finished_run_leaves_everything_behind(runs, name):
    run = runs[name]
    cfg = load_frozen(run)
    assert (run / "DONE").read_text().strip() == name == cfg.stage.name
    assert [record["step"] for record in stages.records(run)][-1] == cfg.run.steps == stages.checkpoints(run)[-1]
    assert (run / "hf" / "config.json").exists() and (run / "hf" / "tokenizer.json").exists()
    if name in ("grpo", "ppo"):
        rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
        assert {row["step"] for row in rows} == {1, 2, 3, 4}
        assert all(math.isfinite(row["reward"]) and math.isfinite(row["advantage"]) for row in rows)


def test_sft_learns(runs):
    losses = [record["sft/loss"] for record in stages.records(runs["sft"])]
    assert abs(losses[0] - math.log(261)) < 0.3 and losses[-1] < 0.5 * losses[0]
    assert stages.records(runs["sft"])[-1]["sft/token_accuracy"] > 0.4


def test_reward_model_learns(runs):
    last = stages.records(runs["rm"])[-1]
    assert last["rm/loss"] < 0.2 and last["rm/accuracy"] == 1 and last["rm/margin"] > 1
    assert last["rm/chosen_mean"] > last["rm/rejected_mean"]


def test_no_alarm_of_group_rewards_where_there_are_no_groups(runs):
    """PPO with one sample for each prompt has no group that could be degenerate."""
    assert "reward/degenerate_groups" not in stages.records(runs["ppo"])[-1]
    alarms = runs["ppo"] / "alarms.jsonl"
    assert not alarms.exists() or "degenerate" not in alarms.read_text()


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_transformers_computes_the_trainers_logits(tiny_data, tiny_runs, tmp_path, monkeypatch, stage):
    from transformers import AutoModelForCausalLM

    from aligner.builders.runs import finish
    from tests.megatron.models import plain_logits

    reports = {}
    tokens = torch.randint(5, 261, (5, 20), generator=torch.Generator().manual_seed(0))

    def spy(job, run, model, extra=None):
        reports["logits"] = plain_logits(model, tokens, torch.full((5,), 20))
        finish(job, run, model, extra)

    monkeypatch.setattr(f"aligner.stages.{stage}.finish", spy)
    run = stages.stage(stage, tiny_data, tmp_path / "run", "run.steps=3", f"model.init={tiny_runs['sft']}")
    model = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    with torch.no_grad():
        theirs = model(tokens).logits
    assert (theirs - reports["logits"]).abs().max() <= 1e-4
    assert theirs.std() > 0.1 and not stages.same_weights(run, tiny_runs["sft"])


def scores_by_transformers(run: Path, rows: list[list[int]]) -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(run / "hf", dtype=torch.float32)
    with torch.no_grad():
        return torch.cat([model(torch.tensor([row])).logits for row in rows])


def tokenizer_of(run: Path):
    from aligner.data.tokenizer import load_tokenizer

    return load_tokenizer(str(run / "hf"))


def test_reward_model_bias_is_the_mean_score_by_transformers(tiny_data, runs):
    tokenizer = tokenizer_of(runs["rm"])
    pairs = [json.loads(line) for line in (tiny_data / "pairs.jsonl").read_text().splitlines()]
    rows = [
        tokenizer(p["prompt"] + p[side])["input_ids"] + [tokenizer.eos_token_id]
        for p in pairs
        for side in ("chosen", "rejected")
    ]
    scores = scores_by_transformers(runs["rm"], rows)[:, 0].double()
    extra = json.loads((runs["rm"] / "hf" / "aligner.json").read_text())
    assert extra["bias"] == pytest.approx(float(scores.mean()), abs=1e-4)
    assert extra["std"] == pytest.approx(float(scores.std(unbiased=False)), abs=1e-4)
    assert (scores[0::2] > scores[1::2]).all()


@pytest.mark.parametrize("margin", [False, True])
def test_the_first_loss_of_a_reward_model_is_known(tiny_data, tiny_runs, tmp_path, margin):
    """A new score head is zero: without margins the loss is ln 2, with them the mean softplus of the margin column."""
    overrides = [
        "run.steps=1",
        "batch.sequences=32",
        f"algorithm.reward_loss.margin={margin}",
        "checkpoint.final=false",
    ]
    run = stages.stage(
        "rm", tiny_data, tmp_path / "run", f"model.init={tiny_runs['sft']}", "run.export=false", *overrides
    )
    margins = [json.loads(line)["margin"] for line in (tiny_data / "pairs.jsonl").read_text().splitlines()]
    wanted = sum(math.log1p(math.exp(m if margin else 0.0)) for m in margins) / len(margins)
    assert stages.records(run)[0]["rm/loss"] == pytest.approx(wanted, abs=1e-5)


def test_the_centre_term_holds_scores_near_zero(tiny_data, tiny_runs, tmp_path):
    means = []
    for coef in (0.0, 1.0):
        overrides = [f"model.init={tiny_runs['sft']}", f"algorithm.reward_loss.center_coef={coef}", "run.steps=12"]
        run = stages.stage(
            "rm", tiny_data, tmp_path / f"run{coef}", *overrides, "checkpoint.final=false", "run.export=false"
        )
        last = stages.records(run)[-1]
        means.append(abs(last["rm/chosen_mean"] + last["rm/rejected_mean"]))
        assert last["rm/accuracy"] == 1
    assert means[1] < 0.5 * means[0]


@pytest.mark.slow
def test_regression_learns_two_attributes(tiny_data, tiny_runs, tmp_path):
    overrides = [
        f"model.init={tiny_runs['sft']}",
        f"data.train={tiny_data / 'scored.jsonl'}",
        "run.steps=80",
        "batch.micro_batch_samples=8",
        "optim.lr=1e-2",
    ]
    overrides += ["algorithm.reward_loss.kind=regression", "algorithm.reward_loss.attributes=[good,short]"]
    run = stages.stage("rm", tiny_data, tmp_path / "run", *overrides, f"data.eval={tiny_data / 'scored.jsonl'}")
    records = stages.records(run)
    assert records[-1]["rm/loss"] < 0.5 * records[0]["rm/loss"] and records[-1]["rm/mse"] == pytest.approx(
        records[-1]["rm/loss"]
    )
    assert json.loads((run / "hf" / "aligner.json").read_text())["attributes"] == ["good", "short"]
    rows = [json.loads(line) for line in (tiny_data / "scored.jsonl").read_text().splitlines()]
    tokenizer = tokenizer_of(run)
    scores = scores_by_transformers(
        run, [tokenizer(r["prompt"] + r["completion"])["input_ids"] + [tokenizer.eos_token_id] for r in rows]
    )
    assert scores.shape == (len(rows), 2)
    targets = torch.tensor([[r["good"], r["short"]] for r in rows])
    assert float((scores - targets).square().mean()) == pytest.approx(records[-1]["eval/loss"], rel=1e-3)


def test_without_kl_no_reference_is_loaded(tiny_data, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("a reference was built")

    monkeypatch.setattr("aligner.builders.models.Reference", refuse)
    overrides = ["run.steps=1", "checkpoint.final=false", "run.export=false"]
    run = stages.stage("grpo", tiny_data, tmp_path / "off", "algorithm.kl.coef=0", *overrides)
    assert "kl/ref_k1" not in stages.records(run)[0]
    with pytest.raises(AssertionError, match="a reference was built"):
        stages.stage("grpo", tiny_data, tmp_path / "on", "algorithm.kl.coef=0.1", *overrides)


def test_epochs_and_minibatches_are_optimizer_steps(tiny_data, runs, tmp_path):
    overrides = [
        "run.steps=3",
        "batch.epochs=2",
        "batch.minibatch_samples=16",
        "checkpoint.final=false",
        "run.export=false",
    ]
    run = stages.stage("grpo", tiny_data, tmp_path / "run", f"model.init={runs['sft']}", *overrides)
    records = stages.records(run)
    assert [record["refit/version"] for record in records] == [0, 4, 8]  # 2 epochs x 32 samples / 16
    assert records[0]["policy/ratio_max"] > 1  # the second minibatch is off-policy
    # PPO: 2 epochs x 16 samples / 8, but the policy waits while the critic warms up for one rollout
    ppo = [record for record in stages.records(runs["ppo"]) if record["step"] > 0]
    assert [record["refit/version"] for record in ppo] == [0, 0, 4, 8]
    assert "policy/loss" not in ppo[0] and "critic/loss" in ppo[0]


def test_the_adaptive_controller_follows_its_rule_across_a_resume(tiny_data, runs, tmp_path):
    kl = "algorithm.kl={coef: 0.1, controller: {kind: adaptive, target: 0.01, horizon: 100}}"
    overrides = [f"model.init={runs['sft']}", kl]
    stages.stage("grpo", tiny_data, tmp_path / "run", *overrides, "run.steps=3")
    run = stages.stage("grpo", tiny_data, tmp_path / "run", *overrides, "run.steps=6")
    records = stages.records(run)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    coefs = [record["kl/coef"] for record in records]
    assert coefs[0] == 0.1 and len(set(coefs)) > 4
    for record, before, after in zip(records, coefs, coefs[1:], strict=False):
        error = min(max(record["kl/ref_k1_sequence_mean"] / 0.01 - 1, -0.2), 0.2)
        assert after == pytest.approx(before * (1 + error * 32 / 100), rel=1e-9)


def test_a_new_critic_says_what_the_reward_model_says(tiny_data, tiny_runs, tmp_path, monkeypatch):
    """The reward model reads its score at the last token, from hidden[last]. The critic's value at index t is that of
    the state before tokens[t], from hidden[t - 1]: so its value at index last + 1, where the whole response
    stands, must be the reward model's centred, scaled score. A column of padding makes that index exist."""
    reported = stop_before_training(monkeypatch, "ppo")

    def check(run, rollouts, policy, critic, reference, kl, cfg):
        rollout, _, scores = rollouts.next(1)
        assert (critic.bias, critic.scale) != (0.0, 1.0)
        longer = rollout.select(torch.arange(len(rollout.lengths)))
        longer.tokens = torch.nn.functional.pad(rollout.tokens, (0, 1))
        longer.lengths = rollout.lengths + 1
        values = critic.values(longer)
        assert (values[:, 0] == 0).all()
        return values[torch.arange(len(values)), rollout.lengths], rollout.rewards, scores.components["model"]

    reported["check"] = check
    overrides = [f"model.init={tiny_runs['sft']}", f"reward.model={tiny_runs['rm']}", "run.steps=2"]
    stages.stage("ppo", tiny_data, tmp_path / "run", *overrides)
    values, rewards, component = reported["result"]
    assert len(set(values.tolist())) > 4
    torch.testing.assert_close(values, rewards, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values, torch.tensor(component), rtol=1e-5, atol=1e-5)


def test_ppo_learns_from_the_reward_model(tiny_data, tiny_runs, tmp_path):
    overrides = [
        f"model.init={tiny_runs['sft']}",
        f"reward.model={tiny_runs['rm']}",
        "run.steps=12",
        "batch.prompts=32",
    ]
    overrides += ["batch.minibatch_samples=32", "batch.micro_batch_samples=16", "algorithm.kl.coef=0.01"]
    overrides += ["checkpoint.final=false", "run.export=false"]
    records = stages.records(stages.stage("ppo", tiny_data, tmp_path / "run", *overrides))
    means = [record["reward/model/mean"] for record in records]
    assert sum(means[-3:]) / 3 > sum(means[:2]) / 2 + 0.1
    # gamma = lambda = 1: what the critic predicts at every token is the reward less the KL still to come
    assert records[0]["critic/return_mean"] == pytest.approx(means[0], abs=0.3)


@pytest.mark.slow
def test_a_critic_is_fitted_to_what_followed_before_anything_else_learns(tiny_data, tiny_runs, tmp_path):
    """On the first rollout, which is generated once; toward the rewards themselves, whatever algorithm.lam says."""
    overrides = [
        f"model.init={tiny_runs['sft']}",
        f"reward.model={tiny_runs['rm']}",
        "run.steps=1",
        "algorithm.lam=0.2",
    ]
    overrides += ["checkpoint.final=false", "run.export=false", "critic.warmup_steps=0", "eval.generate=false"]
    overrides += ["batch.micro_batch_samples=8"]

    def first(name, *changes):
        return stages.records(stages.stage("ppo", tiny_data, tmp_path / name, *overrides, *changes))[0]

    fitted = first("fitted", "critic.pretrain_steps=60", "critic.optim.lr=1e-2")
    before, after = "critic/pretrain_explained_variance_before", "critic/pretrain_explained_variance"
    assert fitted[after] > fitted[before] + 0.2 and fitted["refit/version"] == 0
    plain = first("plain", "algorithm.lam=1")
    assert fitted[before] == pytest.approx(plain["critic/explained_variance"], rel=1e-6)
    assert fitted["reward/mean"] == plain["reward/mean"] and before not in plain
    assert fitted["critic/value_mean"] != plain["critic/value_mean"]  # its values are those it has learned


def test_prompts_of_a_file_are_the_prompts_of_the_run(tiny_data, runs):
    known = {json.loads(line)["prompt"] for line in (tiny_data / "train.jsonl").read_text().splitlines()}
    rows = [json.loads(line) for line in (runs["grpo"] / "samples.jsonl").read_text().splitlines()]
    assert rows and {row["prompt"] for row in rows} <= known and DataConfig().shuffle


@pytest.mark.slow
def test_a_stage_starts_from_a_sharded_checkpoint(tiny_data, tiny_runs, tmp_path):
    """Weights only: a policy continues from a policy's; a reward model takes the body and makes its own head."""
    (checkpoint,) = sorted((tiny_runs["sft"] / "checkpoints").glob("step-*"))[-1:]
    still = ["run.steps=1", "optim.lr=1e-12", f"model.init={checkpoint}", "model.tokenizer=''"]
    again = stages.stage("sft", tiny_data, tmp_path / "sft", *still)
    ours, theirs = stages.weights(again), stages.weights(tiny_runs["sft"])
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)
    scorer = stages.weights(stages.stage("rm", tiny_data, tmp_path / "rm", *still))
    assert "score.weight" in scorer
    assert all(torch.allclose(scorer[name], theirs[name], atol=1e-6) for name in theirs if name in scorer)


def test_a_run_leaves_no_models_and_no_threads_behind(tiny_data, tiny_runs, tmp_path):
    """A process may run many stages. Reward functions, evaluation, engine and groups all have threads."""

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def left(name: str) -> tuple[int, int]:
        overrides = (f"model.init={tiny_runs['sft']}", f"data.eval={tiny_data / 'eval.jsonl'}", "run.steps=1")
        stages.stage("grpo", tiny_data, tmp_path / name, *overrides)
        alive = sum(isinstance(thing, ShardedModel) for thing in gc.get_objects())
        return threads(), alive

    first = left("first")
    now, until = left("second"), time.monotonic() + 120
    while now[0] > first[0] and time.monotonic() < until:  # a thread that was told to end may need its turn
        time.sleep(0.05)
        now = threads(), now[1]
    assert now[0] <= first[0] and now[1] == first[1], (now, first)
