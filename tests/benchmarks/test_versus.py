"""Our side of the comparison with TRL, which has an environment of its own and is not compared here."""

import pytest

from benchmarks.versus.workload import Work, build, response_lengths
from benchmarks.versus_trl import Side, ours

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("versus")


@pytest.mark.parametrize("stage", ["generate", "grpo", "ppo", "sft", "rm", "dpo", "kto"])
def test_our_side_steps_when_it_is_told_to(stage, folder):
    work = Work(stage, "3m", "float32", 16, str(folder), threads=1, max_response=8, epochs=1, sequences=4)
    build(work)
    work.write(folder / "work.json")
    side = Side.start("ours", ours(folder / "work.json"), folder, work.threads)
    try:
        told = [side.step() for _ in range(2)]
    finally:
        side.end()
    for step in told:
        assert step["seconds"] > 0 and step["peak_bytes"] > 1 << 28
        assert ("tokens" in step) == (stage == "sft")
    assert max(response_lengths(work, 0)) == 8
