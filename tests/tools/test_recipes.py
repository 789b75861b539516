"""Recipes: all are plans that fit, as the page says; their data is made from published layouts."""

import gzip
import json
from functools import cache

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aligner.__main__ import main
from aligner.config.resolve import compose
from aligner.config.sections.data import DataConfig
from aligner.data.formats import preference_rows, prompt_rows, sft_rows
from aligner.data.readers import read_rows
from aligner.plan.devices import GIB
from aligner.rewards import code_rows
from aligner.tools.published_rows import PUBLISHED
from aligner.tools.recipes import data_name, plan_of, recipes
from aligner.types import Prompt
from benchmarks.recipes import page_rows

RECIPES = recipes()


@cache
def config(name):
    return RECIPES[name].config


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_gpus_as_the_page_says(name):
    recipe, on_page = RECIPES[name], page_rows()[name]
    cfg = config(name)
    assert cfg.run.name == name and name.rpartition("_")[2] == str(cfg.cluster.gpus)
    assert cfg.data.train == f"data/{data_name(cfg)}/train.jsonl" and data_name(cfg) in PUBLISHED
    assert cfg.data.eval == f"data/{data_name(cfg)}/eval.jsonl" and cfg.model.init.startswith("models/")
    prediction = plan_of(cfg, recipe.device)
    assert on_page["GPUs"] == f"{cfg.cluster.gpus} {'GB200' if 'gb200' in name else 'H100'}"
    assert prediction.memory.fits and recipe.rehearsed == (on_page["faults"] == "0")
    assert float(on_page["plan step s"]) == pytest.approx(prediction.step_s, rel=0.1, abs=0.1)
    assert float(on_page["plan GiB"].split()[0]) == pytest.approx(prediction.memory.peak_bytes / GIB, rel=0.1)


def test_the_page_has_all_recipes_and_they_share_parts():
    assert list(page_rows()) == list(RECIPES) and 15 <= len(RECIPES) <= 25
    configs = [config(name) for name in RECIPES]
    assert {data_name(cfg) for cfg in configs} == set(PUBLISHED)
    assert {cfg.cluster.gpus for cfg in configs} == {1, 8, 32, 64, 128, 256, 512}
    assert {cfg.stage.name for cfg in configs} == {"sft", "rm", "dpo", "grpo", "ppo", "distill"}
    assert all("https://" in recipe.published for recipe in RECIPES.values() if recipe.published)


