"""Layers of a model whose residual stream is several streams (`ops/kernels/hyper.py`), and its ends.

Between layers a token's streams are one vector, [N, 1, S * H], which Megatron passes on as it would a wider hidden
state.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.megatron.attention import RMSNorm, Stream
from aligner.megatron.sharing import LayerConfig
from aligner.ops.kernels import hyper
from aligner.ops.kernels.hyper import StreamWeights


def _parameters(module: torch.nn.Module, config: LayerConfig, streams: int, numbers: int, scales: int) -> None:
    """Give the module weights in float32, which every tensor rank has whole."""
    for name, shape in {"fn": (numbers, streams * config.hidden_size), "base": (numbers,), "scale": (scales,)}.items():
        setattr(module, name, torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32)))
        getattr(module, name).sequence_parallel = config.sequence_parallel


class StreamFactors(torch.nn.Module):
    """What one module of a layer reads of the streams, and how it writes to them."""

    def __init__(self, config: LayerConfig, streams: int):
        super().__init__()
        _parameters(self, config, streams, streams * (streams + 2), 3)

    @property
    def weights(self) -> StreamWeights:
        return StreamWeights(self.fn, self.base, self.scale)


class HyperLayer(TransformerLayer):
    """A layer of attention and experts that read and write several streams."""

    def __init__(self, config: LayerConfig, *args: Any, model: ModelConfig, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.shape, self.eps = model.hyper, model.norm_eps
        self.attention_streams, self.mlp_streams = (StreamFactors(config, self.shape.streams) for _ in range(2))

    def forward(self, hidden_states: Tensor, *, packed_seq_params: Stream, **unused: Any) -> tuple[Tensor, None]:
        x = hidden_states.view(len(hidden_states), self.shape.streams, -1)
        y, post, mix = hyper.read(x, self.attention_streams.weights, self.shape, self.eps)
        y, _ = self.self_attention(self.input_layernorm(y[:, None]), packed_seq_params=packed_seq_params)
        x = hyper.written(x, y[:, 0], post, mix)
        y, post, mix = hyper.read(x, self.mlp_streams.weights, self.shape, self.eps)
        y, _ = self.mlp(self.pre_mlp_layernorm(y[:, None]), padding_mask=packed_seq_params.times)
        return hyper.written(x, y[:, 0], post, mix).flatten(1)[:, None], None


class JoiningNorm(RMSNorm):
    """The norm behind all layers, of the streams' sum."""

    def __init__(self, config: LayerConfig, hidden_size: int, eps: float, model: ModelConfig, **unused: Any):
        super().__init__(config, hidden_size, eps)
        self.shape = model.hyper
        _parameters(self, config, self.shape.streams, self.shape.streams, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.view(len(hidden), self.shape.streams, -1)
        weights = StreamWeights(self.fn, self.base, self.scale)
        return super().forward(hyper.joined(x, weights, self.shape, self.eps)[:, None])


def begin_streams(embedding: torch.nn.Module, streams: int) -> None:
    """Let all streams begin with the embeddings."""
    embedding.register_forward_hook(lambda module, inputs, output: output.repeat(1, 1, streams))
