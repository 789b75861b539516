"""Whole weights of a sharded model, for engines that take whole tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.families.table import family_table
from aligner.megatron.train import ShardedModel
from aligner.megatron.weights import gather_weights
from aligner.models.params import ParamSpec, expected_hf_shapes, hf_dtypes, to_hf
from aligner.ops.reduce import gathered
from aligner.refit.plan import buckets

ALIGNMENT = 8  # bytes: tensors of several dtypes share a buffer


class WeightStream:
    """All weights of a sharded model as full Hugging Face tensors, delivered to every rank, a bucket at a time."""

    def __init__(self, model: ShardedModel, bucket_bytes: int, cfg: ModelConfig | None = None):
        """`cfg`: of the engine, which may have fewer layers that predict further tokens; None: the model's."""
        self.model, self.bucket_bytes, self.cfg = model, bucket_bytes, cfg or model.cfg
        self._owned = self._stage_names()

    def table(self) -> list[ParamSpec]:
        return family_table(self.cfg, self.model.head.kind, self.model.head.outputs)

    def _stage_names(self) -> list[list[str]]:
        """Return the canonical names that each pipeline stage sends; asked once, at construction."""
        model = self.model
        named = set(model.weights())
        own = [spec.canonical for spec in self.table() if spec.canonical in named]
        return gathered(own, model.layout.pgs.pp)

    def _local(self) -> Iterator[tuple[str, Tensor]]:
        model = self.model
        for spec, full in gather_weights(self.table(), model.weights(), model.layout):
            yield from to_hf(spec, full, model.cfg).items()

    def __iter__(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield buckets of (Hugging Face name, full tensor). Collective over tensor and pipeline ranks."""
        if self.model.layout.pipeline == 1:
            yield from self._group(self._local())
            return
        for stage in range(self.model.layout.pipeline):
            yield from self._broadcast(stage)

    def _group(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
        bucket, total = [], 0
        for name, tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if bucket and total + size > self.bucket_bytes:
                yield bucket
                bucket, total = [], 0
            bucket.append((name, tensor))
            total += size
        if bucket:
            yield bucket

    def _broadcast(self, stage: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield one stage's tensors, through flat buffers of at most `bucket_bytes`, from its owner to all stages."""
        model, ranks = self.model, self.model.layout.tensor
        shapes = expected_hf_shapes(self.cfg, model.head.kind, model.head.outputs)
        owned = set(self._owned[stage])
        kept = hf_dtypes((spec for spec in self.table() if spec.canonical in owned), model.dtype)
        names = list(kept)
        sizes = [torch.Size(shapes[name]).numel() * kept[name].itemsize for name in names]
        room = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        local = self._local() if model.layout.pp_rank == stage else iter(())
        for bucket in buckets(room, self.bucket_bytes):
            used = sum(room[i] for i in bucket)
            flat = torch.empty(-(-used // ranks) * ranks, dtype=torch.uint8, device=model.device)
            blocks = zip(bucket, flat[:used].split([room[i] for i in bucket]), strict=True)
            views = [b[: sizes[i]].view(kept[names[i]]).view(shapes[names[i]]) for i, b in blocks]
            if model.layout.pp_rank == stage:
                for i, view in zip(bucket, views, strict=True):
                    name, tensor = next(local)
                    assert name == names[i], (name, names[i])
                    view.copy_(tensor)
            self._spread(flat, stage)
            yield [(names[i], view) for i, view in zip(bucket, views, strict=True)]

    def _spread(self, flat: Tensor, stage: int) -> None:
        """Send `flat`, uint8 [bytes], a multiple of the tensor ranks, from a stage to all others. Each tensor rank
        sends its share: stages are on other nodes, from which the whole would come once for every rank of a node."""
        layout = self.model.layout
        share = flat.view(layout.tensor, -1)[layout.tp_rank]
        dist.broadcast(share, src=dist.get_global_rank(layout.pgs.pp, stage), group=layout.pgs.pp)
        if layout.tensor > 1 and layout.pp_rank != stage:
            dist.all_gather_into_tensor(flat, share.clone(), group=layout.pgs.tp)
