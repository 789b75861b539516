"""Recorded rollouts: one safetensors file for a whole rollout of any layout.

Tensors: the fields of `RolloutBatch` that were set when the rollout came, its `Scores` under `scores/`, and the
fields that the step added (logprobs of the trainer, advantages, ...) under `trained/`; rows are group-major, tokens
int32. Metadata: one entry `header`, JSON: `format`, `version`, and the fields of `Header`; the same step gives the
same bytes. Not recorded: the prompts' other columns (`Prompt.fields`), which are not read after the scores.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aligner.config.options import from_plain
from aligner.errors import AlignerError, ConfigError, DataError
from aligner.foreign import parse_json, record
from aligner.megatron.groups import Layout
from aligner.models.safetensors_io import save_whole
from aligner.ops.agree import fail_together
from aligner.ops.packing.rows import joined
from aligner.rewards.composite import Scores
from aligner.rollout.source import Rollout, Rollouts
from aligner.run.rows import delete_but, file_name
from aligner.types import Prompt, RolloutBatch, Sample

FORMAT, VERSION = "aligner-rollout", 1
FOLDER = "rollouts"  # in the run folder
TRAINED = "trained/"


@dataclass(frozen=True)
class Origin:
    """The properties that a recording and the run that trains on it must share; the last two may differ (a warning)."""

    tokenizer: str  # hash of the vocabulary
    vocab_size: int
    prompts: int
    group: int
    temperature: float
    model: str = ""  # hash of the model's shape
    stage: str = ""


@dataclass(frozen=True)
class Header:
    origin: Origin
    step: int
    weight_version: int
    slots: list[int]  # of `prompts`
    prompts: list[dict[str, Any]]  # {"id", "text"}
    responses: list[str]  # by row, decoded


@dataclass
class Recording:
    header: Header
    rollout: RolloutBatch
    scores: Scores


# --- one file


def write_recording(
    path: Path, rollout: RolloutBatch, scores: Scores, origin: Origin, step: int, trained: Collection[str] = ()
) -> None:
    """Write a whole rollout; the step has added its fields named `trained`. The file is complete or not there.
    Raises OSError."""
    order = torch.argsort(rollout.group, stable=True)
    samples = [rollout.samples[i] for i in order.tolist()]
    rollout = rollout.select(order)
    prompts = {int(slot): sample.prompt for slot, sample in zip(rollout.group, samples, strict=True)}
    header = Header(
        origin,
        step,
        rollout.weight_version,
        list(prompts),
        [{"id": prompt.id, "text": prompt.text} for prompt in prompts.values()],
        [sample.response for sample in samples],
    )
    tensors = {f"{TRAINED * (name in trained)}{name}": t for name, t in rollout.tensors().items()}
    tensors["tokens"] = tensors["tokens"].to(torch.int32)
    tensors["sample_index"] = torch.tensor([sample.index for sample in samples])
    tensors |= {f"scores/{name}": t[order] for name, t in _score_tensors(scores).items()}
    text = json.dumps({"format": FORMAT, "version": VERSION} | dataclasses.asdict(header), allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_whole(path, tensors, {"header": text})


def _score_tensors(scores: Scores) -> dict[str, Tensor]:
    def column(values: list) -> Tensor:
        return torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float64)

    columns = {"total": column(scores.total), "raw": column(scores.raw)}
    columns |= {name: torch.tensor(getattr(scores, name), dtype=torch.bool) for name in ("valid", "clipped")}
    return columns | {f"components/{name}": column(values) for name, values in scores.components.items()}


def read_header(path: Path) -> Header:
    """Read the header. Raises DataError if the file is no recorded rollout, or of another format version."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: cannot be read as a recorded rollout ({error})") from None
    where = f"{path}: header"
    content = record(parse_json(metadata.get("header", "{}"), where, DataError), where, DataError)
    if content.fields.pop("format", None) != FORMAT:
        raise DataError(f"{path}: expected a recorded rollout (debug.record), a safetensors file of format {FORMAT}")
    version = content.fields.pop("version", None)
    if version != VERSION:
        raise DataError(f"{path}: format version {version}: expected {VERSION}. Record it again with this version")
    content.need(*(f.name for f in fields(Header)))
    content.record("origin").need(*(f.name for f in fields(Origin) if f.default is dataclasses.MISSING))
    try:
        header = from_plain(Header, content.fields, "header", Header)
    except ConfigError as error:
        raise DataError(f"{path}: {error}") from None
    for prompt in header.prompts:
        text = record(prompt, f"{where}.prompts", DataError)
        text.integer("id", low=-(2**63))
        text.text("text")
    if len(header.prompts) != len(header.slots):
        raise DataError(f"{where}: {len(header.slots)} slots: expected one for each of {len(header.prompts)} prompts")
    return header


