"""Stage dpo: its loss over cuts of a minibatch, what its first step must be, and what it learns."""

import itertools
import math
import shutil

import pytest
import torch

from aligner.config.sections.preference import PreferenceConfig
from aligner.errors import AlignerError
from aligner.ops.rl.preference import Labels, measure, pair_losses, total
from aligner.roles.policy import TokenOutputs
from aligner.stages.dpo import dpo_loss
from aligner.types import LabelTargets, TrainBatch
from tests import stages

PAIRS, T = 6, 8


def make() -> tuple[TrainBatch, torch.Tensor, torch.Tensor]:
    """A minibatch with reference, logprobs that need a gradient, and log sums of squares."""
    g = torch.Generator().manual_seed(0)
    mask = (torch.rand(2 * PAIRS, T, generator=g) < 0.6).float()
    mask[:, 0], mask[:, -1] = 0, 1
    logprobs = -torch.rand(2 * PAIRS, T, generator=g)
    batch = TrainBatch(
        tokens=torch.randint(0, 9, (2 * PAIRS, T), generator=g),
        lengths=torch.full((2 * PAIRS,), T),
        loss_mask=mask,
        payloads=[
            LabelTargets(
                ref_logprobs=logprobs + torch.randn(2 * PAIRS, T, generator=g),
                labels=torch.rand(2 * PAIRS, 3, generator=g),
            )
        ],
    )
    return batch, logprobs.requires_grad_(), -torch.rand(2 * PAIRS, T, generator=g)


EVERYTHING = {"loss": ["sigmoid", "ipo", "rpo_sq"], "weights": [1.0, 0.1, 0.5], "wpo": True, "ld_alpha": 0.5}


@pytest.mark.parametrize("kind", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_cutting_a_minibatch_changes_nothing(world, kind):
    """Into micro-batches of 1, 2, 4 pairs, permuted; with row weights, WPO, LD, NLL."""
    batch, logprobs, squares = make()
    cfg = PreferenceConfig(**EVERYTHING, nll_coef=0.3, nll_aggregation=kind)
    loss, results = dpo_loss(batch, cfg, world), []
    order = torch.randperm(PAIRS, generator=torch.Generator().manual_seed(1))
    for size in (PAIRS, 1, 2, 4):
        outputs = []
        for pairs in (order if size < PAIRS else torch.arange(PAIRS)).split(size):
            rows = (2 * pairs[:, None] + torch.arange(2)).flatten()
            out = TokenOutputs(logprobs[rows], None, None, squares[rows])
            outputs.append(loss(out, batch.select(rows)))
        whole = sum(out.loss for out in outputs)
        means = {k: sum(out.means[k][0] for out in outputs) for k in outputs[0].means}
        results.append((whole.detach(), torch.autograd.grad(whole, logprobs)[0], means))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])

    # by hand
    answers, labels = (
        measure(logprobs, batch.of(LabelTargets).ref_logprobs, batch.loss_mask, 0.5),
        Labels.of(batch.of(LabelTargets).labels, cfg),
    )
    weights = []
    for row in range(2 * PAIRS):
        on = batch.loss_mask[row].bool()
        weights.append(math.exp(float((logprobs.detach()[row] - squares[row])[on].mean())))
    wpo = torch.tensor(weights).view(-1, 2).prod(1)
    pairs = (total(pair_losses(answers, labels, cfg), cfg) * wpo * batch.of(LabelTargets).labels[0::2, 2]).sum() / PAIRS
    on = batch.loss_mask[0::2]
    sums = (-logprobs[0::2] * on).sum(1)
    by_row = {"seq_mean_token_mean": sums / on.sum(1), "seq_mean_token_sum": sums}
    nll = sums.sum() / on.sum() if kind == "token_mean" else by_row[kind].mean()
    torch.testing.assert_close(results[0][0], (pairs + 0.3 * nll).detach())
    moved = ((logprobs.detach() - batch.of(LabelTargets).ref_logprobs).square() / 2)[batch.loss_mask.bool()]
    torch.testing.assert_close(results[0][2]["kl"], moved.sum())


