"""steps.jsonl: hashes that know nothing of the layout, bound to one another. That resumed runs leave the same file is
in test_resume.py."""

import json
import shutil
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from aligner.errors import DataError
from aligner.run import chain
from aligner.run.chain import DIGITS, FILE, read_chain, start_of
from tests import stages

BARE = ["run.steps=2", "run.export=false", "checkpoint.every=1"]


@pytest.fixture(scope="module")
def made(tiny_data, tmp_path_factory):
    return stages.stage("sft", tiny_data, tmp_path_factory.mktemp("chain") / "run", *BARE)


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def lines(run):
    return [json.loads(line) for line in (run / FILE).read_text().splitlines()]


def test_each_step_leaves_its_hashes(run):
    start, *steps = read_chain(run)
    names = start["start"]["tensors"]
    assert (
        names[0] == "policy/embedding.word_embeddings.weight" and names[-1] == "policy/decoder.final_layernorm.weight"
    )
    assert [result["step"] for result in (start, *steps)] == [0, 1, 2]
    hashes = [[f["weights"][i : i + DIGITS] for i in range(0, len(f["weights"]), DIGITS)] for f in (start, *steps)]
    assert all(len(row) == len(names) == len(set(row)) for row in hashes[1:])  # norms start alike
    assert all(a != b for before, after in pairwise(hashes) for a, b in zip(before, after, strict=True))
    assert steps[0]["batch"].keys() == {"rows"} and steps[0]["batch"] != steps[1]["batch"]
    reports = [
        {name: record[name] for name in result["numbers"]}
        for result, record in zip(steps, stages.records(run), strict=True)
    ]
    assert [result["numbers"] for result in steps] == reports and {"policy/loss", "policy/grad_norm"} <= reports[
        0
    ].keys()
    assert start["start"]["config"]["seed"] == 0 and "run/chain.py" in start["start"]["code"]


def alter(run, number, **change):
    actual = lines(run)
    actual[number] |= change
    stages.write_jsonl(run / FILE, actual)


def test_a_chain_that_was_changed_is_refused(run, tmp_path):
    original = (run / FILE).read_text()
    alter(run, 1, weights="0" * 8)
    with pytest.raises(DataError, match=r"steps.jsonl: the record of step 1 does not follow the one before"):
        read_chain(run)
    (run / FILE).write_text("".join(line for i, line in enumerate(original.splitlines(True)) if i != 1))
    with pytest.raises(DataError, match=r"the record of step 2 does not follow the one before: .* one is lost"):
        read_chain(run)
    (run / FILE).write_text(original)
    alter(run, 0, start={"version": 2})
    with pytest.raises(DataError, match=r"format version 2: expected 1. Read it with the version that wrote it"):
        read_chain(run)
    with pytest.raises(DataError, match=r"expected a file with a record per step; runs of earlier versions have none"):
        read_chain(tmp_path)
    (run / FILE).write_text(original + '{"step": 3, "wei')  # a kill while it was written
    assert read_chain(run)[-1]["step"] == 2


def test_a_start_is_noted_where_something_is_new(run, tiny_data, capsys):
    before = lines(run)
    stages.stage("sft", tiny_data, run, *BARE, "run.steps=3", "optim.lr=1e-3")
    steps = read_chain(run)
    assert steps[:3] == before and [f["step"] for f in steps[3:]] == [2, 3]
    assert "start" in steps[3] and start_of(steps)["config"]["optim.lr"] == 1e-3
    assert "WARNING" not in capsys.readouterr().err


def test_weights_that_are_not_what_the_step_left_are_reported(run, tiny_data, capsys):
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    shutil.copytree(run / "checkpoints" / "step-00000001" / "policy", run / "p")
    actual = lines(run)
    stages.stage("sft", tiny_data, run, *BARE)
    assert lines(run) == actual and "are not those" not in capsys.readouterr().err
    actual[1]["weights"] = actual[2]["weights"]
    stages.write_jsonl(run / FILE, actual)
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    stages.stage("sft", tiny_data, run, *BARE)
    assert "WARNING: the weights of step 1 are not those that the run left there" in capsys.readouterr().err
    assert ["start" in f for f in lines(run)] == [True, False, True, False]


def test_a_rank_whose_weights_others_write_meets_them_on_their_device(tmp_path, monkeypatch):
    """Else a second data-parallel rank's sums would be on another device, and its messages of another backend."""
    met = []
    monkeypatch.setattr(chain, "sum_halves", lambda halves: met.append(halves) or [0] * len(halves))
    chain.Chain(tmp_path, 1, {}, chain.StepHashes(), torch.device("meta")).close(1, {})
    assert [halves.device.type for halves in met] == ["meta"]


def test_records_that_a_power_cut_took_are_no_other_weights(tmp_path, capsys):
    def begun(step):
        made = chain.Chain(tmp_path, 0, {}, chain.StepHashes(), torch.device("cpu"))
        made.begin(step, {"config": {}})
        return made

    first = begun(0)
    for step in (1, 2, 3):
        first.close(step, {"sft/loss": step})
    (tmp_path / FILE).write_text("".join((tmp_path / FILE).read_text().splitlines(True)[:-2]))
    begun(3).close(4, {})
    assert "WARNING" not in capsys.readouterr().err
    steps = read_chain(tmp_path)
    assert [f["step"] for f in steps] == [0, 1, 3, 4] and ["start" in f for f in steps] == [True, False, True, False]


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize(
    "stage, layouts",
    [
        ("sft", {1: [[]], 2: [["parallel.tensor=2"], ["parallel.pipeline=2"], ["optim.distributed=true"]]}),
        ("grpo", {1: [["model=tiny_moe"]], 2: [["model=tiny_moe", "parallel.expert=2"]]}),
    ],
)
def test_the_layout_does_not_show(tiny_data, tmp_path, ranks, stage, layouts):
    """Of weights before the first step, of its rows, of prompts and rewards; and the recording has all of them."""
    results = []
    for world, extra in layouts.items():
        for own in extra:
            folder = tmp_path / f"{len(results)}"
            bare = ["run.steps=1", "run.export=false", "checkpoint.final=false", "debug.record=1"]
            arguments = stages.overrides(stage, tiny_data, folder, *bare, *own)
            ranks.run("tests.run.jobs:run_stage", world=world, arguments=arguments)
            start, step = read_chain(folder)
            exact = {name: value for name, value in step["batch"].items() if name != "logprobs"}
            (file,) = folder.glob("ro*s/step-00000001.safetensors")  # rows or rollouts
            rows = sorted(load_file(file)["tokens"].tolist())
            results.append((start["start"]["tensors"], start["weights"], exact, rows))
    assert all(other == results[0] for other in results[1:])