def read_recording(path: Path, slots: range | None = None, whole: bool = True) -> Recording:
    """Return the rollout, or its rows of these prompt slots, trimmed to the longest of them. Raises DataError, also
    where a `whole` rollout is expected and the file has less."""
    header = read_header(path)
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: cannot be read as a recorded rollout ({error})") from None
    _check_columns(path, header, tensors)
    group = tensors["group"]
    if whole and len(group) != header.origin.prompts * header.origin.group:
        expected = f"{header.origin.prompts} prompts x {header.origin.group}"
        raise DataError(f"{path}: {len(group)} samples: expected {expected}, as its header says")
    keep = torch.ones_like(group, dtype=torch.bool) if slots is None else _inside(group, slots)
    rows = keep.nonzero().flatten()
    tensors = {name: t[rows] for name, t in tensors.items()}
    tensors["tokens"] = tensors["tokens"].to(torch.int64)
    scores = _scores({n.removeprefix("scores/"): t for n, t in tensors.items() if n.startswith("scores/")})
    known = {f.name for f in fields(RolloutBatch)}
    rollout = RolloutBatch(
        **{name: t for name, t in tensors.items() if name in known}, weight_version=header.weight_version
    )
    rollout.samples = _samples(rollout, header, tensors["sample_index"].tolist(), rows.tolist())
    return Recording(header, rollout.trim(), scores)


def _check_columns(path: Path, header: Header, tensors: dict[str, Tensor]) -> None:
    """Check that columns have the same length, and that numbers are in range."""
    rows, width = len(header.responses), 0
    needed = {"tokens": 2, "lengths": 1, "group": 1, "finished": 1, "response_mask": 2, "sample_index": 1}
    needed |= {f"scores/{name}": 1 for name in ("total", "raw", "valid", "clipped")}
    for name, dims in needed.items():
        if name not in tensors or tensors[name].dim() != dims:
            raise DataError(f"{path}: expected {name} with {dims} dimensions, found none")
    width = tensors["tokens"].shape[1]
    for name, t in tensors.items():
        if len(t) != rows or (t.dim() >= 2 and t.shape[1] != width):
            raise DataError(f"{path}: {name} is of shape {tuple(t.shape)}: expected ({rows}, {width})")
    lengths, slots = tensors["lengths"], set(tensors["group"].tolist())
    if rows and not (int(lengths.min()) > 0 and int(lengths.max()) <= width and slots <= set(header.slots)):
        raise DataError(f"{path}: expected lengths from 1 to {width} and prompt slots of its header")


def _inside(group: Tensor, slots: range) -> Tensor:
    return (group >= slots.start) & (group < slots.stop)


def _scores(columns: dict[str, Tensor]) -> Scores:
    components = {
        name.removeprefix("components/"): [None if math.isnan(v) else v for v in t.tolist()]
        for name, t in columns.items()
        if name.startswith("components/")
    }
    total, raw, valid, clipped = (columns[name].tolist() for name in ("total", "raw", "valid", "clipped"))
    return Scores(total, raw, components, valid, clipped)


