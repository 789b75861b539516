"""Attention to a window of tokens and to entries that stand for several (`ops/kernels/entries.py`), over the stream of
tokens (DeepSeek-V4, section 2.3).

All heads share one vector of a token as key and value, and so one of an entry. Its last numbers are rotated; outputs,
which are sums of them, are rotated back. Each group of heads has a matrix that narrows its outputs, before one for all.
A tensor rank has its share of the heads and of these groups, and makes all keys. Rows may share their beginning: each
row's entries are made of its own tokens, from its first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.megatron.attention import Stream, attend_segment
from aligner.megatron.collectives import gather_first
from aligner.megatron.sharing import LayerConfig, SharedLinear, SharedVector, checkpoint_entries, mark_shared
from aligner.models.rope import attention_factor, inverse_frequencies
from aligner.ops.kernels import elementwise as kernels
from aligner.ops.kernels.entries import entries_seen, pooled, tokens_seen
from aligner.ops.kernels.indexed_attention import Index, chosen
from aligner.ops.kernels.scored_attention import ScoreRule
from aligner.ops.packing.pack import Packing, Segment


class EntryAttention(MegatronModule):
    """Replacement of Megatron's self-attention: hidden [N, 1, H] (a 1/TP share of N with sequence parallelism) -> [N,
    1, H], without bias."""

    def __init__(self, config: LayerConfig, layer_number: int, model: ModelConfig, pg_collection: Any, **_: Any):
        super().__init__(config)
        self.tp_group, self.sequence = pg_collection.tp, config.sequence_parallel
        layer, latent, width = layer_number - 1, model.latent, model.kv_channels
        self.width, self.rotary, self.window = width, model.rotary_dim, model.attention.window
        self.groups = latent.output_groups // self.tp_group.size()
        options = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": self.tp_group}
        self.linear_q_down_proj = SharedLinear(config, model.hidden_size, latent.query_rank)
        self.q_layernorm = config.norm(config, latent.query_rank, model.norm_eps)
        heads = model.num_heads * width
        self.linear_q_up_proj = config.column(latent.query_rank, heads, gather_output=False, **options)
        self.linear_kv_proj = SharedLinear(config, model.hidden_size, width)
        self.kv_norm = config.norm(config, width, model.norm_eps)
        self.sinks = SharedVector(config, model.num_heads, 0.0, self.tp_group)
        self.linear_o_down_proj = GroupedProduct(config, model, self.tp_group)
        ranks = latent.output_groups * latent.output_rank
        self.linear_proj = config.row(ranks, model.hidden_size, input_is_parallel=True, skip_bias_add=True, **options)
        kinds = model.entries_of(layer)
        self.tokens = model.entry_tokens(layer)
        self.compressor = Compressor(config, model, width, self.tokens, "indexer" in kinds) if kinds else None
        self.indexer = EntryIndexer(config, model) if "indexer" in kinds else None

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: Stream, **unused: Any
    ) -> tuple[Tensor, None]:
        stream = packed_seq_params if self.tokens else packed_seq_params.local
        vector = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        query = self.linear_q_up_proj(vector)[0].view(len(stream.cos), -1, self.width)
        query = kernels.rms_norm(query, query.new_ones(self.width), self.config.layernorm_epsilon)
        key = self._of_heads(self.kv_norm(self.linear_kv_proj(hidden_states)))
        query, key = (turned(x, stream.cos, stream.sin, self.rotary) for x in (query, key))
        out = self._attended(query, key, hidden_states[:, 0], vector[:, 0], stream)
        out = turned(out, stream.cos, -stream.sin, self.rotary)
        return self.linear_proj(self.linear_o_down_proj(out.unflatten(1, (self.groups, -1)).flatten(2)))[0], None

    def _of_heads(self, x: Tensor) -> Tensor:
        """Return x of all tokens, whose gradient is a sum over the heads of all tensor ranks."""
        if self.sequence:
            return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(x, group=self.tp_group)

    def _keys(self, x: Tensor, stream: Stream) -> list[Tensor]:
        """Return x [N, d] of tokens as keys of each segment, of all context-parallel ranks."""
        return _by_segment(x if stream.group is None else gather_first(x, stream.group), stream.packing, True)

    def _of_all(self, x: Tensor) -> Tensor:
        """Return x of all tokens, whose gradient every tensor rank has whole."""
        if not self.sequence:
            return x
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=self.tp_group)

    @torch.no_grad()
    def _choice(self, hidden: Tensor, vector: Tensor, stream: Stream) -> list[Index]:
        """Return what the indexer compares in each segment."""
        weight, features = (self._of_all(x(hidden)) for x in (self.indexer.weight, self.indexer.compressor))
        query = self.indexer.query(self._of_all(vector), stream)
        asked = (_by_segment(x, stream.packing, False) for x in (query, weight.float()))
        keys = map(self.indexer.compressor.entries, self._keys(features, stream))
        return [Index(*parts, self.indexer.top_k) for parts in zip(*asked, keys, strict=True)]

    def _attended(self, query: Tensor, key: Tensor, hidden: Tensor, vector: Tensor, stream: Stream) -> Tensor:
        """Return query and outputs [N, heads, d], of key [N, 1, d]."""
        packing = stream.packing
        queries, keys = _by_segment(query, packing, False), self._keys(key[:, 0], stream)
        if self.compressor is not None:
            features = self._keys(self._of_all(self.compressor(hidden)), stream)
        if self.indexer is not None:
            choice = self._choice(hidden, vector, stream)
        outs = []
        for i, segment in enumerate(packing.segments):
            positions = query_positions(segment, query.device)
            seen, kv = tokens_seen(positions, segment.k_width, self.window), keys[i]
            if self.compressor is not None:
                entries = self.compressor.entries(features[i])
                visible = entries_seen(positions, entries.shape[1], self.tokens)
                if self.indexer is not None:
                    visible = chosen(choice[i], visible)
                kv = torch.cat([kv, copy_to_tensor_model_parallel_region(entries, group=self.tp_group)], 1)
                seen = torch.cat([seen.expand(len(visible), -1, -1), visible], 2)
            both = kv.flatten(0, 1)[:, None]
            rows = Segment(segment.rows, segment.q_width, kv.shape[1], None, seen[:, None])
            scores = ScoreRule(sinks=self.sinks.weight)
            outs.append(attend_segment(queries[i].flatten(0, 1), both, both, rows, scores, None).flatten(0, 1))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if packing.out_index is None else kernels.collect(out, packing.out_index)


def query_positions(segment: Segment, device: torch.device) -> Tensor:
    """Return the positions of a segment's queries in their rows, int64 [rows or 1, q_width]."""
    start = torch.zeros(1, dtype=torch.int64, device=device) if segment.q_start is None else segment.q_start
    return (start[:, None] + torch.arange(segment.q_width, device=device)).clamp_max(segment.k_width - 1)


