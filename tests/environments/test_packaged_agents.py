"""Agents of packages in the sandbox of their task: their requests repeat the model's own tokens."""

import json
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from aligner.sandbox.terminal import lacks
from aligner.types import Stop
from tests.rollout.test_agents import play, tokenizer
from tests.rollout.test_trajectory_generator import call

pytest.importorskip("uvicorn")
pytestmark = pytest.mark.skipif(bool(why := lacks()), reason=str(why))
FILE = Path(__file__).parents[1] / "assets" / "packaged_agents.py"
ROW = {"files": {}, "tests": "grep -q three a.txt", "instruction": "Write three into a.txt."}
BASH = "THOUGHT: so.\n\n```mswea_bash_command\necho three > a.txt\n```"
END = "```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"
CODE = "Thought: so.\n<code>\nwrite('three')\n</code>"
PACKAGES = {"smolagents": "smolagents", "agents": "openai-agents", "minisweagent": "mini-swe-agent"}
SAYS = {
    "smolagents": (CODE, "<code>\nfinal_answer(3)\n</code>"),
    "agents": (call("write", text="three"), " it is  written", "yes"),
    "minisweagent": (BASH, END),
}
__all__ = ["play", "tokenizer"]


@pytest.mark.slow
@pytest.mark.parametrize("package", SAYS)
def test_a_package_works_in_the_sandbox_by_the_models_own_tokens(play, tokenizer, package):
    try:
        installed = distribution(PACKAGES[package])
    except PackageNotFoundError:
        pytest.skip(f"{PACKAGES[package]} is not installed")
    answers = iter(SAYS[package])
    folders = {str(FILE), sys.prefix, str(installed.locate_file(""))}
    (sample,), _, engine = play(
        f"{sys.executable} {FILE} {package} {' '.join(sorted(folders))}",
        lambda *_: next(answers),
        json.loads(json.dumps(ROW)),
        path="aligner.environments.terminal:Terminal",
        args={"readable": sorted(folders), "cpu_s": 60, "processes": 200, "memory_mb": 4000},
        longest=20_000,
        max_tokens=40_000,
        retries=0,
        timeout_s=300,
    )
    trajectory = sample.trajectory
    assert (trajectory.stop, trajectory.reward) == (Stop.DONE, 1.0), trajectory.failure
    assert trajectory.turns == len(SAYS[package]) and trajectory.rows == 1
    for before, text, after in zip(engine.given, SAYS[package], engine.given[1:], strict=False):
        end = "" if package == "smolagents" else "<eos>"  # it adds its calls to what the model said
        assert tokenizer.decode(after).startswith(f"{tokenizer.decode(before)}{text}{end}")
