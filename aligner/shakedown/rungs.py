"""The rungs of the shakedown, in their order: what each proves, what it needs, and its jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from aligner.families import FAMILIES
from aligner.shakedown.jobs import CheckedMachine, RungError, demand_close, metrics
from aligner.shakedown.toy import family_keys

ROOT = Path(__file__).resolve().parents[2]
SINGLE, HALF = 1e-3, 5e-2  # shares by which metrics may differ: in float32, and losses in bfloat16
TWO_STEPS = ["run.steps=2", "checkpoint.final=false"]
EXPERTS = family_keys("qwen3_moe")
# layout -> stage, overrides of both jobs, overrides of the job on several ranks
LAYOUTS: dict[str, tuple[str, list[str], list[str]]] = {
    "data": ("sft", [], []),
    "tensor": ("sft", [], ["parallel.tensor=2"]),
    "tensor-grpo": ("grpo", [], ["parallel.tensor=2"]),
    "pipeline": ("sft", [], ["parallel.pipeline=2"]),
    "pipeline-grpo": ("grpo", [], ["parallel.pipeline=2"]),
    "context": ("sft", [], ["parallel.context=2"]),
    "experts": ("sft", EXPERTS, ["parallel.expert=2"]),
    "engine-ranks": ("grpo", [], ["engine.ranks=1"]),
}
OFFLOAD, SLEEP = "memory.offload=[gradients,optimizer,weights]", "memory.sleep=always"
RESUMED, KILLED_AFTER, STEPS = ("sft", "grpo"), 22, 30
KEPT = [f"run.steps={STEPS}", "checkpoint.every=10", "checkpoint.async_save=true", OFFLOAD]
LEARNED = 0.15  # rise of the mean reward


@dataclass(frozen=True)
class Rung:
    """A rung. `needs` returns why this machine cannot climb it, or ""; `climb` returns what it measured."""

    proves: str
    climb: Callable[[CheckedMachine], dict[str, Any]]
    needs: Callable[[CheckedMachine], str] = lambda machine: ""


def card_rates(machine: CheckedMachine) -> dict[str, Any]:
    command = [sys.executable, "-m", "aligner.shakedown.rates", *([] if machine.gpus else ["--cpu"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RungError(f"rates: exit code {done.returncode}\n{done.stderr[-2000:]}")
    rates = json.loads(done.stdout)
    for card in rates["cards"]:
        for name, (measured, sheet, least) in card["rates"].items():
            if measured < least * sheet:
                expected = f"{least:.0%} of the data sheet's {sheet:.3g}"
                raise RungError(f"{card['name']}: {name} {measured:.3g}, expected {expected}")
    return rates


def families(machine: CheckedMachine) -> dict[str, Any]:
    with machine.jobs("families") as jobs:
        for name in FAMILIES:
            jobs.same_on_cpu(name, "sft", *family_keys(name), *TWO_STEPS, share=SINGLE)
    return {"families": list(FAMILIES)}


def bfloat16(machine: CheckedMachine) -> dict[str, Any]:
    names = ("llama", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_next")
    with machine.jobs("bfloat16") as jobs:
        for name in names:
            keys = [*family_keys(name), *TWO_STEPS, "model.dtype=bfloat16"]
            jobs.same_on_cpu(name, "sft", *keys, share=HALF, only="/loss")
    return {"families": list(names)}


def stages(machine: CheckedMachine) -> dict[str, Any]:
    with machine.jobs("stages") as jobs:
        bases = [jobs.start(f"{name}-base", name, "run.steps=10", on_cpu=True) for name in ("sft", "rm")]
        sft, rm = (f"{job.wait()}" for job in bases)
        own = {
            "rm": [],
            "dpo": [f"model.init={sft}"],
            "kto": [f"model.init={sft}"],
            "distill": [f"algorithm.distill.teacher={sft}", "algorithm.distill.on_policy=0.5"],
            "online_dpo": [f"model.init={sft}"],
            "grpo": [f"model.init={sft}", "refit.verify=checksum"],
            "ppo": [f"model.init={sft}", f"reward.model={rm}", "reward.functions=[]"],
        }
        for name, overrides in own.items():
            jobs.same_on_cpu(name, name, *overrides, *TWO_STEPS, share=SINGLE)
    return {"stages": list(own)}


def layouts(machine: CheckedMachine) -> dict[str, Any]:
    with machine.jobs("layouts") as jobs:
        for name, (stage, both, several) in LAYOUTS.items():
            one = jobs.start(f"{name}-one", stage, *both, *TWO_STEPS)
            two = jobs.start(name, stage, *both, *several, *TWO_STEPS, ranks=2)
            alone = metrics(one.wait())
            demand_close(name, metrics(two.wait()), alone, SINGLE, "one rank's", ("/loss", "/grad_norm"))
    return {"layouts": list(LAYOUTS)}


def engines(machine: CheckedMachine) -> dict[str, Any]:
    """Generate with each installed engine; each refit is verified by checksums and logprobs."""
    python = ROOT / ".venv-vllm/bin/python"
    installed = {"native": [OFFLOAD, SLEEP]}
    installed |= {"vllm": [f"engine.vllm.python={python}"]} if python.exists() else {}
    installed |= {"trtllm": []} if machine.gpus and find_spec("tensorrt_llm") else {}
    with machine.jobs("engines") as jobs:
        for name, overrides in installed.items():
            verified = [f"engine.name={name}", "refit.verify=checksum", "model.head_dim=64", *overrides]
            jobs.start(name, "grpo", *verified, *TWO_STEPS).wait()
    return {"engines": list(installed)}


def resume(machine: CheckedMachine) -> dict[str, Any]:
    """Kill a job and start it again; its steps have the hashes of one that was not killed."""
    from aligner.tools.bisect import bisect  # with torch

    with machine.jobs("resume") as jobs:
        for stage in RESUMED:
            keys = [*KEPT, SLEEP] if stage == "grpo" else KEPT
            whole = jobs.start(f"{stage}-whole", stage, *keys)
            killed = jobs.start(stage, stage, *keys)
            killed.reach(KILLED_AFTER)
            killed.kill()
            again = jobs.start(stage, stage, *keys)
            difference = next(bisect(whole.wait(), again.wait()))
            if difference != f"the same: steps 1 to {STEPS}":
                raise RungError(f"{stage}, whole and killed: {difference}")
    return {"killed after step": KILLED_AFTER}


def learning(machine: CheckedMachine) -> dict[str, Any]:
    with machine.jobs("learning") as jobs:
        run = jobs.start("learning", "grpo", "run.steps=40", "optim.lr=1e-2", "checkpoint.final=false").wait()
    rewards = [record["reward/mean"] for record in metrics(run)]
    first, last = fmean(rewards[:5]), fmean(rewards[-5:])
    if last - first < LEARNED:
        raise RungError(f"learning: the mean reward went from {first:.3f} to {last:.3f}, expected a rise of {LEARNED}")
    return {"reward of the first 5 steps": first, "of the last 5": last}


def speed(machine: CheckedMachine) -> dict[str, Any]:
    out = machine.folder / "speed.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--json", str(out)]
    command += ["--shapes", "0.6b,8b_width", "--budget-s", "420"] if machine.gpus else ["--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    (machine.folder / "speed.log").write_text(done.stdout + done.stderr)
    if not machine.gpus and done.returncode == 0:
        return {"self-check": done.stdout.strip()}
    if not out.exists():
        raise RungError(
            f"speed: exit code {done.returncode}; log: {machine.folder / 'speed.log'}\n{done.stderr[-2000:]}"
        )
    return json.loads(out.read_text())


def _two_ranks(machine: CheckedMachine) -> str:
    return "" if machine.ranks >= 2 else f"it needs 2 GPUs, this machine has {machine.gpus}"


def _clone(machine: CheckedMachine) -> str:
    return "" if (ROOT / "benchmarks/gpu.py").exists() else "it needs a clone: benchmarks/ is not installed"


RUNGS = {
    "machine": Rung("Each card has the rates of its data sheet; versions are noted.", card_rates),
    "families": Rung("Loss, gradients and two updates of every model family are the CPU's, in float32.", families),
    "bfloat16": Rung("Losses in bfloat16 are the CPU's, within 5 %.", bfloat16),
    "stages": Rung("Two steps of every stage are the CPU's, sampled tokens included.", stages),
    "layouts": Rung("Losses and gradients on two ranks, in every layout, are those of one rank.", layouts, _two_ranks),
    "engines": Rung("Every installed engine gets the trainer's weights, asleep and awake.", engines),
    "resume": Rung("A killed run continues with the same bits, with offloading and asynchronous checkpoints.", resume),
    "learning": Rung("GRPO raises the mean reward.", learning),
    "speed": Rung("Nothing; notes the speed of updates, refit and generation beside the plan's.", speed, _clone),
}
