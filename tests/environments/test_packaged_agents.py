"""Agents of packages in the sandbox of their task: their requests repeat the model's own tokens."""

import json
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from aligner.config.resolve import quoted
from aligner.sandbox.terminal import lacks
from aligner.types import Stop
from tests import soak_terminal, stages
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


def agent_of(package: str) -> tuple[str, dict]:
    """The command line of a package's agent, and arguments of its terminal."""
    try:
        installed = distribution(PACKAGES[package])
    except PackageNotFoundError:
        pytest.skip(f"{PACKAGES[package]} is not installed")
    folders = sorted({str(FILE), sys.prefix, str(installed.locate_file(""))})
    args = {"readable": folders, "cpu_s": 60, "processes": 200, "memory_mb": 4000}
    return f"{sys.executable} {FILE} {package} {' '.join(folders)}", args


@pytest.mark.slow
@pytest.mark.parametrize("package", SAYS)
def test_a_package_works_in_the_sandbox_by_the_models_own_tokens(play, tokenizer, package):
    command, args = agent_of(package)
    answers = iter(SAYS[package])
    (sample,), _, engine = play(
        command,
        lambda *_: next(answers),
        json.loads(json.dumps(ROW)),
        path="aligner.environments.terminal:Terminal",
        args=args,
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


@pytest.mark.slow
def test_a_run_trains_on_what_its_engine_answered_a_package(tmp_path):
    """A random model, whose answers are no code: the package asks again, and then for a last answer."""
    command, args = agent_of("smolagents")
    soak_terminal.make_data(tmp_path / "data")
    readable = ",".join(map(quoted, args.pop("readable")))
    own = [f"environment.agent={quoted(command)}", "sampling.stop=[]"]
    own.append(f"environment.args={{readable: [{readable}], {', '.join(f'{k}: {v}' for k, v in args.items())}}}")
    own += ["model.max_position=65536", "data.max_prompt_tokens=20000", "environment.max_tokens=40000"]
    own += ["environment.timeout_s=300", "batch.prompts=1", "batch.group=2", "batch.micro_batch_samples=1"]
    own += ["run.steps=1", "checkpoint.final=false"]
    run = stages.run(soak_terminal.overrides(tmp_path / "data", tmp_path / "run", *own))
    (record,) = stages.records(run)
    assert (record["environment/turns_mean"], record["environment/failed"], record["reward/invalid"]) == (3, 0, 0)
    # other tokens than the engine's would have other probabilities
    assert record["mismatch/token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
