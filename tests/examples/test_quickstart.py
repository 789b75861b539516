"""The quick start, whole, in the tutorial that begins with it: what a newcomer runs first must learn.
tests/algorithms/test_recipes.py shuffles the rewards of this task, and nothing is learned."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from aligner.errors import ConfigError
from examples.pairs import change_digit
from examples.quickstart import STAGES, Quickstart
from tests.test_tutorials import clone, execute


def test_change_digit_gives_another_number_of_the_same_length():
    rng = random.Random(0)
    for answer in ("7", "-28", "105", "10", "-99"):
        for _ in range(50):
            wrong = change_digit(answer, rng)
            assert int(wrong) != int(answer) and len(wrong) == len(answer)
            assert str(int(wrong)) == wrong or wrong.lstrip("-") in "0123456789", wrong


def test_overrides_reach_every_stage_and_run_dir_moves_every_path(tmp_path):
    quick = Quickstart([f"run.dir={tmp_path}/q", "seed=3"], ranks=1)
    from aligner.config.resolve import compose

    for stage in STAGES:
        cfg = compose(quick.arguments(stage))
        assert cfg.seed == 3 and cfg.run.dir == f"{tmp_path}/q/{stage}"
        assert cfg.data.train.startswith(f"{tmp_path}/q/data/")
        assert "runs/quickstart" not in repr(cfg)


def test_a_folder_with_other_runs_is_not_touched(tmp_path):
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "precious").write_text("x")
    with pytest.raises(ConfigError, match=r"run\.dir.*sft"):
        Quickstart([f"run.dir={tmp_path}"], ranks=1).begin()
    assert (tmp_path / "sft" / "precious").exists()


def test_seconds_of_the_shell_that_it_was_are_not_its_own(tmp_path):
    """The launcher installs, and is then replaced by the quick start."""
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 1: pass"], check=True)
    assert Quickstart([f"run.dir={tmp_path}"], ranks=1).cpu_seconds() < 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The first tutorial, which does what it shows, in a folder of its own; its quick start's (folder, summary,
    output)."""
    folder = clone(tmp_path_factory.mktemp("quickstart"))
    output = execute("first-run", folder, limit_s=7000)
    root = folder / "runs/quickstart"
    return root, json.loads((root / "summary.json").read_text()), output


@pytest.mark.slow
@pytest.mark.quickstart
@pytest.mark.timeout(7200)
class TestQuickstart:
    def test_every_stage_learns(self, finished):
        _, summary, _ = finished
        sft = summary["sft"]["accuracy"]
        assert 0.28 <= sft <= 0.45 and summary["sft"]["stopped_early"]
        assert summary["rm_init"]["accuracy"] - sft >= 0.3
        assert summary["rm"]["pair_accuracy"] >= 0.85
        assert summary["grpo"]["accuracy"] - sft >= 0.15
        assert summary["ppo"]["accuracy"] - sft >= 0.15
        assert set(summary["seconds"]) == set(STAGES) and summary["peak_rss_bytes"] < 3e9

    def test_it_says_so_and_leaves_a_report(self, finished):
        root, _, output = finished
        assert "stopped early on purpose" in output
        assert (root / "report.html").stat().st_size > 10_000
