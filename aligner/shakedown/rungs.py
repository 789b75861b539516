"""The rungs of the shakedown, in their order: what each proves, what it needs, and its jobs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from aligner.config.engines import ENGINES
from aligner.config.resolve import quoted
from aligner.families import FAMILIES
from aligner.plan.devices import sheet_of
from aligner.run.metrics import read_jsonl
from aligner.shakedown.jobs import TIMEOUT_S, CheckedMachine, RungError, demand_close, metrics, on_nodes, own_address
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
LEAST_OF_LINKS = 0.5  # of NVLink within a node, of the network between nodes
LEARNED = 0.15  # rise of the mean reward
SIZED = [  # a job whose memory is more than a card's own noise
    *("model.num_layers=8", "model.hidden_size=1024", "model.ffn_hidden_size=3072", "model.num_heads=16"),
    *("model.num_kv_heads=8", "model.vocab_size=32768", "model.max_position=1024", "model.dtype=bfloat16"),
    *("sampling.max_response_tokens=256", "batch.prompts=16", "batch.group=8", "engine.kv_cache_bytes=2147483648"),
]
NEAR, NEAR_BYTES = 0.15, 256 << 20  # by how much memory may differ from the rehearsal's
# Qwen2.5-1.5B-Instruct on GSM8K: 73 % by its authors (4 examples); in another published run 70 %, after GRPO 82 %
ASKED = '{question}\nLet\'s think step by step and output the final answer after "####".'
PUBLISHED = [
    *("run.steps=10", "run.eval_every=10", "checkpoint.final=false", "optim.lr=1e-6", "batch.prompts=64"),
    *("batch.group=8", "batch.minibatch_samples=0", "batch.micro_batch_tokens=16384", "engine.max_batch=512"),
    *("sampling.max_response_tokens=512", "data.max_prompt_tokens=512", "eval.prompts=500"),
    f"data.prompt_template={quoted(ASKED)}",
]


@dataclass(frozen=True)
class Rung:
    """A rung. `needs` returns why this machine cannot climb it, or ""; `climb` returns what it measured."""

    proves: str
    climb: Callable[[CheckedMachine], dict[str, Any]]
    needs: Callable[[CheckedMachine], str] = lambda machine: ""


def _printed(command: Sequence[str], what: str, **options: Any) -> str:
    """Run a command and return what it prints. Raises RungError with the exit code and the output if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    except subprocess.TimeoutExpired as error:
        raise RungError(f"{what}: no end after {error.timeout:.0f} s") from None
    if done.returncode:
        raise RungError(f"{what}: exit code {done.returncode}\n{done.stdout}{done.stderr[-2000:]}")
    return done.stdout


def card_rates(machine: CheckedMachine) -> dict[str, Any]:
    command = [sys.executable, "-m", "aligner.shakedown.rates", *([] if machine.gpus else ["--cpu"])]
    rates = json.loads(_printed(command, "rates"))
    for card in rates["cards"]:
        for name, (measured, sheet, least) in card["rates"].items():
            if measured < least * sheet:
                expected = f"{least:.0%} of the data sheet's {sheet:.3g}"
                raise RungError(f"{card['name']}: {name} {measured:.3g}, expected {expected}")
    return rates


def _links(machine: CheckedMachine, nodes: int, ranks: int) -> dict[str, Any]:
    """Sum over all ranks; compare the slowest rank's links with the data sheet's."""
    program = ["-m", "aligner.cluster.health", "--all-reduce"]
    here = ["--standalone", "--local-addr=127.0.0.1"]  # it would wait for a host name that nothing resolves
    command = [sys.executable, "-m", "torch.distributed.run", *here, f"--nproc-per-node={ranks}", *program]
    if nodes > 1:
        command = [*on_nodes(nodes, ranks), sys.executable, *program]
    environ = os.environ | {"MASTER_ADDR": own_address()} if nodes > 1 else None
    what = f"all-reduce over {ranks} ranks"
    text = _printed(command, what, env=environ, timeout=TIMEOUT_S)
    rates = {card: float(rate) for card, rate in re.findall(r"^(.*\)): .* ([\d.e+]+) GB/s", text, re.MULTILINE)}
    if len(rates) != ranks:
        raise RungError(f"{what}: {len(rates)} reported a rate\n{text}")
    slowest = min(rates, key=lambda card: rates[card])
    if machine.gpus and (sheet := sheet_of(slowest)):
        link = (sheet.network if nodes > 1 else sheet.nvlink) / 1e9
        if rates[slowest] < LEAST_OF_LINKS * link:
            expected = f"{LEAST_OF_LINKS:.0%} of the data sheet's {link:.3g}"
            raise RungError(f"{slowest}: all-reduce at {rates[slowest]:.3g} GB/s, expected {expected}")
    return {"all-reduce, GB/s": rates}


def links(machine: CheckedMachine) -> dict[str, Any]:
    return _links(machine, 1, machine.ranks)


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
    return _layouts(machine, "layouts", 1)


def across_nodes(machine: CheckedMachine) -> dict[str, Any]:
    """Sum over all cards of two nodes, and compare layouts that span them with one rank."""
    return _links(machine, machine.nodes, machine.nodes * (machine.gpus or 1)) | _layouts(machine, "nodes", 2)


def _layouts(machine: CheckedMachine, rung: str, nodes: int) -> dict[str, Any]:
    with machine.jobs(rung) as jobs:
        for name, (stage, both, several) in LAYOUTS.items():
            one = jobs.start(f"{name}-one", stage, *both, *TWO_STEPS)
            two = jobs.start(name, stage, *both, *several, *TWO_STEPS, ranks=2, nodes=nodes)
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
            if ENGINES[name].can.own_process and machine.gpus > 1:
                jobs.start(f"{name}-two", "grpo", *verified, "engine.tensor_parallel=2", *TWO_STEPS, ranks=2).wait()
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


