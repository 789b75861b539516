"""A job on a device: its memory, its times, and both as plain data or as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from aligner.config.derived import nodes_told
from aligner.config.schema import Config
from aligner.config.validate_model import validate_on_gpu
from aligner.plan.devices import GIB, Assumptions, Device, find_device
from aligner.plan.host import host_items
from aligner.plan.job import Job, job_of
from aligner.plan.memory import Memory, generating, most_of, plan_memory, refuse, training
from aligner.plan.shapes import parameters
from aligner.plan.times import Machine, Phase, plan_times, pretrain_phase, update_mfu
from aligner.plan.windows import Windows, window_of


@dataclass(frozen=True)
class Prediction:
    job: Job
    device: Device
    memory: Memory
    phases: dict[str, Phase]
    pretrain_s: float  # once, in the first step
    windows: Callable[[], tuple[float, Windows]]  # see `window_of`

    @property
    def host(self) -> dict[str, float]:
        """Of one GPU's rank: item -> bytes."""
        return host_items(self.job)

    @property
    def step_s(self) -> float:
        """With a lag the refit, and the longer of what engines and trainer then do at once."""
        seconds = {name: phase.seconds for name, phase in self.phases.items()}
        if self.job.engine is None or not self.job.engine.lag:
            return sum(seconds.values())
        refit, generate = seconds.pop("refit"), seconds.pop("generate")
        return refit + max(generate, sum(seconds.values()))

    @property
    def tokens_per_gpu_s(self) -> float:
        return self.job.rows.tokens / self.step_s / self.job.gpus

    @property
    def mfu(self) -> float:
        update = self.phases.get("update")
        return update_mfu(self.job, self.device, update) if update else 0.0

    def data(self) -> dict[str, Any]:
        rows, memory = self.job.rows, self.memory
        return {
            "device": self.device.name,
            "gpus": self.job.gpus,
            "layout": vars(self.job.grid) | {"recompute": self.job.recompute},
            "parameters": {part.name: parameters(part.shape, part.head, part.outputs) for part in self.job.parts},
            "tokens": {"prompt_mean": rows.prompt_mean, "response_mean": rows.response_mean, "step": rows.tokens},
            "fits": memory.fits,
            "limit_bytes": memory.limit_bytes,
            "memory": {
                phase: {"total_bytes": memory.total(phase), "items": items} for phase, items in memory.phases.items()
            },
            "host_bytes": self.host,
            "step_s": self.step_s,
            "pretrain_s": self.pretrain_s,
            "tokens_per_gpu_s": self.tokens_per_gpu_s,
            "update_mfu": self.mfu,
            "time": {
                name: {"seconds": phase.seconds, "parts": phase.parts, "wire_bytes": phase.wire_bytes}
                for name, phase in self.phases.items()
            },
        }

    def text(self) -> str:
        job, rows, memory = self.job, self.job.rows, self.memory
        names = ", ".join(f"{p.name} {parameters(p.shape, p.head, p.outputs) / 1e9:.3g}B" for p in job.parts)
        count, tokens = job.micro_batches()
        engines = job.gpus - job.grid.gpus
        nodes = nodes_told(job.grid.gpus, engines, job.gpus_per_node)
        apart = f", {engines} that only generate{nodes and f' ({nodes})'}" if engines else ""
        at_once = " (the refit, and the longer of generate and the rest)" if job.engine and job.engine.lag else ""
        layout = f"{job.grid}{', recompute' * job.recompute}{apart}"
        lines = [
            f"{job.stage} on {job.gpus} x {self.device.name}, {layout}: {names}",
            f"{rows.count} rows a step, prompts {rows.prompt_mean:g} + responses {rows.response_mean:g} tokens on "
            f"average (at most {rows.prompt_longest} + {rows.response_longest})",
            f"{job.minibatches * job.epochs} optimizer steps of {count} micro-batches, {tokens:.0f} tokens each"
            if any(part.trained for part in job.parts)
            else "no optimizer steps",
            "",
            f"{'phase':<10}{'seconds':>9}{'GiB':>8}   of it",
        ]
        for name in dict.fromkeys([*self.phases, *memory.phases]):
            phase, items = self.phases.get(name), memory.phases.get(name)
            seconds = f"{phase.seconds:9.2f}" if phase else f"{'':9}"
            size = f"{memory.total(name) / GIB:8.1f}" if items else f"{'':8}"
            largest = sorted((items or {}).items(), key=lambda item: -item[1])
            parts = sorted((phase.parts if phase else {}).items(), key=lambda part: -part[1])
            words = [f"{part} {s:.2f} s" for part, s in parts if phase and s > 0.02 * phase.seconds]
            words += [f"{item} {b / GIB:.1f}" for item, b in largest if b > 0.02 * memory.total(name)]
            lines.append(f"{name:<10}{seconds}{size}   {', '.join(words)}")
        lines += [
            "",
            f"step {self.step_s:.1f} s{at_once}, {self.tokens_per_gpu_s:.0f} tokens/s/GPU, update at "
            f"{100 * self.mfu:.0f} % of the peak (operations made)",
            *([self._windows_text()] if job.engine and job.engine.lag else []),
            *([f"critic.pretrain_steps {self.pretrain_s:.1f} s, once"] if self.pretrain_s else []),
            f"memory {memory.peak_bytes / GIB:.1f} of {memory.limit_bytes / GIB:.1f} GiB in {memory.peak}",
            f"host memory {self._host_text()}",
        ]
        return "\n".join(lines)

    def _windows_text(self) -> str:
        each, found = self.windows()
        step_s = each * found.step + self.phases["refit"].seconds
        return (
            f"engine.window={found.window}: step about {step_s:.1f} s, engines {100 * found.engines:.0f} % and trainer "
            f"{100 * found.trainer:.0f} % of it at work; tokens {found.mean:.1f} steps old, a sample's first "
            f"{found.oldest:.1f}"
        )

    def _host_text(self) -> str:
        per_gpu, gpus = sum(self.host.values()), min(self.job.gpus_per_node, self.job.grid.gpus)
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.host.items() if size)
        return (
            f"{per_gpu / GIB:.1f} GiB a GPU, {gpus * per_gpu / GIB:.1f} a node, while a checkpoint is written"
            f"{f': {parts}' if parts else ''}"
        )


def predict(job: Job, device: Device, assumed: Assumptions = Assumptions()) -> Prediction:  # noqa: B008 (frozen)
    times = plan_times(job, device, assumed)
    pretrain = pretrain_phase(job, Machine(device, assumed, job.gpus_per_node)) if job.pretrain_steps else Phase()
    windows = partial(window_of, job, Machine(device, assumed, job.gpus_per_node), times)
    return Prediction(job, device, plan_memory(job, device, assumed), times, pretrain.seconds, windows)


def check(cfg: Config, gpus: int, gpus_per_node: int, kinds: dict[str, str]) -> None:
    """ConfigError for what no GPU computes, MemoryPlanError if the config cannot fit so many. `kinds`: the device by
    the key that names it, of all of them, or first of those that train, then of those that only generate."""
    devices = [find_device(name, key) for key, name in kinds.items()]
    job = job_of(cfg, gpus, gpus_per_node=gpus_per_node)
    validate_on_gpu(cfg, job.policy.shape)
    sides = (training(job), generating(job)) if len(devices) > 1 else (training(job) + generating(job),)
    for device, phases in zip(devices, sides, strict=True):
        refuse(job, device, most_of(phases, device, Assumptions()))
