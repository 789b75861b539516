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
LONG = "model.max_position=65536"  # for the prompts of smolagents
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


def learned_from(package: str) -> dict:
    """The conversation of `SAYS`, as the package holds it."""
    first, *later = SAYS[package]
    asked = {"role": "user", "content": f"Work.\n\n{ROW['instruction']}"}
    if package == "minisweagent":
        output = {"role": "user", "content": "<returncode>0</returncode>\n<output>\n</output>"}
        call, end = ({"role": "assistant", "content": text} for text in (first, *later))
        return {"messages": [{"role": "system", "content": "Write bash."}, asked, call, output, end]}
    function = {"name": "write", "arguments": {"text": "three"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    end, again = ({"role": "assistant", "content": text} for text in later)
    messages = [asked, call, {"role": "tool", "content": "written"}, end, {"role": "user", "content": "sure?"}, again]
    return {"messages": messages, "tools": [{"type": "function", "function": {"name": "write", "parameters": {}}}]}


def trained(package: str, data: Path, run: Path, *settings: str) -> dict:
    """The metrics of a step of grpo, by a package's agent."""
    command, args = agent_of(package)
    stages.write_jsonl(data / "train.jsonl", [ROW | {"prompt": "Work."}])
    readable = ",".join(map(quoted, args.pop("readable")))
    own = [f"environment.agent={quoted(command)}", "sampling.stop=[]"]
    own.append(f"environment.args={{readable: [{readable}], {', '.join(f'{k}: {v}' for k, v in args.items())}}}")
    own += [LONG, "data.max_prompt_tokens=20000", "environment.max_tokens=40000"]
    own += ["environment.timeout_s=300", "batch.prompts=1", "batch.group=2", "batch.micro_batch_samples=1"]
    own += ["run.steps=1", "checkpoint.final=false", *settings]
    (record,) = stages.records(stages.run(soak_terminal.overrides(data, run, *own)))
    assert record["environment/failed"] == record["environment/retried"] == record["reward/invalid"] == 0
    # other tokens than the engine's would have other probabilities
    assert record["mismatch/token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
    return record


@pytest.mark.slow
@pytest.mark.parametrize("package, turns", [("smolagents", 3), ("agents", 1), ("minisweagent", 2)])
def test_a_run_trains_on_what_its_engine_answered_a_package(tmp_path, package, turns):
    """A random model, whose answers are no calls, and are cut: smolagents asks again, and then for a last answer,
    mini-swe-agent to its limit of steps; the Agents SDK dies of a cut one."""
    agent_of(package)
    soak_terminal.make_data(tmp_path)
    record = trained(package, tmp_path, tmp_path / "run")
    assert (record["environment/turns_mean"], record["reward/environment/mean"]) == (turns, 0)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["agents", "minisweagent"])
def test_a_model_that_has_learned_a_packages_calls_works_by_them(tmp_path, package):
    """By the run's engine: the file is written. The prompts of smolagents would take long to learn."""
    agent_of(package)
    soak_terminal.make_data(tmp_path)
    stages.write_jsonl(tmp_path / "calls.jsonl", [learned_from(package)] * 4)
    sft = [f"data.train={tmp_path / 'calls.jsonl'}", "data.max_tokens=500", "run.steps=100", "optim.lr=1e-2", LONG]
    stages.stage("sft", tmp_path, tmp_path / "sft", *sft, "batch.sequences=4", "batch.micro_batch_samples=4")
    sampling = ["sampling.max_response_tokens=120", "sampling.temperature=0.1"]
    record = trained(package, tmp_path, tmp_path / "run", f"model.init={tmp_path / 'sft'}", *sampling)
    assert record["reward/environment/mean"] == record["environment/rows_mean"] == 1
    assert record["environment/turns_mean"] == len(SAYS[package])
