"""Modules of families whose layers Megatron's own cannot build: norms after attention and MLP (Gemma 3,
arXiv:2503.19786), scaled embeddings and layers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.megatron.attention import GatedMLP, StreamAttention
from aligner.megatron.groups import Layout
from aligner.megatron.moe import StreamLayer
from aligner.megatron.sharing import LayerConfig, SharedLinear, checkpoint_entries
from aligner.models.params import rounded_root
from aligner.ops.kernels.elementwise import collect, gelu_tanh


class _NormedOutput:
    """Base of a module whose output is normalised before it is added to the residual stream."""

    def __init__(self, config: LayerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.post_layernorm = config.norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(*args, **kwargs)  # type: ignore[misc]
        return self.post_layernorm(out), bias


class NormedAttention(_NormedOutput, StreamAttention):
    pass


class NormedMLP(_NormedOutput, GatedMLP):
    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        """Add the norm with this model's process groups; Megatron's method uses the global ones."""
        at = f"{prefix}post_layernorm."
        norm = checkpoint_entries(self.post_layernorm, at, sharded_offsets, metadata, self.tp_group)
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | norm


class LayerInputs(torch.nn.Module):
    """What tokens give each layer: rows of a table, and a projection of their embeddings (Gemma 3n)."""

    def __init__(self, config: LayerConfig, model: ModelConfig, vocab: int, layout: Layout):
        super().__init__()
        size, hidden = model.layer_input_size, model.hidden_size
        self.sizes, self.tp = (model.num_layers, size), layout.pgs.tp
        self.table = VocabParallelEmbedding(
            vocab,
            model.num_layers * size,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=self.tp,
        )
        self.projection = SharedLinear(config, hidden, model.num_layers * size)
        self.norm = config.norm(config, size, config.layernorm_epsilon)
        self.factors = rounded_root(size, config.params_dtype), hidden**-0.5, 2**-0.5

    def forward(self, tokens: Tensor, embeddings: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs [n, 1, size] of each layer from tokens [1, N] and embeddings [n, 1, H]."""
        of_token, projected, both = self.factors
        rows = self.table(tokens)
        rows = rows if self.table.reduce_scatter_embeddings else rows.transpose(0, 1)
        context = self.norm((self.projection(embeddings) * projected).unflatten(-1, self.sizes))
        return ((context + rows.unflatten(-1, self.sizes) * of_token) * both).unbind(2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        entries = self.table.sharded_state_dict(f"{prefix}table.", sharded_offsets, metadata)
        for name in ("projection", "norm"):
            module, at = getattr(self, name), f"{prefix}{name}."
            entries |= checkpoint_entries(module, at, sharded_offsets, metadata, self.tp)
        return entries


class LayerInput(torch.nn.Module):
    """The addend of a layer's output that its input makes."""

    def __init__(self, config: LayerConfig, size: int):
        super().__init__()
        self.gate = SharedLinear(config, config.hidden_size, size)
        self.projection = SharedLinear(config, size, config.hidden_size)
        self.post_layernorm = config.norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, x: Tensor, of_layer: Tensor) -> Tensor:
        return self.post_layernorm(self.projection(gelu_tanh(self.gate(x)) * of_layer))


class ScaledLayer(TransformerLayer):
    """A layer whose output is multiplied by `layer_scalar` [1]; no gradient changes it. Where tokens have an input for
    each layer, it comes to the output before."""

    def __init__(self, config: LayerConfig, *args: Any, input_size: int, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.layer_scalar = torch.nn.Parameter(torch.ones(1, dtype=config.params_dtype), requires_grad=False)
        self.layer_input = LayerInput(config, input_size) if input_size else None

    def _forward_mlp(self, hidden_states, inference_context=None, padding_mask=None, packed_seq_params=None):
        x = super()._forward_mlp(hidden_states, inference_context, padding_mask, packed_seq_params)
        if self.layer_input is not None:
            own, final = packed_seq_params.inputs[self.layer_number - 1], packed_seq_params.packing.final
            if final is not None and self.layer_number == self.config.num_layers:
                own = collect(own, final.kept)
            x = x + self.layer_input(x, own)
        return x * self.layer_scalar


class ScaledStreamLayer(ScaledLayer, StreamLayer):
    pass


def scale_embeddings(embedding: torch.nn.Module, factor: float) -> None:
    """Multiply the module's output, if by another number than 1."""
    if factor != 1:
        embedding.register_forward_hook(lambda module, inputs, output: output * factor)
