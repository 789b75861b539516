"""What a rollout engine is, and the bookkeeping every engine needs while its weights are replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.engines import Capabilities
from aligner.errors import EngineError, RefitError
from aligner.ops.reduce import gathered
from aligner.types import Generations, Progress, SamplingParams, SeedLists, TokenLists

if TYPE_CHECKING:
    from aligner.engines.bridge import Bridge


Finished = Callable[[int, int, list[int], list[float], bool], None]


class RolloutEngine:
    """Generates responses with weights that are replaced from outside, one complete version at a time. This is the one
    contract: what not every engine does has a default here and an entry in `can` (config/engines.py).

    A fresh engine holds no weights: `generate` and `logprobs` refuse (RefitError) until an update is complete, and
    again after an update that failed.
    """

    can = Capabilities()
    weight_version: int  # of the last complete update; -1 before the first
    dtype: torch.dtype  # of its weights
    tensor_parallel: int = 1  # ranks that are one engine
    bridge: Bridge | None = None  # to the ranks that it is on, if those are not this one

    def generate(
        self, prompts: TokenLists, seeds: SeedLists, sampling: SamplingParams, progress: Progress | None = None
    ) -> Generations:
        """len(seeds[i]) samples of prompts[i], prompt-major. A sample depends on its prompt, its seed and `sampling`
        alone. `progress` gets (finished samples, all samples). CPU tensors. ConfigError if a row can never fit."""
        raise NotImplementedError

    def logprobs(self, tokens: Tensor, lengths: Tensor, temperature: float = 1.0) -> Tensor:
        """float32 [B, T]: log p(tokens[:, t] | tokens[:, :t]) of the distribution tempered by `temperature`; 0 at
        index 0 and on padding. tokens int64 [B, T] right-padded, lengths int64 [B]. CPU tensor."""
        raise NotImplementedError

    def begin_update(self, version: int) -> None:
        raise NotImplementedError

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Full tensors by Hugging Face name, in any order, over any number of calls. Copied before it returns."""
        raise NotImplementedError

    def finish_update(self) -> None:
        """Raises RefitError naming every missing, doubled, unknown or wrong-shaped tensor; else the new version
        holds."""
        raise NotImplementedError

    def checksums(self) -> Mapping[str, int]:
        """Hugging Face name -> `ops.checksum.tensor_checksum` of the tensor in the engine's dtype."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Give back the KV cache; weights stay, and an update may come meanwhile. Sleeping twice is sleeping."""

    def wake(self) -> None:
        """`generate` and `logprobs` may be called again. Waking twice is waking."""

    def close(self) -> None:
        """Its process and memory end."""

    # --- of all replicas, where they are on other ranks

    def logprobs_of_replicas(self, tokens: Tensor, lengths: Tensor, temperature: float = 1.0) -> list[Tensor]:
        return [self.logprobs(tokens, lengths, temperature)]

    def decoded_of_replicas(self, tokens: Tensor, lengths: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
        return [self.decoded(tokens, lengths, count)]

    # --- with a capability

    def decoded(self, tokens: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """With `own_process`: `count` greedy tokens after each row, and their logprobs."""
        raise NotImplementedError

    def held_bytes(self) -> Mapping[str, int]:
        """With `computes_here`: what it holds on this process's device, by name: "weights", "cache" (0 while it
        sleeps), "scratch"."""
        return {}

    finished: Finished | None = None
    """With `tells_finished`, where set: `generate` calls it with (prompt, sample, tokens, their logprobs, whether it
    stopped by itself) as samples end: of the prompts and seeds that this rank gave it, perhaps not of all. In the
    caller's thread, so it should be short."""

    def order(
        self, prompts: TokenLists, seeds: SeedLists, sampling: SamplingParams, begun: Sequence[int] | None = None
    ) -> Callable[[], Generations]:
        """With a `bridge`. Begin to `generate`; what is returned waits, and returns or raises what that does, each
        time. Any other call of the engine waits for the samples first: they have the weights of now.

        With `begun`, where every rank gives one, for `engine.window` decode steps: of each prompt so many tokens are
        the response already, of its one sample. Prompts come in their order; samples that have not ended come back as
        they stand, of length 0 where they did not run. Logprobs are 0 of tokens that were there.
        """
        raise NotImplementedError

    def serve(
        self, pool: Any, asked: list[tuple[int, int] | None], finished: Finished, sampling: SamplingParams
    ) -> Generations:
        """With `serves`: samples of what `pool` (`native/schedule.PromptPool`) gives, by this rank alone, in the order
        in which it is taken. `finished` is told of each; the pool notes in `asked` as what."""
        raise NotImplementedError

    def place(self, name: str, start: int, stop: int, afresh: bool = False) -> Tensor | None:
        """With `in_place`, part by part between begin_update and finish_update: the ranks of `tensor_parallel`
        neighbouring engines share one model. Where entries [start, stop) of the tensor's `HfTensor.axis` go (counted
        in the whole tensor): a view whose elements are in the tensor's order. They count as written. None if they must
        not be (`finish_update` tells). `afresh`: all parts of all tensors are written in this update, so the engine
        need not keep what it holds."""
        raise NotImplementedError


class EngineAround(RolloutEngine):
    """Stands before another engine; what a subclass does not change, the inner engine does. It is given whole tensors,
    and whole batches."""

    def __init__(self, engine: RolloutEngine):
        self.engine = engine
        self.can = replace(engine.can, in_place=False, serves=False, tells_finished=False, merges_adapters=False)
        self.dtype, self.tensor_parallel = engine.dtype, engine.tensor_parallel
        for name in _INNER:
            if getattr(type(self), name) is getattr(RolloutEngine, name):
                setattr(self, name, getattr(engine, name))

    @property
    def weight_version(self) -> int:
        return self.engine.weight_version

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


_INNER = ("generate", "logprobs", "begin_update", "update_weights", "finish_update", "checksums", "sleep", "wake")
_INNER += ("close", "decoded", "held_bytes")


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
