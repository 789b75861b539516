"""Scores of steps: one loss over all labelled steps, the same in every layout."""

from dataclasses import replace

import pytest
import torch

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.data.steps import StepEncoder
from aligner.data.tokenizer import load_tokenizer
from aligner.errors import ConfigError
from aligner.megatron.model import Head
from aligner.roles.process_reward import ProcessRewardModel
from aligner.stages.rm import steps_loss
from aligner.types import Prompt, Sample, StepTargets, TrainBatch
from tests import stages
from tests.megatron.models import build, shares, weights
from tests.ranks import on_ranks
from tests.tiny import LLAMA, SGD, batch, relative

CASES = {
    "micro-batch 2": (1, ParallelConfig(), BatchConfig(micro_batch_samples=2)),
    "padded": (1, ParallelConfig(), BatchConfig(packing=False)),
    "dp2": (2, ParallelConfig(), BatchConfig()),
    "tp2": (2, ParallelConfig(tensor=2, sequence=True), BatchConfig()),
    "cp2": (2, ParallelConfig(context=2), BatchConfig()),
    "pp2": (2, ParallelConfig(pipeline=2), BatchConfig(micro_batch_samples=4)),
}


def steps_update(cfg: ModelConfig, parallel: ParallelConfig, bc: BatchConfig) -> dict:
    """Gradient descent on the labels of steps; the logits before it, at the steps' ends."""
    model = build(cfg, parallel, SGD, Head("score"), packed=bc.packing)
    full = batch(cfg)
    full = TrainBatch(full.tokens, full.lengths, full.loss_mask, [StepTargets((full.tokens % 3 == 0).float())])
    role = ProcessRewardModel(model, bc, None)
    logits, own = role.logits(full), shares(model, full)
    stats = role.update(own, steps_loss(own, model.layout.pgs.dp))
    on = full.loss_mask.bool()
    return {
        "logits": logits[on],
        "labels": full.of(StepTargets).step_labels[on],
        "stats": stats,
        "after": weights(model),
    }


@pytest.fixture(scope="module")
def one(ranks):
    return ranks.run(steps_update, cfg=LLAMA, parallel=ParallelConfig(), bc=BatchConfig())[0]


def test_the_loss_is_the_cross_entropy_of_all_labelled_steps(one):
    x, y = one["logits"].double(), one["labels"].double()
    wanted = -(y * x.sigmoid().log() + (1 - y) * (1 - x.sigmoid()).log()).mean()
    assert one["stats"]["rm/loss"] == pytest.approx(float(wanted), rel=1e-5)
    assert one["stats"]["rm/accuracy"] == pytest.approx(float(((x > 0) == (y > 0.5)).double().mean()))


@on_ranks(1)
def test_an_answer_gets_the_least_or_the_product_of_its_steps(tiny_data):
    """All at once or one by one: of the logits that a plain pass finds at the steps' ends."""
    model = build(replace(LLAMA, vocab_size=261), head=Head("score"))
    encoder = StepEncoder(load_tokenizer(str(tiny_data / "tokenizer"), announce=False), ".")
    prompt = Prompt(id=0, tokens=(5, 6, 7), text="")
    answers = ["ab.c.", "", "ab. .c", " . "]  # an end that is missing, and blank steps, change nothing
    samples = [Sample(prompt, i, answer, (1,), finished=True) for i, answer in enumerate(answers)]
    tokens, ends = encoder.encode(["ab", "c"])
    row = torch.tensor([[*prompt.tokens, *tokens]])
    mask = torch.zeros(row.shape)
    mask[0, torch.tensor(ends) + 3] = 1.0
    logits = ProcessRewardModel(model, BatchConfig(), encoder).logits(
        TrainBatch(row, torch.tensor([row.shape[1]]), mask)
    )
    first, second = logits[mask.bool()].sigmoid().tolist()
    for over, wanted in (("min", min(first, second)), ("product", first * second)):
        role = ProcessRewardModel(model, BatchConfig(), encoder, over)
        assert role(samples) == pytest.approx([wanted, 0, wanted, 0], rel=1e-5)
        assert [score for sample in samples for score in role([sample])] == pytest.approx(role(samples), rel=1e-5)


