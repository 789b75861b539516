"""A run in terminals that is stopped by a signal, loses its power in the middle of a rollout, and comes to its end."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from aligner.builders.stage import run_stage
from aligner.cluster.env import RankEnv
from aligner.cluster.signals import StopSignals
from aligner.run.loop import Run
from aligner.sandbox.terminal import lacks
from tests import soak, soak_terminal, stages

pytestmark = pytest.mark.skipif(bool(why := lacks()), reason=str(why))
PROMPTS, GROUP, STEPS = 2, 4, 3


def lines(run: Path, rollout: int) -> list[list]:
    """Key, number, hash and answer of each line of a rollout's log."""
    (path,) = (run / "answers").glob(f"step-{rollout:08d}-*")
    return [json.loads(line.partition(" ")[2]) for line in path.read_text().splitlines()]


@pytest.fixture
def play(tmp_path):
    """play(name, signals): a run to its end or to its stop, and the number of terminals that it started."""
    data = tmp_path / "data"
    soak_terminal.make_data(data)

    def start(name: str, signals: StopSignals | None = None) -> tuple[Path, int]:
        run, starts = tmp_path / name, tmp_path / f"starts-{name}"
        starts.write_text("")
        args = f"environment.args={{memory_mb: 128, disk_mb: 16, starts: '{starts}'}}"
        settings = ["environment.path=tests/soak_terminal.py:CountedShell", args, f"run.steps={STEPS}"]
        cfg = soak.frozen(soak_terminal.overrides(data, run, *settings, "checkpoint.every=1"), 1)
        try:
            with (
                soak_terminal.as_commands(),
                patch.object(soak_terminal, "OTHERS", []),
                patch("aligner.answers.AnswerLog.drop"),
            ):
                assert run_stage(cfg, RankEnv(), signals or StopSignals()) == 0
        finally:
            torch.use_deterministic_algorithms(False)
        return run, len(starts.read_text().splitlines())

    return start


@pytest.mark.slow
def test_a_run_goes_on_with_the_answers_that_it_was_given_and_starts_only_what_they_lack(play, tmp_path):
    whole, started = play("whole")
    assert started == STEPS * PROMPTS * GROUP
    signals, finish = StopSignals(), Run.finish

    def stops(self, now, *args, **kwargs):
        signals._note(int(signal.SIGTERM), None)
        return finish(self, now, *args, **kwargs)

    with patch.object(Run, "finish", stops):
        run, started = play("cut", signals)
    stopped = json.loads((run / "STOPPED").read_text())
    assert (stopped["step"], stopped["reason"]) == (1, "SIGTERM") and started == PROMPTS * GROUP
    with pytest.raises(stages.PowerCut), stages.power_cut_at_answer(len(lines(whole, 2)) // 2):
        play("cut")
    counts = Counter(line[0] for line in lines(whole, 2))
    ended = sum(count == counts[key] for key, count in Counter(line[0] for line in lines(run, 2)).items())
    assert 0 < len(lines(run, 2)) < len(lines(whole, 2))
    _, started = play("cut")
    assert started == 2 * PROMPTS * GROUP - ended and (run / "DONE").exists()
    shutil.copytree(run / "answers", tmp_path / "again" / "answers")
    again, started = play("again")
    assert started == 0
    for other in (run, again):
        assert stages.same_weights(whole, other) and stages.differences(whole, other) == []
    assert all(
        record["environment/restarted"] == 0 for record in stages.records(run) if "environment/retried" in record
    )