def _by_segment(x: Tensor, packing: Packing, keys: bool) -> list[Tensor]:
    """Return x [N, ...] of the queries, or keys, of each segment: [rows, width, ...]."""
    index, segments = packing.q_index, packing.segments
    if keys and segments[0].k_index is not None:
        index = torch.cat([s.k_index for s in segments])
    x = x if index is None else x.index_select(0, index)
    widths = [s.k_width if keys else s.q_width for s in segments]
    parts = x.split([s.rows * width for s, width in zip(segments, widths, strict=True)])
    return [x.unflatten(0, (-1, width)) for x, width in zip(parts, widths, strict=True)]


def turned(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    """Return x [N, heads, d] with its last `rotary` numbers rotated, in pairs of neighbours."""
    plain, last = x.split([x.shape[2] - rotary, rotary], 2)
    return torch.cat([plain, kernels.rotate(last, cos, sin, True)], 2)


class Compressor(torch.nn.Module):
    """What makes entries of tokens. Every tensor rank has it whole, and makes the entries of all tokens."""

    def __init__(self, config: LayerConfig, model: ModelConfig, width: int, tokens: int, twice: bool):
        super().__init__()
        self.tokens, self.twice, self.rotary = tokens, twice, model.rotary_dim
        made = width * (1 + twice)
        self.linear_kv, self.linear_gate = (SharedLinear(config, model.hidden_size, made) for _ in range(2))
        self.position_bias = torch.nn.Parameter(torch.zeros(tokens, made, dtype=torch.float32))
        self.norm = config.norm(config, width, model.norm_eps)
        self.norm.weight.sequence_parallel = False
        self.register_buffer("frequencies", inverse_frequencies(model), persistent=False)
        self.factor = attention_factor(model)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return vectors and gates of tokens, [N, 2 * width]."""
        return torch.cat([self.linear_kv(hidden), self.linear_gate(hidden)], 1)

    def entries(self, features: Tensor) -> Tensor:
        """Return entries [B, n, d] of what `forward` returned of the tokens of rows [B, T, ...]."""
        out = self.norm(pooled(*features.chunk(2, 2), self.position_bias, self.twice))
        positions = torch.arange(out.shape[1], device=out.device) * self.tokens
        angles = positions[:, None].float() * self.frequencies
        cos, sin = ((f(angles) * self.factor).to(out.dtype) for f in (torch.cos, torch.sin))
        return turned(out.transpose(0, 1), cos[:, None], sin[:, None], self.rotary).transpose(0, 1)


class EntryIndexer(torch.nn.Module):
    """What chooses among entries. No gradient of a loss reaches it."""

    def __init__(self, config: LayerConfig, model: ModelConfig):
        super().__init__()
        shape = model.indexer
        self.heads, self.head_dim, self.top_k, self.rotary = shape.heads, shape.head_dim, shape.top_k, model.rotary_dim
        self.compressor = Compressor(config, model, shape.head_dim, model.entries.tokens, True)
        self.linear_wq_b = SharedLinear(config, model.latent.query_rank, shape.heads * shape.head_dim)
        self.linear_weights_proj = SharedLinear(config, model.hidden_size, shape.heads)
        self.requires_grad_(False)

    def query(self, vector: Tensor, stream: Stream) -> Tensor:
        """Return [N, heads, head_dim] of the vectors that attention's queries are made of, too."""
        query = self.linear_wq_b(vector).view(len(vector), self.heads, self.head_dim)
        return turned(query, stream.cos, stream.sin, self.rotary)

    def weight(self, hidden: Tensor) -> Tensor:
        return self.linear_weights_proj(hidden) * (self.heads * self.head_dim) ** -0.5


class GroupedProduct(torch.nn.Module):
    """A matrix of each group: [N, groups, width] -> [N, 1, groups * rank]. Tensor ranks share the groups."""

    def __init__(self, config: LayerConfig, model: ModelConfig, group: dist.ProcessGroup):
        super().__init__()
        latent, self.group = model.latent, group
        self.count = latent.output_groups // group.size()
        width = model.num_heads * model.kv_channels // latent.output_groups
        self.weight = torch.nn.Parameter(torch.zeros(self.count * latent.output_rank, width, dtype=config.params_dtype))
        mark_shared(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.unflatten(0, (self.count, -1))
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).flatten(1)[:, None]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        return checkpoint_entries(self, prefix, sharded_offsets, metadata, self.group, {"weight": 0})
