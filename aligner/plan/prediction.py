"""A job on a device: its memory, its times, and both as plain data or as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil
from typing import Any

from aligner.config.derived import node_purposes
from aligner.config.schema import Config
from aligner.config.sections.model.kernels import NEAR
from aligner.config.validate_model import validate_on_gpu
from aligner.errors import ConfigError
from aligner.families.table import parameters
from aligner.plan.devices import GIB, Assumptions, Device, find_device
from aligner.plan.host import engine_host_bytes, host_items
from aligner.plan.job import PlanJob, job_of
from aligner.plan.limits import Limit, limits
from aligner.plan.memory import Memory, generating, most_of, plan_memory, refuse, training
from aligner.plan.sizing import Room, sized
from aligner.plan.times import Machine, PhaseTime, computed_tokens, plan_times, pretrain_phase, update_mfu
from aligner.plan.windows import Windows, window_of


@dataclass(frozen=True)
class Prediction:
    job: PlanJob
    device: Device
    memory: Memory
    phases: dict[str, PhaseTime]
    pretrain_s: float  # once, in the first step
    machine: Machine

    @property
    def host(self) -> dict[str, float]:
        """Host memory of one GPU's rank: item -> bytes."""
        return host_items(self.job)

    @property
    def step_s(self) -> float:
        """Seconds of a step. With a lag: the refit, and the longer of the engines' and the trainer's work at the same
        time."""
        if not self.lag:
            return sum(phase.seconds for phase in self.phases.values())
        return self.phases["refit"].seconds + max(self._sides)

    @property
    def lag(self) -> int:
        return self.job.engine.lag if self.job.engine else 0

    @property
    def ranks(self) -> int:
        """Number of ranks that only generate."""
        return self.job.engine.ranks if self.job.engine else 0

    @property
    def _sides(self) -> tuple[float, float]:
        """Seconds of the engines and of the trainer, without the refit."""
        rest = (phase.seconds for name, phase in self.phases.items() if name not in ("refit", "generate"))
        return self.phases["generate"].seconds, sum(rest)

    @property
    def at_work(self) -> tuple[float, float]:
        """Shares of a step with a lag in which the engines, and the trainer, do not wait."""
        engines, trainer = self._sides
        return 1 - max(0.0, trainer - engines) / self.step_s, 1 - max(0.0, engines - trainer) / self.step_s

    @cached_property
    def windows(self) -> tuple[float, Windows] | None:
        """Seconds of a step of training with a lag, and the effects of windows; None where windows add nothing."""
        clocked = window_of(self.job, self.machine, self.phases)
        return clocked and (clocked[0] * clocked[1].step + self.phases["refit"].seconds, clocked[1])

    @property
    def overlapped(self) -> tuple[float, int, float, float]:
        """Seconds of a step with a lag, its `engine.window`, and the shares in which engines and trainer work. Windows
        that the config does not have count where they are faster."""
        assert self.job.engine is not None
        if self.windows and (self.job.engine.window or self.windows[0] < self.step_s):
            step_s, windows = self.windows
            return step_s, windows.window, windows.engines, windows.trainer
        return self.step_s, 0, *self.at_work

    @cached_property
    def limits(self) -> list[Limit]:
        """Key that limits each phase."""
        return limits(self.job, self.machine, self.phases)

    @property
    def sizes(self) -> dict[str, int]:
        """Key -> its value here, set or chosen for `auto`."""
        job = self.job
        by_tokens = {"batch.micro_batch_tokens": job.micro_tokens}
        sizes = by_tokens if job.micro_tokens else {"batch.micro_batch_samples": job.micro_rows // job.unit}
        sizes |= {"batch.logprob_tokens": job.logprob_tokens} if job.asked else {}
        if job.engine is None:
            return sizes
        return sizes | {"engine.tensor_parallel": job.engine.tensor, "engine.kv_cache_bytes": int(job.engine.kv_bytes)}

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
            "layout": vars(self.job.grid) | {"recompute": self.job.policy.shape.recompute},
            "parameters": {model.name: parameters(model.shape, model.head, model.outputs) for model in self.job.models},
            "tokens": {"prompt_mean": rows.prompt_mean, "response_mean": rows.response_mean, "step": rows.tokens},
            "fits": memory.fits,
            "limit_bytes": memory.limit_bytes,
            "memory": {
                phase: {"total_bytes": memory.total(phase), "items": items} for phase, items in memory.phases.items()
            },
            "host_bytes": self.host,
            "engine_host_bytes": engine_host_bytes(self.job),
            "sizes": self.sizes,
            "limits": [vars(limit) for limit in self.limits],
            "step_s": self.step_s,
            "pretrain_s": self.pretrain_s,
            "tokens_per_gpu_s": self.tokens_per_gpu_s,
            "update_mfu": self.mfu,
            "time": {
                name: {"seconds": phase.seconds, "parts": phase.parts, "wire_bytes": phase.wire_bytes}
                for name, phase in self.phases.items()
            },
        } | ({"lag": self.lag_data()} if self.lag else {})

    def lag_data(self) -> dict[str, Any]:
        fields = {"ranks": self.ranks, "step_s": self.step_s, "engines": self.at_work[0], "trainer": self.at_work[1]}
        return fields | {"windows": {"step_s": self.windows[0]} | asdict(self.windows[1]) if self.windows else None}

    def text(self) -> str:
        job, rows, memory = self.job, self.job.rows, self.memory
        names = ", ".join(
            f"{model.name} {_short(parameters(model.shape, model.head, model.outputs))}" for model in job.models
        )
        (count, tokens), steps = job.micro_batches(), job.minibatches * job.epochs
        nodes = node_purposes(job.grid.gpus, self.ranks, job.gpus_per_node)
        apart = f", {self.ranks} that only generate{nodes and f' ({nodes})'}" if self.ranks else ""
        at_once = " (the refit, and the longer of generate and the rest)" if self.lag else ""
        layout = f"{job.grid}{job.recompute_text}{apart}"
        taught = job.teacher_rows
        theirs = f", teachers' prompts {taught.prompt_mean:g} (at most {taught.prompt_longest})" if taught else ""
        lines = [
            f"{job.stage} on {job.gpus} x {self.device.name}, {layout}: {names}",
            f"{rows.count} rows a step, prompts {rows.prompt_mean:g} + responses {rows.response_mean:g} tokens on "
            f"average (at most {rows.prompt_longest} + {rows.response_longest}){theirs}",
            f"{steps} optimizer step{'s' * (steps > 1)} of {count} micro-batch{'es' * (count > 1)}, "
            f"{tokens:.0f} tokens each"
            if any(model.trained for model in job.models)
            else "no optimizer steps",
            "",
            f"{'phase':<10}{'seconds':>9}{'GiB':>8}   of it",
        ]
        for name in dict.fromkeys([*self.phases, *memory.phases]):
            phase, items = self.phases.get(name), memory.phases.get(name)
            seconds = f"{phase.seconds:9.2f}" if phase else f"{'':9}"
            size = f"{memory.total(name) / GIB:8.1f}" if items else f"{'':8}"
            largest = sorted((items or {}).items(), key=lambda item: -item[1])
            parts = sorted((phase.parts if phase else {}).items(), key=lambda kind: -kind[1])
            words = [f"{kind} {s:.2f} s" for kind, s in parts if phase and s > 0.02 * phase.seconds]
            words += [f"{item} {b / GIB:.1f}" for item, b in largest if b > 0.02 * memory.total(name)]
            lines.append(f"{name:<10}{seconds}{size}   {', '.join(words)}")
        lines += [
            "",
            f"step {self.step_s:.1f} s{at_once}, {self.tokens_per_gpu_s:.0f} tokens/s/GPU, update at "
            f"{100 * self.mfu:.0f} % of the peak (operations made)",
            *(self._lag_lines() if self.lag else []),
            *([f"critic.pretrain_steps {self.pretrain_s:.1f} s, once"] if self.pretrain_s else []),
            f"sizes {' '.join(f'{key}={value}' for key, value in self.sizes.items())}{self._slots_text()}",
            *self._linear_lines(),
            *self._buffer_lines(),
            *(str(limit) for limit in self.limits),
            f"memory {memory.peak_bytes / GIB:.1f} of {memory.limit_bytes / GIB:.1f} GiB in {memory.peak}"
            f"{self._apart_text()}",
            f"host memory {self._host_text()}",
        ]
        return "\n".join(lines)

    def _lag_lines(self) -> list[str]:
        whole = f"engine.window=0: {shares_text(*self.at_work)}; token lag {self.lag} step{'s' * (self.lag > 1)}"
        if self.windows is None:
            waits = "; windows would gain nothing, as the engines wait for the trainer"
            return [whole + waits * (self.at_work[0] < 1)]
        step_s, windows = self.windows
        return [
            whole,
            f"engine.window={windows.window}: step about {step_s:.1f} s, "
            f"{shares_text(windows.engines, windows.trainer)}; "
            f"token lag {windows.mean:.1f} steps, of a sample's first token {windows.oldest:.1f}",
        ]

    def _slots_text(self) -> str:
        if "generate" not in self.phases:
            return ""
        rows = ceil(self.job.rows.count / self.job.replicas)
        return f" ({self.job.slots()[0]} of an engine's {rows} rows are decoded together)"

    def _linear_lines(self) -> list[str]:
        """Return the line about what linear attention remembers of a row."""
        engine, shape = self.job.engine, self.job.policy.shape
        if engine is None or not shape.layers_of("linear"):
            return []
        each = engine.state_bytes(shape)
        slots = self.job.slots()[0] // engine.shares
        held = f"{each / 1e6:.1f} MB of a row of any length, {each * slots / GIB:.1f} GiB of {slots} rows"
        return [f"linear attention remembers on an engine's GPU {held}"]

    def _buffer_lines(self) -> list[str]:
        """Return the line about user buffers that micro-batches do not fill."""
        job, tokens = self.job, computed_tokens(self.job)
        if not job.policy.shape.megatron.get("tp_comm_overlap") or tokens >= NEAR * job.micro_tokens:
            return []
        shared = ", as rows share prompts (batch.share_prompts)" * (tokens < job.micro_batches()[1])
        return [
            f"no message goes beside products (model.megatron.tp_comm_overlap): a micro-batch has {tokens:.0f} tokens "
            f"of the {job.micro_tokens} of user buffers{shared}"
        ]

    def _apart_text(self) -> str:
        if not self.ranks:
            return ""
        needed = most_of(generating(self.job), self.device, self.machine.assumed).peak_bytes
        return f", {needed / GIB:.1f} on ranks that only generate"

    def _host_text(self) -> str:
        per_gpu, gpus = sum(self.host.values()), min(self.job.gpus_per_node, self.job.grid.gpus)
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.host.items() if size)
        return (
            f"{per_gpu / GIB:.1f} GiB a GPU, {gpus * per_gpu / GIB:.1f} a node, while a checkpoint is written"
            f"{f': {parts}' if parts else ''}{self._engine_host_text()}"
        )

    def _engine_host_text(self) -> str:
        size = engine_host_bytes(self.job)
        if not size:
            return ""
        return f"; {size / GIB:.1f} GiB a GPU on ranks that only generate: weights on their way to the engine"


