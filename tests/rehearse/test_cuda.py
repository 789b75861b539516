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
