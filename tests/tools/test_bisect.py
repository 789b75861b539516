"""What is planted into the second of two runs is named: step, part, sample, token, tensor, and what was computed by."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from aligner.__main__ import main
from aligner.errors import DataError
from aligner.rollout.record import read_header
from aligner.run.rows import file_name
from aligner.tools.bisect import _row, _sample, bisect
from aligner.tools.replay import prepare
from tests import stages

BARE = ["run.steps=3", "run.export=false", "checkpoint.final=false", "debug.record=3"]
GRPO = ["algorithm.old_logprobs=recompute", "batch.minibatch_samples=16"]


def told(a, b):
    return list(bisect(a, b))


@pytest.fixture(scope="module")
def grpo(tiny_data, tmp_path_factory):
    return stages.stage("grpo", tiny_data, tmp_path_factory.mktemp("bisect") / "grpo", *BARE, *GRPO)


@pytest.fixture(scope="module")
def sft(tiny_data, tmp_path_factory):
    return stages.stage("sft", tiny_data, tmp_path_factory.mktemp("bisect") / "sft", *BARE)


def test_runs_that_are_the_same(tiny_data, tmp_path, grpo, capsys):
    again = stages.stage("grpo", tiny_data, tmp_path / "again", *BARE, *GRPO, "run.steps=2", "logging.samples_shown=1")
    assert told(grpo, again)[0] == "the same: steps 1 to 2"
    assert main(["bisect", str(grpo), str(grpo)]) == 0 and capsys.readouterr().out.endswith(
        "\nthe same: steps 1 to 3\n"
    )


def recorded(run, step, folder="rollouts"):
    return load_file(run / folder / f"step-{step:08d}.safetensors")


def test_a_changed_kernel_is_located(tiny_data, tmp_path, grpo, monkeypatch):
    """From step 2 on the trainer gives one token of the vocabulary another logprob."""
    from aligner.roles import policy
    from aligner.rollout.source import RolloutSource

    there = recorded(grpo, 2)
    answers = there["response_mask"].bool()
    letter = there["tokens"][answers][5]
    kernel, take, now = policy.token_logprobs, RolloutSource.next, [0]

    def changed(logits, targets, **options):
        logprobs, entropy = kernel(logits, targets, **options)
        return logprobs * (1 + 1e-3 * (targets == letter) * (now[0] == 2)), entropy

    def counted(self, step):
        actual = take(self, step)
        now[0] = step
        return actual

    monkeypatch.setattr(policy, "token_logprobs", changed)
    monkeypatch.setattr(RolloutSource, "next", counted)
    other = stages.stage("grpo", tiny_data, tmp_path / "other", *BARE, *GRPO)
    first, second = told(grpo, other)
    assert re.match(r"differ at step 2 of 1 to 3: policy/loss \S+ \| \S+$", first)
    row, token = (answers & (there["tokens"] == letter)).nonzero()[0].tolist()
    name = f"sample {int(there['sample_index'][row])} of prompt {int(there['group'][row])} (row "
    assert second.startswith(name) and f"), token {token} (of the answer): old_logprobs -" in second
    old, new = map(float, second.rpartition("old_logprobs ")[2].split(" | "))
    assert old == float(there["trained/old_logprobs"][row, token]) and new / old == pytest.approx(1 + 1e-3)


SLOT = 3


@pytest.fixture(scope="module")
def rewarded(grpo, tiny_data, tmp_path_factory):
    """Its reward gives more for a prompt of step 2."""
    root = tmp_path_factory.mktemp("rewarded")
    asked = read_header(grpo / "rollouts" / file_name(2)).prompts[SLOT]["text"]
    (root / "mine.py").write_text(
        "def vowels(samples):\n"
        "    found = [sum(c in 'aeiouAEIOU' for c in s.response[:4]) / 4 for s in samples]\n"
        f"    return [r + 0.5 * (s.prompt.text == {asked!r}) for r, s in zip(found, samples)]\n"
    )
    own = f"reward.functions=[{{path: {root / 'mine.py'}:vowels}}]"
    return stages.stage("grpo", tiny_data, root / "run", *BARE, *GRPO, own)


def test_a_changed_reward_is_located(grpo, rewarded):
    first, *others, last = told(grpo, rewarded)
    assert first == "differ at step 2 of 1 to 3: rewards"
    assert any(re.match(r"also different: content of reward.functions \S+ \| \S+$", line) for line in others)
    match = re.fullmatch(rf"sample 0 of prompt {SLOT} \(row \d+ of the data\): vowels (\S+) \| (\S+)", last)
    assert float(match[2]) - float(match[1]) == 0.5


def test_replays_record_what_the_runs_have_not(grpo, rewarded, tmp_path):
    runs = [Path(shutil.copytree(run, tmp_path / f"{i}")) for i, run in enumerate((grpo, rewarded))]
    expected = told(*runs)
    for run in runs:
        shutil.rmtree(run / "rollouts")
    first, *_, hint = told(*runs)
    assert first == expected[0] and f"aligner replay {runs[1]} --step 2. Then bisect" in hint
    again = [stages.execute(prepare(run, 2).cfg) for run in runs]
    assert told(*again)[-1] == expected[-1]


def test_a_row_of_the_data(tiny_data, tmp_path, sft):
    lines = (tiny_data / "train.jsonl").read_text().splitlines()
    row = json.loads(lines[7])
    assert row["completion"] == "h"
    lines[7] = json.dumps(row | {"completion": "i"})
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    other = stages.stage("sft", tiny_data, tmp_path / "run", *BARE, f"data.train={tmp_path / 'train.jsonl'}")
    first, *others, last = told(sft, other)
    batches = [recorded(sft, step, "rows") for step in (1, 2, 3)]
    tokenizer = AutoTokenizer.from_pretrained(tiny_data / "tokenizer")
    asked, letters = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("say h:", "hi"))
    same = [(b["tokens"][:, : len(asked)] == torch.tensor(asked)).all(1) for b in batches]
    step = next(i for i, rows in enumerate(same, 1) if rows.any())
    assert first == f"differ at step {step} of 1 to 3: rows"
    assert any(line.startswith("also different: content of data.train") for line in others)
    row, ids = int(same[step - 1].nonzero()), [f"id {letter}, mask 1" for letter in letters]
    assert last == f"1 of 16 rows differ: row {row} of the batch, token {len(asked)}: {ids[0]} | {ids[1]}"


def test_another_seed_is_located(tiny_data, tmp_path, sft):
    other = stages.stage("sft", tiny_data, tmp_path / "run", *BARE, "seed=1")
    first, second = told(sft, other)[:2]
    tensor = "policy/embedding.word_embeddings.weight"
    assert first == f"differ at step 1 of 1 to 3: the weights before it, first of 9 tensors {tensor}"
    assert second == "also different: seed 0 | 1"


def test_padding_and_what_one_has_alone_are_no_difference(grpo, tmp_path):
    """Rollouts are as wide as their longest sample, and padded with a token that need not be 0."""
    paths = [grpo / "rollouts" / file_name(2), tmp_path / "other.safetensors"]
    with safe_open(paths[0], framework="pt") as file:
        metadata = file.metadata()
    other = recorded(grpo, 2)
    other["tokens"] = torch.nn.functional.pad(other["tokens"], (0, 3), value=9)
    other["rollout_logprobs"] = torch.nn.functional.pad(other["rollout_logprobs"], (0, 3))
    other["scores/components/mine"] = other.pop("scores/components/vowels")
    save_file(other, paths[1], metadata)
    assert _sample(paths) == ""
    other["valid"][-1] = False
    save_file(other, paths[1], metadata)
    assert re.fullmatch(r"sample \d+ of prompt \d+ \(row \d+ of the data\): valid True \| False", _sample(paths))


def test_a_changed_label_is_located(sft, tmp_path):
    paths, rows = [tmp_path / name for name in "abc"], recorded(sft, 1, "rows")
    for path, label in zip(paths, (0.0, 0.0, 1.0), strict=True):
        save_file(rows | {"labels": torch.full((len(rows["tokens"]),), label)}, path)
    assert _row(paths[:2]) == "" and _row(paths[1:]) == "labels or the number of rows differ"


def test_runs_that_cannot_be_compared(tmp_path, sft, tiny_data):
    with pytest.raises(DataError, match=r"steps.jsonl: expected a file with a record per step"):
        told(sft, tmp_path)
    short = stages.stage("sft", tiny_data, tmp_path / "run", *BARE, "run.steps=0")
    with pytest.raises(DataError, match="expected runs that have a step in common"):
        told(sft, short)
    broken = Path(shutil.copytree(sft, tmp_path / "broken"))
    stages.stage("sft", tiny_data, tmp_path / "other", *BARE, "optim.lr=1e-3")
    (broken / "rows" / file_name(1)).write_bytes(b"no recording")
    with pytest.raises(DataError, match=r"step-00000001\.safetensors: cannot be read as a recording"):
        told(broken, tmp_path / "other")
