"""GSM8K's files become data for the stages: splits that share nothing, pairs of one problem, and three runs on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aligner.config.resolve import compose
from aligner.data.formats import preference_rows, prompt_rows, sft_rows
from aligner.data.readers import read_rows
from aligner.data.tokenizer import load_tokenizer
from aligner.run.metrics import read_jsonl
from examples import gsm8k
from tests import stages

ROOT = Path(__file__).parents[2]
FILES = (gsm8k.TRAIN, gsm8k.TEST, gsm8k.SOLUTIONS)
SMALL = [
    *("run.steps=2", "run.eval_every=2", "?data.max_tokens=128", "?data.max_prompt_tokens=64", "logging=quiet"),
    *("eval.prompts=4", "?batch.sequences=4", "model.num_layers=1", "model.hidden_size=32", "model.num_heads=2"),
    *("model.num_kv_heads=2", "model.ffn_hidden_size=48", "cluster.threads=1", "?reward.workers=1"),
    *("?batch.prompts=2", "?batch.group=4", "?sampling.max_response_tokens=8"),
]


def problem(a: int, b: int, thing: str) -> dict:
    total = a + b
    worked = f"There are {a}+{b} = <<{a}+{b}={total}>>{total} {thing}.\n#### {total:,}"
    return {"question": f"Kim has {a} {thing} and finds {b} more. How many {thing}?", "answer": worked}


def labelled(row: dict, answers: dict[str, tuple[int, bool]]) -> dict:
    """A row of the solutions file: by model, the number it answered and whether that is right."""
    models = {
        name: {"is_correct": right, "solution": f"{name} thinks <<1+1=2>>2\nA: {number}"}
        for name, (number, right) in answers.items()
    }
    return {"question": row["question"], "ground_truth": row["answer"].replace("####", "A:")} | models


def write(folder: Path, name: str, rows: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_source(folder: Path, thing: str = "quokkas", train_thing: str = "apples") -> Path:
    test = [problem(2000 + i, i, thing) for i in range(40)]
    # one right and two wrong answers; the last two problems have answers of one kind only
    solutions = [
        labelled(r, {"m1": (i, False), "m2": (2000 + 2 * i, True), "m3": (9, False)}) for i, r in enumerate(test)
    ]
    solutions[-2] = labelled(test[-2], {"m1": (1, True), "m2": (1, True)})
    solutions[-1] = labelled(test[-1], {"m1": (1, False), "m2": (2, False)})
    write(folder, gsm8k.TRAIN, [problem(i, 7 * i, train_thing) for i in range(60)])
    write(folder, gsm8k.TEST, test)
    write(folder, gsm8k.SOLUTIONS, solutions)
    return folder


def every_pair(source: Path) -> list[dict]:
    return [pair for part in gsm8k.read(str(source)).pairs.values() for pair in part]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gsm8k")
    source = make_source(folder / "source")
    assert gsm8k.main([str(source), "--out", str(folder / "data"), "--vocab-size", "320"]) == 0
    return folder / "data"


def test_pairs_are_split_by_problem_and_lose_none(made):
    train, test = (read_jsonl(made / f"pairs_{name}.jsonl") for name in ("train", "test"))
    problems, others = ({pair["prompt"] for pair in pairs} for pairs in (train, test))
    assert train and test and not problems & others
    assert len(problems | others) == 38 and len(train) + len(test) == 2 * 38


def test_pairs_are_a_correct_and_an_incorrect_solution_of_one_problem(made):
    source = {gsm8k.prompt(r["question"]): r for r in read_jsonl(made.parent / "source" / gsm8k.SOLUTIONS)}
    for name in ("train", "test"):
        for pair in read_jsonl(made / f"pairs_{name}.jsonl"):
            row = source[pair["prompt"]]
            for kind, right in (("chosen", True), ("rejected", False)):
                solution = row[pair[f"{kind}_by"]]
                assert solution["is_correct"] is right
                # in the form of the training answers, otherwise as it was
                assert pair[kind] == solution["solution"].replace("\nA: ", "\n#### ") != solution["solution"]


def test_the_same_text_is_never_both_and_no_pair_comes_twice(tmp_path):
    source = make_source(tmp_path)
    row = {**{f"m{i}": {"is_correct": i % 2 == 0, "solution": "same\nA: 1"} for i in range(3)}}
    row["m4"] = row["m5"] = {"is_correct": False, "solution": "other\nA: 2"}
    write(source, gsm8k.SOLUTIONS, [{"question": f"q{i}"} | row for i in range(20)])
    actual = every_pair(source)
    assert len(actual) == 20 and {(p["chosen"], p["rejected"]) for p in actual} == {("same\n#### 1", "other\n#### 2")}


def test_an_unfinished_solution_stays_as_it_is(tmp_path):
    source = make_source(tmp_path)
    texts = {True: "A: 3 is a start\nA: 4", False: "A: 3 is a start\nA: 4\nand then 33333"}
    row = {str(correct): {"is_correct": correct, "solution": text} for correct, text in texts.items()}
    write(source, gsm8k.SOLUTIONS, [{"question": f"q{i}"} | row for i in range(20)])
    pair = every_pair(source)[0]
    assert pair["chosen"] == "A: 3 is a start\n#### 4" and pair["rejected"] == texts[False]


def test_the_tokenizer_saw_the_train_split_alone(made, tmp_path):
    def tokenizer(**things) -> str:
        source = make_source(tmp_path / "source", **things)
        gsm8k.prepare(str(source), str(tmp_path / "out"), 320)
        return (tmp_path / "out" / "tokenizer" / "tokenizer.json").read_text()

    reference = (made / "tokenizer" / "tokenizer.json").read_text()
    assert tokenizer(thing="wombats") == reference
    assert tokenizer(train_thing="wombats") != reference
    loaded = load_tokenizer(str(made / "tokenizer"))
    assert len(loaded.tokenize("2048")) == 4  # each digit by itself


def test_the_stages_read_what_was_written(made):
    def rows(name, experiment):
        path = str(made / name)
        return read_rows(path), compose([f"experiment={experiment}", f"data.train='{path}'"]).data

    sft = sft_rows(*rows("train.jsonl", "gsm8k_sft"))
    assert len(sft) == 60 and sft[59].prompt == "Kim has 59 apples and finds 413 more. How many apples?\n"
    assert sft[59].completion.endswith("<<59+413=472>>472 apples.\n#### 472")
    prompts = prompt_rows(*rows("test.jsonl", "gsm8k_grpo"))
    assert prompts[3].fields["answer"] == "#### 2,006" and len(prompts) == 40
    assert preference_rows(*rows("pairs_test.jsonl", "gsm8k_rm"))


def replace_first(name, change):
    def damage(folder: Path) -> None:
        rows = read_jsonl(folder / name)
        write(folder, name, [change(rows[0]), *rows[1:]])

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / gsm8k.SOLUTIONS).unlink(), ["SOURCE_FOLDER", "no example_model_solutions.jsonl"]),
        (lambda f: [(f / name).unlink() for name in FILES[:2]], ["no train.jsonl and no test.jsonl"]),
        (lambda f: (f / gsm8k.TEST).write_text('{"question": "q"\n'), ["test.jsonl:1", "not valid JSON"]),
        (lambda f: (f / gsm8k.TRAIN).write_text(""), ["train.jsonl", "empty"]),
        (lambda f: (f / gsm8k.TEST).write_text((f / gsm8k.TRAIN).read_text()), ["in both", "found 60", "Kim has 0"]),
        (replace_first(gsm8k.TRAIN, lambda r: {"q": r["question"]}), ["train.jsonl, row 1", "`question`", "q (str)"]),
        (replace_first(gsm8k.TEST, lambda r: r | {"answer": 42}), ["test.jsonl, row 1", "`answer`", "answer (int)"]),
        (replace_first(gsm8k.TRAIN, lambda r: r | {"answer": "it is 42"}), ["train.jsonl, row 1", "####", "it is 42"]),
        (replace_first(gsm8k.SOLUTIONS, lambda r: {"question": "q"}), ["solutions.jsonl, row 1", "is_correct"]),
        (
            replace_first(gsm8k.SOLUTIONS, lambda r: r | {"m1": {"is_correct": "no", "solution": "x"}}),
            ["solutions.jsonl, row 1", "`m1`", "is_correct"],
        ),
        (
            lambda f: write(f, gsm8k.SOLUTIONS, [{"question": "q", "m": {"is_correct": True, "solution": "x"}}]),
            ["solutions.jsonl: expected problems with a correct and an incorrect solution", "pairs_train is empty"],
        ),
    ],
)
def test_errors_name_file_and_column_and_write_nothing(tmp_path, capsys, damage, words):
    source = make_source(tmp_path / "source")
    damage(source)
    assert gsm8k.main([str(source), "--out", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and all(word in shown for word in words), shown
    assert not (tmp_path / "out").exists()


def test_wrong_arguments_are_refused(tmp_path, capsys):
    source = str(make_source(tmp_path / "source"))
    (tmp_path / "file").write_text("")
    for arguments, words in (
        ([str(tmp_path / "nowhere")], ["SOURCE_FOLDER", "nowhere", "expected a folder"]),
        ([source, "--out", str(tmp_path / "file")], ["--out", "a folder that can be written"]),
        ([source, "--out", str(tmp_path / "out"), "--vocab-size", "100"], ["vocab_size=100", "261"]),
    ):
        assert gsm8k.main(arguments) == 2
        shown = capsys.readouterr().err
        assert all(word in shown for word in words), shown


@pytest.mark.slow
def test_sft_reward_model_and_grpo_run_on_the_data(made, tmp_path, monkeypatch):
    """Two steps each, the first as a user types it: other paths and sizes are overrides, the rest is the experiment's.
    The other two need not import everything once more."""
    monkeypatch.chdir(tmp_path)
    data = {name: f"'{made / name}.jsonl'" for name in ("train", "test", "pairs_train", "pairs_test")}

    def run(stage: str, train: str, held_out: str, *overrides: str) -> list[dict]:
        settings = [f"experiment=gsm8k_{stage}", f"run.dir='{tmp_path / stage}'"]
        settings += [f"data.train={data[train]}", f"data.eval={data[held_out]}", *SMALL, *overrides]
        if stage == "sft":
            command = [sys.executable, "-m", "aligner", "run", *settings]
            environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
        else:
            stages.run(settings)
        assert (tmp_path / stage / "DONE").exists()
        return read_jsonl(tmp_path / stage / "metrics.jsonl")

    sft = run("sft", "train", "test", f"model.tokenizer='{made / 'tokenizer'}'")
    assert sft[0]["step"] == 0 and sft[-1]["step"] == 2
    assert sft[-1]["eval/loss"] < sft[0]["eval/loss"]  # a large first step already leaves the uniform distribution
    start = f"model.init='{tmp_path / 'sft'}'"
    rm = run("rm", "pairs_train", "pairs_test", start)
    assert 0 <= rm[-1]["eval/accuracy"] <= 1 and rm[-1]["step"] == 2
    grpo = run("grpo", "train", "test", start)
    assert [record["step"] for record in grpo] == [0, 1, 2]
    assert all(record["reward/degenerate_groups"] == 1 for record in grpo[1:])
    texts = [record["text"] for record in read_jsonl(tmp_path / "grpo" / "alarms.jsonl")]
    assert len([text for text in texts if "all groups are degenerate" in text]) == 1