ASKED, DAPO_FIRST = "What is 6 x 7?", "Solve the following math problem step by step. The last line is the answer.\n\n"
CHAT = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "42"}]
WRONG = [CHAT[0], {"role": "assistant", "content": "13"}]
IO = [{"input": "6 7\n", "output": "42\n", "testtype": "stdin", "metadata": {"func_name": None}}]
SECOND = {"description": "Second.", "type": "int, optional", "default": 1}
TOOL = {"name": "times", "description": "Multiplies."}
TOOL |= {"parameters": {"a": {"description": "First.", "type": "int"}, "b": SECOND}}
SOLVED = {"problem": ASKED, "generated_solution": "<think>6 x 7</think>\\boxed{42}", "expected_answer": "42"}
SOLVED |= {"problem_type": "has_answer_extracted", "problem_source": "aops", "generation_model": "DeepSeek-R1"}
SOLVED |= {"pass_rate_72b_tir": "0.9", "inference_mode": "cot", "used_in_kaggle": False}
# dataset -> its files, with rows in the columns that they have on the Hub
FILES = {
    "gsm8k": {
        "main/train-00000-of-00001.parquet": [{"question": ASKED, "answer": "6 x 7 = <<6*7=42>>42\n#### 42"}],
        "main/test-00000-of-00001.parquet": [{"question": "7 x 6?", "answer": "It is 42.\n#### 42"}],
        "socratic/train-00000-of-00001.parquet": [{"question": "no", "answer": "no"}],
    },
    "dapo_math": {
        "data/dapo-math-17k.parquet": 2
        * [
            {
                "data_source": "math_dapo",
                "prompt": [{"content": f'{DAPO_FIRST}{ASKED}\n\nRemember to put your answer on its own line.',
                            "role": "user"}],
                "ability": "MATH",
                "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": "9a9b6eb4"},
            }
        ]
    },
    "openmath": {"data/cot-00000-of-00144.parquet": [SOLVED, SOLVED | {"problem_type": "converted_proof"}],
                 "data/tir-00000-of-00072.parquet": [SOLVED | {"inference_mode": "tir"}]},
    "deepcoder": {
        "primeintellect/train-00000-of-00001.parquet": [
            {"problem": ASKED, "solutions": ["..."], "tests": json.dumps([{"type": "stdin_stdout"} | IO[0]])},
            {"problem": "?", "solutions": [], "tests": "[]"},
        ],
        "lcbv5/train-00000-of-00001.parquet": [
            {
                "problem": "Write times(a, b).",
                "starter_code": "class Solution:\n    def times(self, a, b):\n        ",
                "tests": json.dumps([{"input": "6\n7", "output": "42", "testtype": "functional",
                                      "metadata": {"func_name": "times"}}]),
                "metadata": {"func_name": "times"},
            }
        ],
        "lcbv5/test-00000-of-00001.parquet": [{"problem": "Another.", "starter_code": "", "tests": json.dumps(IO)}],
    },
    "xlam": {"xlam_function_calling_60k.json": [
        {"id": 0, "query": ASKED, "answers": '[{"name": "times", "arguments": {"a": 6, "b": 7}}]',
         "tools": json.dumps([TOOL])}]},
    "tulu3": {"data/train-00000-of-00006.parquet": [{"id": "a", "messages": CHAT, "source": "ai2"}]},
    "tulu3_pairs": {"data/train-00000-of-00002.parquet": [
        {"id": "a", "source": "x", "prompt": ASKED, "chosen": CHAT, "rejected": WRONG},
        {"id": "b", "source": "x", "prompt": ASKED, "chosen": CHAT, "rejected": CHAT}]},
    "skywork_pairs": {"data/train-00000-of-00001.parquet": [{"chosen": CHAT, "rejected": WRONG, "source": "magpie"}]},
    "ultrafeedback": {
        "data/train_prefs-00000-of-00001.parquet": [{"prompt": ASKED, "prompt_id": "a", "chosen": CHAT,
                                                     "rejected": WRONG, "messages": CHAT, "score_chosen": 9.0,
                                                     "score_rejected": 2.0}],
        "data/train_sft-00000-of-00001.parquet": [{"prompt": "no", "prompt_id": "b", "messages": CHAT}],
        "data/test_prefs-00000-of-00001.parquet": [{"prompt": "7 x 6?", "prompt_id": "c"}],
    },
}  # fmt: skip


def made(tmp_path, name, files):
    """Return the rows that `aligner data` writes of these files."""
    for path, rows in files.items():
        file = tmp_path / "hub" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
        else:
            file.write_text(json.dumps(rows))
    assert main(["data", name, str(tmp_path / "hub"), "--out", str(tmp_path / "out")]) == 0
    return [
        list(read_rows(str(path))) if (path := tmp_path / "out" / name / file).stat().st_size else []
        for file in ("train.jsonl", "eval.jsonl")
    ]


@pytest.mark.parametrize("name", FILES)
def test_rows_are_made_of_the_published_layout(tmp_path, name, capsys):
    assert set(FILES) == set(PUBLISHED)
    train, held_out = made(tmp_path, name, FILES[name])
    printed = capsys.readouterr().out
    data = DataConfig(format=compose([f"data={name}"]).data.format)
    if name.endswith("pairs"):
        assert len(preference_rows(train, data)) == 1 and ("1 left out: equal responses" in printed) == (name[0] == "t")
    elif name in ("openmath", "xlam", "tulu3"):
        (row,) = sft_rows(train, data)
        assert row and ("1 left out: no extracted answer" in printed) == (name == "openmath")
    else:
        row, *others = prompt_rows(train, data)
        assert row.prompt[0]["content"].startswith(ASKED) and "Remember" not in row.prompt[0]["content"]
        assert (row.fields.get("answer") == "42") == (name in ("gsm8k", "dapo_math"))
        assert len(held_out) == (name != "dapo_math") and ("1 left out: repeated prompt" in printed) == (
            name == "dapo_math"
        )
        if name == "deepcoder":
            programs = [row, *others, *prompt_rows(held_out, data)]
            tests = [code_rows.tests_of(Prompt(0, (), "", one.fields))[0] for one in programs]
            assert tests[0] == tests[2] and tests[1] == {"call": "times", "args": [6, 7], "expected": 42}
            assert "class Solution" in others[0].prompt[0]["content"] and "1 left out: unreadable tests" in printed


def test_calls_have_schemas(tmp_path):
    (row,), _ = made(tmp_path, "xlam", FILES["xlam"])
    function = row["tools"][0]["function"]
    assert function["parameters"]["required"] == ["a"] and set(function["parameters"]["properties"]) == {"a", "b"}
    assert {each["type"] for each in function["parameters"]["properties"].values()} == {"integer"}
    assert row["messages"][1]["tool_calls"][0]["function"] == {"name": "times", "arguments": {"a": 6, "b": 7}}


