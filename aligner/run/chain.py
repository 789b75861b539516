"""steps.jsonl: input and result of each step as hashes that do not depend on the layout, each record bound to the
previous one.

A record of a start has what computes: config and contents, code, versions, ranks, names of tensors; and the weights
with which the next steps begin. It is written if any of this is new, so a run that was killed and resumed leaves the
same file as one that was not. A record of a step has the weights after it, the batch (rows of a supervised stage;
prompts, tokens, logprobs and rewards of a rollout as generated), losses and gradient norms. `chain` is a hash of the
record and of the `chain` before it: runs that agree in it agree in all before.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

import aligner
from aligner.errors import DataError
from aligner.files import file_hash
from aligner.foreign import record
from aligner.megatron.train import ShardedModel
from aligner.megatron.weight_hashes import WeightHashes
from aligner.ops.kernels.hashes import row_hashes
from aligner.ops.reduce import gathered, sum_halves
from aligner.run.metrics import append_jsonl, finite, read_jsonl, rewrite_jsonl
from aligner.types import RolloutBatch, TrainBatch

FILE, VERSION = "steps.jsonl", 1
PARTS = ("rows", "prompts", "tokens", "logprobs", "rewards")  # of a batch, in the order of their creation
NUMBERS = ("loss", "grad_norm")  # the last word of the recorded metrics
DIGITS = 8  # hexadecimal, of each tensor's hash
Record = dict[str, Any]


@dataclass
class StepHashes:
    """Hashes of this rank's batches of a step. `counts`: no other rank has the same rows."""

    counts: bool = True
    keeps_batch: bool = False
    batch: TrainBatch | None = None  # of a supervised stage, if it `keeps_batch`
    sums: dict[str, int] = field(default_factory=dict)

    def rows(self, batch: TrainBatch) -> None:
        self.batch = batch if self.keeps_batch else None
        columns = batch.tensors()
        each = [columns[name] for name in ("lengths", "labels", "told_by") if name in columns]
        self._add("rows", row_hashes([batch.tokens, batch.loss_mask], _inside(batch), each))

    def rollout(self, batch: RolloutBatch) -> None:
        """Add a rollout as generated. Tool output between turns counts as tokens, as it comes after the model's first
        token."""
        inside, who = _inside(batch), [batch.group, torch.tensor([sample.index for sample in batch.samples])]
        answer = (batch.response_mask.cumsum(1) > 0) & inside
        self._add("prompts", row_hashes([batch.tokens], inside & ~answer, who))
        self._add("tokens", row_hashes([batch.tokens, batch.response_mask], answer, who))
        self._add("logprobs", row_hashes([batch.rollout_logprobs], answer, who))
        self._add("rewards", row_hashes([], answer, [batch.rewards, batch.valid, *who]))

    def _add(self, kind: str, value: int) -> None:
        self.sums[kind] = self.sums.get(kind, 0) + value * self.counts

    def take(self) -> dict[str, int]:
        taken, self.sums = self.sums, {}
        return taken


def _inside(batch: RolloutBatch | TrainBatch) -> torch.Tensor:
    return torch.arange(batch.tokens.shape[1]) < batch.lengths.cpu()[:, None]


