"""Linear attention by flash-linear-attention: a rehearsal needs no more of it than that it is found."""

import pytest

from tests.rehearse import grid


@pytest.mark.slow
def test_it_takes_the_memory_that_plan_says(tmp_path, monkeypatch):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(grid, "SMALL", [*grid.SMALL, "data.max_tokens=2048"])  # torch's operations keep 11 % more then
    names = ("qwen3_next_80b_a3b", "nemotron3_nano_30b_a3b")
    cases = [("sft", names[0], "tensor"), ("dpo", names[1], "context")]
    for case, result in grid.rehearsed(cases, tmp_path).items():
        assert not result.faults, case
        for rank, phases in result.planned.items():
            for phase in {"update", "logprobs"} & phases.keys():
                there = result.records[rank]["phases"][phase]["peak_bytes"]
                assert phases[phase] == pytest.approx(there, rel=0.04), (case, rank, phase)
