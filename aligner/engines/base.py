"""The interface of a rollout engine, and the bookkeeping that every engine needs while its weights are replaced."""

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
from aligner.types import Generations, Progress, SamplingParams, SeedLists, Sums, TokenLists

if TYPE_CHECKING:
    from aligner.engines.bridge import Bridge


Finished = Callable[[int, int, list[int], list[float], bool], None]


class RolloutEngine:
    """An engine that generates responses with weights that are replaced from outside, one complete version at a time.

    This is the one interface. A method that not every engine has is a default here and an entry in `can`
    (config/engines.py). A fresh engine holds no weights: `generate` and `logprobs` raise RefitError until an update
    is complete, and again after an update that failed.
    """

    can = Capabilities()
    weight_version: int  # of the last complete update; -1 before the first
    dtype: torch.dtype  # of its weights
    weight_bytes: int = 0  # of its weights on this process's device, once it has any
    tensor_parallel: int = 1  # ranks that are one engine
    bridge: Bridge | None = None  # to the ranks that it is on, if those are not this one
    no_routing: Tensor | None = None  # the routing of no rows, if generations have `routing`

    def generate(
        self, prompts: TokenLists, seeds: SeedLists, sampling: SamplingParams, progress: Progress | None = None
    ) -> Generations:
        """Return len(seeds[i]) samples of prompts[i], prompt-major. A sample depends on its prompt, its seed and
        `sampling` alone. `progress` gets (finished samples, all samples). CPU tensors. Raises ConfigError if a row
        can never fit."""
        raise NotImplementedError

    def logprobs(self, tokens: Tensor, lengths: Tensor, temperature: float = 1.0) -> Tensor:
        """Return log p(tokens[:, t] | tokens[:, :t]) of the distribution tempered by `temperature`, as float32 [B,
        T] on the CPU; 0 at index 0 and on padding. tokens int64 [B, T] right-padded, lengths int64 [B]."""
        raise NotImplementedError

    def begin_update(self, version: int) -> None:
        raise NotImplementedError

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy full tensors, by Hugging Face name, in any order and over any number of calls."""
        raise NotImplementedError

    def finish_update(self) -> None:
        """Make the new version usable. Raises RefitError naming every missing, doubled, unknown or wrong-shaped
        tensor."""
        raise NotImplementedError

    def checksums(self) -> Mapping[str, int]:
        """Return Hugging Face name -> `ops.checksum.tensor_checksum` of the tensor in the engine's dtype."""
        raise NotImplementedError

    def sleep(self, weights: bool = False) -> None:
        """Release the KV cache; an update may come meanwhile. A second call does nothing. `weights`: an update will
        come before the engine is used, so the weights may be released, too."""

    def wake(self) -> None:
        """Allow `generate` and `logprobs` again. A second call does nothing."""

    def close(self) -> None:
        """End the engine's process and release its memory."""

    # --- of all replicas, where these are on other ranks

    def logprobs_of_replicas(self, tokens: Tensor, lengths: Tensor, temperature: float = 1.0) -> list[Tensor]:
        return [self.logprobs(tokens, lengths, temperature)]

    def decoded_of_replicas(self, tokens: Tensor, lengths: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
        return [self.decoded(tokens, lengths, count)]

    # --- with a capability

    def decoded(self, tokens: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` greedy tokens after each row, and their logprobs. Needs `own_process`."""
        raise NotImplementedError

    def top_logprobs(self, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return log p(tokens[:, t] | tokens[:, :t]) for t >= 1, float32 [B, T - 1], and of the `count` likeliest
        tokens there their logprobs and ids, [B, T - 1, count] in descending order. tokens int64 [B, T]
        right-padded. By this rank's replica alone, or the first of those on other ranks. Needs `scores`."""
        raise NotImplementedError

    def take_sums(self) -> Sums:
        """Return sums of generations since the last call, for metrics: the same names on every rank."""
        return {}

    def held_bytes(self) -> Mapping[str, int]:
        """Return the bytes held on this process's device: "weights", "cache" (0 while asleep), "scratch". Needs
        `computes_here`."""
        return {}

    finished: Finished | None = None
    """Callback that `generate` calls as samples end, with (prompt, sample, tokens, their logprobs, whether the model
    stopped). It is called for this rank's prompts and seeds, perhaps not for all of them, in the caller's thread: keep
    it short. Needs `tells_finished`."""

    def order(
        self, prompts: TokenLists, seeds: SeedLists, sampling: SamplingParams, begun: Sequence[int] | None = None
    ) -> Callable[[], Generations]:
        """Begin to `generate`; return a function that waits, and each time returns or raises what `generate` does.
        Needs a `bridge`. Any other call of the engine waits for the samples first: they have the current weights.

        `begun`, which every rank gives or none, limits the call to `engine.window` decode steps. It counts the
        tokens of each prompt that belong to the response of its one sample already. Prompts are taken in their
        order. Unfinished samples are returned as they are, with length 0 if they did not run. Logprobs of tokens
        that were there before are 0.
        """
        raise NotImplementedError

    def serve(
        self, pool: Any, asked: list[tuple[int, int] | None], finished: Finished, sampling: SamplingParams
    ) -> Generations:
        """Return samples of the prompts of `pool` (`native/schedule.PromptPool`), by this rank alone, in the order
        in which they are taken. Calls `finished` for each; the pool notes its (prompt, sample) in `asked`. Needs
        `serves`."""
        raise NotImplementedError

    def weight_view(self, name: str, start: int, stop: int, afresh: bool = False) -> Tensor | None:
        """Return a view for entries [start, stop) of the tensor's `HfTensor.axis`, counted in the whole tensor; its
        elements are in the tensor's order. Needs `in_place`: the ranks of `tensor_parallel` neighbouring engines share
        one model.

        Called shard by shard between begin_update and finish_update. The entries count as written. Returns None if
        they must not be written; `finish_update` raises the reason. `afresh`: all shards of all tensors are written
        in this update, so the engine need not keep its content. The view can be kept for later updates: `rewrite`.
        """
        raise NotImplementedError

    def rewrite(self, name: str, start: int, stop: int, afresh: bool = False) -> bool:
        """Count entries as written through the view of an earlier update, as `weight_view` does; return whether they
        may be."""
        raise NotImplementedError


class EngineWrapper(RolloutEngine):
    """An engine around another one. The inner engine does everything that a subclass does not override. It gets
    whole tensors and whole batches."""

    def __init__(self, engine: RolloutEngine):
        self.engine = engine
        self.can = replace(engine.can, in_place=False, serves=False, tells_finished=False, merges_adapters=False)
        self.dtype, self.tensor_parallel, self.no_routing = engine.dtype, engine.tensor_parallel, engine.no_routing
        for name in _INNER:
            if getattr(type(self), name) is getattr(RolloutEngine, name):
                setattr(self, name, getattr(engine, name))

    @property
    def weight_version(self) -> int:
        return self.engine.weight_version

    @property
    def weight_bytes(self) -> int:
        return self.engine.weight_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


_INNER = ("generate", "logprobs", "begin_update", "update_weights", "finish_update", "checksums", "sleep", "wake")
_INNER += ("close", "decoded", "held_bytes", "take_sums", "top_logprobs")


class UpdateLedger:
    """A record of the tensors that an update has brought, and of the version that is complete.

    `expected`: Hugging Face name -> shape. An update of a `group`, to which each of its ranks gets a shard, is
    complete on all of them or on none.
    """

    def __init__(self, expected: Mapping[str, tuple[int, ...]], group: dist.ProcessGroup | None = None):
        self.expected, self.group = dict(expected), group
        self.version = -1
        self._complete = False
        self._pending: int | None = None
        self._seen: set[str] = set()
        self._shards: dict[str, list[tuple[int, int]]] = {}  # of tensors that come in shards
        self._faults: dict[str, list[str]] = {}

    def begin(self, version: int) -> None:
        """Begin an update, abandoning an unfinished one. Only a complete update makes the engine usable again."""
        self._pending, self._complete = version, False
        self._seen, self._shards, self._faults = set(), {}, {}

    def accept(self, name: str, shape: Sequence[int]) -> bool:
        """Note a tensor; return whether it may be copied. `finish` reports the fault."""
        if not self._knows(name):
            return False
        if tuple(shape) != self.expected[name]:
            return self._fault("wrong shape", f"{name} {tuple(shape)} (expected {self.expected[name]})")
        if name in self._seen:
            return self._fault("doubled", name)
        self._seen.add(name)
        return True

    def accept_shard(self, name: str, start: int, stop: int) -> bool:
        """Note a shard; return whether it may be copied. `settle_shards` notes missing and overlapping ones."""
        if not self._knows(name):
            return False
        self._shards.setdefault(name, []).append((start, stop))
        return True

    def _knows(self, name: str) -> bool:
        if self._pending is None:
            raise RefitError(f"tensor {name!r} came outside begin_update and finish_update")
        return name in self.expected or self._fault("unknown", name)

    def settle_shards(self, name: str, start: int, stop: int) -> None:
        """Check that the shards of tensor `name` cover [start, stop), each entry once; call before `finish`."""
        shards, at = self._shards.pop(name, []), start
        if shards == [(start, stop)] and name not in self._seen:  # the common case
            self._seen.add(name)
            return
        shards.sort()
        if not shards and (start < stop or name in self._seen):
            return  # missing, or it came whole
        for a, b in shards:
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
        """Return the faults of the tensors so far, settled shards included, and the missing ones; empty if there are
        none."""
        # a tensor of a wrong shape is not also missing
        wrong = {text.split(" ")[0] for text in self._faults.get("wrong shape", [])}
        missing = [name for name in self.expected if name not in self._seen and name not in wrong]
        faults = ({"missing": missing} if missing else {}) | self._faults
        return "; ".join(f"{kind}: {listed(names)}" for kind, names in faults.items())

    def finish(self, commit: Callable[[], None] | None = None) -> None:
        """Complete the update; call `commit` if nothing is wrong. If `commit` raises, the update has failed.
        Collective over the group."""
        if self._pending is None:
            raise RefitError("finish_update came without begin_update")
        pending, self._pending = self._pending, None
        faults = [self.faults()] if self.group is None else gathered(self.faults(), self.group)
        if faults := next(filter(None, faults), ""):
            raise RefitError(f"update to weight version {pending} is not usable: {faults}")
        if commit is not None:
            commit()
        self.version, self._complete = pending, True

    def lose(self) -> None:
        """Forget the weights, as before the first update."""
        self.version, self._complete, self._pending = -1, False, None

    def require(self) -> None:
        if not self._complete:
            raise RefitError(
                f"the engine holds no complete weights (last complete version: {self.version}); "
                "finish an update before generating"
            )


def listed(names: Sequence[str], limit: int = 8) -> str:
    """Return the first `limit` names for a message, and how many others there are."""
    others = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + others


def require_finite(generations: Generations) -> Generations:
    """Return the generations, on the CPU. Raises EngineError where the logprob of a sampled token is NaN: its logits
    were not finite."""
    written = torch.arange(generations.logprobs.shape[1]) < generations.lengths[:, None]
    broken = (generations.logprobs.isnan() & written).any(1)
    if broken.any():
        raise EngineError(
            f"weight version {generations.weight_version}: the engine's logits are not finite in "
            f"{int(broken.sum())} of {len(broken)} samples. Its weights hold NaN or infinity, or overflow: resume "
            "from an earlier checkpoint with a lower optim.lr"
        )
    return generations


def draft_sums(passes: int, drafts: int, drafted_tokens: int, accepted_tokens: int) -> Sums:
    """Return metrics of drafts. `drafts`: fed to a row in a pass."""
    return {
        "engine/decode_passes": (float(passes), 1.0),
        "engine/draft_acceptance_rate": (float(accepted_tokens), float(drafted_tokens)),
        "engine/mean_acceptance_length": (float(accepted_tokens + drafts), float(drafts)),
    }