def test_some_prompts_are_held_out_with_all_their_rows(tmp_path):
    asked = [[{"role": "user", "content": str(number // 2)}, CHAT[1]] for number in range(1000)]
    path = tmp_path / "hub/data/train-00000-of-00001.jsonl.gz"
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"id": "x", "messages": each, "source": "y"}) + "\n" for each in asked)
    train, held_out = made(tmp_path, "tulu3", {})
    questions = [{row["messages"][0]["content"] for row in rows} for rows in (train, held_out)]
    assert len(train) + len(held_out) == 1000 and 2 <= len(held_out) <= 30 and not questions[0] & questions[1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["gsm9k", "x"], "NAME='gsm9k': expected one of gsm8k, "),
        (["gsm8k"], "FOLDER='': expected the folder of openai/gsm8k: hf download --repo-type dataset openai/gsm8k"),
        (["gsm8k", "."], "expected files main/test-*, test.jsonl there: hf download"),
        (["gsm8k", ".", "--rows", "-1"], "--rows=-1: expected a number >= 0"),
    ],
)
def test_what_is_no_dataset_is_refused(tmp_path, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(tmp_path)
    assert main(["data", *arguments]) == 2 and expected in capsys.readouterr().err


def test_another_layout_is_refused_with_its_row(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text('{"question": "?", "solution": "42"}\n')
    (tmp_path / "test.jsonl").write_text('{"question": "?", "solution": "42"}\n')
    assert main(["data", "gsm8k", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert (
        "test.jsonl, row 1: expected a row of openai/gsm8k, found the columns question, solution (KeyError: 'answer'"
        in err
    )
    assert not (tmp_path / "out/gsm8k/train.jsonl").exists()


def test_missing_data_and_weights_name_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "--ranks", "8", "experiment=qwen3_8b_gsm8k_grpo_8"]) == 2
    assert "Made by: aligner data gsm8k FOLDER" in capsys.readouterr().err
    for name in ("train", "eval"):
        (tmp_path / "data/gsm8k").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"data/gsm8k/{name}.jsonl").write_text("{}\n")
    assert main(["launch", "--ranks", "8", "experiment=qwen3_8b_gsm8k_grpo_8"]) == 2
    assert "hf download Qwen/Qwen3-8B --local-dir models/Qwen/Qwen3-8B" in capsys.readouterr().err


def test_recipes_are_listed_and_described(capsys, monkeypatch):
    monkeypatch.setattr("aligner.tools.recipes.recipes", lambda: {n: RECIPES[n] for n in ("llama3_8b_tulu3_sft_8",)})
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert "llama3_8b_tulu3_sft_8" in out and "None has run on a GPU" in out and " tulu3 " in out
    assert main(["recipes", "llama3_8b_tulu3_sft_8"]) == 0
    out = capsys.readouterr().out
    assert "GSM8K 0.762" in out and "aligner data tulu3 downloads/tulu3" in out
    assert "hf download meta-llama/Llama-3.1-8B --local-dir models/meta-llama/Llama-3.1-8B" in out
    monkeypatch.setattr("aligner.tools.recipes.recipes", lambda: RECIPES)
    assert main(["recipes", "llama3_70b_tulu3_sft_gb200_32"]) == 0
    machine = "--device gb200 --gpus-per-node 4 experiment=llama3_70b_tulu3_sft_gb200_32"
    assert f"plan {machine}\n" in (out := capsys.readouterr().out) and f"rehearse {machine}\n" in out
    assert main(["recipes", "llama4"]) == 2 and "NAME='llama4': expected one of" in capsys.readouterr().err


def test_plan_takes_the_recipes_gpus(capsys):
    assert main(["plan", "experiment=llama3_8b_tulu3_sft_8", "cluster.gpus=16"]) == 0
    assert "sft on 16 x h100" in capsys.readouterr().out
    assert main(["plan", "--gpus", "4", "experiment=llama3_8b_tulu3_sft_8"]) in (0, 1)
    assert "sft on 4 x h100" in capsys.readouterr().out


def test_two_layers_of_a_recipe_are_rehearsed(capsys):
    fewer = ["model.num_layers=2", "batch.sequences=8", "data.max_tokens=256"]
    assert main(["rehearse", "--ranks", "0", "experiment=llama3_8b_tulu3_dpo_8", *fewer]) == 0
    assert "no fault" in capsys.readouterr().out
