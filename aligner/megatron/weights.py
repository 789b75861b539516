"""Weights of a sharded model by canonical name: set from any full source, gathered back one tensor at a time.

Canonical names are those of `families/rows.py`; this file maps them to the parameters of this rank, for pipeline stages
and tied embeddings.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.families.table import family_table
from aligner.megatron.groups import Layout
from aligner.megatron.model import Head
from aligner.models.params import ParamSpec, merge_tp, split_tp
from aligner.models.slices import HfSource, Shard
from aligner.ops.reduce import of_each_rank

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

WeightSource = Callable[[ParamSpec], Tensor]  # spec -> full canonical tensor (tensor-parallel size 1)


def canonical_name(name: str, layers: Sequence[int]) -> str:
    """Return the canonical name of a rank's parameter `name`; `layers` are the numbers of its layers."""
    if name.startswith("decoder.layers."):
        index, rest = name.removeprefix("decoder.layers.").split(".", 1)
        return f"decoder.layers.{layers[int(index)]}.{rest}"
    return name


def own_layers(model: GPTModel) -> list[int]:
    return [layer.layer_number - 1 for layer in model.decoder.layers]


def local_modules(model: GPTModel) -> dict[str, torch.nn.Module]:
    """Return canonical name -> this rank's module that has parameters of its own."""
    layers = own_layers(model)
    own = ((name, module) for name, module in model.named_modules() if list(module.parameters(recurse=False)))
    return {canonical_name(f"{name}.", layers).removesuffix("."): module for name, module in own}


def local_parameters(model: GPTModel) -> dict[str, torch.nn.Parameter]:
    """Return canonical name -> this rank's parameter (its tensor-parallel shard), without those of adapters."""
    layers = own_layers(model)
    named = {canonical_name(name, layers): p for name, p in model.named_parameters() if "adapters." not in name}
    if model.share_embeddings_and_output_weights and not model.pre_process and OUTPUT in named:
        named[EMBEDDING] = named.pop(OUTPUT)  # the last stage's copy of the tied embedding
    return named


@torch.no_grad()
def load_weights(model: GPTModel, cfg: ModelConfig, layout: Layout, head: Head, source: WeightSource) -> None:
    """Set every parameter of this stage from `source`; a parameter without a spec is an error of the table. The first
    data-parallel copy reads the files and sends to the others. Collective over the copies."""
    named = local_parameters(model)
    table = {spec.canonical: spec for spec in family_table(cfg, head.kind, head.outputs)}
    unknown = sorted(set(named) - set(table))
    assert not unknown, f"parameters without a row in the family table: {unknown}"
    for name, spec in table.items():
        if name not in named:
            continue
        copies, reads = layout.copies(spec.experts), isinstance(source, HfSource)
        if not reads or copies.rank() == 0:
            shard = own_shard(spec, source, layout)
            assert shard.shape == named[name].shape, (name, tuple(shard.shape), tuple(named[name].shape))
            named[name].copy_(shard)
        if reads:
            broadcast_to_copies(named[name], copies)


def broadcast_to_copies(tensor: Tensor, copies: dist.ProcessGroup) -> None:
    """Broadcast the first copy's tensor to all of `copies`. Collective over these."""
    if copies.size() > 1:
        dist.broadcast(tensor.detach(), group=copies, group_src=0)


def own_shard(spec: ParamSpec, source: WeightSource, layout: Layout) -> Tensor:
    """Return this rank's shard of a tensor of `source`."""
    if isinstance(source, HfSource):
        share = spec.shape[0] // layout.expert if spec.experts else 0
        return source.shard(spec, Shard(*layout.share(spec.experts), layout.ep_rank * share, share))
    shard = split_tp(spec, source(spec), *layout.share(spec.experts))
    return shard.chunk(layout.expert)[layout.ep_rank] if spec.experts else shard


def random_source(cfg: ModelConfig, seed: int) -> WeightSource:
    """Return a source of Gaussian weights that depend on seed and name only, never on the layout. Norms multiply by
    1, biases are 0; projections into the residual stream are scaled by 1/sqrt(2 x layers) (GPT-2). Linear attention
    forgets as in transformers' random models."""

    def source(spec: ParamSpec) -> Tensor:
        if spec.canonical.endswith("norm.weight"):
            offset = cfg.traits.offset_norms and not spec.canonical.endswith("out_norm.weight")
            return torch.full(spec.shape, 0.0 if offset else 1.0)
        if spec.canonical.endswith(("bias", ".base")):
            return torch.full(spec.shape, float(spec.canonical.endswith("dt_bias")))
        if spec.integer:  # experts take turns
            return torch.arange(math.prod(spec.shape)).view(spec.shape) % cfg.moe.num_experts
        if spec.canonical.endswith(("self_attention.D", "layer_scalar", "expert_scale", ".scale")):
            return torch.ones(spec.shape)
        word = hashlib.sha256(f"{seed}/{spec.canonical}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(word[:7], "big"))
        if spec.canonical.endswith("A_log"):
            return (0.01 + 15.99 * torch.rand(spec.shape, generator=generator)).log()
        std = cfg.init_std
        if spec.canonical.endswith(("linear_proj.weight", "out_proj.weight", "linear_fc2.weight", "experts.down")):
            std /= (2 * cfg.num_layers) ** 0.5
        return torch.randn(spec.shape, generator=generator) * std

    return source


@torch.no_grad()
def gather_weights(
    table: Iterable[ParamSpec], named: Mapping[str, Tensor], layout: Layout
) -> Iterator[tuple[ParamSpec, Tensor]]:
    """Yield (spec, full canonical tensor) of every row whose shard is among those `named`, in table order, gathered
    over tensor ranks, or of experts over expert ranks. Of these, which may take much more than all else, one rank's
    come at a time, with a spec of their own. Collective over the ranks of a pipeline stage."""
    for spec in table:
        if spec.canonical not in named:
            continue
        shard = named[spec.canonical].detach()
        if not spec.experts:
            yield spec, merge_tp(spec, of_each_rank(shard, layout.pgs.tp) if spec.tp_axis is not None else [shard])
            continue
        if layout.expert == 1:
            yield spec, shard
            continue
        names = len(spec.hf) // layout.expert
        for rank in range(layout.expert):
            block = shard.contiguous() if rank == layout.pgs.ep.rank() else torch.empty_like(shard).contiguous()
            dist.broadcast(block, group=layout.pgs.ep, group_src=rank)
            own = spec.hf[rank * names : (rank + 1) * names]
            yield replace(spec, hf=own, shape=(len(shard), *spec.shape[1:])), block
