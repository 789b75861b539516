"""The command on small models."""

import json

import pytest

from aligner.__main__ import main

TINY = ["model=tiny", "model.vocab_size=320", "parallel.pipeline=2"]


@pytest.mark.slow
def test_a_pipeline_without_faults(tmp_path, capsys):
    out = tmp_path / "found.json"
    assert main(["rehearse", "--gpus", "4", "--json", str(out), "stage=dpo", *TINY]) == 0
    found = json.loads(out.read_text())
    assert found["faults"] == [] and sorted(found["ranks"]) == ["0", "2"]
    first, last = (found["ranks"][rank]["phases"] for rank in ("0", "2"))
    for phases in (first, last):
        assert {"build", "logprobs", "update", "save"} <= set(phases)
        held = phases["update"]["held"]
        assert held["policy gradients"] == pytest.approx(2 * held["policy weights"], rel=0.01)  # float32 of bfloat16
        assert held["policy optimizer"] == pytest.approx(3 * held["policy weights"], rel=0.01)  # 12 bytes over 2 ranks
        assert phases["update"]["peak_bytes"] == pytest.approx(phases["update"]["planned_bytes"], rel=0.25)
    sent, received = (
        sum(size for _, what, _, size in phases["update"]["collectives"] if what == kind)
        for phases, kind in ((first, "send"), (last, "recv"))
    )
    assert sent == received > 0
    assert "no fault" in capsys.readouterr().out


def test_a_layout_that_does_not_divide_is_refused(capsys):
    assert main(["rehearse", "--gpus", "3", *TINY]) == 2
    assert "world size=3" in capsys.readouterr().err
