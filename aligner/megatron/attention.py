"""Core attention on torch's scaled_dot_product_attention: causal, right-padded rows, grouped queries without
expanding K/V.

Megatron's local `DotProductAttention` builds the [s, s] score matrix and needs a mask; this one does neither. Rows are
right-padded, so no real token can see padding and causality is all the masking there is.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class CausalAttention(MegatronModule):
    """Drop-in core attention. query [s, b, heads/tp, d]; key, value [s, b, kv_heads/tp, d] -> [s, b, heads/tp * d]."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal, attn_mask_type
        assert config.context_parallel_size == 1, config.context_parallel_size
        assert not (attention_dropout or config.attention_dropout), "dropout is off in policy and reference"
        assert pg_collection is not None, "every model passes its own process groups"
        self.tp_group = pg_collection.tp  # sharded_state_dict asks for it
        self.softmax_scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **unused: Any
    ) -> Tensor:
        s, b, heads, d = query.shape
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=heads != key.shape[2]
        )
        return out.permute(2, 0, 1, 3).reshape(s, b, heads * d)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm in float32 (Zhang & Sennrich 2019). Unlike Megatron's torch wrapper its weight is
    marked for sequence parallelism, so that its gradient is summed over tensor ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