class Chain:
    """Writer of the file, on rank 0. All methods are collective over the world."""

    def __init__(
        self, run_dir: Path, rank: int, models: Mapping[str, ShardedModel], seen: StepHashes, device: torch.device
    ):
        """Take `device`: where all ranks' sums are added, also of ranks whose weights others write."""
        self.path, self.rank, self.seen, self.device = run_dir / FILE, rank, seen, device
        self.weights = {name: WeightHashes(model) for name, model in models.items()}
        own = [f"{name}/{tensor}" for name, hashes in self.weights.items() for tensor in hashes.names]
        self.tensors = sorted({name for names in gathered(own) for name in names}, key=_position)
        self._last = ""

    def begin(self, step: int, facts: Mapping[str, Any]) -> None:
        """Begin after `step`, the last complete one: records of later ones are dropped. Warn if the resumed weights
        differ from those that it left."""
        weights, _ = self._sums()
        if self.rank:
            return
        records = (record(content, str(self.path), DataError) for content in read_jsonl(self.path))
        kept = [content.fields for content in records if content.integer("step") <= step]
        while kept and "start" in kept[-1]:  # no step followed it
            kept.pop()
        rewrite_jsonl(self.path, kept)
        before, last = start_of(kept), kept[-1] if kept else {}
        self._last = last.get("chain", "")
        start = json.loads(json.dumps({"version": VERSION, **facts, "tensors": self.tensors}))
        same = (last.get("step"), last.get("weights")) == (step, weights)
        if last.get("step") == step and not same and before.get("tensors") == self.tensors:
            text = f"the weights of step {step} are not those that the run left there, by {self.path}"
            print(f"WARNING: {text}", file=sys.stderr, flush=True)
        if before != start or not same:
            self._write({"step": step, "start": start, "weights": weights})

    def close(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the record of a finished step with its metrics."""
        weights, batch = self._sums()
        numbers = {name: finite(value) for name, value in metrics.items() if name.rpartition("/")[2] in NUMBERS}
        if not self.rank:
            self._write({"step": step, "batch": batch, "numbers": numbers, "weights": weights})

    def _sums(self) -> tuple[str, dict[str, str]]:
        """Return sums over all ranks: the hashes of all tensors in order, and those of the batch."""
        own = {f"{name}/{tensor}": x for name, hashes in self.weights.items() for tensor, x in hashes().items()}
        seen, zero = self.seen.take(), torch.zeros((), dtype=torch.int64, device=self.device)
        sums = torch.stack([zero, *(own.get(name, zero) for name in self.tensors)])[1:]
        parts = [(value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF) for value in (seen.get(kind, 0) for kind in PARTS)]
        parts += [(int(kind in seen), 0) for kind in PARTS]
        halves = torch.stack([sums & 0xFFFFFFFF, (sums >> 32) & 0xFFFFFFFF], 1)
        sums_of_all = sum_halves(torch.cat([halves, torch.tensor(parts, device=self.device)]))
        values, there = sums_of_all[-2 * len(PARTS) : -len(PARTS)], sums_of_all[-len(PARTS) :]
        batch = {kind: f"{value:016x}" for kind, value, ranks in zip(PARTS, values, there, strict=True) if ranks}
        return "".join(f"{value >> 32:0{DIGITS}x}" for value in sums_of_all[: len(self.tensors)]), batch

    def _write(self, content: Record) -> None:
        self._last = _link(self._last, content)
        append_jsonl(self.path, [content | {"chain": self._last}])


def _position(name: str) -> tuple:
    """Return a tensor's position in the order in which a token passes the tensors."""
    model, _, tensor = name.partition("/")
    parts = ("embedding.", "decoder.layers.", "decoder.", "")
    numbered = [(int(word), "") if word.isdigit() else (-1, word) for word in tensor.split(".")]
    return model != "policy", model, next(i for i, prefix in enumerate(parts) if tensor.startswith(prefix)), numbered


def _link(last: str, content: Record) -> str:
    return hashlib.blake2b(f"{last}{json.dumps(content, sort_keys=True)}".encode(), digest_size=8).hexdigest()


def start_of(records: Sequence[Record]) -> Record:
    """Return the last start in these records; {} if there is none."""
    return next((content["start"] for content in reversed(records) if "start" in content), {})


def by_tensor(start: Record, content: Record) -> dict[str, str]:
    """Return name -> hash, of a record after this start."""
    text = content["weights"]
    return {name: text[DIGITS * i : DIGITS * (i + 1)] for i, name in enumerate(start["tensors"])}


def read_chain(run_dir: Path) -> list[Record]:
    """Read the chain. Raises DataError for a folder without one, one of a later version, or one that was changed."""
    path, last = Path(run_dir) / FILE, ""
    if not path.is_file():
        raise DataError(f"{path}: expected a file with a record per step; runs of earlier versions have none")
    records = read_jsonl(path)
    for content in records:
        where = record(content, str(path), DataError)
        step, chain = where.integer("step"), where.text("chain")
        if "start" in content and (version := where.record("start").integer("version")) != VERSION:
            raise DataError(
                f"{path}: format version {version}: expected {VERSION}. Read it with the version that wrote it"
            )
        if chain != (last := _link(last, {name: value for name, value in content.items() if name != "chain"})):
            raise DataError(
                f"{path}: the record of step {step} does not follow the one before: it was changed, or one is lost"
            )
    if not records or "start" not in records[0]:
        raise DataError(f"{path}: expected a record of a start before those of steps")
    return records


@cache
def code() -> dict[str, str]:
    """Return file of this package -> 8 hexadecimal digits of its hash."""
    root = Path(aligner.__file__).parent
    return {str(path.relative_to(root)): file_hash(path)[:8] for path in sorted(root.rglob("*.py"))}
