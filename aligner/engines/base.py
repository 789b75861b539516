"""What a rollout engine is, and the bookkeeping every engine needs while its weights are replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import EngineError, RefitError
from aligner.ops.reduce import gathered
from aligner.types import Generations, Progress, SamplingParams, SeedLists, TokenLists


class RolloutEngine(Protocol):
    """Generates responses with weights that are replaced from outside, one complete version at a time.

    A fresh engine holds no weights: `generate` and `logprobs` refuse (RefitError) until an update is complete, and
    again after an update that failed.
    """

    weight_version: int  # of the last complete update; -1 before the first
    dtype: torch.dtype  # of its weights

    def generate(
        self, prompts: TokenLists, seeds: SeedLists, sampling: SamplingParams, progress: Progress | None = None
    ) -> Generations:
        """len(seeds[i]) samples of prompts[i], prompt-major. A sample depends on its prompt, its seed and `sampling`
        alone. `progress` gets (finished samples, all samples). CPU tensors. ConfigError if a row can never fit."""
        ...

    def logprobs(self, tokens: Tensor, lengths: Tensor, temperature: float = 1.0) -> Tensor:
        """float32 [B, T]: log p(tokens[:, t] | tokens[:, :t]) of the distribution tempered by `temperature`; 0 at
        index 0 and on padding. tokens int64 [B, T] right-padded, lengths int64 [B]. CPU tensor."""
        ...

    def begin_update(self, version: int) -> None: ...

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Full tensors by Hugging Face name, in any order, over any number of calls. Copied before it returns."""
        ...

    def finish_update(self) -> None:
        """Raises RefitError naming every missing, doubled, unknown or wrong-shaped tensor; else the new version
        holds."""
        ...

    def checksums(self) -> Mapping[str, int]:
        """Hugging Face name -> `ops.checksum.tensor_checksum` of the tensor in the engine's dtype."""
        ...

    def sleep(self) -> None:
        """Give back the KV cache; weights stay, and an update may come meanwhile. Sleeping twice is sleeping."""
        ...

    def wake(self) -> None:
        """`generate` and `logprobs` may be called again. Waking twice is waking."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class MeasuredEngine(Protocol):
    """An engine that can tell what it holds on the device of this process."""

    def held_bytes(self) -> Mapping[str, int]:
        """By name: "weights", "cache" (0 while it sleeps), "scratch"."""
        ...


Finished = Callable[[int, int, list[int], list[float], bool], None]


@runtime_checkable
class TellingEngine(Protocol):
    """An engine that tells of samples while it generates others."""

    finished: Finished | None
    """Where set, `generate` calls it with (prompt, sample, tokens, their logprobs, whether it stopped by itself) as
    samples end: of the prompts and seeds that this rank gave it, perhaps not of all. In the caller's thread, so it
    should be short."""


@runtime_checkable
class OrderedEngine(Protocol):
    """An engine that generates while its caller does something else."""

    def order(
        self, prompts: TokenLists, seeds: SeedLists, sampling: SamplingParams, begun: Sequence[int] | None = None
    ) -> Callable[[], Generations]:
        """Begin to `generate`; what is returned waits, and returns or raises what that does, each time. Any other call
        of the engine waits for the samples first: they have the weights of now.

        With `begun`, where every rank gives one, for `engine.window` decode steps: of each prompt so many tokens are
        the response already, of its one sample. Prompts come in their order; samples that have not ended come back as
        they stand, of length 0 where they did not run. Logprobs are 0 of tokens that were there.
        """
        ...


@runtime_checkable
class PlacingEngine(Protocol):
    """A `RolloutEngine` whose weights others may write in place, part by part, between begin_update and
    finish_update: the ranks of `tensor_parallel` neighbouring engines share one model."""

    tensor_parallel: int

    def place(self, name: str, start: int, stop: int, afresh: bool = False) -> Tensor | None:
        """Where entries [start, stop) of the tensor's `HfTensor.axis` go (counted in the whole tensor): a view whose
        elements are in the tensor's order. They count as written. None if they must not be (`finish_update` tells).
        `afresh`: all parts of all tensors are written in this update, so the engine need not keep what it holds."""
        ...


class EngineAround:
    """Stands before another engine; what a subclass does not change, the inner engine does. It is none of the protocols
    above unless it says so: they are asked by attributes of its own."""

    def __init__(self, engine: RolloutEngine):
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def held_bytes(self) -> Mapping[str, int]:
        return self.engine.held_bytes() if isinstance(self.engine, MeasuredEngine) else {}


class UpdateLedger:
    """Which tensors of an update have come, and which version is complete.

    `expected`: Hugging Face name -> shape. An update of a `group`, to which each of its ranks gets a part, is complete
    on all of them or on none.
    """

    def __init__(self, expected: Mapping[str, tuple[int, ...]], group: dist.ProcessGroup | None = None):
        self.expected, self.group = dict(expected), group
        self.version = -1
        self._complete = False
        self._pending: int | None = None
        self._seen: set[str] = set()
        self._parts: dict[str, list[tuple[int, int]]] = {}  # of tensors that come in parts
        self._faults: dict[str, list[str]] = {}

    def begin(self, version: int) -> None:
        """An unfinished update is abandoned: from here on only a complete one makes the engine usable."""
        self._pending, self._complete = version, False
        self._seen, self._parts, self._faults = set(), {}, {}

    def accept(self, name: str, shape: Sequence[int]) -> bool:
        """Note a tensor; False where it must not be copied (the fault is told by `finish`)."""
        if not self._knows(name):
            return False
        if tuple(shape) != self.expected[name]:
            return self._fault("wrong shape", f"{name} {tuple(shape)} (expected {self.expected[name]})")
        if name in self._seen:
            return self._fault("doubled", name)
        self._seen.add(name)
        return True

    def accept_part(self, name: str, start: int, stop: int) -> bool:
        """Note a part; False where it must not be copied. `settle_parts` tells what is missing or overlaps."""
        if not self._knows(name):
            return False
        self._parts.setdefault(name, []).append((start, stop))
        return True

    def _knows(self, name: str) -> bool:
        if self._pending is None:
            raise RefitError(f"tensor {name!r} came outside begin_update and finish_update")
        return name in self.expected or self._fault("unknown", name)

    def settle_parts(self, name: str, start: int, stop: int) -> None:
        """The parts of tensor `name` must be [start, stop) in all, each entry once; call before `finish`."""
        parts, at = self._parts.pop(name, []), start
        if parts == [(start, stop)] and name not in self._seen:  # as it is mostly
            self._seen.add(name)
            return
        parts.sort()
        if not parts and start < stop:
            return  # missing, or it came whole
        for a, b in parts:
            if a != at:
                self._fault("doubled" if a < at else "incomplete", f"{name} [{min(a, at)}:{max(a, at)}]")
                break
            at = b
        else:
            if at != stop:
                self._fault("incomplete" if at < stop else "beyond", f"{name} [{min(at, stop)}:{max(at, stop)}]")
        if name in self._seen:
            self._fault("doubled", name)
        self._seen.add(name)

    def _fault(self, kind: str, text: str) -> bool:
        self._faults.setdefault(kind, []).append(text)
        return False

    def faults(self) -> str:
        """What is wrong with what has come, parts settled, and what is missing; empty if nothing."""
        # a tensor of a wrong shape is not also missing
        wrong = {text.split(" ")[0] for text in self._faults.get("wrong shape", [])}
        missing = [name for name in self.expected if name not in self._seen and name not in wrong]
        faults = ({"missing": missing} if missing else {}) | self._faults
        return "; ".join(f"{kind}: {listed(names)}" for kind, names in faults.items())

    def finish(self, commit: Callable[[], None] | None = None) -> None:
        """`commit` is called when nothing is wrong, and may raise: then the update has failed. Collective over the
        group."""
        if self._pending is None:
            raise RefitError("finish_update came without begin_update")
        pending, self._pending = self._pending, None
        told = [self.faults()] if self.group is None else gathered(self.faults(), self.group)
        if told := next(filter(None, told), ""):
            raise RefitError(f"update to weight version {pending} is not usable: {told}")
        if commit is not None:
            commit()
        self.version, self._complete = pending, True

    def lose(self) -> None:
        """The weights are gone: as before the first update."""
        self.version, self._complete, self._pending = -1, False, None

    def require(self) -> None:
        if not self._complete:
            raise RefitError(
                f"the engine holds no complete weights (last complete version: {self.version}); "
                "finish an update before generating"
            )


def listed(names: Sequence[str], limit: int = 8) -> str:
    """For a message: the first of them, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def require_finite(generations: Generations) -> Generations:
    """The same, on CPU. Raises EngineError where the logprob of a sampled token is NaN: its logits were not finite."""
    written = torch.arange(generations.logprobs.shape[1]) < generations.lengths[:, None]
    broken = (generations.logprobs.isnan() & written).any(1)
    if broken.any():
        raise EngineError(
            f"weight version {generations.weight_version}: the engine's logits are not finite in "
            f"{int(broken.sum())} of {len(broken)} samples. Its weights hold NaN or infinity, or overflow: go on "
            "from an earlier checkpoint with a lower optim.lr"
        )
    return generations
