"""`aligner eval` on finished toy runs: answers, held-out loss, pairs, and what it says where there is nothing to do."""

import json
import math
from itertools import combinations
from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from aligner.__main__ import main
from aligner.config.freeze import freeze, load_frozen
from aligner.config.resolve import compose, compose_over
from aligner.errors import ConfigError, DataError
from aligner.run.metrics import read_jsonl
from aligner.tools.evaluate import evaluate
from aligner.tools.evaluate_judges import kappa
from tests import stages
from tests.servers import Server

VOWELS = "eval.functions=[{path: tests/assets/tiny_rewards.py:vowels}]"


@pytest.fixture
def folder(tmp_path, tiny_runs, monkeypatch):
    """folder(name) -> a copy of a finished run without its weights' history, to write into."""
    monkeypatch.chdir(stages.ROOT)

    def copy(name):
        target = tmp_path / name
        target.mkdir()
        (target / "config.yaml").write_text((tiny_runs[name] / "config.yaml").read_text())
        (target / "hf").symlink_to(tiny_runs[name] / "hf")
        return target

    return copy


def run(folder, *more):
    cfg = compose_over(load_frozen(folder), [f"run.dir={folder}", "logging.samples_shown=0", *more])
    return evaluate(cfg), json.loads((folder / "eval.json").read_text()), read_jsonl(folder / "eval_samples.jsonl")


def test_answers_are_kept_with_their_scores(folder, tiny_data):
    sft = folder("sft")
    overrides = ["eval.prompts=6", "eval.samples=2", "eval.temperature=1.0", "eval.full_score=0.25", VOWELS]
    overrides += ["sampling.max_response_tokens=4", f"data.eval={tiny_data / 'train.jsonl'}"]
    actual, written, samples = run(sft, *overrides)
    assert len(samples) == 12 and written["prompts"] == 6
    assert actual["eval/reward"] == pytest.approx(sum(s["scores"]["vowels"] for s in samples) / 12)
    assert actual["eval/vowels/mean"] == pytest.approx(actual["eval/reward"])
    assert actual["eval/accuracy"] == pytest.approx(sum(s["correct"] for s in samples) / 12)
    assert all(s["correct"] == (s["scores"]["vowels"] >= 0.25) for s in samples)
    assert samples[0]["columns"] == {"completion": "a"} and samples[0]["prompt"] == samples[1]["prompt"] == "say a:"
    for name, (low, high) in written["intervals"].items():
        assert low <= actual[name] <= high
    assert "bootstrap resamples of prompts" in written["interval_method"]


def test_of_several_answers_pass_at_k_and_the_majority_are_measured(folder, tiny_data):
    """By prompt, from the written samples; with intervals that draw prompts."""
    overrides = ["eval.prompts=6", "eval.samples=5", "eval.temperature=5", "eval.full_score=0.25", VOWELS]
    overrides += ["sampling.max_response_tokens=2", f"data.eval={tiny_data / 'train.jsonl'}"]
    actual, written, samples = run(folder("sft"), *overrides)
    groups = [samples[i : i + 5] for i in range(0, 30, 5)]
    for k, name in ((1, "accuracy"), (2, "pass_at_2"), (4, "pass_at_4"), (5, "pass_at_k")):
        drawn = [mean(any(s["correct"] for s in some) for some in combinations(group, k)) for group in groups]
        assert actual[f"eval/{name}"] == pytest.approx(mean(drawn)) and f"eval/{name}" in written["intervals"]
    assert "eval/pass_at_8" not in actual and actual["eval/accuracy"] < actual["eval/pass_at_2"] < 1
    low, high = written["intervals"]["eval/maj_at_k"]
    assert 0 <= low <= actual["eval/maj_at_k"] <= high <= 1


