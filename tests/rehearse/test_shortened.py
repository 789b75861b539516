"""A job whose micro-batches are not all run is counted as if they were."""

import pytest

from aligner.config.resolve import compose
from aligner.rehearse import command
from aligner.rehearse.shortened import kept

SMALL = ["model=tiny", "model.vocab_size=320", "data.max_prompt_tokens=40", "data.max_tokens=100"]
ROLLOUT = ["batch.prompts=4", "batch.group=12", "batch.minibatch_samples=24", "batch.logprob_tokens=300"]
JOBS = {
    "rollouts": ["stage=grpo", "batch.micro_batch_samples=2", "sampling.max_response_tokens=32", *ROLLOUT],
    "stages": ["stage=sft", "parallel.pipeline=2", "batch.sequences=24", "batch.micro_batch_samples=2"],
    "an uneven last one": ["stage=sft", "parallel.tensor=2", "batch.sequences=44", "batch.micro_batch_tokens=250"],
}


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_every_micro_batch_is_run_or_counted(stages):
    for kinds in ("a", "aaa", "a" * 9, "a" * 50 + "b", "ab" * 20, "a" * 9 + "b" * 9 + "a" * 9):
        plan = kept(kinds, stages)
        assert len(plan) + sum(times for _, times in plan) == len(kinds)
        numbers = [number for number, _ in plan]
        assert numbers == sorted(set(numbers)) and {0, len(kinds) - 1} <= set(numbers)
        for (number, times), following in zip(plan, [*numbers[1:], None], strict=True):
            assert not times or kinds[number : following + 1] == kinds[number] * (times + 2)
    assert len(kept("a" * 1000, stages)) == stages + 2


@pytest.mark.slow
def test_all_numbers_are_those_of_the_whole_job(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "PROGRAM", "tests.rehearse.unshortened")
    configs = [(name, compose([*job, *SMALL])) for name, job in JOBS.items()]
    every = []
    for kind in ("short", "whole"):
        jobs = [command.cases_of(cfg, 4, "stages", tmp_path / kind / name) for name, cfg in configs]
        every += [case | {"whole": kind == "whole"} for _, cases in jobs for case in cases]
    records = command.run(every, "h100", tmp_path)
    results = [[r for case, r in zip(every, records, strict=True) if case["whole"] == whole] for whole in (False, True)]
    for short, whole in zip(*results, strict=True):
        assert not short["errors"] and not whole["errors"]
        assert short["phases"].keys() == whole["phases"].keys()
        for name, phase in whole["phases"].items():
            other = short["phases"][name]
            assert other["peak_bytes"] == pytest.approx(phase["peak_bytes"], rel=0.01)  # a loss of each micro-batch
            assert other["device_s"] == pytest.approx(phase["device_s"])
            for kind in ("seconds", "launch_s", "idle_s", "bubble_s"):
                assert other[kind] == pytest.approx(phase[kind], rel=0.01), (name, kind)
            for kind in phase.keys() - {"peak_bytes", "device_s", "seconds", "launch_s", "idle_s", "bubble_s"}:
                sides = [
                    side if isinstance(side, int | float | dict) else sorted(side)
                    for side in (other[kind], phase[kind])
                ]
                assert sides[0] == sides[1], (name, kind)
    calls = [sum(len(each) for record in records for each in record["sequences"].values()) for records in results]
    assert calls[0] < 0.6 * calls[1]  # it was shorter
