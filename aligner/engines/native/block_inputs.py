"""The common tools of a native model's blocks, and the inputs of a pass.

A block has the weights of its kind in all layers that have that kind. It makes its buffers, names the views into them,
and computes its share of a pass:

    matrices   of its products, by name, one for each of its layers: packed for their kernels (`packs.py`)
    views      Hugging Face name -> view into its buffers whose elements are in Hugging Face's order
    out        of a layer: the matrix and the bias of its last product, which the model adds to the layer's input
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.engines.native.attention import PrefillPositions
from aligner.engines.native.packs import PackedMatrices, matrices
from aligner.engines.native.peers import EngineRanks
from aligner.engines.native.scratch import Scratch
from aligner.ops.kernels import invariant
from aligner.ops.kernels.elementwise import rms_norm
from aligner.ops.kernels.indexed_attention import Index
from aligner.ops.kernels.packed_products import packed_linear
from aligner.ops.kernels.products import linear, product_into

if TYPE_CHECKING:
    from aligner.engines.native.cache import SlotCache
    from aligner.engines.native.states import RowStates

Product = tuple[Tensor, Tensor | None]  # matrix and bias


class PrefillInputs(NamedTuple):
    """The inputs of a prefill of P rows of T tokens. `behind` has their positions if others are staged before them."""

    rows: int
    length: int
    rope: tuple[Tensor, ...]  # of `NativeModel.rotations`, of P * T positions
    causal: Tensor | None  # bool [P, 1, T, staged positions], with `behind`
    near: Tensor | None  # the same, or [T, T], of layers with a local window; None: as all
    staged: tuple[Tensor, ...] | None  # of each kind of heads [layer, plane, P, kv_head, T, d]
    behind: PrefillPositions | None
    real: Tensor | None  # bool [P, T]: tokens that are no padding
    memories: RowStates | None
    indices: dict[int, Index]  # of layers whose choice the layer behind them uses
    keys: dict[int, tuple[Tensor, Tensor]]  # and values, of layers whose others use


@dataclass
class DecodeStep:
    """The inputs of a decode step of slots [0, rows), at positions below `longest`, of w tokens each, one row's behind
    the other's. A mask is made when a layer first asks for it."""

    rows: int
    longest: int
    window: int  # of layers with a local window; 0: there are none
    positions: Tensor  # int64 [rows * w]
    fused: bool  # attention of plain heads is one kernel (`ops/kernels/cuda/decode.py`), if it takes their width
    cache: SlotCache
    places: tuple[Tensor, ...]  # of each kind of heads, of `cache.places`
    scratch: Scratch
    rope: tuple[Tensor, ...]  # of `NativeModel.rotations`
    masks: dict[int, Tensor] = field(default_factory=dict)  # of layers whose choice the layer behind them uses
    closed: dict[int, Tensor] = field(default_factory=dict)  # of `closing`
    lines: dict[int, Tensor | None] = field(default_factory=dict)  # of each kind of heads, of `cache.lines`

    def kept(self, layer: int, kind: int = 0) -> Tensor:
        """Return [plane, rows, kv_head, longest, head_dim] of a layer of the cache, until the next call."""
        cache, rows = self.cache.kinds[kind], slice(self.rows)
        if kind not in self.lines:
            self.lines[kind] = cache.lines(rows, self.longest)
        return cache.read(layer, rows, self.longest, self.lines[kind], self.scratch)

    def closing(self, tokens: int) -> Tensor:
        """Return the slots, int64, whose new tokens are the last ones of entries of so many tokens."""
        if tokens not in self.closed:  # once for all layers: a host that launches a GPU's work waits for it
            self.closed[tokens] = ((self.positions + 1) % tokens == 0).nonzero().flatten()
        return self.closed[tokens]

    @cached_property
    def mask(self) -> Tensor:
        """The causal mask, float32 [rows * w, 1, 1, longest], 0 or -inf."""
        return self._hidden(torch.arange(self.longest, device=self.positions.device) > self.positions[:, None])

    @cached_property
    def near(self) -> Tensor | None:
        """The mask of layers with a local window; None: as all."""
        seen = nearby(self.positions, self.longest, self.window)
        return None if seen is None else self._hidden(~seen)

    def _hidden(self, beyond: Tensor) -> Tensor:
        return torch.zeros(beyond.shape, device=beyond.device).masked_fill_(beyond, float("-inf"))[:, None, None]


def nearby(query: Tensor, keys: int, window: int) -> Tensor | None:
    """Return bool [M, keys]: the keys that queries at positions int64 [M] see in layers with this window; None: all
    up to their own."""
    if not window or keys <= window:
        return None
    key = torch.arange(keys, device=query.device)
    return (key <= query[:, None]) & (key > query[:, None] - window)


class BlockContext:
    """The model's shape, this rank's place among `peers`, and the products of its matrices."""

    packs: PackedMatrices  # of all blocks' matrices, once they are made

    def __init__(self, cfg: ModelConfig, device: torch.device, dtype: torch.dtype, peers: EngineRanks):
        self.cfg, self.device, self.dtype, self.peers = cfg, device, dtype, peers
        self.scratch = Scratch(device, dtype)
        self.weights: list[Tensor] = []  # all buffers of weights

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        self.weights.append(torch.empty(shape, dtype=dtype or self.dtype, device=self.device))
        return self.weights[-1]

    def matrices(self, layers: int, rows: int, columns: int) -> Sequence[Tensor]:
        return matrices(layers, rows, columns, self.dtype, self.device, self.empty)

    def linear(self, y: Tensor, weight: Tensor) -> Tensor:
        return invariant.linear(y, weight) if self.cfg.invariant else linear(y, weight)

    def product(self, name: str, index: int, y: Tensor, bias: Tensor | None) -> Tensor:
        """Return y W^T + bias, perhaps in a buffer that the next layer uses again."""
        weight = self.packs[name, index]
        if self.cfg.invariant:
            return invariant.linear(y, weight, bias)
        if weight.is_mkldnn:
            return packed_linear(y, weight, bias)
        return product_into(self.scratch.take(name, len(y), len(weight)), y, weight.t(), bias)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        size, eps = weight.shape, self.cfg.norm_eps
        if self.cfg.invariant:
            return rms_norm(x, weight, eps)
        if self.cfg.traits.offset_norms:
            return F.rms_norm(x.float(), size, 1 + weight.float(), eps).to(x.dtype)
        return F.rms_norm(x, size, weight, eps)


def of(biases: Tensor | None, index: int) -> Tensor | None:
    return None if biases is None else biases[index]