def test_two_data_parallel_ranks_share_one_denominator(world, monkeypatch):
    """A rank's loss is its share: over twice the pairs, and over the chosen tokens of both."""
    batch, logprobs, _ = make()

    class Two:
        def size(self):
            return 2

    monkeypatch.setattr("aligner.ops.rl.aggregate.sum_over", lambda count, group: 2 * count)
    half = dpo_loss(batch, PreferenceConfig(nll_coef=1.0), Two())(TokenOutputs(logprobs, None, None), batch)
    monkeypatch.undo()
    whole = dpo_loss(batch, PreferenceConfig(nll_coef=1.0), world)(TokenOutputs(logprobs, None, None), batch)
    torch.testing.assert_close(2 * half.loss, whole.loss)


def run(name, data, folder, *more):
    return stages.stage("dpo", data, folder, "run.steps=3", "run.export=false", "checkpoint.final=false", *more)


RUNS = {
    "plain": [],
    "padded, micro-batch 1": ["batch.packing=false", "batch.micro_batch_samples=1"],
    "by tokens": ["batch.micro_batch_tokens=40", "batch.share_prompts=false"],
    "everything": [
        "algorithm.preference={loss: [sigmoid, ipo], weights: [1, 0.01], margin: false, ld_alpha: 0.5, wpo: true}",
        "algorithm.preference.nll_coef=0.2",
    ],
    "margins": ["algorithm.preference.margin=true", "algorithm.preference.gamma=0.5"],
    "separable": ["algorithm.preference.loss=[apo_zero,nca_pair,bco_pair,sppo_hard]"],
    "no reference": ["experiment=simpo"],
    "odds": ["experiment=orpo"],
    "by rank": ["algorithm.preference.loss=[aot,aot_unpaired]"],
    "by rank, padded, micro-batch 1": [
        *("algorithm.preference.loss=[aot,aot_unpaired]", "batch.packing=false", "batch.micro_batch_samples=1"),
    ],
}


@pytest.fixture(scope="module")
def first_steps(tiny_data, tiny_runs, tmp_path_factory):
    """Three steps of each of RUNS, with the first-step check."""
    root = tmp_path_factory.mktemp("dpo")
    start = [f"model.init={tiny_runs['sft']}", "debug.first_step_checks=true", "run.eval_every=1"]
    start += [f"data.eval={tiny_data / 'pairs.jsonl'}"]
    made = {}

    def get(name):
        if name not in made:
            made[name] = stages.records(run(name, tiny_data, root / str(len(made)), *start, *RUNS[name]))
        return made[name]

    return get


METRICS = [
    *("dpo/loss", "policy/loss", "policy/grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins"),
    *("rewards/accuracies", "logps/chosen", "logps/rejected", "length/chosen", "length/rejected", "time/update_s"),
    *("preference/equal_answers", "batch/balance", "eval/accuracy", "eval/margin", "eval/loss"),
]


