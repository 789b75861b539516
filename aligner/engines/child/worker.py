"""The common base of the workers of engines in child processes: the buffer of the transfer, and when weights count."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aligner.engines.child.buckets import Memory, Slot, checksums
from aligner.errors import EngineError, RefitError
from aligner.types import LENGTH, STOP

_REASONS = {"stop": STOP, "length": LENGTH}
KV_CACHE, WEIGHTS = "kv_cache", "model_weights"  # tags of those memories
Progress = Callable[[int], None]
Row = tuple[list[int], list[float] | None, int, list[float] | None]
"""Tokens, logprobs (None where the engine gave none that can be used), finish reason, and logprobs of the whole
tempered distribution where the worker computes them."""


@dataclass(frozen=True)
class Meeting:
    """How the processes of an engine of several ranks meet."""

    hosts: tuple[str, ...]  # of each rank
    ports: tuple[int, int]  # of the first rank's host
    secret: bytes
    limit_s: float
    key: str  # of the engine's section


@dataclass
class Settings:
    """Everything a child needs to know; sent once."""

    folder: str  # holds config.json and nothing else
    memory: Memory  # that weights come through
    vocab_size: int
    dtype: str
    max_seq_len: int
    max_batch: int
    kv_cache_bytes: int
    sleep: bool
    sleep_weights: bool
    prefix_reuse: bool
    cuda_graphs: bool
    pad_id: int
    checksums: bool
    tensor_parallel: int = 1
    rank: int = 0  # of them, where each has a process
    device: int = 0  # of this rank, among those that its process sees
    meeting: Meeting | None = None  # of several ranks
    block: int = 0  # tokens of a block of the KV cache, where the package needs it
    args: Mapping[str, Any] = field(default_factory=dict)  # additional options of the package
    lasting: bool = False  # a bucket stays in the memory until the update has ended
    routed_layers: tuple[int, ...] = ()  # of which generations name each token's experts
    draft_tokens: int = 0  # that are drafted for a row, where the package does that
    drafts_ahead: bool = False  # by the model's layer for multi-token prediction
    draft_folder: str = ""  # of another model, which drafts instead
    draft_method: str = ""  # as the package names it

    @property
    def max_num_tokens(self) -> int:
        """Tokens of one forward pass."""
        return max(8192, self.max_seq_len, self.max_batch)


class BaseWorker(ABC):
    """A worker around one engine. `whole`: the engine holds one complete set of weights."""

    def __init__(self, settings: Settings):
        self.settings, self.whole = settings, False
        self._checksums: dict[str, int] = {}

    def bucket(self, slots: list[Slot]) -> int:
        """Take one bucket; return its number of tensors once they are no longer needed in the memory."""
        self._checksums |= self.take(slots)
        return len(slots)

    @abstractmethod
    def take(self, slots: list[Slot]) -> dict[str, int]:
        """Load the tensors of one bucket; return their checksums, or none where they are not asked for."""

    @abstractmethod
    def close(self) -> None:
        """End the engine."""

    def orphaned(self) -> None:
        """End the engine after its trainer has ended."""
        self.close()

    def checksums(self) -> dict[str, int]:
        return self._checksums

    def _require(self) -> None:
        if not self.whole:
            raise RefitError("the engine holds no complete weights: an update was begun and has not been finished")

    def _in_vocabulary(self, tokens: list[int]) -> None:
        beyond = [t for t in tokens if not 0 <= t < self.settings.vocab_size]
        if beyond:
            raise EngineError(f"token {beyond[0]} was generated: the vocabulary has {self.settings.vocab_size}")

    def _row(self, output: Any, with_logprobs: bool = True) -> Row:
        """Return a finished request as a row; `output` has the packages' `token_ids`, `finish_reason`, `logprobs`."""
        tokens, reason = list(output.token_ids), output.finish_reason
        if reason not in _REASONS:
            raise EngineError(f"a request ended with finish_reason={reason!r}: expected stop or length")
        self._in_vocabulary(tokens)
        logprobs = None
        if with_logprobs:
            if len(output.logprobs or ()) != len(tokens):
                raise EngineError(f"{len(tokens)} tokens came with {len(output.logprobs or ())} logprobs")
            logprobs = _logprobs(output.logprobs, tokens)
        return tokens, logprobs, _REASONS[reason], None


class LocalWorker(BaseWorker):
    """A worker of an engine, or of one rank of it, that computes in this process, on one device."""

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self.buffer = settings.memory.tensor(settings.device)

    def take(self, slots: list[Slot]) -> dict[str, int]:
        sums = checksums(slots, self.buffer) if self.settings.checksums else {}
        self.load({slot.name: slot.view(self.buffer) for slot in slots})
        self._synchronize()
        return sums

    @abstractmethod
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load the tensors of one bucket, views of the buffer."""

    def _synchronize(self) -> None:
        if torch.cuda.is_available():  # also where the buffer is host memory
            torch.cuda.synchronize()

    def _give_back(self) -> None:
        """Return freed memory to the trainer, which shares the device."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _logprobs(entries: list, tokens: list[int]) -> list[float] | None:
    """Return the logprob of each token. Some packages give a number per token, others a table from token to its
    logprob. In some versions it holds the likeliest token alone, which need not be the sampled one: then None."""
    if any(not isinstance(entry, float) and token not in entry for entry, token in zip(entries, tokens, strict=True)):
        return None
    pairs = zip(entries, tokens, strict=True)
    return [entry if isinstance(entry, float) else float(entry[token].logprob) for entry, token in pairs]
