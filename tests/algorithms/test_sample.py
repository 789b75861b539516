"""Stage sample: the same files from any layout and after any interruption, and files that other stages train on."""

import json

import pytest

from aligner.errors import CheckpointError
from aligner.rollout.samples_file import SamplesFile
from tests import stages
from tests.stages import PowerCut

ABOVE = "stage.sample.reward_above=0"  # also labels


@pytest.fixture(scope="module")
def whole(tiny_data, tiny_runs, tmp_path_factory):
    """An uninterrupted run: 32 prompts in batches of 12, 12 and 8."""
    run = tmp_path_factory.mktemp("sample") / "whole"
    return stages.stage("sample", tiny_data, run, f"model.init={tiny_runs['sft']}", ABOVE)


def content(run):
    return {path.name: path.read_bytes() for path in sorted((run / "sampled").iterdir())}


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_sample_is_there_in_the_order_of_the_data(whole, tiny_data):
    read, data = rows(whole / "sampled/all.jsonl"), rows(tiny_data / "train.jsonl")
    assert [(one["row"], one["sample"]) for one in read] == [(row, i) for row in range(32) for i in range(4)]
    for one in read:
        row = data[one["row"]]
        assert (one["prompt"], one["reference"]) == (row["prompt"], row["completion"])
        assert one["reward"] == one["scores"]["vowels"] == sum(c in "aeiouAEIOU" for c in one["completion"][:4]) / 4
    assert len({one["reward"] for one in read}) > 1 and len({one["completion"] for one in read}) > 32
    assert (whole / "DONE").read_text() == "sample\n" and not (whole / "hf").exists()
    assert [record["step"] for record in stages.records(whole)] == [1, 2, 3]
    assert set(content(whole)) == {"all.jsonl", "best.jsonl", "pairs.jsonl", "labels.jsonl"}


@pytest.mark.slow
@pytest.mark.parametrize("written", [0.0, 0.5, 1.0])
def test_killed_in_the_middle_of_a_write(whole, tiny_data, tiny_runs, tmp_path, monkeypatch, written):
    """In the second batch, of which a part is in the file."""
    append, run, calls = SamplesFile.append, tmp_path / "run", []

    def cut(self, records):
        calls.append(1)
        if len(calls) < 2:
            return append(self, records)
        before = self.path.stat().st_size
        append(self, records)
        size = self.path.stat().st_size
        with self.path.open("r+b") as file:
            file.truncate(before + int(written * (size - before)))
        raise PowerCut

    overrides = [f"model.init={tiny_runs['sft']}", ABOVE]
    with monkeypatch.context() as patch, pytest.raises(PowerCut):
        patch.setattr(SamplesFile, "append", cut)
        stages.stage("sample", tiny_data, run, *overrides)
    assert not (run / "DONE").exists()
    stages.stage("sample", tiny_data, run, *overrides)
    assert content(run) == content(whole) and stages.differences(run, whole) == []
    stages.stage("sample", tiny_data, run, *overrides)  # a finished one
    assert content(run) == content(whole)


def test_a_sample_does_not_depend_on_its_batch(whole, tiny_data, tiny_runs, tmp_path):
    more = [f"model.init={tiny_runs['sft']}", ABOVE, "batch.prompts=32"]
    assert content(stages.stage("sample", tiny_data, tmp_path / "run", *more)) == content(whole)


@pytest.mark.multirank
@pytest.mark.parametrize("layout", [[], ["parallel.tensor=2"], ["engine.tensor_parallel=2"]])
def test_two_ranks_write_the_same_bytes(ranks, whole, tiny_data, tiny_runs, tmp_path, layout):
    """Data-parallel, where the last batch of one prompt leaves a rank without any; tensor-parallel, of which the peers
    share the prompts; one engine over both."""
    overrides = [f"model.init={tiny_runs['sft']}", ABOVE, "batch.prompts=31", "logging.progress=false", *layout]
    line = stages.overrides("sample", tiny_data, tmp_path / "run", *overrides)
    assert ranks.run("tests.run.jobs:run_stage", world=2, arguments=line) == [0, 0]
    assert content(tmp_path / "run") == content(whole)


