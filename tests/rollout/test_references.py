"""Rows that no reward can score are refused together, before training, by file and row."""

from __future__ import annotations

import json

import pytest

from aligner.config.sections.data import DataConfig
from aligner.config.sections.rewards import RewardConfig, RewardFunctionConfig
from aligner.data.dataset import PromptDataset
from aligner.data.formats import prompt_rows
from aligner.data.readers import read_rows
from aligner.data.tokenizer import byte_tokenizer, load_tokenizer
from aligner.errors import DataError
from aligner.rewards.composite import RewardPipeline
from aligner.rewards.functions import load_function
from aligner.rollout.references import check_rows


def check(folder, tokenizer) -> str:
    data = DataConfig()
    rows = prompt_rows(read_rows(str(folder), "data.train"), data)
    prompts = PromptDataset(rows, load_tokenizer(tokenizer), data, "data.train")
    rewards = RewardPipeline([(load_function(RewardFunctionConfig(path="math")), 1.0)], RewardConfig(workers=1))
    with pytest.raises(DataError) as caught:
        check_rows(rewards, prompts, len(prompts), print)
    return str(caught.value)


def test_all_unreadable_references_are_in_one_error_on_every_rank(ranks, tmp_path):
    golds = {"a": ["42", "???", "7 dollars"], "b": [None, "5", "\\$36", "..."]}
    (tmp_path / "data").mkdir()
    for name, answers in golds.items():
        lines = [json.dumps({"prompt": "How many?", "answer": answer}) for answer in answers]
        (tmp_path / "data" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = str(tmp_path / "tokenizer")
    byte_tokenizer(tokenizer)
    first, second = ranks.run("tests.rollout.test_references:check", 2, folder=tmp_path / "data", tokenizer=tokenizer)
    assert first == second
    assert "data.train: 3 of 7 rows cannot be scored by reward.functions" in first
    assert "a.jsonl, row 2: no mathematical expression found in the reference answer '???'" in first
    assert "b.jsonl, row 4: no mathematical expression found in the reference answer '...'" in first