@pytest.mark.slow
def test_references_that_cannot_be_read_are_reported_before_anything_is_generated(folder, tmp_path):
    rows = [{"prompt": "say a:", "completion": answer} for answer in ("1", "???", "3 apples")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    math_of = "eval.functions=[{path: math, args: {field: completion}}]"
    with pytest.raises(
        DataError, match=r"data.eval: 1 of 3 rows cannot be scored .*rows.jsonl, row 2: no mathematical"
    ):
        run(folder("sft"), math_of, f"data.eval={tmp_path / 'rows.jsonl'}")


@torch.no_grad()
def test_the_loss_of_held_out_answers_is_transformers(folder, tiny_data):
    sft = folder("sft")
    actual, written, samples = run(sft, f"data.eval={tiny_data / 'eval.jsonl'}")
    model = AutoModelForCausalLM.from_pretrained(sft / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(sft / "hf")
    total, count = 0.0, 0
    for row in read_jsonl(tiny_data / "eval.jsonl"):
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = torch.tensor([prompt + tokenizer(row["completion"])["input_ids"] + [tokenizer.eos_token_id]])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        learned = ids.shape[1] - len(prompt)
        total, count = total + float(model(ids, labels=labels).loss) * learned, count + learned
    assert actual["eval/loss"] == pytest.approx(total / count, rel=1e-4)
    assert actual["eval/perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert written["rows"] == len(samples) == 8 and sum(s["tokens"] for s in samples) == count


def test_samples_of_an_evaluation_belong_to_no_step_and_have_no_advantage(folder, tiny_data, capsys):
    sft = folder("sft")
    overrides = ["eval.prompts=2", VOWELS, "sampling.max_response_tokens=4", "logging.samples_shown=2"]
    _, _, samples = run(sft, *overrides, f"data.eval={tiny_data / 'train.jsonl'}")
    out, err = capsys.readouterr()
    assert err.startswith("samples ") and "step" not in err and "advantage" not in err
    assert [sample["advantage"] for sample in samples] == [None, None]
    assert f"written: {sft / 'eval.json'}, eval_samples.jsonl\n" in out


@torch.no_grad()
def test_pairs_are_ordered_as_by_transformers(folder, tiny_data):
    rm = folder("rm")
    actual, written, samples = run(rm, f"data.eval={tiny_data / 'pairs.jsonl'}", "eval.prompts=10")
    model = AutoModelForSequenceClassification.from_pretrained(rm / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(rm / "hf")

    def score(text):
        return float(model(torch.tensor([tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]])).logits)

    pairs = read_jsonl(tiny_data / "pairs.jsonl")[:10]
    chosen, rejected = ([score(pair["prompt"] + pair[name]) for pair in pairs] for name in ("chosen", "rejected"))
    assert [s["chosen_score"] for s in samples] == pytest.approx(chosen, abs=1e-4)
    assert [s["rejected_score"] for s in samples] == pytest.approx(rejected, abs=1e-4)
    assert actual["eval/accuracy"] == sum(a > b for a, b in zip(chosen, rejected, strict=True)) / 10
    assert written["pairs"] == 10


def test_judges_are_compared_with_labels(folder, tiny_data, tmp_path):
    """Three yes of a judge and three labels, two of both, of six responses; a server refuses a seventh. Who agrees four
    times, half of the time by chance, has a kappa of (4/6 - 1/2) / (1 - 1/2). The run's own model says nothing."""

    def says(body):
        response, criterion = body["messages"][0]["content"].split("|")
        verdict = {"choices": [{"message": {"content": "yes" if criterion in response else "no"}}]}
        return (400, {}) if "?" in response else (200, verdict)

    rubric = [{"criterion": "a", "points": 2}, {"criterion": "b", "points": 1}]
    labelled = [("ab", True), ("ab", True), ("b", True), ("a", False), ("b", False), ("b", False), ("?", True)]
    rows = [{"prompt": "q", "completion": text, "label": label, "rubric": rubric} for text, label in labelled]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = Server(says).start()
    listed = (
        f"kind: rubric, question: '{{response}}|{{criterion}}', endpoint: {{base_url: '{server.base_url}', model: m}}"
    )
    judges = f"reward.judges=[{{name: listed, {listed}}}, {{name: own, question: '{{response}}', max_tokens: 3}}]"
    overrides = ["stage.name=grpo", "eval.generate=false", f"data.eval={tmp_path / 'rows.jsonl'}", judges]
    actual, written, records = run(folder("sft"), *overrides)
    server.close()
    assert len(server.bodies) == 14 and written["rows"] == 7
    assert actual["eval/listed/answered"] == pytest.approx(6 / 7) and actual["eval/own/answered"] == 0
    assert actual["eval/listed/accuracy"] == pytest.approx(4 / 6) and "eval/own/accuracy" not in actual
    assert actual["eval/listed/kappa"] == pytest.approx(1 / 3)
    low, high = written["intervals"]["eval/listed/kappa"]
    assert -1 <= low < 0 < 1 / 3 < high <= 1
    assert [one["scores"]["listed"] for one in records[1:4]] == [1, pytest.approx(1 / 3), pytest.approx(2 / 3)]
    assert [kappa((4, 2, 2, both)) for both in (2, 1, 0)] == [1, 0, -1] and math.isnan(kappa((4, 4, 4, 4)))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    with pytest.raises(DataError, match=r"data.eval=.*expected responses with label true and false, found one"):
        run(tmp_path / "sft", *overrides)
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0] | {"rubric": "a"}))
    with pytest.raises(DataError, match=r"data.eval: .*rows.jsonl, row 1: expected a list of \{criterion: text"):
        run(tmp_path / "sft", *overrides)
    pairs = "reward.judges=[{name: better, kind: pairwise, question: '{first}{second}'}]"
    with pytest.raises(ConfigError, match=r"reward.judges.better.kind='pairwise': expected grade or rubric"):
        run(tmp_path / "sft", *overrides[:-1], pairs)


def test_what_is_missing_is_named(folder, tiny_data, capsys, tmp_path):
    rm, sft = folder("rm"), folder("sft")
    assert main(["eval", f"run.dir={tmp_path / 'nothing'}"]) == 2
    assert "nothing': expected a finished run" in capsys.readouterr().err
    assert main(["chat", f"run.dir={rm}"]) == 2
    assert "expected a model that answers; this one is a reward model" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"data.eval=''"):
        run(sft, "data.eval=")
    with pytest.raises(ConfigError, match=r"eval.functions=\[\].*stage ppo with reward.model alone"):
        run(sft, "stage.name=ppo", f"data.eval={tiny_data / 'eval.jsonl'}")


def test_suites_are_refused_unless_they_are_of_the_run(folder, capsys):
    """Whose stage runs them."""
    tasks = ["eval.tasks=[gsm8k]", "eval.tasks_chat=true"]
    there = folder("sft")
    freeze(compose(["stage=grpo", *tasks]), there)
    for key in tasks:
        assert main(["eval", str(there), key]) == 2
        assert "expected no value with `aligner eval`, which" in capsys.readouterr().err
    assert main(["eval", str(there)]) == 2
    assert "tasks" not in capsys.readouterr().err  # but that there are no rows
