"""Rows of a supervised stage's last steps as files (`debug.record`), each of all data-parallel ranks:
<run.dir>/rows/step-00000001.safetensors with `tokens` int32 [N, T], `lengths`, `loss_mask` and, if rows have them,
`labels` and `told_by`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import AlignerError
from aligner.megatron.groups import Layout
from aligner.models.safetensors_io import save_whole
from aligner.ops.agree import fail_together
from aligner.run.chain import StepHashes

FOLDER = "rows"  # in the run folder
NAME = re.compile(r"step-(\d{8,18})\.safetensors", re.ASCII)
COLUMNS = ("tokens", "lengths", "loss_mask", "labels", "told_by")


def file_name(step: int) -> str:
    return f"step-{step:08d}.safetensors"


def delete_but(folder: Path, steps: range) -> None:
    """Delete recordings of other steps. Later ones are of a start that this one replaces."""
    for path in folder.glob("step-*.safetensors"):
        match = NAME.fullmatch(path.name)
        if match and int(match[1]) not in steps and path.is_file():
            path.unlink()


@dataclass
class RowRecorder:
    seen: StepHashes
    folder: Path
    count: int  # steps
    layout: Layout

    def keep(self, step: int) -> None:
        """Record a finished step. Collective. Raises AlignerError on every rank if the file cannot be written."""
        batch, self.seen.batch, cause = self.seen.batch, None, ""
        if batch is None:
            return
        path, columns = self.folder / file_name(step), batch.tensors()
        parts = self._gathered({name: columns[name].cpu() for name in COLUMNS if name in columns})
        if parts:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                save_whole(path, {name: _below([shard[name] for shard in parts]) for name in parts[0]}, {})
                delete_but(self.folder, range(step - self.count + 1, step + 1))
            except OSError as error:
                cause = f"cannot write {path} (debug.record): {error}. Free space or change run.dir"
        fail_together(cause, AlignerError)

    def _gathered(self, local: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Gather the columns of all data-parallel ranks on the first rank; [] elsewhere."""
        group = self.layout.pgs.dp
        if self.layout.peers.rank() or group.size() == 1:
            return [] if self.layout.peers.rank() else [local]
        of_ranks: list | None = [None] * group.size() if group.rank() == 0 else None
        dist.gather_object(local, of_ranks, dst=dist.get_global_rank(group, 0), group=group)
        return of_ranks or []


def _below(parts: list[Tensor]) -> Tensor:
    """Concatenate rows, the narrower padded with 0; integers as int32."""
    width = max(column.shape[1] if column.dim() > 1 else 0 for column in parts)
    wide = [torch.nn.functional.pad(column, (0, width - column.shape[1])) if width else column for column in parts]
    joined = torch.cat(wide)
    return joined if joined.is_floating_point() else joined.to(torch.int32)