@pytest.mark.few(4)
@pytest.mark.parametrize("name", RUNS)
def test_first_steps_have_finite_metrics_and_lower_the_loss(first_steps, name):
    records = [record for record in first_steps(name) if record["step"]]
    for record in records:
        assert [m for m in METRICS if record.get(m) is None or not math.isfinite(record[m])] == []
        assert record["rewards/margins"] == pytest.approx(
            record["rewards/chosen"] - record["rewards/rejected"], abs=1e-5
        )
    assert len(records) == 3 and records[-1]["eval/loss"] < records[0]["eval/loss"] + 1e-6
    if name in ("plain", "by tokens", "padded, micro-batch 1"):
        first = records[0]
        assert first["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert first["dpo/loss"] == first["policy/loss"] and abs(first["rewards/margins"]) < 1e-5
        assert first["length/chosen"] == 2 and first["logps/chosen"] < 0


@pytest.mark.slow
def test_cuts_and_packing_give_the_same_run(first_steps):
    for names in (list(RUNS)[:3], list(RUNS)[-2:]):
        compare([[r for r in first_steps(name) if r["step"]] for name in names])


def compare(runs):
    for record, *others in zip(*runs, strict=True):
        for name, other in itertools.product(METRICS[:10], others):
            if name != "rewards/accuracies":  # of ties at the first step, which rounding breaks
                assert other[name] == pytest.approx(record[name], abs=2e-4), (record["step"], name)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("layout", [[], ["parallel.tensor=2"]])
def test_ranks_sort_together(ranks, tiny_data, tiny_runs, tmp_path, first_steps, layout):
    """Also of one held-out pair, which one of them has."""
    overrides = [
        f"model.init={tiny_runs['sft']}",
        "debug.first_step_checks=true",
        "logging.progress=false",
        "run.steps=3",
    ]
    overrides += ["algorithm.preference.loss=[aot,aot_unpaired]", "batch.micro_batch_samples=2", "run.eval_every=1"]
    overrides += [
        f"data.eval={tiny_data / 'pairs.jsonl'}",
        "eval.prompts=1",
        "checkpoint.final=false",
        "run.export=false",
    ]
    line = stages.overrides("dpo", tiny_data, tmp_path / "two", *overrides, *layout)
    assert ranks.run("tests.run.jobs:run_stage", world=2, arguments=line) == [0, 0]
    whole, shared = first_steps("by rank"), stages.records(tmp_path / "two")
    for a, b in zip(whole[-3:], shared[-3:], strict=True):
        assert a["step"] == b["step"] and math.isfinite(b["eval/loss"])
        names = ("dpo/loss/aot", "dpo/loss/aot_unpaired", "rewards/margins", "policy/grad_norm")
        assert [b[name] for name in names] == pytest.approx([a[name] for name in names], rel=1e-4, abs=1e-5)


def test_a_stored_reference_is_the_model(tiny_data, tiny_runs, tmp_path, first_steps, capsys):
    """The same run without a second model; read again for the same weights and rows, else made anew."""

    def go(name, *overrides):
        start = [f"model.init={tiny_runs['sft']}", "debug.first_step_checks=true", "run.eval_every=1"]
        start += [f"data.eval={tiny_data / 'pairs.jsonl'}", "algorithm.preference.reference=stored", *overrides]
        capsys.readouterr()
        actual = run(name, tiny_data, tmp_path / name, *start)
        output = capsys.readouterr().out.splitlines()
        return stages.records(actual), [line for line in output if "reference logprobs" in line]

    records, lines = go("a")
    assert len(lines) == 2 and all("written to" in line for line in lines)
    for record, other in zip(records, first_steps("plain"), strict=True):
        for name in METRICS:
            if name in other and not name.startswith("time/") and name not in ("rewards/accuracies", "eval/accuracy"):
                assert record[name] == pytest.approx(other[name], abs=1e-5), (record["step"], name)
    files = sorted((tmp_path / "a/reference").iterdir())
    assert [file.name for file in files] == ["eval.safetensors", "train-0.safetensors"]
    shutil.copytree(tmp_path / "a/reference", tmp_path / "b/reference")
    again, lines = go("b")
    assert all("read from" in line for line in lines) and again[-1]["dpo/loss"] == records[-1]["dpo/loss"]
    shutil.copytree(tmp_path / "a/reference", tmp_path / "c/reference")
    (tmp_path / "c/reference/eval.safetensors").write_bytes(files[0].read_bytes()[:99])  # torn
    other = stages.stage("sft", tiny_data, tmp_path / "sft", "run.steps=1", f"model.init={tiny_runs['sft']}")
    assert all("written to" in line for line in go("c", f"model.init={other}")[1])  # of other weights


def test_a_first_step_that_is_not_its_value_is_refused(tiny_data, tiny_runs, tmp_path, monkeypatch):
    """The policy computes something else than the reference: a dropout left on, say."""
    from aligner.roles.policy import Policy

    outputs = Policy._outputs

    def other(self, hidden, batch, update):
        found = outputs(self, hidden, batch, update)
        return found._replace(logprobs=found.logprobs * (1.05 if update else 1.0))

    monkeypatch.setattr(Policy, "_outputs", other)
    text = r"dpo/loss/sigmoid=0\.\d+ at the first update: expected 0\.69314718 within 1e-05"
    with pytest.raises(AlignerError, match=text):
        run("x", tiny_data, tmp_path / "x", f"model.init={tiny_runs['sft']}", "debug.first_step_checks=true")


def test_a_reference_that_copies_the_policy_makes_every_step_a_first_one(tiny_data, tiny_runs, tmp_path):
    """TR-DPO with alpha 1 after every step; with 1/2, the reference lags behind."""

    def losses(folder, alpha):
        overrides = [f"model.init={tiny_runs['sft']}", "algorithm.preference.sync_every=1"]
        records = stages.records(
            run("x", tiny_data, tmp_path / folder, *overrides, f"algorithm.preference.sync_alpha={alpha}")
        )
        return [record["dpo/loss"] for record in records], [record["kl"] for record in records]

    copied, kl = losses("copied", 1.0)
    assert copied == pytest.approx([math.log(2)] * 3, abs=1e-5) and max(kl) < 1e-8
    half, kl = losses("half", 0.5)
    assert half[0] == pytest.approx(math.log(2), abs=1e-5) and half[2] < half[1] < half[0] - 1e-3 and kl[1] > 1e-6


@pytest.mark.parametrize("every", [2, 3])
def test_a_reference_follows_after_so_many_steps_and_in_no_other(tiny_data, tiny_runs, tmp_path, every):
    """With alpha 1 the steps 1, 1 + n, 1 + 2n, ... are first ones."""
    overrides = [f"model.init={tiny_runs['sft']}", f"algorithm.preference={{sync_every: {every}, sync_alpha: 1.0}}"]
    records = stages.records(run("x", tiny_data, tmp_path / "x", *overrides, f"run.steps={2 * every + 2}"))
    fresh = [record["step"] for record in records if record["kl"] < 1e-8]
    assert fresh == [1, 1 + every, 1 + 2 * every]
    assert all(abs(r["dpo/loss"] - math.log(2)) < 1e-5 for r in records if r["step"] in fresh)
    assert all(r["kl"] > 1e-6 for r in records if r["step"] not in fresh)


def test_equal_answers_are_counted_and_learn_nothing(tiny_data, tiny_runs, tmp_path):
    """All but the last pair of the file, which these steps do not reach; a file of nothing else is refused."""
    rows = [{"prompt": f"say {c}:", "chosen": c, "rejected": c} for c in stages.LETTERS]
    data = stages.write_jsonl(tmp_path / "equal.jsonl", [*rows, {**rows[0], "rejected": "b"}])
    overrides = [f"model.init={tiny_runs['sft']}", f"data.train={data}", "optim.weight_decay=0", "data.shuffle=false"]
    records = stages.records(run("x", tiny_data, tmp_path / "x", *overrides))
    assert {r["preference/equal_answers"] for r in records} == {1.0}
    assert all(r["policy/grad_norm"] < 1e-6 and r["rewards/accuracies"] == 0.5 for r in records)


def test_it_prefers_as_the_data_does(tiny_data, tiny_runs, tmp_path):
    overrides = [f"model.init={tiny_runs['sft']}", f"data.eval={tiny_data / 'pairs.jsonl'}", "optim.lr=1e-3"]
    overrides += ["run.eval_every=6", "checkpoint.every=6", "checkpoint.keep_best=1", "run.export=false"]
    folder = stages.stage("dpo", tiny_data, tmp_path / "run", "run.steps=12", *overrides)
    last = stages.records(folder)[-1]
    assert last["eval/accuracy"] == 1 and last["rewards/accuracies"] == 1 and last["dpo/loss"] < 0.4
    assert last["logps/chosen"] > last["logps/rejected"]
