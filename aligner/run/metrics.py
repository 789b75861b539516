"""Destinations of metrics: metrics.jsonl and the trackers. Only rank 0 writes."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.config.on_demand import on_demand
from aligner.config.sections.logging import LoggingConfig
from aligner.errors import AlignerError, WriteError
from aligner.files import write_whole
from aligner.foreign import parse_json, record

# the most telling metrics of a run, in order
HEADLINE = (
    "eval/accuracy",
    "eval/loss",
    "reward/mean",
    "sft/loss",
    "rm/loss",
    "rm/accuracy",
    "rewards/accuracies",
    "dpo/loss",
    "kto/loss",
    "distill/loss",
    "kl/ref_k3",
    "policy/entropy",
)


def finite(value: Any) -> Any:
    """Convert a number for JSON: NaN and infinities become null; tensors and numpy scalars become Python numbers."""
    if value is None or isinstance(value, bool | int | str):
        return value
    value = float(value)
    return value if math.isfinite(value) else None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read all complete records of a file; a last line torn by a crash is left out. No file: no records."""
    return list(each_jsonl(path))


def each_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what `read_jsonl` reads, one record in memory at a time."""
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from jsonl_records(file, str(path))


def jsonl_records(lines: Iterable[bytes], where: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a file's lines, as `read_jsonl`."""
    rest = iter(lines)
    for number, line in enumerate(rest, 1):
        if not line.strip(b" \r\n\t\0"):
            continue
        try:
            value = parse_json(line.removesuffix(b"\n"), where, AlignerError, line=number, nan=True)
            fields = record(value, f"{where}:{number}", AlignerError).fields
        except AlignerError:
            if not any(later.strip(b" \r\n\t\0") for later in rest):  # the write was cut off
                return
            raise
        yield fields


def append_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records, one line each. Raises AlignerError naming run.dir if the folder is full or unwritable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    except OSError as cause:
        raise unwritable(path, cause) from cause


def truncate_jsonl(path: Path, step: int) -> None:
    """Drop the records later than `step`, and a torn last line: a resumed run will write them again."""
    if not path.exists():
        return
    kept = [row for row in read_jsonl(path) if record(row, str(path), AlignerError).integer("step", low=-1) <= step]
    rewrite_jsonl(path, kept)


def rewrite_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file's content by these records. Raises AlignerError as `append_jsonl`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, records)
    except OSError as cause:
        raise unwritable(path, cause) from cause


def _replace(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file's content by these records. At any moment, also after a power cut, it has the old ones or the
    new ones."""
    write_whole(path, "".join(json.dumps(record) + "\n" for record in records))


def unwritable(path: Path, cause: OSError) -> WriteError:
    return WriteError(f"run.dir={str(path.parent)!r}: expected a folder that can be written, but {path.name}: {cause}")


class MetricsLogger:
    """Logger with one record per step: {"step", "wall_time" (seconds since the epoch), <metric>: number or null}.

    Steps do not go back; a second `log` of the same step joins its record. Call `resume_at` before the first `log`.

    To join, the record is cut off and written again. Until then its new content is in `metrics.joined.jsonl`, so that
    neither a kill nor a full disk in between loses the record; `resume_at` restores it.
    """

    def __init__(self, run_dir: str | Path, config: LoggingConfig, full_config: dict[str, Any], rank: int):
        self.run_dir, self.config, self.rank = Path(run_dir), config, rank
        self._path = self.run_dir / "metrics.jsonl"
        self._joined = self.run_dir / "metrics.joined.jsonl"
        self._last: dict[str, Any] = {}
        self._offset = 0  # where the last record begins
        trackers = rank == 0 and bool(config.trackers)
        self._trackers = on_demand("logging.trackers")(self.run_dir, config, full_config) if trackers else None

    def resume_at(self, step: int) -> None:
        """Forget what was logged after `step` (the last completed one): those steps will run again.

        For a fresh start in a folder that was used before: resume_at(-1).
        """
        if self.rank:
            return
        self._mend()
        truncate_jsonl(self._path, step)
        records = read_jsonl(self._path)
        if records:
            self._last = records[-1]
            self._offset = self._path.stat().st_size - len(json.dumps(self._last).encode()) - 1
        if self._trackers is not None:
            self._trackers.start(step, records)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self.rank:
            return
        metrics = {name: finite(value) for name, value in metrics.items()}
        if self.config.jsonl:
            self._write(step, metrics)
        if self._trackers is not None:
            self._trackers.log(step, metrics)

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        if self._trackers is not None:
            self._trackers.samples(step, records)

    def close(self) -> None:
        if self._trackers is not None:
            self._trackers.finish()

    def _write(self, step: int, metrics: dict[str, Any]) -> None:
        last = self._last.get("step")
        assert last is None or step >= last, f"step {step} logged after step {last}"
        record = {"step": step, "wall_time": round(time.time(), 3), **metrics}
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if joins := step == last:
                record = {**self._last, **record}
                _replace(self._joined, [record])
                os.truncate(self._path, self._offset)  # the last record is written again
            with self._path.open("ab") as file:
                self._offset = os.fstat(file.fileno()).st_size
                file.write(json.dumps(record).encode() + b"\n")
                if joins:
                    file.flush()
                    os.fsync(file.fileno())
            if joins:
                self._joined.unlink(missing_ok=True)
        except OSError as cause:
            raise unwritable(self._path, cause) from cause
        self._last = record

    def _mend(self) -> None:
        """Restore the record that was cut off and never written."""
        records = read_jsonl(self._path)
        last = record(records[-1], str(self._path), AlignerError).integer("step", low=-1) if records else -1
        joined = self._cut_off()
        try:
            if joined and joined["step"] > last:
                _replace(self._path, [*records, joined])
            self._joined.unlink(missing_ok=True)  # of these steps, which may be done again
        except OSError as cause:
            raise unwritable(self._path, cause) from cause

    def _cut_off(self) -> dict[str, Any] | None:
        """Return the cut-off record. Other content is reported."""
        try:
            *_, last = [None, *read_jsonl(self._joined)]
            if last is not None:
                record(last, str(self._joined), AlignerError).integer("step", low=-1)
        except (AlignerError, OSError) as error:
            print(f"warning: ignored: {error}", file=sys.stderr, flush=True)
            return None
        return last