def test_what_was_kept_and_is_damaged_is_no_beginning(tiny_data, tiny_runs, tmp_path):
    overrides = [f"model.init={tiny_runs['sft']}", "checkpoint.keep_last=1"]
    run = stages.stage("sample", tiny_data, tmp_path / "run", *overrides, "run.steps=1")
    assert len(rows(run / "sampled/all.jsonl")) == 48
    (run / "sampled/all.jsonl").write_bytes((run / "sampled/all.jsonl").read_bytes().replace(b"say", b"Say", 1))
    with pytest.raises(CheckpointError, match=r"all\.jsonl: damaged"):
        stages.stage("sample", tiny_data, run, *overrides)


@pytest.mark.slow
def test_other_stages_train_on_the_files(whole, tiny_data, tiny_runs, tmp_path):
    start = f"model.init={tiny_runs['sft']}"
    for stage, name in (("sft", "best"), ("dpo", "pairs"), ("kto", "pairs"), ("kto", "labels")):
        overrides = [start, f"data.train={whole}/sampled/{name}.jsonl", "run.steps=1", "batch.sequences=2"]
        run = stages.stage(stage, tiny_data, tmp_path / f"{stage}-{name}", *overrides, "batch.micro_batch_samples=2")
        assert (run / "DONE").exists()


def test_conversations_and_the_rows_own_answers(tiny_data, tiny_runs, tmp_path):
    """SPIN: no reward, one sample of each prompt; a conversation stays one."""
    turns = [{"role": "user", "content": "say a:"}, {"role": "assistant", "content": "a"}]
    stages.write_jsonl(tmp_path / "chats.jsonl", [{"messages": turns, "topic": i} for i in range(3)])
    template = (
        "{% for m in messages %}{{ m.role[0] + m.content }};{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    (tmp_path / "short.jinja").write_text(template)
    both = [f"model.init={tiny_runs['sft']}", f"data.chat_template={tmp_path}/short.jinja"]
    overrides = [
        "sampling.temperature=5",
        "reward.functions=[]",
        "stage.sample.pairs=answers",
        "stage.sample.unfinished=true",
        "batch.group=1",
    ]
    run = stages.stage("sample", tiny_data, tmp_path / "run", *both, *overrides, f"data.train={tmp_path}/chats.jsonl")
    assert set(content(run)) == {"all.jsonl", "pairs.jsonl"}
    read = rows(run / "sampled/all.jsonl")
    assert [one["topic"] for one in read] == [0, 1, 2] and all(one["reward"] is None for one in read)
    pairs = rows(run / "sampled/pairs.jsonl")
    assert pairs and all(pair["prompt"] == turns[:1] and pair["chosen"] == turns[1:] for pair in pairs)
    overrides = ["run.steps=1", "batch.sequences=1", f"data.train={run}/sampled/pairs.jsonl"]
    assert (stages.stage("dpo", tiny_data, tmp_path / "dpo", *both, *overrides) / "DONE").exists()


def test_a_cut_answers_reward_is_lowered_before_it_is_compared(whole, tiny_data, tiny_runs, tmp_path):
    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=1", "algorithm.overlong.penalty=0.5"]
    read = rows(stages.stage("sample", tiny_data, tmp_path / "run", *overrides) / "sampled/all.jsonl")
    assert {one["finished"] for one in read} == {True, False}
    assert all(one["reward"] == one["scores"]["vowels"] - 0.5 * (not one["finished"]) for one in read)


def test_another_round_draws_other_samples(whole, tiny_data, tiny_runs, tmp_path):
    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=1", "stage.sample.round=1"]
    read = rows(stages.stage("sample", tiny_data, tmp_path / "run", *overrides) / "sampled/all.jsonl")
    first = rows(whole / "sampled/all.jsonl")[: len(read)]
    assert sum(a["completion"] != b["completion"] for a, b in zip(read, first, strict=True)) > len(read) / 4