@pytest.mark.slow
def test_a_trained_one_scores_rollouts(tiny_data, tiny_runs, tmp_path):
    """Stage rm learns which steps are right, leaves what scoring needs beside the weights, and stage grpo reads it."""
    rows = [
        {"prompt": f"say {c}:", "completions": [c, "yn"[i % 2]], "labels": [True, bool(i % 2)]}
        for i, c in enumerate(stages.LETTERS)
    ]
    file, start = stages.write_jsonl(tmp_path / "steps.jsonl", rows), f"model.init={tiny_runs['sft']}"
    kind = "algorithm.reward_loss={kind: process, separator: '.'}"
    overrides = [start, kind, f"data.train={file}", f"data.eval={file}", "run.eval_every=15", "optim.lr=1e-2"]
    model = stages.stage("rm", tiny_data, tmp_path / "rm", *overrides, "run.steps=15")
    records = stages.records(model)
    assert records[0]["eval/loss"] == pytest.approx(0.6931, abs=1e-3)  # a head of zeros
    assert records[-1]["eval/loss"] < 0.45 and records[-1]["eval/accuracy"] > 0.8
    grpo = [start, f"reward.model={model}", "reward.functions=[]", "run.steps=1", "run.export=false"]
    run = stages.stage("grpo", tiny_data, tmp_path / "grpo", *grpo, "checkpoint.final=false")
    record = stages.records(run)[0]
    assert 0 <= record["reward/min"] < record["reward/max"] < 1 and record["reward/invalid"] == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_layouts_do_not_change_scores_and_updates(ranks, one, case):
    world, parallel, bc = CASES[case]
    results = ranks.run(steps_update, world=world, cfg=LLAMA, parallel=parallel, bc=bc)[0]
    torch.testing.assert_close(results["logits"], one["logits"], rtol=1e-4, atol=1e-5)
    assert results["stats"]["rm/loss"] == pytest.approx(one["stats"]["rm/loss"], rel=1e-5)
    for name, wanted in one["after"].items():
        assert relative(results["after"][name], wanted) <= 1e-5, name


@pytest.mark.slow
def test_attributes_are_weighed_by_the_config(tiny_data, tiny_runs, tmp_path):
    """Also of a model of several: a head of two outputs is read as it was trained."""
    loss = "algorithm.reward_loss={kind: regression, attributes: [good, short]}"
    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=2", "checkpoint.final=false"]
    model = stages.stage("rm", tiny_data, tmp_path / "rm", *overrides, loss, f"data.train={tiny_data / 'scored.jsonl'}")

    def mean(name, weights):
        scored = [f"reward.model={model}", f"reward.model_attributes={weights}", "run.steps=1", "run.export=false"]
        run = stages.stage("grpo", tiny_data, tmp_path / name, *overrides, *scored)
        return stages.records(run)[0]["reward/model/mean"]

    first, second, both = mean("a", "{}"), mean("b", "{short: 1}"), mean("c", "{good: 2, short: -0.5}")
    assert both == pytest.approx(2 * first - 0.5 * second, rel=1e-4)
    with pytest.raises(ConfigError, match=r"reward.model_attributes='tall': expected attributes of .* has good, short"):
        mean("d", "{tall: 1}")
    critic = [f"reward.model={model}", "reward.model_attributes={good: 1}", "run.steps=1"]
    with pytest.raises(
        ConfigError, match=r"critic.init='': expected .* reward model of one score.* scores good, short"
    ):
        stages.stage("ppo", tiny_data, tmp_path / "ppo", f"model.init={tiny_runs['sft']}", *critic)
