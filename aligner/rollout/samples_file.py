"""The file of all samples of a run, which grows with each batch, and the files made of it at the end.

<run.dir>/sampled/all.jsonl every sample, prompt by prompt in the order of the data <run.dir>/sampled/best.jsonl ...
see rollout/select.py
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from aligner.config.stages.sample import SampleConfig
from aligner.errors import CheckpointError
from aligner.rewards.composite import Scores
from aligner.rollout import select
from aligner.rollout.groups import Groups
from aligner.rollout.select import Record
from aligner.run.metrics import each_jsonl, finite, unwritable

FOLDER, ALL = "sampled", "all.jsonl"


def make_records(
    groups: Groups, scores: Scores, rewards: Sequence[float], prompts: Sequence[select.Text], column: str
) -> list[Record]:
    """Return a record for each sample: the columns of its prompt's row, then new ones. `prompts`: the prompt in the
    row of each group, which the model saw as tokens."""
    records = []
    for i, sample in enumerate(groups.samples):
        fields = dict(sample.prompt.fields)
        own = answer_of(fields)
        fields.pop("messages", None)
        record = {
            **{name: value for name, value in fields.items() if value is not None},
            "prompt": prompts[i // groups.size],
            column: sample.response,
            "row": sample.prompt.id,
            "sample": sample.index,
            "reward": finite(rewards[i]) if scores.valid[i] else None,
            "finished": sample.finished,
            "scores": {name: finite(values[i]) for name, values in scores.components.items()},
        }
        records.append(record | ({} if own is None else {"reference": own}))
    return records


def answer_of(fields: Mapping[str, Any]) -> select.Text | None:
    """Return the answer in the row of a prompt itself."""
    messages = fields.get("messages")
    if messages:
        return messages[-1:] if messages[-1]["role"] == "assistant" else None
    return fields.get("completion")


class SamplesFile:
    """The file all.jsonl. Records that a checkpoint counts are permanent; a killed run's later ones are written
    again. On rank 0 alone."""

    def __init__(self, run_dir: Path):
        self.path = run_dir / FOLDER / ALL
        self.bytes, self._digest = 0, hashlib.sha256()

    def append(self, records: Sequence[Record]) -> None:
        """Append records. Raises WriteError."""
        text = "".join(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("r+b" if self.path.exists() else "wb") as file:
                file.truncate(self.bytes)
                file.seek(self.bytes)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as cause:
            raise unwritable(self.path, cause) from cause
        self.bytes += len(text)
        self._digest.update(text)

    def finish(self, cfg: SampleConfig, rewards: bool) -> dict[str, int]:
        """Write the other files, each whole or not at all, and delete those of an earlier config; return their
        numbers of rows by name. Raises WriteError."""
        makers, counts = select.files(cfg, rewards), {}
        for name in ("best.jsonl", "pairs.jsonl", "labels.jsonl"):
            path = self.path.with_name(name)
            try:
                if name not in makers:
                    path.unlink(missing_ok=True)
                    continue
                with path.with_suffix(".aside").open("w", encoding="utf-8") as file:
                    counts[name] = 0
                    for group in self._groups():
                        rows = makers[name](group, cfg)
                        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                        counts[name] += len(rows)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(path.with_suffix(".aside"), path)
            except OSError as cause:
                raise unwritable(path, cause) from cause
        return counts

    def _groups(self) -> Iterator[list[Record]]:
        return (list(group) for _, group in groupby(each_jsonl(self.path), key=lambda record: record["row"]))

    def state_dict(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "sha256": self._digest.hexdigest()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state. Raises CheckpointError where the file has lost content."""
        digest, left = hashlib.sha256(), state["bytes"]
        if self.path.exists():
            with self.path.open("rb") as file:
                while left and (piece := file.read(min(left, 1 << 20))):
                    digest.update(piece)
                    left -= len(piece)
        if digest.hexdigest() != state["sha256"]:
            raise CheckpointError(f"{self.path}: damaged: its first {state['bytes']} bytes are not those written")
        self.bytes, self._digest = state["bytes"], digest