def shares_text(engines: float, trainer: float) -> str:
    return f"engines {100 * engines:.0f} % and trainer {100 * trainer:.0f} % of it at work"


def predict(job: PlanJob, device: Device, assumed: Assumptions = Assumptions()) -> Prediction:  # noqa: B008 (frozen)
    check_fp8(job, device)
    machine = Machine(device, assumed, job.gpus_per_node)
    pretrain = pretrain_phase(job, machine) if job.pretrain_steps else PhaseTime()
    times = plan_times(job, device, assumed)
    return Prediction(job, device, plan_memory(job, device, assumed), times, pretrain.seconds, machine)


def check_fp8(job: PlanJob, device: Device) -> None:
    """Check that a device has the FP8 products that the model asks for. Raises ConfigError."""
    recipe = job.policy.shape.megatron.get("fp8_recipe")
    if recipe and recipe not in device.fp8:
        known = ", ".join(device.fp8) or "no value: it has none"
        raise ConfigError("model.megatron.fp8_recipe", recipe, f"on {device.name} {known}")


def _short(count: int) -> str:
    return f"{count / 1e9:.3g}B" if count >= 1e8 else f"{count / 1e6:.3g}M"


def check(cfg: Config, gpus: int, gpus_per_node: int, kinds: dict[str, str]) -> None:
    """Check that GPUs can compute the config and that it fits. Raises ConfigError, or MemoryPlanError if it does not
    fit.

    `kinds`: the device by the key that names it, of all GPUs, or first of those that train, then of those that only
    generate."""
    devices = [find_device(name, key) for key, name in kinds.items()]
    room = Room(devices[0].memory_bytes, devices[-1].memory_bytes, cuda=True)
    job = job_of(sized(cfg, gpus, room), gpus, gpus_per_node=gpus_per_node)
    validate_on_gpu(cfg, job.policy.shape)
    check_fp8(job, devices[0])
    sides = (training(job), generating(job)) if len(devices) > 1 else (training(job) + generating(job),)
    for device, phases in zip(devices, sides, strict=True):
        refuse(job, device, most_of(phases, device, Assumptions()))
