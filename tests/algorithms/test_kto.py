"""Stage kto: its loss over cuts of a minibatch, its zero point, what its first step must be, and what it learns."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from aligner.config.sections.kto import KtoConfig
from aligner.errors import AlignerError, DataError
from aligner.ops.rl.kto import mismatched
from aligner.roles.policy import TokenOutputs
from aligner.stages.kto import kto_loss, losses_at_start
from aligner.types import LabelTargets, TrainBatch
from tests import stages

B, T = 8, 7


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def make() -> tuple[TrainBatch, torch.Tensor]:
    """A minibatch with reference, and logprobs that need a gradient."""
    g = torch.Generator().manual_seed(0)
    mask = (torch.rand(B, T, generator=g) < 0.6).float()
    mask[:, 0], mask[:, -1] = 0, 1
    logprobs = -torch.rand(B, T, generator=g)
    labels = torch.stack([(torch.arange(B) % 3 > 0).float(), torch.zeros(B)], 1)
    reference = logprobs + torch.randn(B, T, generator=g)
    known = LabelTargets(labels, reference)
    batch = TrainBatch(torch.randint(0, 9, (B, T), generator=g), torch.full((B,), T), mask, [known])
    return batch, logprobs.requires_grad_()


WEIGHTED = KtoConfig(beta=0.3, desirable_weight=1.3, undesirable_weight=0.8)


def test_cutting_a_minibatch_changes_nothing(alone):
    """Into micro-batches of 1, 2, 4 answers, permuted."""
    batch, logprobs = make()
    loss, results = kto_loss(batch, 0.4, WEIGHTED, alone), []
    order = torch.randperm(B, generator=torch.Generator().manual_seed(1))
    for size in (B, 1, 2, 4):
        outputs = []
        for rows in (order if size < B else torch.arange(B)).split(size):
            outputs.append(loss(TokenOutputs(logprobs[rows], None, None), batch.select(rows)))
        whole = sum(out.loss for out in outputs)
        means = {k: torch.stack([torch.stack(out.means[k]) for out in outputs]).sum(0) for k in outputs[0].means}
        results.append((whole.detach(), torch.autograd.grad(whole, logprobs)[0], means))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])
    # by hand
    desirable, on = batch.of(LabelTargets).labels[:, 0], batch.loss_mask
    ratios = ((logprobs.detach() - batch.of(LabelTargets).ref_logprobs) * on).sum(1)
    each = [
        1.3 / (1 + math.exp(0.3 * (float(d) - 0.4))) if up else 0.8 / (1 + math.exp(0.3 * (0.4 - float(d))))
        for d, up in zip(ratios, desirable, strict=True)
    ]
    assert float(results[0][0]) == pytest.approx(sum(each) / B)
    means = {name: float(n / d) for name, (n, d) in results[0][2].items()}
    assert means["rewards/chosen"] == pytest.approx(0.3 * float(ratios[desirable == 1].mean()))
    assert means["logps/rejected"] == pytest.approx(float((logprobs.detach() * on).sum(1)[desirable == 0].mean()))
    assert means["kto/desirable"] == pytest.approx(5 / 8)
    assert means["length/chosen"] == pytest.approx(float(on.sum(1)[desirable == 1].mean()))


def test_a_label_that_is_not_there_has_no_start(alone):
    batch, _ = make()
    assert losses_at_start(batch, WEIGHTED, alone) == {"kto/loss/chosen": 0.65, "kto/loss/rejected": 0.4}
    one = batch.select((batch.of(LabelTargets).labels[:, 0] == 1).nonzero().flatten())
    assert losses_at_start(one, WEIGHTED, alone) == {"kto/loss/chosen": 0.65}


def run(data, folder, *more):
    more = ("run.steps=3", "run.export=false", "checkpoint.final=false", *more)
    return stages.stage("kto", data, folder, *more)


RUNS = {
    "plain": [],
    "padded, micro-batch 1, of pairs": [
        *("batch.packing=false", "batch.micro_batch_samples=1", "data.train={data}/pairs.jsonl"),
    ],
    "by tokens": ["batch.micro_batch_tokens=40", "batch.logprob_tokens=40", "batch.share_prompts=false"],
    "stored": ["algorithm.kto.reference=stored"],
    "stored, without a zero point": ["algorithm.kto.kl=none", "algorithm.kto.reference=stored"],
}
METRICS = [
    *("kto/loss", "kto/loss/chosen", "kto/loss/rejected", "kl", "rewards/chosen", "rewards/rejected"),
    *("rewards/margins", "logps/chosen", "logps/rejected", "policy/grad_norm", "length/chosen", "length/rejected"),
    *("kto/desirable", "eval/accuracy", "eval/margin", "eval/loss", "eval/kl"),
]


@pytest.fixture(scope="module")
def first_steps(tiny_data, tiny_runs, tmp_path_factory):
    """Three steps of each of RUNS, with the first-step check."""
    root = tmp_path_factory.mktemp("kto")
    start = [f"model.init={tiny_runs['sft']}", "debug.first_step_checks=true", "run.eval_every=1", "optim.lr=1e-2"]
    start += [f"data.eval={tiny_data / 'labels.jsonl'}", "eval.prompts=20", "batch.sequences=16"]
    made = {}

    def get(name):
        if name not in made:
            overrides = [text.format(data=tiny_data) for text in RUNS[name]]
            records = stages.records(run(tiny_data, root / str(len(made)), *start, *overrides))
            made[name] = [record for record in records if record["step"]]
        return made[name]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_first_steps_start_at_the_known_loss_and_raise_the_margin(first_steps, name):
    first, *_, last = first_steps(name)
    assert [m for m in METRICS if first.get(m) is None or not math.isfinite(first[m])] == []
    assert first["kto/loss"] == pytest.approx(0.5, abs=1e-5) and abs(first["kl"]) < 1e-5
    assert last["rewards/margins"] > 0 and last["eval/margin"] > first["eval/margin"]
    assert ("kto/unmatched" in first) == ("without" not in name)


@pytest.mark.slow
def test_cuts_packing_and_stored_references_give_the_same_run(first_steps):
    """Also without z0, which is 0 here: on this task other answers become less likely."""
    runs = [first_steps(name) for name in RUNS]
    for record, *others in zip(*runs, strict=True):
        for name, other in itertools.product(METRICS, others):
            assert other[name] == pytest.approx(record[name], abs=2e-4), (record["step"], name)


def test_the_zero_point_is_that_of_all_mismatched_answers(tiny_data, tiny_runs, tmp_path, monkeypatch):
    """Against logprobs of transformers' model, row by row; the reference knows next to nothing, so that also
    mismatched answers are likelier to the policy."""
    from transformers import AutoModelForCausalLM

    from aligner.builders import models
    from aligner.rollout import unpaired
    from aligner.stages import kto as stage

    behind = stages.stage("sft", tiny_data, tmp_path / "behind", "run.steps=1")
    seen, reference = [], models.make_reference
    before = AutoModelForCausalLM.from_pretrained(behind / "hf", dtype=torch.float64)
    after = AutoModelForCausalLM.from_pretrained(tiny_runs["sft"] / "hf", dtype=torch.float64)

    def other(job, policy):
        from aligner.roles.model_init import resolve

        return reference(replace(job, initial=resolve(job.cfg.model, str(behind), 0)), policy)

    def told(policy, rows):
        seen.append((unpaired.zero_point(policy, rows), rows))
        return seen[-1][0]

    monkeypatch.setattr(stage, "make_reference", other)
    monkeypatch.setattr(stage, "zero_point", told)
    record = stages.records(run(tiny_data, tmp_path / "run", f"model.init={tiny_runs['sft']}", "run.steps=1"))[-1]
    [(z0, rows)] = seen

    def logprob(model, tokens, first):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].log_softmax(-1)
        return sum(float(logits[t - 1, tokens[t]]) for t in range(first, len(tokens)))

    each = []
    for tokens, mask, length in zip(rows.tokens, rows.loss_mask, rows.lengths, strict=True):
        first = int(mask.argmax())
        each.append(logprob(after, tokens[:length], first) - logprob(before, tokens[:length], first))
    assert len(each) == 8 and z0 == pytest.approx(max(0.0, sum(each) / 8), abs=1e-5) == record["kl"]
    assert z0 > 1e-3  # not clamped


def test_one_prompt_alone_has_no_zero_point(tiny_data, tiny_runs, tmp_path):
    rows = [{"prompt": "say it:", "completion": c, "label": i % 2 == 0} for i, c in enumerate(stages.LETTERS)]
    data = stages.write_jsonl(tmp_path / "one.jsonl", rows)
    overrides = [f"data.train={data}", f"model.init={tiny_runs['sft']}"]
    records = stages.records(run(tiny_data, tmp_path / "x", *overrides))
    assert {r["kto/unmatched"] for r in records} == {1.0} and {r["kl"] for r in records} == {0.0}
    assert mismatched([row["prompt"] for row in rows]) is None
    alarms = (tmp_path / "x/alarms.jsonl").read_text()
    assert "one prompt" in alarms


def test_a_minibatch_of_one_label_raises_an_alarm(tiny_data, tiny_runs, tmp_path):
    """A file in the order of its labels, unshuffled."""
    rows = [{"prompt": f"say {c}:", "completion": c, "label": i < 24} for i, c in enumerate(stages.LETTERS)]
    data = stages.write_jsonl(tmp_path / "sorted.jsonl", rows)
    overrides = [f"data.train={data}", f"model.init={tiny_runs['sft']}", "data.shuffle=false"]
    assert [r["kto/desirable"] for r in stages.records(run(tiny_data, tmp_path / "x", *overrides))] == [1, 1, 1]
    assert "data.shuffle" in (tmp_path / "x/alarms.jsonl").read_text()


def test_the_balance_of_labels_is_reported(tiny_data, tiny_runs, tmp_path, capsys):
    rows = [{"prompt": f"say {c}:", "completion": c, "label": i % 4 == 0} for i, c in enumerate(stages.LETTERS)]
    data = stages.write_jsonl(tmp_path / "few.jsonl", rows)
    overrides = [f"data.train={data}", f"model.init={tiny_runs['sft']}", "run.steps=1"]
    run(tiny_data, tmp_path / "x", *overrides)
    output = capsys.readouterr().out
    assert "WARNING: 0.25 of the answers are desirable; weighted, they count 0.333 times as much" in output
    assert "algorithm.kto.desirable_weight=3 would do" in output
    run(tiny_data, tmp_path / "y", *overrides, "algorithm.kto.desirable_weight=3")
    assert "WARNING" not in capsys.readouterr().out


def test_a_source_may_have_one_label_if_the_others_have_both(tiny_data, tiny_runs, tmp_path):
    for name, label in (("good", "true"), ("bad", "false")):
        rows = [{"prompt": f"say {c}:", "completion": c, "label": label == "true"} for c in stages.LETTERS]
        stages.write_jsonl(tmp_path / f"{name}.jsonl", rows)
    sources = [f"{{path: {tmp_path}/{name}.jsonl, weight: 1}}" for name in ("good", "bad")]
    start = [f"model.init={tiny_runs['sft']}", "data.train=''", "run.steps=1"]
    run(tiny_data, tmp_path / "x", *start, f"data.sources=[{','.join(sources)}]")
    with pytest.raises(DataError, match="all are false"):
        run(tiny_data, tmp_path / "y", *start, f"data.sources=[{sources[1]}]")


def test_a_first_step_that_is_not_its_value_is_refused(tiny_data, tiny_runs, tmp_path, monkeypatch):
    """The policy computes something else than the reference: a dropout left on, say."""
    from aligner.roles.policy import Policy

    outputs = Policy._outputs

    def other(self, hidden, batch, update):
        found = outputs(self, hidden, batch, update)
        return found._replace(logprobs=found.logprobs * (1.05 if update else 1.0))

    monkeypatch.setattr(Policy, "_outputs", other)
    with pytest.raises(AlignerError, match=r"kto/loss/chosen=0\.5\d+ at the first update: expected 0\.5 within 1e-05"):
        run(tiny_data, tmp_path / "x", f"model.init={tiny_runs['sft']}", "debug.first_step_checks=true")


@pytest.mark.slow
def test_it_prefers_as_the_data_does(tiny_data, tiny_runs, tmp_path):
    overrides = [f"model.init={tiny_runs['sft']}", f"data.eval={tiny_data / 'labels.jsonl'}", "optim.lr=2e-3"]
    overrides += ["run.eval_every=8", "checkpoint.every=8", "checkpoint.keep_best=1", "run.export=false"]
    last = stages.records(stages.stage("kto", tiny_data, tmp_path / "run", "run.steps=16", *overrides))[-1]
    assert last["eval/accuracy"] > 0.9 and last["rewards/margins"] > 1 and last["eval/loss"] < 0.45
