"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) over the stream of tokens.

From a hidden state h: c = norm(W_dkv h), from which each head's plain key and value are made, and one rotated key r
for all heads; queries from norm(W_dq h), or from h. Between the two column-parallel products and the row-parallel one
a tensor rank has its share of the heads, as elsewhere. The products that make c, r and the queries' vector are small,
and every tensor rank computes them whole. With sequence parallelism it does so for its own tokens, so c is sent, not
h.

Layers with an indexer (`ops/kernels/indexed_attention.py`) also compute what it compares, from the same vector of
queries and from h: every tensor rank does, for all tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.megatron.attention import Stream, attend, gathered
from aligner.megatron.sharing import LayerConfig, SharedLinear
from aligner.models.rope import INDEX_EPS, LATENT_EPS, score_scale
from aligner.ops.kernels import elementwise as kernels
from aligner.ops.kernels.indexed_attention import Index, Lesson
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
        layer = layer_number - 1
        self.indexer = Indexer(config, model, self.tp_group) if model.indexer.is_full(layer) else None
        self.layer, self.chooses, self.top_k = layer, model.indexer.heads > 0, model.indexer.top_k
        self.is_followed = model.indexer.is_followed(layer)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: Stream, **unused: Any
    ) -> tuple[Tensor, None]:
        stream = packed_seq_params
        assert stream.packing.final is None, "rows of models with experts are not narrowed"
        vector = self._query_vector(hidden_states)
        query, (key, value) = self._queries(vector, stream), self._keys_and_values(hidden_states, stream)
        index = self._index(hidden_states, vector, stream) if self.chooses else None
        context = attend(query, key, value, stream, ScoreRule(self.scale), self.config.rows, index)
        return self.linear_proj(context.reshape(len(context), 1, -1))[0], None

    def _index(self, hidden: Tensor, vector: Tensor, stream: Stream) -> Index | None:
        """Return what this layer's indexer compares, or that of the layer whose choice it uses; None where no row is
        longer than a choice, unless the indexer learns."""
        learns = self.indexer is not None and self.indexer.learns
        if not learns and all(segment.k_width <= self.top_k for segment in stream.packing.segments):
            return None
        if self.indexer is None:
            index = stream.indices[self.layer - 1]
        else:
            index = gathered(self.indexer(hidden[:, 0], vector[:, 0], stream), stream)
        if self.is_followed:
            stream.indices[self.layer] = index._replace(lesson=None)
        return index

    def _query_vector(self, hidden: Tensor) -> Tensor:
        """Return what the queries are made of."""
        return self.q_layernorm(self.linear_q_down_proj(hidden)) if self.latent.query_rank else hidden

    def _queries(self, vector: Tensor, stream: Stream) -> Tensor:
        """Return [N, heads, plain_dim + rotary_dim]."""
        mixed, _ = (self.linear_q_up_proj if self.latent.query_rank else self.linear_q_proj)(vector)
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


class Indexer(torch.nn.Module):
    """What scores the tokens that attention may see. Its parameters have the names of Megatron's `DSAIndexer`, every
    tensor rank has them whole. `model.indexer.loss` trains them, and no other loss does."""

    def __init__(self, config: LayerConfig, model: ModelConfig, group: dist.ProcessGroup):
        super().__init__()
        shape, rank = model.indexer, model.latent.query_rank
        self.shape, self.group, self.sequence = shape, group, config.sequence_parallel
        self.neighbours = model.traits.indexer_neighbours
        self.linear_wq_b = SharedLinear(config, rank, shape.heads * shape.head_dim)
        self.linear_wk = SharedLinear(config, model.hidden_size, shape.head_dim)
        self.k_norm = torch.nn.LayerNorm(shape.head_dim, INDEX_EPS, dtype=config.params_dtype)
        self.linear_weights_proj = SharedLinear(config, model.hidden_size, shape.heads)
        self.requires_grad_(shape.loss > 0)
        for each in (self.linear_wk, self.linear_weights_proj, self.k_norm):  # they see a rank's share of the tokens
            for parameter in each.parameters():
                parameter.sequence_parallel = config.sequence_parallel
        self.linear_wq_b.weight.sequence_parallel = False
        self.tokens = 0.0  # of the minibatch
        self.register_buffer("total", torch.zeros((), dtype=torch.float64), persistent=False)  # of the step's loss

    @property
    def learns(self) -> bool:
        return self.shape.loss > 0 and self.training and torch.is_grad_enabled()

    def forward(self, hidden: Tensor, vector: Tensor, stream: Stream) -> Index:
        """Compare tokens by their hidden states and the vectors of their queries, [N, H] and [N, query_rank] (a 1/TP
        share of N with sequence parallelism)."""
        hidden, vector = hidden.detach(), vector.detach()
        key, weight = self.k_norm(self.linear_wk(hidden)), self.linear_weights_proj(hidden)
        if self.sequence:
            alike = {"tensor_parallel_output_grad": False, "group": self.group}  # all ranks compute the same loss
            key, weight, vector = (gather_from_sequence_parallel_region(x, **alike) for x in (key, weight, vector))
        heads, d = self.shape.heads, self.shape.head_dim
        both = self.linear_wq_b(vector).view(len(vector), heads, d), key[:, None]
        query, key = (kernels.rotate(x, stream.cos, stream.sin, self.neighbours) for x in both)
        lesson = self._lesson(stream) if self.learns else None
        return Index(query, weight.float() * (heads * d) ** -0.5, key[:, 0], self.shape.top_k, lesson)

    def _lesson(self, stream: Stream) -> Lesson:
        """Return a lesson in which each token counts as often as it stands in the micro-batch."""
        factors = stream.each * (self.shape.loss / self.tokens)
        return Lesson(factors, self.total, (self.group,) if self.group.size() > 1 else ())
