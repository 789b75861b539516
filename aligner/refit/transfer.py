"""Move the trainer's weights into this rank's engine: gather over tensor ranks, broadcast over pipeline stages, commit.

Every rank runs it together. Whatever fails on one rank stops all of them, with the first cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.schema import RefitConfig
from aligner.engines.base import RolloutEngine
from aligner.errors import RefitError
from aligner.megatron.train import ShardedModel
from aligner.megatron.weights import EMBEDDING, gather_weights, local_parameters
from aligner.models.families import ParamSpec, expected_hf_shapes, family_table, to_hf
from aligner.ops.checksum import tensor_checksum
from aligner.ops.reduce import first_cause
from aligner.refit.plan import buckets
from aligner.types import ScalarMetrics


class WeightStream:
    """All weights of a sharded model as full Hugging Face tensors, delivered to every rank, a bucket at a time."""

    def __init__(self, model: ShardedModel, bucket_bytes: int):
        self.model, self.bucket_bytes = model, bucket_bytes
        self._owned = self._stage_names()

    def _table(self) -> list[ParamSpec]:
        return family_table(self.model.cfg, self.model.head.kind, self.model.head.outputs)

    def _stage_names(self) -> list[list[str]]:
        """Per pipeline stage, the canonical names it sends; asked once, at construction."""
        model = self.model
        named = set(local_parameters(model.module))
        if model.module.share_embeddings_and_output_weights and not model.module.pre_process:
            named.discard(EMBEDDING)
        mine = [spec.canonical for spec in self._table() if spec.canonical in named]
        owned: list[list[str] | None] = [None] * model.layout.pipeline
        if model.layout.pipeline == 1:
            return [mine]
        dist.all_gather_object(owned, mine, group=model.layout.pgs.pp)
        return owned  # type: ignore[return-value]

    def _local(self) -> Iterator[tuple[str, Tensor]]:
        model = self.model
        for spec, full in gather_weights(model.module, model.cfg, model.layout, model.head):
            yield from to_hf(spec, full, model.cfg).items()

    def __iter__(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Buckets of (Hugging Face name, full tensor). Collective over tensor and pipeline ranks."""
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
        """One stage's tensors, through flat buffers of at most `bucket_bytes`, from its owner to all stages."""
        model, group = self.model, self.model.layout.pgs.pp
        source = dist.get_global_rank(group, stage)
        shapes = expected_hf_shapes(model.cfg, model.head.kind, model.head.outputs)
        owned = set(self._owned[stage])
        names = [n for spec in self._table() if spec.canonical in owned for n in spec.hf]
        counts = [torch.Size(shapes[name]).numel() for name in names]
        dtype = torch.float32 if model.head.kind == "score" else model.dtype  # score heads are float32
        size = dtype.itemsize
        local = self._local() if model.layout.pp_rank == stage else iter(())
        for part in buckets([c * size for c in counts], self.bucket_bytes):
            flat = torch.empty(sum(counts[i] for i in part), dtype=dtype, device=model.device)
            views = [v.view(shapes[names[i]]) for i, v in zip(part, flat.split([counts[i] for i in part]), strict=True)]
            if model.layout.pp_rank == stage:
                for i, view in zip(part, views, strict=True):
                    name, tensor = next(local)
                    assert name == names[i], (name, names[i])
                    view.copy_(tensor)
            dist.broadcast(flat, src=source, group=group)
            yield [(names[i], view) for i, view in zip(part, views, strict=True)]


class Refit:
    """Callable once per rollout: afterwards this rank's engine holds the trainer's weights and their version."""

    def __init__(self, model: ShardedModel, engine: RolloutEngine, config: RefitConfig, skip: bool = False):
        self.stream = WeightStream(model, config.bucket_bytes)
        self.model, self.engine, self.config = model, engine, config
        self.skip = skip  # test hook `debug.skip_refit`: the engine keeps its first weights
        self.checksums: dict[str, int] = {}
        self._hold, self._cause = False, ""

    def __call__(self) -> ScalarMetrics:
        start, self._cause = time.perf_counter(), ""
        moved = self._transfer()
        seconds = time.perf_counter() - start
        if seconds > self.config.timeout_s and not self._cause:
            self._cause = f"it took {seconds:.1f} s, more than refit.timeout_s={self.config.timeout_s:g}"
        fail_together(self._cause)
        return {
            "refit/seconds": seconds,
            "refit/bytes": float(moved),
            "refit/version": float(self.model.step_count),
        }

    def _transfer(self) -> int:
        version, moved = self.model.step_count, 0
        self._hold = self.skip and self.engine.weight_version >= 0
        hashes = self.config.verify == "checksum"
        dtype = self.engine.dtype
        self._ask(self.engine.begin_update, version)
        for bucket in self.stream:  # always consumed whole, even after a refusal: it is collective
            self._ask(self.engine.update_weights, bucket)
            for name, tensor in bucket:
                moved += tensor.numel() * tensor.element_size()
                if hashes:
                    self.checksums[name] = tensor_checksum(tensor.to(dtype))
        self._ask(self.engine.finish_update)
        return moved

    def _ask(self, action: Callable, *arguments) -> None:
        """One call of the engine, unless it keeps its weights or has refused an earlier one."""
        if self._hold or self._cause:
            return
        try:
            action(*arguments)
        except RefitError as error:
            self._cause = str(error)


def fail_together(cause: str) -> None:
    """Raise RefitError on every rank if any rank has a cause; the lowest rank's cause is the message. Collective."""
    first = first_cause(cause)
    if first is not None:
        raise RefitError(f"refit failed on rank {first[0]}: {first[1]}")
