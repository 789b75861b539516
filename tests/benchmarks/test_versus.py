"""Our side of the comparisons with TRL and vLLM, which have environments of their own and are not compared here."""

import sys

import pytest

from benchmarks.versus.workload import Work, build, response_lengths
from benchmarks.versus_trl import WORK, Side, ours

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("versus")


@pytest.mark.parametrize("stage", ["generate", "ppo", "sft"])  # grpo: as ppo; rm, dpo and kto: as sft
def test_our_side_steps_when_it_is_told_to(stage, folder):
    work = Work(stage, "3m", "float32", 16, str(folder), threads=1, max_response=8, epochs=1, sequences=4)
    build(work)
    work.write(folder / WORK)
    side = Side.start("ours", ours(folder / WORK), folder, work.threads)
    try:
        reports = [side.step() for _ in range(2)]
    finally:
        side.end()
    for step in reports:
        assert step["seconds"] > 0 and step["peak_bytes"] > 1 << 28
        assert ("tokens" in step) == (stage == "sft")
    assert max(response_lengths(work, 0)) == 8


def test_an_engine_generates_when_it_is_told_to(folder):
    work = Work("generate", "3m", "float32", 16, str(folder), threads=1, max_response=8)
    work.write(folder / WORK)
    command = [sys.executable, "-m", "benchmarks.versus.engines", str(folder / WORK), "native"]
    side = Side.start("ours", command, folder, work.threads)
    try:
        reported = side.step()
    finally:
        side.end()
    assert reported["tokens"] == 128 * 8 and reported["seconds"] > 0 and reported["peak_bytes"] > 1 << 28
