"""Phases of training and generation on one device: what must be on it in each phase, and what each phase used.

    refit -> verify -> generate -> score -> logprobs -> update -> save, eval (refit, generate, score) -> refit ...

Entering a phase first offloads what it does not use, then restores what it needs, so that the two never add up. The
timers name the phases (`Timers.around`); those without a rule change nothing. An engine that never sleeps is always
awake.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from aligner.config.sections.memory import MemoryConfig
from aligner.engines.base import RolloutEngine
from aligner.errors import ConfigError, MemoryLimitError, OutOfMemoryError
from aligner.megatron.offload import KINDS, FrozenMemory
from aligner.run.memory import PeakMeter
from aligner.types import ScalarMetrics

# roles of models, up to a dot (teachers.<name>, judge.<number>)
TRAINED, SCORED = ("policy", "critic"), ("policy", "critic", "reference", "teacher", "teachers")


@dataclass(frozen=True)
class PhaseNeeds:
    """Needs of a phase. `after`: the phases that may come directly before (None: any). `weights`: roles whose weights
    it reads. Others are offloaded, unless it `keeps_state`. `engine`: awake, asleep, empty (asleep, with a refit before
    it is used again), or "" for unchanged."""

    after: tuple[str, ...] | None = None
    weights: tuple[str, ...] = ()
    gradients: bool = False
    optimizer: bool = False
    engine: str = "asleep"
    keeps_state: bool = False
    within: tuple[str, ...] = ("", "eval")  # phases with a rule that it may be part of; "": none


RULES = {
    "refit": PhaseNeeds(weights=("policy",)),
    "verify": PhaseNeeds(after=("refit",), weights=("policy",), engine="awake", within=("refit",)),
    "generate": PhaseNeeds(after=("refit", "verify", "generate", "score"), engine="awake"),
    "score": PhaseNeeds(after=("generate", "score"), weights=("reward", "judge"), engine="", keeps_state=True),
    "logprobs": PhaseNeeds(weights=SCORED, engine="empty"),
    "average": PhaseNeeds(weights=SCORED, optimizer=True, engine="empty", within=("logprobs",)),
    "update": PhaseNeeds(weights=TRAINED, gradients=True, optimizer=True, engine="empty", within=("",)),
    "eval": PhaseNeeds(weights=("policy",), within=("",)),
    "save": PhaseNeeds(weights=TRAINED, optimizer=True, keeps_state=True, within=("",)),
    "record": PhaseNeeds(weights=TRAINED, keeps_state=True, engine="", within=("",)),
    "export": PhaseNeeds(weights=("policy",), engine="empty", within=("",)),
    "export_ema": PhaseNeeds(weights=("policy",), optimizer=True, engine="empty", within=("",)),
}
METERED = ("refit", "generate", "score", "logprobs", "update", "eval", "save")
# keys that reduce a phase's memory, besides memory.offload
KEYS = {
    "refit": "refit.bucket_bytes",
    "generate": "engine.kv_cache_bytes or engine.max_batch",
    "score": "batch.logprob_tokens",
    "logprobs": "batch.logprob_tokens or batch.logits_bytes",
    "update": "batch.micro_batch_tokens, batch.micro_batch_samples or batch.logits_bytes, or set model.recompute=full",
    "eval": "engine.kv_cache_bytes or batch.logprob_tokens",
    "save": "a rank's share: parallel.tensor, parallel.pipeline and optim.distributed divide it among more ranks",
}
ON_CPU = {"save": ", or set checkpoint.async_save=false"}  # from a GPU a save copies to host memory in any case


class PhaseMemory:
    """Memory of this rank by phase. `phase` is the timers' `around`; `take` and `check` are collective."""

    def __init__(
        self,
        config: MemoryConfig,
        device: torch.device,
        models: Mapping[str, FrozenMemory],
        engine: RolloutEngine | None = None,
        kv_cache_bytes: int = 0,
        judges: bool = False,
        empties: bool = False,
    ):
        """Take `models` by role: policy (the trained model), critic, reference, reward, judge.<number>, teacher (or
        teachers.<name>). `judges`: the engine answers while samples are scored. `empties`: it releases its weights
        where a refit comes before its next use. Raises ConfigError for a limit below what its phase holds before it
        does anything."""
        self.config, self.device, self.models, self.engine = config, device, dict(models), engine
        self.kv_cache_bytes = kv_cache_bytes  # at most
        self.judges = judges
        tight = device.type == "cuda" or bool(config.offload) or any(map(config.limit_of, METERED))
        self.sleeps = config.sleep == "always" or (config.sleep == "auto" and tight)
        self.empties = empties and self.sleeps
        self.awake = True
        self.rank: int | None = None  # of this process, if it differs from the world's
        self.now = ""  # the innermost phase entered last that does not keep the state before it
        self._open: list[str] = []  # phases that run now
        self._meter = PeakMeter(device)
        self._peaks: dict[str, int] = {}
        self._moved_bytes, self._moving_s = 0, 0.0
        self._check_limits()

    # --- the state machine

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter a phase. `name` is the timers' name, with the phases around it (`eval/generate`). Raises
        OutOfMemoryError."""
        leaf, outer = name.rpartition("/")[2], name.partition("/")[0]
        rule = RULES.get(leaf)
        metered = name == outer and outer in METERED
        if metered:
            self._meter.start()
        try:
            if rule is None:
                yield
                return
            self._enter(leaf, rule)
            self._open.append(leaf)
            try:
                yield
            finally:
                self._open.pop()
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            raise OutOfMemoryError(self._explained(leaf, outer, error)) from error
        finally:
            if metered:
                self._peaks[outer] = max(self._peaks.get(outer, 0), self._meter.stop())

    def _enter(self, leaf: str, rule: PhaseNeeds) -> None:
        outside = self._open[-1] if self._open else ""
        assert outside in rule.within, f"phase {leaf} within {outside or 'none'}: expected within {rule.within}"
        if rule.after is not None:
            assert self.now in rule.after, f"phase {leaf} after {self.now or 'the start'}: expected one of {rule.after}"
        start = time.perf_counter()
        if not rule.keeps_state:
            self._offload_others(rule)
        needed = self._needed(rule)
        # with reward functions only, it is left unchanged
        self._set_engine("asleep" if leaf == "score" and needed and not self.judges else rule.engine)
        for role, kind in needed:
            self._moved_bytes += self.models[role].restore(kind)
        self._moving_s += time.perf_counter() - start
        if not rule.keeps_state:  # otherwise generation may continue after it as before it
            self.now = leaf

    def _needed(self, rule: PhaseNeeds) -> list[tuple[str, str]]:
        kinds = {"weights": True, "gradients": rule.gradients, "optimizer": rule.optimizer}
        roles = [role for role in self.models if role.partition(".")[0] in rule.weights]
        return [(role, kind) for role in roles for kind in kinds if kinds[kind]]

    def _offload_others(self, rule: PhaseNeeds) -> None:
        needed = self._needed(rule)
        if rule.engine in ("asleep", "empty"):
            self._set_engine(rule.engine)  # before anything else: it frees memory
        for kind in KINDS:
            for role in self.models if kind in self.config.offload else ():
                if (role, kind) not in needed:
                    self._moved_bytes += self.models[role].offload(kind)

    def _set_engine(self, state: str) -> None:
        if self.engine is None or not self.sleeps or not state:
            return
        was, empty = self.awake, self.empties and state == "empty"
        self.awake = state == "awake"
        if self.awake and not was:
            self.engine.wake()
        elif empty or was > self.awake:
            self.engine.sleep(empty)

    # --- the contract

    def held_bytes(self) -> dict[str, int]:
        """Return what is on the device now, by owner."""
        held = {
            f"{role} {kind}": memory.held_bytes(kind) for role, memory in self.models.items() for kind in memory.kinds()
        }
        if self.engine is not None:
            held |= {f"engine {name}": size for name, size in self.engine.held_bytes().items()}
        return held

    def _check_limits(self) -> None:
        for phase in METERED:
            limit = self.config.limit_of(phase)
            least = self._least(phase) if limit else {}
            if sum(least.values()) > limit:
                raise ConfigError(
                    f"memory.limit.{phase}_bytes",
                    limit,
                    f"at least {sum(least.values())}, which the phase holds at its start: {_listed(least)}",
                    f"Raise it, or lower {self._smaller(phase)}, or add to memory.offload.",
                )

    def _least(self, phase: str) -> dict[str, int]:
        """Return what is on the device while `phase` runs, before it computes. The optimizer's state comes with the
        first step; a cache counts with its whole budget."""
        rule, held = RULES[phase], self.held_bytes()
        needed = {f"{role} {kind}" for role, kind in self._needed(rule)}
        movable = {f"{role} {kind}" for role in self.models for kind in self.config.offload}
        least = {name: n for name, n in held.items() if name in needed or (rule.keeps_state or name not in movable)}
        least.pop("engine cache", None)
        if self.engine is not None and not (self.empties and (rule.engine == "empty" or phase == "save")):
            least["engine weights"] = self.engine.weight_bytes
        if self.engine is not None and (rule.engine == "awake" or phase == "eval" or not self.sleeps):
            least["engine cache (engine.kv_cache_bytes)"] = self.kv_cache_bytes
        return {name: n for name, n in least.items() if n}

    def take(self, alone: bool = False) -> ScalarMetrics:
        """Return `memory/<phase>_peak_bytes`, the largest of all ranks (or of this one `alone`), and the bytes that
        this one moved, since the last take."""
        peaks = torch.tensor([self._peaks.get(phase, 0) for phase in METERED], dtype=torch.int64, device=self.device)
        if dist.get_world_size() > 1 and not alone:
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        metrics = {f"memory/{p}_peak_bytes": float(n) for p, n in zip(METERED, peaks.tolist(), strict=True) if n}
        if self.config.offload:
            metrics |= {"memory/moved_bytes": float(self._moved_bytes), "memory/moving_s": self._moving_s}
        self._peaks, self._moved_bytes, self._moving_s = {}, 0, 0.0
        return metrics

    def check(self, metrics: ScalarMetrics) -> None:
        """Raise MemoryLimitError on every rank, or warn, if a phase of these (reduced) metrics exceeded its limit."""
        for phase in METERED:
            peak, limit = metrics.get(f"memory/{phase}_peak_bytes", 0.0), self.config.limit_of(phase)
            if not limit or peak <= limit:
                continue
            text = (
                f"phase {phase} used {peak:.0f} bytes at its peak, more than memory.limit.{phase}_bytes={limit}: raise "
                f"it, or lower {self._smaller(phase)}, or add to memory.offload={self.config.offload}"
            )
            if self.config.on_excess == "stop":
                raise MemoryLimitError(text)
            if dist.get_rank() == 0:
                print(f"warning: {text}", file=sys.stderr, flush=True)

    def _smaller(self, phase: str) -> str:
        return KEYS[phase] + (ON_CPU.get(phase, "") if self.device.type == "cpu" else "")

    def _explained(self, leaf: str, outer: str, error: BaseException) -> str:
        key = f"memory.limit.{outer}_bytes={self.config.limit_of(outer)}" if outer in METERED else "no memory.limit"
        which = leaf if leaf in KEYS else outer
        hint = f"lower {self._smaller(which)}" if which in KEYS else "use a smaller model"
        left = [kind for kind in KINDS if kind not in self.config.offload]
        rank = dist.get_rank() if self.rank is None else self.rank
        if left and self.models:
            hint += f", or add {', '.join(left)} to memory.offload"
        return (
            f"out of memory in phase {leaf}{f' of {outer}' if outer != leaf else ''} on rank {rank} "
            f"({self.device}, {key}, engine.kv_cache_bytes={self.kv_cache_bytes}). Held: {_listed(self.held_bytes())}. "
            f"To fit, {hint}. Cause: {str(error).splitlines()[0][:300]}"
        )


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory is exhausted. torch has a class for a GPU's error; the CPU's is a RuntimeError with these
    words."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sizes.items()) or "nothing"