def _samples(rollout: RolloutBatch, header: Header, indices: list[int], rows: list[int]) -> list[Sample]:
    starts = rollout.response_mask.argmax(1).tolist()  # the first response token
    texts = dict(zip(header.slots, header.prompts, strict=True))
    prompts: dict[int, Prompt] = {}
    samples = []
    for i, row in enumerate(rows):
        slot, tokens = int(rollout.group[i]), rollout.tokens[i, : int(rollout.lengths[i])].tolist()
        if slot not in prompts:
            prompts[slot] = Prompt(texts[slot]["id"], tuple(tokens[: starts[i]]), texts[slot]["text"])
        samples.append(
            Sample(
                prompts[slot],
                indices[i],
                header.responses[row],
                tuple(tokens[starts[i] :]),
                bool(rollout.finished[i]),
                header.weight_version,
            )
        )
    return samples


# --- between ranks


def gather_rollout(
    rollout: RolloutBatch, scores: Scores, layout: Layout, pad_id: int
) -> tuple[RolloutBatch, Scores] | None:
    """Return the whole rollout on global rank 0, None elsewhere. Collective over the data-parallel ranks."""
    if layout.peers.rank() != 0:  # tensor, context and pipeline peers hold the same samples
        return None
    parts: list[tuple[RolloutBatch, Scores]] = [(rollout, scores)]
    if layout.data > 1:
        first = layout.dp_rank == 0
        received: list | None = [None] * layout.data if first else None
        dist.gather_object((rollout, scores), received, dst=dist.get_global_rank(layout.pgs.dp, 0), group=layout.pgs.dp)
        if received is None:
            return None
        parts = received
    return join_rollouts([one for one, _ in parts], pad_id), join_scores([one for _, one in parts])


def join_rollouts(parts: list[RolloutBatch], pad_id: int) -> RolloutBatch:
    """Join the rows of several ranks, padded to the longest."""
    return dataclasses.replace(joined(parts, pad_id), samples=[s for batch in parts for s in batch.samples])


def join_scores(parts: list[Scores]) -> Scores:
    def column(name: str) -> list:
        return [value for scores in parts for value in getattr(scores, name)]

    components = {name: [v for own in parts for v in own.components[name]] for name in parts[0].components}
    return Scores(column("total"), column("raw"), components, column("valid"), column("clipped"))


@dataclass
class Recorder:
    """A source whose last `count` rollouts are kept as files (`debug.record`)."""

    source: Rollouts
    folder: Path
    count: int
    origin: Origin
    layout: Layout
    pad_id: int
    _came: tuple[RolloutBatch, RolloutBatch, Scores] | None = field(default=None, init=False)

    def next(self, step: int) -> Rollout:
        """Return the source's rollout."""
        rollout = self.source.next(step)
        batch = rollout.batch
        # the step changes these (debug.shuffle_rewards, mismatch.correction)
        came = dataclasses.replace(batch, rewards=batch.rewards.clone(), valid=batch.valid.clone())
        self._came = came, batch, copy.deepcopy(rollout.scores)
        return rollout

    def keep(self, step: int) -> None:
        """Write the rollout after its step. Raises AlignerError on every rank if the file cannot be written."""
        if self._came is None:
            return
        (came, done, scores), self._came, cause = self._came, None, ""
        trained = done.tensors().keys() - came.tensors().keys()
        batch = dataclasses.replace(done, rewards=came.rewards, valid=came.valid)
        whole, path = gather_rollout(batch, scores, self.layout, self.pad_id), self.folder / file_name(step)
        if whole is not None:
            try:
                write_recording(path, *whole, self.origin, step, trained)
                delete_but(self.folder, range(step - self.count + 1, step + 1))
            except OSError as error:
                cause = f"cannot write {path} (debug.record): {error}. Free space or change run.dir"
        fail_together(cause, AlignerError)
