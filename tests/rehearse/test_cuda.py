"""The rehearsed device is a GPU's, whatever this machine has."""

import pytest

from aligner.config.resolve import compose
from aligner.rehearse import command

JOB = ["stage=sft", "model=tiny", "model.vocab_size=320", "data.max_tokens=80"]


@pytest.mark.slow
def test_kernels_of_one_pass_run_without_triton(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "PROGRAM", "tests.rehearse.without_triton")
    _, cases = command.cases_of(compose(JOB), 1, "stages", tmp_path / "job")
    (record,) = command.run(cases, "h100", tmp_path)
    assert record["errors"] == []
    operations = {operation for _, operation, _ in record["phases"]["update"]["made"]}
    assert operations >= {"gate", "split"}


@pytest.mark.slow
def test_a_last_layer_of_fewer_queries_runs_without_flash_attention(tmp_path):
    """Rows of one length that are too long for a mask, in heads that only the efficient kernel takes."""
    job = ["stage=sft", "model=tiny", "model.vocab_size=320", "model.num_layers=1", "model.head_dim=264"]
    job += ["model.dtype=bfloat16", "model.max_position=4096", "data.max_tokens=2200", "data.max_prompt_tokens=1100"]
    _, cases = command.cases_of(compose([*job, "batch.sequences=4"]), 1, "stages", tmp_path / "job")
    (record,) = command.run(cases, "h100", tmp_path)
    assert record["errors"] == []
    assert {kernel for kernel, _, _ in record["phases"]["update"]["attention"]} == {"efficient"}
