"""The rehearsed device is a GPU's, whatever this machine has."""

import pytest

from aligner.config.resolve import compose
from aligner.rehearse import command

JOB = ["stage=sft", "model=tiny", "model.vocab_size=320", "data.max_tokens=80"]


LAST = [*JOB[:-1], "model.num_layers=1", "model.head_dim=264", "model.dtype=bfloat16", "model.max_position=4096"]
LAST += ["data.max_tokens=2200", "data.max_prompt_tokens=1100", "batch.sequences=4"]


@pytest.mark.slow
def test_kernels_without_triton_and_without_flash_attention(tmp_path, monkeypatch):
    """Those of one pass need no Triton here. A last layer of fewer queries has rows of one length that are too long for
    a mask, in heads that only the efficient kernel takes."""
    monkeypatch.setattr(command, "PROGRAM", "tests.rehearse.without_triton")
    jobs = [command.cases_of(compose(job), 1, "stages", tmp_path / str(i))[1] for i, job in enumerate((JOB, LAST))]
    fused, last = command.run([case for cases in jobs for case in cases], "h100", tmp_path)
    assert fused["errors"] == last["errors"] == []
    assert {operation for _, operation, _ in fused["phases"]["update"]["made"]} >= {"gate", "split"}
    assert {kernel for kernel, _, _ in last["phases"]["update"]["attention"]} == {"efficient"}
