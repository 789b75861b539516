"""An engine's answers on disk, and an engine that replays them: a run repeats without generating anything.

`RecordingEngine` wraps another engine and writes each call of `generate` and `logprobs` as one safetensors file: a
tensor per column, and in the metadata a key per row, a hash of everything the row depends on (weight version,
prompt, seed, sampling). `RecordedEngine` finds answers by that key, on any rank and in any batch. Trainer and
rewards are live; the sentinel then compares the live trainer with the recorded engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aligner.config.engines import ENGINES
from aligner.config.sections.model.config import ModelConfig
from aligner.engines.base import EngineWrapper, RolloutEngine, UpdateLedger
from aligner.errors import ConfigError, DataError, EngineError
from aligner.families.table import family_table
from aligner.foreign import parse_json, record
from aligner.models.params import expected_hf_shapes, hf_dtypes
from aligner.models.safetensors_io import save_whole
from aligner.ops.kernels.checksum import tensor_checksum
from aligner.types import Generations, Progress, SamplingParams, SeedLists, TokenLists

FOLDER = "answers"  # in the run folder
FORMAT, VERSION = "aligner-answers", 1
_COLUMNS = ("tokens", "lengths", "logprobs", "finish_reason", "full_logprobs")


def _key(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _sample_keys(version: int, prompts: Sequence, seeds: Sequence, sampling: SamplingParams) -> list[str]:
    pairs = ((list(map(int, p)), int(s)) for p, own in zip(prompts, seeds, strict=True) for s in own)
    return [_key("sample", version, prompt, seed, sampling) for prompt, seed in pairs]


def _score_keys(version: int, tokens: Tensor, lengths: Tensor, temperature: float) -> list[str]:
    rows = zip(tokens.tolist(), lengths.tolist(), strict=True)
    return [_key("score", version, row[:n], float(temperature)) for row, n in rows]


def recording(engine: RolloutEngine, run_dir: Path, rank: int) -> RecordingEngine:
    return RecordingEngine(engine, run_dir / FOLDER, rank)


class RecordingEngine(EngineWrapper):
    """A `RolloutEngine` around another one that writes its answers to `folder`; `rank` keeps the files of ranks
    apart."""

    def __init__(self, engine: RolloutEngine, folder: Path, rank: int):
        super().__init__(engine)
        self.folder, self.rank = folder, rank
        folder.mkdir(parents=True, exist_ok=True)
        self.count = len(list(folder.glob(f"{rank:05d}-*.safetensors")))

    def generate(
        self, prompts: TokenLists, seeds: SeedLists, sampling: SamplingParams, progress: Progress | None = None
    ) -> Generations:
        generations = self.engine.generate(prompts, seeds, sampling, progress)
        columns = {name: getattr(generations, name) for name in _COLUMNS if getattr(generations, name) is not None}
        self._write(_sample_keys(generations.weight_version, prompts, seeds, sampling), columns)
        return generations

    def logprobs(self, tokens: Tensor, lengths: Tensor, temperature: float = 1.0) -> Tensor:
        logprobs = self.engine.logprobs(tokens, lengths, temperature)
        keys = _score_keys(self.engine.weight_version, tokens, lengths, temperature)
        self._write(keys, {"logprobs": logprobs, "lengths": lengths})
        return logprobs

    def _write(self, keys: list[str], columns: dict[str, Tensor]) -> None:
        """Write one complete file or none. Raises OSError."""
        if not keys:
            return
        path = self.folder / f"{self.rank:05d}-{self.count:07d}.safetensors"
        header = json.dumps({"format": FORMAT, "version": VERSION, "keys": keys})
        save_whole(path, columns, {"header": header})
        self.count += 1


class AnswerFiles:
    """The rows of a folder by their keys. Raises ConfigError `engine.answers` for a folder without answers, and
    DataError for a file that holds none."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._places: dict[str, tuple[Path, int]] = {}
        self._open: tuple[Path | None, dict[str, Tensor]] = (None, {})
        for path in sorted(folder.glob("*.safetensors")):
            self._places |= {key: (path, row) for row, key in enumerate(_keys_of(path))}
        if not self._places:
            expected = "a folder of recorded answers (debug.record_answers writes them)"
            raise ConfigError("engine.answers", str(folder), expected)

    def row(self, key: str) -> dict[str, Tensor] | None:
        """Return the columns of one row without padding; None if the folder has no such answer."""
        if key not in self._places:
            return None
        path, row = self._places[key]
        if self._open[0] != path:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                self._open = path, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        columns = {name: t[row] for name, t in self._open[1].items()}
        n = int(columns["lengths"])
        return {name: t[:n] if t.dim() else t for name, t in columns.items()}


