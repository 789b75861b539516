"""Self-attention over a flat stream of tokens (`ops/packing/pack.py`): packed rows that do not see each other, padded
rows, and context parallelism.

Megatron's local attention builds the [s, s] score matrix, needs a mask, and knows neither packed rows nor context
parallelism; the module here replaces its forward between the two linear layers. Rotary positions come with the stream,
so they are right whatever the order of tokens.

Context parallelism, "allgather": every rank gets the keys and values of all ranks, and computes its own queries (Llama
3, arXiv:2407.21783, section 3.3.2). "alltoall": every rank gets all tokens of a share of the heads (DeepSpeed Ulysses,
arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.nn.functional import silu

from aligner.config.sections.model.config import ModelConfig
from aligner.megatron import varlen
from aligner.megatron.collectives import gather_first, heads_to_tokens, tokens_to_heads
from aligner.megatron.sharing import LayerConfig, SharedVector, with_fields
from aligner.models.rope import score_scale
from aligner.ops.kernels import elementwise as kernels
from aligner.ops.kernels.bfloat16_products import widened
from aligner.ops.kernels.indexed_attention import Index, indexed_attention
from aligner.ops.kernels.scored_attention import ScoreRule, attention
from aligner.ops.kernels.spread import spread
from aligner.ops.packing.pack import Final, Packing, Segment, Times

Kernel = Callable[..., Tensor] | None  # of rows of any length (`varlen.attend`); None where there are segments


@dataclass(frozen=True)
class Stream:
    """Attention's view of a micro-batch, as it passes through Megatron as `packed_seq_params`."""

    packing: Packing
    cos: Tensor  # [N, 1, head_dim / 2]
    sin: Tensor
    group: dist.ProcessGroup | None  # of the context-parallel ranks, None if there is one
    over_heads: bool  # all-to-all instead of all-gather
    times: Times | None = None  # of a model with experts
    each: Tensor | None = None  # `Packing.times` of such a model, as all with indexers are
    factors: Tensor | None = None  # of queries, float32 [N, 1, 1]
    local: Stream | None = None  # of layers with a window: its masks, their angles
    indices: dict[int, Index] = field(default_factory=dict)  # of layers whose choice the following layers use
    keys: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # and values, of layers that others read
    inputs: list[Tensor] = field(default_factory=list)  # of each layer, [N, 1, model.layer_input_size]
    ahead: Packing | None = None  # pairs of the layer that predicts further tokens (`ops/packing/ahead.py`)


