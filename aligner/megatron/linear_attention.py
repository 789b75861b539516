"""Linear attention over a flat stream of tokens (`ops/packing/pack.py`): Gated DeltaNet as in Qwen3-Next, or Mamba-2,
in place of attention in some layers.

Megatron-Core's own (`core/ssm`) run only on CUDA, with flash-linear-attention or mamba-ssm installed, and support
neither padded rows nor prompts that rows share. The module here has their names; a row's memory begins with its first
token, at any position in the stream.

The tensors of a key head (query, key, values, gates, and the numbers of each head of values) are neighbours, so tensor
ranks have shares of the heads. Context parallelism as attention does it: "allgather": every rank gets the tokens
of all ranks, and computes those rows up to its own last token; "alltoall": all tokens of a share of the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from aligner.config.sections.model.linear import LinearConfig
from aligner.megatron.attention import Stream
from aligner.megatron.collectives import gather_first, heads_to_tokens, tokens_to_heads
from aligner.megatron.sharing import LayerConfig, checkpoint_entries, mark_shared
from aligner.ops.kernels import elementwise as kernels
from aligner.ops.kernels import fused
from aligner.ops.kernels.linear_rules import RULES, vector_dtype
from aligner.ops.kernels.spread import spread
from aligner.ops.packing.pack import Packing, Segment


class _Weight(torch.nn.Module):
    def __init__(self, *shape: int, dtype: torch.dtype, biased: bool = False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        if biased:
            self.bias = torch.nn.Parameter(torch.zeros(shape[0], dtype=dtype))


class LinearAttention(MegatronModule):
    """hidden [N, 1, H] (a 1/TP share of N with sequence parallelism) -> [N, 1, H]; of the last layer with a `Final` [K,
    1, H] and which of the N these are, as `StreamAttention`."""

    def __init__(self, config: LayerConfig, layer_number: int, pg_collection: Any, linear: LinearConfig, **unused: Any):
        super().__init__(config)
        self.linear, self.pgs, self.is_last = linear, pg_collection, layer_number == config.num_layers
        self.rule = RULES[linear.rule]
        tp, dtype = pg_collection.tp, config.params_dtype
        hidden, values = config.hidden_size, linear.value_heads * linear.value_head_dim
        common = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": tp}
        self.in_proj = config.column(hidden, linear.key_heads * linear.width, gather_output=False, **common)
        self.out_proj = config.row(values, hidden, input_is_parallel=True, skip_bias_add=True, **common)
        # whole on every tensor rank, which uses the channels of its heads; the others' order is not theirs
        channels = linear.key_heads * linear.mixed_width
        self.conv1d = _Weight(channels, 1, linear.conv, dtype=dtype, biased=self.rule.biased)
        self.out_norm = _Weight(values // tp.size() if self.rule.wide_norm else linear.value_head_dim, dtype=dtype)
        if self.rule.wide_norm:
            mark_shared(self.out_norm.weight)
        for name in self.rule.vectors:
            own = vector_dtype(name, dtype)
            parameter = torch.nn.Parameter(torch.zeros(linear.value_heads // tp.size(), dtype=own))
            mark_shared(parameter)
            setattr(self, name, parameter)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: Stream, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        linear, stream = self.linear, packed_seq_params
        mixed, _ = self.in_proj(hidden_states)
        mixed = mixed.view(len(mixed), -1, linear.width)
        channels, gate, numbers = mixed.split(
            [linear.mixed_width, linear.gated_width - linear.mixed_width, linear.numbers], -1
        )
        out = self._over_context(torch.cat([channels, numbers], -1), stream)
        gate = gate.reshape(out.shape)
        final = stream.packing.final if self.is_last else None
        if final is not None:
            out, gate = kernels.collect(out, final.kept), kernels.collect(gate, final.kept)
        norm = self.out_norm.weight if self.rule.wide_norm else self._whole(self.out_norm.weight)
        out = self.rule.norm(out, gate, norm, self.config.layernorm_epsilon, linear)
        out, _ = self.out_proj(out.view(len(out), 1, -1))
        return out, None if final is None else final.kept

    def _whole(self, weight: Tensor) -> Tensor:
        """Prepare a weight that all tensor ranks hold: each rank has the gradients of its own heads, which are
        summed."""
        return copy_to_tensor_model_parallel_region(weight, group=self.pgs.tp)

    def _over_context(self, mixed: Tensor, stream: Stream) -> Tensor:
        """Compute mixed [N, G, channels and numbers] of this rank's tokens -> [N, H, dv]."""
        packing, group = stream.packing, stream.group
        if group is None:
            return self._segments(mixed, packing, 0)
        if not stream.over_heads:
            return self._segments(gather_first(mixed, group), packing, 0)
        (mixed,) = tokens_to_heads([mixed], group)
        return heads_to_tokens(self._segments(mixed, packing, group.rank()), group)

    def _segments(self, mixed: Tensor, packing: Packing, share: int) -> Tensor:
        """Compute the rows of each segment in their padded shape, or of all rows unpadded. mixed [keys, G, ...] ->
        [N, H, dv]. G is the `share`-th share of this rank's heads. A row's padding comes after it, and nobody reads its
        output."""
        weights = self._weights(share, mixed.shape[1])
        if packing.ragged is not None and fused.linear(mixed):
            return self._packed(mixed, packing, weights)
        if packing.q_index is None:
            return self._rows(mixed, packing.segments[0], weights)
        if packing.segments[0].k_index is None:
            parts = spread(mixed, packing.q_index, packing.out_index).split(
                [s.rows * s.q_width for s in packing.segments]
            )
        else:
            parts = [mixed.index_select(0, s.k_index) for s in packing.segments]
        outs = [self._rows(x, s, weights) for x, s in zip(parts, packing.segments, strict=True)]
        return kernels.collect(torch.cat(outs), packing.out_index)

    def _packed(self, mixed: Tensor, packing: Packing, weights: Mapping[str, Tensor]) -> Tensor:
        rows = packing.ragged
        if rows.k_index is not None:
            mixed = mixed.index_select(0, rows.k_index)
        elif rows.order is not None:
            mixed = spread(mixed, rows.order, rows.back)
        arguments = self.rule.prepared(mixed[None], weights, self.linear, ends=rows.cu_k)
        out = self.rule.rows(*arguments, ends=rows.cu_k)[0][0]
        if rows.k_index is not None:  # queries are the last of a row's keys
            count = len(packing.out_index)
            ahead = (rows.cu_k - rows.cu_q)[1:].repeat_interleave(rows.cu_q.diff(), output_size=count)
            out = out.index_select(0, torch.arange(count, device=out.device) + ahead)
        return out if rows.order is None else spread(out, rows.back, rows.order)

    def _weights(self, share: int, heads: int) -> dict[str, Tensor]:
        """Return the weights of the mixing [G, channels, ...] and the vectors of its value heads."""
        values = heads * self.linear.values_per_key
        first = self.pgs.tp.rank() * (self.linear.key_heads // self.pgs.tp.size()) + share * heads
        mixing = {f"conv1d.{name}": self._whole(weight) for name, weight in self.conv1d.named_parameters()}
        mixing = {k: self.rule.by_head(weight, self.linear)[first : first + heads] for k, weight in mixing.items()}
        return mixing | {k: getattr(self, k)[share * values : (share + 1) * values] for k in self.rule.vectors}

    def _rows(self, mixed: Tensor, segment: Segment, weights: Mapping[str, Tensor]) -> Tensor:
        """Compute mixed [rows * k_width, G, ...] -> the outputs [rows * q_width, H, dv] of the segment's queries."""
        rows = mixed.unflatten(0, (segment.rows, segment.k_width))
        out, _ = self.rule.rows(*self.rule.prepared(rows, weights, self.linear))
        if segment.q_start is not None or segment.q_width != segment.k_width:
            query = torch.arange(segment.q_width, device=out.device)
            first = 0 if segment.q_start is None else segment.q_start[:, None]
            places = (first + query).clamp_max(segment.k_width - 1).expand(segment.rows, -1)
            out = out.gather(1, places[..., None, None].expand(-1, -1, *out.shape[2:]))
        return out.flatten(0, 1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        own = {
            name: tensor for name, tensor in self.state_dict(prefix="", keep_vars=True).items() if "_proj" not in name
        }
        axes = dict.fromkeys((*self.rule.vectors, *["out_norm.weight"] * self.rule.wide_norm), 0)
        entries = checkpoint_entries(own, prefix, sharded_offsets, metadata, self.pgs.tp, axes)
        for name in ("in_proj", "out_proj"):
            entries |= getattr(self, name).sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return entries