def published(machine: CheckedMachine) -> dict[str, Any]:
    """Train a published model on published data; compare its accuracy with the band of published runs."""
    weights, rows = (Path(folder).expanduser().absolute() for folder in (machine.weights, machine.rows))
    with machine.jobs("published") as jobs:
        run = jobs.folder / "published"
        paths = {"run.dir": run, "model.init": weights, "data.train": rows / "train.jsonl"}
        paths |= {"data.eval": rows / "test.jsonl"}
        named = [f"{key}={quoted(str(path))}" for key, path in paths.items()]
        arguments = ["experiment=gsm8k_grpo", *named, *PUBLISHED, *machine.overrides]
        jobs.launch("published", run, arguments, machine.ranks).wait()
    records = read_jsonl(run / "metrics.jsonl")
    accuracies = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
    low, high = machine.band
    if not accuracies or not low <= accuracies[-1] <= high:
        raise RungError(f"published: accuracy {accuracies[-1:]} in {run}, expected {low} to {high}")
    return {"accuracy": accuracies, "band": [low, high]}


def prediction(machine: CheckedMachine) -> dict[str, Any]:
    """Measure a job's memory and seconds per phase; its memory must be near to what `rehearse` says."""
    keys = [*(SIZED if machine.gpus else ["sampling.max_response_tokens=8"]), "run.steps=3", "checkpoint.final=false"]
    keys.append("model.kernels=own")  # TransformerEngine's cannot be rehearsed
    card = device_name(machine)
    with machine.jobs("prediction") as jobs:
        run = jobs.start("prediction", "grpo", *keys).wait()
        asked = [*machine.data.arguments("grpo", jobs.folder / "rehearsed", *keys, *machine.overrides)]
        out = jobs.folder / "rehearsed.json"
        program, options = [sys.executable, "-m", "aligner"], ["--gpus", "1", "--device", card]
        _printed([*program, "rehearse", *options, "--json", str(out), *asked], "rehearse of a job that runs")
        planned = json.loads(_printed([*program, "plan", *options, "--json", *asked], "plan of a job that runs"))
    rehearsed = json.loads(out.read_text())["ranks"]["0"]["phases"]
    last, phases = read_jsonl(run / "metrics.jsonl")[-1], dict[str, Any]()
    for name, phase in rehearsed.items():
        if measured := last.get(f"memory/{name}_peak_bytes"):
            phases[name] = {"bytes": measured, "rehearsed": phase["peak_bytes"], "planned": phase.get("planned_bytes")}
            phases[name] |= {"seconds": last.get(f"time/{name}_s")}
            phases[name] |= {"rehearsed seconds": phase["seconds"] / phase["entries"]}
            phases[name] |= {"planned seconds": planned["time"].get(name, {}).get("seconds")}
            far = abs(measured - phase["peak_bytes"]) > NEAR * phase["peak_bytes"] + NEAR_BYTES
            if machine.gpus and far:
                expected = f"{phase['peak_bytes']:.4g}, as rehearsed, within {NEAR:.0%} and {NEAR_BYTES >> 20} MiB"
                raise RungError(f"prediction: memory/{name}_peak_bytes {measured:.4g}, expected {expected}")
    if not phases:
        raise RungError(f"prediction: no memory/<phase>_peak_bytes in {run / 'metrics.jsonl'}")
    return {"device of the predictions": card, "phases": phases}


def device_name(machine: CheckedMachine) -> str:
    """Return the card's name as `plan` and `rehearse` know it; "" for others. h100 stands for a CPU."""
    if not machine.gpus:
        return "h100"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return ""
    return sheet.name if (sheet := sheet_of(names[0])) else ""


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


def _two_nodes(machine: CheckedMachine) -> str:
    return "" if machine.nodes >= 2 else "it needs 2 nodes: sbatch --nodes=2 ... launchers/shakedown.sh"


def _model_and_data(machine: CheckedMachine) -> str:
    return "" if machine.weights and machine.rows else "it needs a model and data: --weights FOLDER --rows FOLDER"


def _known(machine: CheckedMachine) -> str:
    return "" if device_name(machine) else "plan and rehearse do not know this card"


def _clone(machine: CheckedMachine) -> str:
    return "" if (ROOT / "benchmarks/gpu.py").exists() else "it needs a clone: benchmarks/ is not installed"


RUNGS = {
    "machine": Rung("Each card has the rates of its data sheet; versions are noted.", card_rates),
    "links": Rung("A sum over all cards is right, at the rate of their links.", links, _two_ranks),
    "families": Rung("Loss, gradients and two updates of every model family are the CPU's, in float32.", families),
    "bfloat16": Rung("Losses in bfloat16 are the CPU's, within 5 %.", bfloat16),
    "stages": Rung("Two steps of every stage are the CPU's, sampled tokens included.", stages),
    "layouts": Rung("Losses and gradients on two ranks, in every layout, are those of one rank.", layouts, _two_ranks),
    "nodes": Rung("The same on two nodes, with a sum over all of their cards.", across_nodes, _two_nodes),
    "engines": Rung("Every installed engine gets the trainer's weights, asleep and awake.", engines),
    "resume": Rung("A killed run continues with the same bits, with offloading and asynchronous checkpoints.", resume),
    "learning": Rung("GRPO raises the mean reward.", learning),
    "prediction": Rung("Memory per phase is what rehearse says; notes seconds beside the plan's.", prediction, _known),
    "published": Rung("A published model, trained on GSM8K, has a published accuracy.", published, _model_and_data),
    "speed": Rung("Nothing; notes the speed of updates, refit and generation beside the plan's.", speed, _clone),
}