class StreamAttention(SelfAttention):
    """hidden [N, 1, H] (a 1/TP share of N with sequence parallelism) -> [N, 1, H]; of the last layer with a `Final` [K,
    1, H] and, where Megatron has a bias, which of the N these are: for `add_residual`."""

    def __init__(self, config: LayerConfig, *args: Any, model: ModelConfig, **kwargs: Any):
        config = with_fields(config, kv_channels=model.kv_channels, num_query_groups=model.num_kv_heads)
        super().__init__(config, *args, **kwargs)
        layer, shape = self.layer_number - 1, model.attention
        self.is_local, self.is_rotated = shape.is_local(layer), model.is_rotated(layer)
        self.is_last = self.layer_number == config.num_layers
        self.scores = ScoreRule(score_scale(model), shape.softcap, invariant=config.invariant)
        self.neighbours = model.traits.interleaved_rotary
        # of [queries, key, value] of a group
        self.each = [model.queries_per_group] + [1] * model.kv_matrices(model.heads_of(layer))
        self.keys_of = model.keys_of(layer)
        self.is_read = model.lends_keys(layer)
        self.norms_values = model.traits.value_norm
        self.wide = model.traits.wide_qk_norm
        has_sinks, tp = model.traits.sinks, self.pg_collection.tp
        self.sinks = SharedVector(config, model.num_heads, 0.0, tp) if has_sinks else None
        self.gated = model.traits.gated_attention
        if self.wide:
            for name, heads in (("q_layernorm", model.num_heads), ("k_layernorm", model.num_kv_heads)):
                setattr(self, name, WideNorm(config, heads * model.kv_channels, tp))

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: Stream, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        stream = packed_seq_params.local if self.is_local else packed_seq_params
        query, key, value, gate = self._heads(hidden_states, stream)
        if self.is_read:
            stream.keys[self.keys_of] = key, value
        query = query if stream.factors is None else query * stream.factors.to(query.dtype)
        final = stream.packing.final if self.is_last else None
        scores = self.scores if self.sinks is None else self.scores._replace(sinks=self.sinks.weight)
        if final is None:
            context = attend(query, key, value, stream, scores, self.config.rows)
        else:
            query = kernels.collect(query, final.kept)
            context = _segments(query, key, value, final, scores, self.config.rows)
            gate = None if gate is None else kernels.collect(gate, final.kept)
        if gate is not None:
            context = context * gate.sigmoid()
        out, bias = self.linear_proj(context.reshape(len(context), 1, -1))
        return out if bias is None else out + bias, None if final is None else final.kept

    def _heads(self, hidden: Tensor, stream: Stream) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys, values and, in some families, gates of the outputs."""
        mixed, _ = self.linear_qkv(hidden)
        groups, d = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        mixed = mixed.view(len(mixed), groups, -1, d)
        normed = self.q_layernorm is not None and not isinstance(self.q_layernorm, IdentityOp)
        if self.is_rotated and not normed:
            return *kernels.split_and_rotate(mixed, stream.cos, stream.sin, self.neighbours), None
        parts = mixed.split(self.each, dim=2)
        # copies: as views keys and values would keep all of `mixed` for backward, beside the copied queries
        query, *own = (x.reshape(len(mixed), -1, d).contiguous() for x in parts)
        query, gate = (query[:, ::2], query[:, 1::2]) if self.gated else (query, None)
        query = self._placed(query, self.q_layernorm if normed else None, stream)
        if not own:
            return query, *stream.keys[self.keys_of], gate
        key, value = own[0], own[-1]
        if self.norms_values:
            value = kernels.rms_norm(value, value.new_ones(d), self.config.layernorm_epsilon)
        return query, self._placed(key, self.k_layernorm if normed else None, stream), value, gate

    def _placed(self, x: Tensor, norm: torch.nn.Module | None, stream: Stream) -> Tensor:
        """Return queries or keys normed and rotated."""
        if norm is not None:
            x = norm(x.flatten(1)).view(x.shape) if self.wide else norm(x)
        return kernels.rotate(x, stream.cos, stream.sin, self.neighbours) if self.is_rotated else x


def residual_adder(scale: float) -> Callable:
    """Return what replaces Megatron's bias-dropout-add after attention and the MLP. There is neither bias nor
    dropout, but some families have a factor `scale`."""

    def add_residual(training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        def add(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            x, kept = output
            x = x if scale == 1 else x * scale
            return x + (residual if kept is None else kernels.collect(residual, kept))

        return add

    return add_residual


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stream: Stream,
    scores: ScoreRule,
    kernel: Kernel,
    index: Index | None = None,
) -> Tensor:
    """Compute causal attention within rows: query [N, heads, d], key [N, kv_heads, d], value [N, kv_heads, e] ->
    [N, heads, e]. `index`: what chooses the keys, of the tokens whose queries and keys this rank has (`gathered`)."""
    if stream.group is None:
        return _segments(query, key, value, stream.packing, scores, kernel, index)
    if stream.over_heads:
        mixed = tokens_to_heads([query, key, value], stream.group)
        if scores.sinks is not None:
            scores = scores._replace(sinks=scores.sinks.chunk(stream.group.size())[stream.group.rank()])
        return heads_to_tokens(_segments(*mixed, stream.packing, scores, kernel, index), stream.group)
    both = gather_first(torch.cat([key, value], 2), stream.group)
    key, value = both.split([key.shape[2], value.shape[2]], 2)
    return _segments(query, key, value, stream.packing, scores, kernel, index)


def gathered(index: Index, stream: Stream) -> Index:
    """Return the index of all tokens whose queries, or keys, `attend` computes on this context-parallel rank."""
    if stream.group is None:
        return index
    index = index._replace(key=gather_first(index.key, stream.group))
    if not stream.over_heads:
        return index
    query, weight = (gather_first(x, stream.group) for x in index[:2])
    lesson = index.lesson
    if lesson is not None:  # each rank computes the whole loss, with a share of the heads
        factors = gather_first(lesson.factors / stream.group.size(), stream.group)
        lesson = lesson._replace(factors=factors, groups=(*lesson.groups, stream.group))
    return index._replace(query=query, weight=weight, lesson=lesson)


def _segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing | Final,
    scores: ScoreRule,
    kernel: Kernel,
    index: Index | None = None,
) -> Tensor:
    """Compute attention of each segment in its padded shape, or of all rows unpadded (`ops/packing/ragged.py`). Queries
    may be fewer than keys (other ranks have them, or nobody reads them)."""
    if packing.ragged is not None:
        return varlen.attend(query, key, value, packing.ragged, scores, kernel)
    n, heads, width = len(query), query.shape[1], value.shape[2]
    if packing.q_index is None:
        return attend_segment(query, key, value, packing.segments[0], scores, index).reshape(n, heads, width)
    indices = [None] * len(packing.segments) if index is None else _indices(index, packing)
    query = spread(query, packing.q_index, packing.out_index)
    if packing.segments[0].k_index is None:
        key, value = (spread(x, packing.q_index, packing.out_index) for x in (key, value))
    else:  # in one gather, so that backward makes one gradient of all keys and not one for each segment
        k_index = torch.cat([s.k_index for s in packing.segments])
        key, value = key.index_select(0, k_index), value.index_select(0, k_index)
    queries = query.split([s.rows * s.q_width for s in packing.segments])
    keys, values = (x.split([s.rows * s.k_width for s in packing.segments]) for x in (key, value))
    outs = [
        attend_segment(*parts, scores, own).reshape(-1, heads, width)
        for *parts, own in zip(queries, keys, values, packing.segments, indices, strict=True)
    ]
    return kernels.collect(outs[0] if len(outs) == 1 else torch.cat(outs), packing.out_index)


def _indices(index: Index, packing: Packing | Final) -> list[Index | None]:
    """Return the index of each segment."""
    q_index, keys = packing.q_index, [s.k_index for s in packing.segments]
    rows = q_index if keys[0] is None else torch.cat(keys)
    of_queries = [x.index_select(0, q_index).split([s.rows * s.q_width for s in packing.segments]) for x in index[:2]]
    of_keys = index.key.index_select(0, rows).split([s.rows * s.k_width for s in packing.segments])
    own = [Index(*parts, index.top_k) for parts in zip(*of_queries, of_keys, strict=True)]
    if index.lesson is None:
        return own
    factors = index.lesson.factors.new_zeros(len(q_index)).index_copy_(0, packing.out_index, index.lesson.factors)
    each = factors.split([len(one.query) for one in own])  # 0 of padded cells
    return [one._replace(lesson=index.lesson._replace(factors=x)) for one, x in zip(own, each, strict=True)]


def attend_segment(
    query: Tensor, key: Tensor, value: Tensor, segment: Segment, scores: ScoreRule, index: Index | None
) -> Tensor:
    """Compute [rows * width, heads, d] each (values may be of another width) -> [rows, q_width, heads, that width].
    Padding needs no mask: a padded key comes after every real query, and nobody reads a padded query."""
    rows = segment.rows
    q = query.view(rows, segment.q_width, *query.shape[1:]).transpose(1, 2)
    k, v = (x.view(rows, segment.k_width, *x.shape[1:]).transpose(1, 2) for x in (key, value))
    mask, dtype = segment.mask, q.dtype
    if widened(q.device, dtype) and not scores.invariant:  # the fused kernel has products of its own
        q, k, v = q.float(), k.float(), v.float()
        mask = mask if mask is None or mask.dtype == torch.bool else mask.float()
    if index is not None and (index.lesson is not None or segment.k_width > index.top_k):
        own = Index(*(x.unflatten(0, (rows, -1)) for x in index[:3]), index.top_k, index.lesson)
        return indexed_attention(q, k, v, mask, scores.scale, own).to(dtype).transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.device.type == "cuda" and not _flash_takes(q, mask):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return attention(q, k, v, mask, scores).to(dtype).transpose(1, 2)


def _flash_takes(query: Tensor, mask: Tensor | None) -> bool:
    """Return whether flash attention takes them. On CUDA it is the only fused kernel for fewer key heads than query
    heads. The other kernels need the keys repeated, and backward keeps the copies."""
    return mask is None and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256


class GatedMLP(MLP):
    """Megatron's MLP with SwiGLU in two passes over memory, with another gate, or without one."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **unused: Any):
        assert per_token_scale is None, "experts have their own module"
        (mixed, bias), gate = self.linear_fc1(hidden_states), self.config.activation_func
        mixed = mixed if bias is None else mixed + bias
        if self.config.gated_linear_unit:
            limit = self.config.activation_func_clamp_value
            if gate is silu and limit is None:
                mixed = kernels.swiglu(mixed, self.config.invariant)
            else:
                mixed = kernels.gated(mixed, gate, limit)
        else:
            mixed = gate(mixed)
        out, bias = self.linear_fc2(mixed)
        return out if bias is None else out + bias, None


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019). Unlike Megatron's torch wrapper its weight is marked for sequence
    parallelism, so that its gradient is summed over tensor ranks. With `layernorm_zero_centered_gamma` the factor is
    1 + weight, and rounding comes last, as in Gemma."""

    def __init__(self, config: LayerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps, self.offset = eps, config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        if self.offset:
            return kernels.rms_norm(x.float(), 1 + self.weight.float(), self.eps).to(x.dtype)
        return kernels.rms_norm(x, self.weight, self.eps)


class WideNorm(SharedVector):
    """Root-mean-square norm over all heads of a token; a tensor rank has a share of them (OLMo 2, arXiv:2501.00656)."""

    def __init__(self, config: LayerConfig, size: int, group: dist.ProcessGroup):
        super().__init__(config, size, 1.0, group)
        self.size, self.eps = size, config.layernorm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Norm x [N, size / tensor ranks]."""
        if self.group.size() == 1:
            return kernels.rms_norm(x, self.weight, self.eps)
        wide = x.float()
        total = wide.square().sum(-1, keepdim=True)  # of this rank; the gradient of all ranks' sum is a sum, too
        total = copy_to_tensor_model_parallel_region(
            reduce_from_tensor_model_parallel_region(total, group=self.group), group=self.group
        )
        return (wide * (total / self.size + self.eps).rsqrt() * self.weight.float()).to(x.dtype)
