"""The recipes of docs/how-to/sample.md at toy size: SteerLM, Constitutional AI."""

import json
import random
import re

import pytest

from tests import stages

QUESTION = 'data.prompt_template="{question}"'


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def vowels(text: str) -> float:
    return float(sum(c in "aeiou" for c in text))


@pytest.mark.slow
def test_steerlm_steers(tiny_data, tmp_path):
    """Answers are random letters, the attribute is how many of them are vowels. Asked for few (for fewer still there
    are not enough rows to learn from) and for many, the policy answered with a share of 0.26 and 0.69."""
    draw = random.Random(0)
    words = ["".join(draw.choice("aeioubcdfg") for _ in range(4)) for _ in range(64)]
    data = [
        {"question": f"say {stages.LETTERS[i // 2]}:", "completion": w, "vowels": vowels(w)}
        for i, w in enumerate(words)
    ]
    train = f"data.train={stages.write_jsonl(tmp_path / 'rated.jsonl', data)}"
    whole = "batch.micro_batch_samples=16"
    sft = stages.stage("sft", tiny_data, tmp_path / "sft", train, QUESTION, "run.steps=60", whole)

    regression = ["algorithm.reward_loss={kind: regression, attributes: [vowels]}", "run.steps=120"]
    regression += ["batch.sequences=16", whole]
    rm = stages.stage("rm", tiny_data, tmp_path / "rm", train, QUESTION, f"model.init={sft}", *regression)

    sampling = [f"model.init={sft}", f"reward.model={rm}", "reward.functions=[]", "reward.model_standardize=false"]
    sampling += ["stage.sample.best=0", "sampling.max_response_tokens=6", "batch.group=16"]
    sampled = stages.stage("sample", tiny_data, tmp_path / "sampled", train, QUESTION, *sampling) / "sampled/best.jsonl"

    reports = ["data.prompt_template='{scores[model]:+.0f} {question}'", f"data.train={sampled}"]
    overrides = [f"model.init={sft}", "run.steps=320", "optim.lr=1e-2", whole]
    steered = stages.stage("sft", tiny_data, tmp_path / "steered", *reports, *overrides)
    results = {}
    for wanted in ("-1", "+2"):
        asked = [
            f"data.prompt_template='{wanted} {{question}}'",
            f"model.init={steered}",
            "sampling.max_response_tokens=6",
        ]
        run = stages.stage("sample", tiny_data, tmp_path / f"asked{wanted}", train, *asked)
        answers = rows(run / "sampled/all.jsonl")
        results[wanted] = sum(one["scores"]["vowels"] for one in answers) / len(answers)
    assert results["+2"] > results["-1"] + 0.3, results


@pytest.mark.slow
def test_constitutional_ai_goes_from_drafts_to_pairs(tiny_data, tiny_runs, tmp_path):
    """A model of letters has no principles: what is tested is that each step asks for what the one before has found."""
    start, folder = f"model.init={tiny_runs['sft']}", {}
    data = stages.write_jsonl(tmp_path / "q.jsonl", [{"question": f"say {c}:"} for c in stages.LETTERS])
    common = [start, "sampling.temperature=2", "batch.group=1", "batch.prompts=32", "stage.sample.unfinished=true"]
    common += ["data.max_prompt_tokens=56", "data.max_tokens=60"]

    def step(name: str, train: object, template: str, text: str = "."):
        """A run whose answers are the column `name`; its rows with an answer that matches `text`."""
        kept = [f"reward.functions=[{{path: format, args: {{pattern: '{text}'}}}}]", "stage.sample.reward_above=0"]
        overrides = [f"data.train={train}", f"data.prompt_template='{template}'", f"stage.sample.column={name}"]
        folder[name] = stages.stage("sample", tiny_data, tmp_path / name, *common, *kept, *overrides)
        return folder[name] / "sampled/best.jsonl"

    drafts = step("draft", data, "{question}")
    critiques = step("critique", drafts, "{question}{draft}?")
    revisions = step("revision", critiques, "{question}{draft}?{critique}!")
    for row in rows(revisions):
        assert row["prompt"] == f"{row['question']}{row['draft']}?{row['critique']}!" and row["revision"]
    overrides = [start, f"data.train={revisions}", QUESTION, 'data.completion_template="{revision}"', "run.steps=1"]
    assert (stages.stage("sft", tiny_data, tmp_path / "sft", *overrides, "batch.sequences=4") / "DONE").exists()

    better = "^[^a-m]"  # stands for "the second"
    second = step("verdict", revisions, "{question}1{draft}2{revision}=", better)
    judged = {row["row"]: row["verdict"] for row in rows(folder["verdict"] / "sampled/all.jsonl")}
    assert 0 < len(rows(second)) < len(judged)
    kept = [i for i, text in judged.items() if text.strip() and re.search(better, text)]
    assert [row["row"] for row in rows(second)] == kept
    both = step("swapped", second, "{question}1{revision}2{draft}=")
    columns = "data.columns={prompt: question, chosen: revision, rejected: draft}"
    overrides = [
        start,
        f"data.train={both}",
        columns,
        "run.steps=1",
        "batch.sequences=2",
        "batch.micro_batch_samples=2",
    ]
    assert (stages.stage("dpo", tiny_data, tmp_path / "dpo", *overrides) / "DONE").exists()
