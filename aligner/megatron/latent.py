"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) over the stream of tokens.

From a hidden state h: c = norm(W_dkv h), from which each head's plain key and value are made, and one rotated key r
for all heads; queries from norm(W_dq h), or from h. Between the two column-parallel products and the row-parallel one
a tensor rank has its share of the heads, as elsewhere. The products that make c, r and the queries' vector are small,
and every tensor rank computes them whole. With sequence parallelism it does so for its own tokens, so c is sent, not
h.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.megatron import kernels
from aligner.megatron.attention import Stream, attend
from aligner.megatron.sharing import LayerConfig, SharedLinear
from aligner.models.rope import LATENT_EPS, score_scale
from aligner.ops.kernels.scored_attention import ScoreRule


class LatentAttention(MegatronModule):
    """Replacement of Megatron's self-attention: hidden [N, 1, H] (a 1/TP share of N with sequence parallelism) -> [N,
    1, H], without bias. Parameters have the names of Megatron's `MLASelfAttention`."""

    def __init__(self, config: LayerConfig, layer_number: int, model: ModelConfig, pg_collection: Any, **_: Any):
        super().__init__(config)
        self.tp_group, self.sequence, self.latent = pg_collection.tp, config.sequence_parallel, model.latent
        self.heads, self.scale = model.num_heads // self.tp_group.size(), score_scale(model)
        latent, hidden, heads = model.latent, model.hidden_size, model.num_heads
        options = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": self.tp_group}
        widen, norm = partial(config.column, gather_output=False, **options), partial(config.norm, config)
        if model.latent_queries:
            self.linear_q_down_proj = SharedLinear(config, hidden, latent.query_rank)
            self.q_layernorm = norm(latent.query_rank, LATENT_EPS)
            self.linear_q_up_proj = widen(latent.query_rank, heads * latent.head_dim)
        else:
            self.linear_q_proj = widen(hidden, heads * latent.head_dim)
        self.linear_kv_down_proj = SharedLinear(config, hidden, latent.kv_rank + latent.rotary_dim)
        self.kv_layernorm = norm(latent.kv_rank, LATENT_EPS)
        self.linear_kv_up_proj = widen(latent.kv_rank, heads * (latent.plain_dim + latent.value_dim))
        width = heads * latent.value_dim
        self.linear_proj = config.row(width, hidden, input_is_parallel=True, skip_bias_add=True, **options)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: Stream, **unused: Any
    ) -> tuple[Tensor, None]:
        stream = packed_seq_params
        assert stream.packing.final is None, "rows of models with experts are not narrowed"
        query, (key, value) = self._queries(hidden_states, stream), self._keys_and_values(hidden_states, stream)
        context = attend(query, key, value, stream, ScoreRule(self.scale), self.config.rows)
        return self.linear_proj(context.reshape(len(context), 1, -1))[0], None

    def _queries(self, hidden: Tensor, stream: Stream) -> Tensor:
        """Return [N, heads, plain_dim + rotary_dim]."""
        if self.latent.query_rank:
            mixed, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        else:
            mixed, _ = self.linear_q_proj(hidden)
        plain, rotary = mixed.view(len(mixed), self.heads, -1).split([self.latent.plain_dim, self.latent.rotary_dim], 2)
        return torch.cat([plain, self._rotate(rotary, stream)], 2)

    def _keys_and_values(self, hidden: Tensor, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return [N, heads, plain_dim + rotary_dim], [N, heads, value_dim]."""
        latent = self.latent
        c, rotary = self.linear_kv_down_proj(hidden).split([latent.kv_rank, latent.rotary_dim], 2)
        if self.sequence:
            rotary = gather_from_sequence_parallel_region(rotary, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            rotary = copy_to_tensor_model_parallel_region(rotary, group=self.tp_group)
        mixed, _ = self.linear_kv_up_proj(self.kv_layernorm(c))
        plain, value = mixed.view(len(mixed), self.heads, -1).split([latent.plain_dim, latent.value_dim], 2)
        return torch.cat([plain, self._rotate(rotary, stream).expand(-1, self.heads, -1)], 2), value

    def _rotate(self, x: Tensor, stream: Stream) -> Tensor:
        return kernels.rotate(x, stream.cos, stream.sin, self.latent.neighbours)