def _keys_of(path: Path) -> list[str]:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            text = (file.metadata() or {}).get("header", "{}")
            rows = file.get_slice("lengths").get_shape() if "lengths" in file.keys() else None  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: cannot be read as recorded answers ({error})") from None
    header = record(parse_json(text, f"{path}: header", DataError), f"{path}: header", DataError)
    if (header.fields.get("format"), header.fields.get("version")) != (FORMAT, VERSION):
        raise DataError(f"{path}: expected recorded answers (debug.record_answers), format {FORMAT} {VERSION}")
    keys = header.texts("keys")
    if rows != [len(keys)]:
        raise DataError(f"{path}: {len(keys)} keys: expected one for each row of lengths, of shape {rows}")
    return keys


class RecordedEngine(RolloutEngine):
    """A `RolloutEngine` that replays the answers of a folder to the same questions at the same weight version."""

    can = ENGINES["recorded"].can

    def __init__(self, model: ModelConfig, folder: str | Path, *, dtype: torch.dtype):
        self.dtype, self.answers = dtype, AnswerFiles(Path(folder).expanduser())
        self._ledger, self._asleep = UpdateLedger(expected_hf_shapes(model)), False
        self._kept = hf_dtypes(family_table(model), dtype)
        self._checksums: dict[str, int] = {}

    @property
    def weight_version(self) -> int:
        return self._ledger.version

    def begin_update(self, version: int) -> None:
        self._ledger.begin(version)

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keep only the checksum of each tensor."""
        for name, tensor in tensors:
            if self._ledger.accept(name, tensor.shape):
                self._checksums[name] = tensor_checksum(tensor.to(self._kept[name]))

    def finish_update(self) -> None:
        self._ledger.finish()

    def checksums(self) -> Mapping[str, int]:
        return self._checksums

    def sleep(self, weights: bool = False) -> None:
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def close(self) -> None:
        self._ledger.lose()

    def generate(
        self, prompts: TokenLists, seeds: SeedLists, sampling: SamplingParams, progress: Progress | None = None
    ) -> Generations:
        """See `RolloutEngine.generate`. Raises EngineError for samples that were not recorded."""
        self._ledger.require()
        assert not self._asleep, "generate() on a sleeping engine: wake() it first"
        keys = _sample_keys(self.weight_version, prompts, seeds, sampling)
        rows = []
        for i, key in enumerate(keys):
            rows.append(self._row(key, f"sample {i} of {len(keys)}"))
            if progress is not None:
                progress(i + 1, len(keys))
        width = max((int(row["lengths"]) for row in rows), default=0)
        columns = {name: _stacked([row[name] for row in rows], width) for name in _COLUMNS if rows and name in rows[0]}
        if not rows:
            empty, ints = torch.zeros(0, 0), torch.zeros(0, dtype=torch.int64)
            columns = {"tokens": empty.long(), "lengths": ints, "logprobs": empty, "finish_reason": ints.clone()}
        return Generations(**columns, weight_version=self.weight_version)

    def logprobs(self, tokens: Tensor, lengths: Tensor, temperature: float = 1.0) -> Tensor:
        """See `RolloutEngine.logprobs`. Raises EngineError for rows that were not recorded."""
        self._ledger.require()
        keys = _score_keys(self.weight_version, tokens, lengths, temperature)
        rows = [self._row(key, f"row {i} of {len(keys)}") for i, key in enumerate(keys)]
        return _stacked([row["logprobs"] for row in rows], tokens.shape[1])

    def _row(self, key: str, which: str) -> dict[str, Tensor]:
        columns = self.answers.row(key)
        if columns is None:
            raise EngineError(
                f"{self.answers.folder} has no answer to {which} at weight version {self.weight_version}: expected the "
                "prompts, seeds and sampling of the run that recorded it (engine.answers)"
            )
        return columns


def _stacked(rows: list[Tensor], width: int) -> Tensor:
    """Return [N] of scalars, or [N, width] of rows right-padded with 0."""
    if rows and not rows[0].dim():
        return torch.stack(rows)
    out = torch.zeros(len(rows), width, dtype=rows[0].dtype if rows else torch.float32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
