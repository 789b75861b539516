"""Multi-head latent attention of the native engine (DeepSeek-V2, arXiv:2405.04434, section 2.1).

The cache keeps two things of a position: the normalised latent vector c, from which all heads' plain keys and values
are computed, and the rotated key that the heads share. These are kv_rank + rotary_dim numbers, the same on every rank
of an engine, and with an indexer (`ops/kernels/indexed_attention.py`) its key. Prompts compute keys and values from
them.

A new token does not. With a head's plain key K c and value V c, its scores are (K^T q) c and its result is V (sum of
weights times c). So all heads read the cache as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.engines.native.attention import prefill_attention, rotate
from aligner.engines.native.block_inputs import BlockContext, DecodeStep, PrefillInputs, Product
from aligner.models.rope import INDEX_EPS, LATENT_EPS, score_scale
from aligner.ops.kernels.indexed_attention import Index, chosen
from aligner.ops.kernels.scored_attention import ScoreRule


class LatentHeads:
    """This rank's heads of latent attention in all layers: their weights and computation."""

    def __init__(self, kit: BlockContext):
        cfg, heads = kit.cfg, kit.cfg.num_heads // kit.peers.size
        self.kit, self.shape, self.heads = kit, cfg.latent, heads
        self.scale = score_scale(cfg) or cfg.kv_channels**-0.5
        layers, hidden, latent = cfg.num_layers, cfg.hidden_size, cfg.latent

        def empty(*shape: int) -> Tensor:
            return kit.empty(layers, *shape)

        rank = latent.query_rank
        self.query_down, self.query_norm = (empty(rank, hidden), empty(rank)) if rank else (None, None)
        self.query_up = empty(heads * latent.head_dim, rank or hidden)
        self.down, self.norm = empty(self.width, hidden), empty(latent.kv_rank)
        self.up = empty(heads * (latent.plain_dim + latent.value_dim), latent.kv_rank)
        self.out = kit.matrices(layers, hidden, heads * cfg.value_channels)
        self.indexer = NativeIndexer(kit) if cfg.indexer.heads else None

    @property
    def width(self) -> int:
        """The numbers of a position that attention reads."""
        return self.shape.kv_rank + self.shape.rotary_dim

    @property
    def kept_width(self) -> int:
        """The numbers that are kept of a position."""
        return self.width + self.kit.cfg.indexer.head_dim

    @property
    def cached(self) -> tuple[int, int, int, int]:
        """The cache's layers, heads, numbers of a head, and planes."""
        return len(self.out), 1, self.kept_width, 1

    def matrices(self) -> Mapping[str, Sequence[Tensor]]:
        return {"out": self.out}

    def out_of(self, layer: int) -> Product:
        return self.kit.packs["out", layer], None

    def views(self) -> dict[str, Tensor]:
        return {name: view for layer in range(self.kit.cfg.num_layers) for name, view in self._views(layer).items()}

    def _views(self, layer: int) -> dict[str, Tensor]:
        named = {"o_proj": self.out, "kv_a_proj_with_mqa": self.down, "kv_a_layernorm": self.norm, "kv_b_proj": self.up}
        if self.query_down is None:
            named["q_proj"] = self.query_up
        else:
            named |= {"q_a_proj": self.query_down, "q_a_layernorm": self.query_norm, "q_b_proj": self.query_up}
        views = {f"model.layers.{layer}.self_attn.{name}.weight": buffer[layer] for name, buffer in named.items()}
        return views | (self.indexer.views(layer) if self.indexer else {})

    def prefill(self, layer: int, y: Tensor, prompts: PrefillInputs) -> Tensor:
        """Return y [P * T, hidden] -> [P * T, heads * value_dim]; kept numbers are written to the staged ones, if
        there are any."""
        rope, rows, behind = prompts.rope[0], prompts.rows, prompts.behind
        staged = None if prompts.staged is None else prompts.staged[0][layer, 0, :, 0]  # [P, T, kept_width]
        latent, vector = self.shape, self._query_vector(layer, y)
        kept = self._kept(layer, y, rope)
        if behind is not None:
            staged[behind.rows, behind.positions] = kept
            kept = staged.flatten(0, 1)
        elif staged is not None:
            staged.copy_(kept.view(rows, -1, self.kept_width))
        c, shared, index_key = kept.tensor_split([latent.kv_rank, self.width], 1)
        both = F.linear(c, self.up[layer]).view(len(kept), self.heads, -1)
        key, value = both.split([latent.plain_dim, latent.value_dim], 2)
        key = torch.cat([key, shared[:, None].expand(-1, self.heads, -1)], 2)
        query = torch.cat(self._queries(layer, vector, rope), 2)
        q, k, v = (x.unflatten(0, (rows, -1)) for x in (query, key, value))
        seen, index = None if behind is None else behind.seen, None
        if self.indexer and k.shape[1] > self.indexer.shape.top_k:
            index = self.indexer.index(layer, y, vector, prompts, index_key)
        return prefill_attention(q, k, v, seen, ScoreRule(self.scale), index).flatten(0, 1)

    def decode(self, layer: int, y: Tensor, step: DecodeStep) -> Tensor:
        """Return y [M, hidden] -> [M, heads * value_dim]; kept numbers are written to the cache."""
        rope, vector = step.rope[0], self._query_vector(layer, y)
        query = self._absorbed(layer, vector, rope)
        step.cache.write(layer, step.places[0], self._kept(layer, y, rope)[:, None])
        seen, mask = step.kept(layer)[0, :, 0], step.mask.view(step.rows, -1, step.longest)
        kept, index_key = seen.split([self.width, self.kept_width - self.width], 2)
        if self.indexer and step.longest > self.indexer.shape.top_k:
            mask = self.indexer.mask(layer, y, vector, step, index_key)
        return self._attended(layer, query, kept, mask)

    def _absorbed(self, layer: int, vector: Tensor, rope: Tensor) -> Tensor:
        """Return queries of kept numbers [n, heads, width]."""
        plain, rotated = self._queries(layer, vector, rope)
        keys, _ = self._ups(layer)
        query = torch.bmm(plain.transpose(0, 1), keys).transpose(0, 1)
        return torch.cat([query, rotated], 2)

    def _attended(self, layer: int, query: Tensor, kept: Tensor, mask: Tensor) -> Tensor:
        """Return query [n * w, heads, width], kept [n, T, width], mask float32 [n, w, T] (0 or -inf) -> [n * w, heads
        * value_dim]."""
        query = query.view(len(kept), -1, query.shape[2])  # all read the same
        mask = mask if mask.shape[1] == 1 else mask[:, :, None].expand(-1, -1, self.heads, -1).flatten(1, 2)
        scores = torch.add(mask, torch.matmul(query, kept.transpose(1, 2)).float(), alpha=self.scale)
        mixed = torch.matmul(scores.softmax(-1).to(kept.dtype), kept[..., : self.shape.kv_rank])
        mixed = mixed.view(-1, self.heads, self.shape.kv_rank)
        _, values = self._ups(layer)
        return torch.bmm(mixed.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _ups(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return K [heads, plain_dim, kv_rank] and V [heads, value_dim, kv_rank]."""
        both = self.up[layer].unflatten(0, (self.heads, -1))
        return both.split([self.shape.plain_dim, self.shape.value_dim], 1)

    def _query_vector(self, layer: int, y: Tensor) -> Tensor:
        """Return what the queries are made of, [M, query_rank or hidden]."""
        if self.query_down is None:
            return y
        y = F.linear(y, self.query_down[layer])
        return F.rms_norm(y, y.shape[1:], self.query_norm[layer], LATENT_EPS)

    def _queries(self, layer: int, vector: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return [M, heads, plain_dim] and, rotated, [M, heads, rotary_dim]."""
        heads = F.linear(vector, self.query_up[layer]).view(len(vector), self.heads, -1)
        plain, rotated = heads.split([self.shape.plain_dim, self.shape.rotary_dim], 2)
        return plain, turned(rotated, rope, self.shape.neighbours)

    def _kept(self, layer: int, y: Tensor, rope: Tensor) -> Tensor:
        c, shared = F.linear(y, self.down[layer]).split([self.shape.kv_rank, self.shape.rotary_dim], 1)
        c = F.rms_norm(c, c.shape[1:], self.norm[layer], LATENT_EPS)
        kept = [c, turned(shared[:, None], rope, self.shape.neighbours)[:, 0]]
        return torch.cat(kept + ([self.indexer.key(layer, y, rope)] if self.indexer else []), 1)


class NativeIndexer:
    """The indexers of all layers, the same on every rank: what attention of `LatentHeads` sees."""

    def __init__(self, kit: BlockContext):
        cfg, shape = kit.cfg, kit.cfg.indexer
        self.shape, self.rotary, self.neighbours = shape, cfg.latent.rotary_dim, cfg.traits.indexer_neighbours
        count, d = cfg.num_layers, shape.head_dim
        self.up, self.down = (
            kit.empty(count, *size) for size in ((shape.heads * d, cfg.latent.query_rank), (d, cfg.hidden_size))
        )
        self.weights = kit.empty(count, shape.heads, cfg.hidden_size)
        self.norm, self.bias = kit.empty(count, d), kit.empty(count, d)

    def views(self, layer: int) -> dict[str, Tensor]:
        if not self.shape.is_full(layer):
            return {}
        named = {"wq_b.weight": self.up, "wk.weight": self.down, "weights_proj.weight": self.weights}
        named |= {"k_norm.weight": self.norm, "k_norm.bias": self.bias}
        return {f"model.layers.{layer}.self_attn.indexer.{name}": buffer[layer] for name, buffer in named.items()}

    def key(self, layer: int, y: Tensor, rope: Tensor) -> Tensor:
        """Return y [M, hidden] -> keys [M, head_dim]; zeros in layers without an indexer of their own."""
        if not self.shape.is_full(layer):
            return y.new_zeros(len(y), self.shape.head_dim)
        key = F.layer_norm(
            F.linear(y, self.down[layer]), self.norm.shape[1:], self.norm[layer], self.bias[layer], INDEX_EPS
        )
        return self._rotated(key[:, None], rope)[:, 0]

    def index(self, layer: int, y: Tensor, vector: Tensor, prompts: PrefillInputs, key: Tensor) -> Index:
        """Return what is compared in the rows of a prefill: of this layer, with its keys [rows * T, head_dim], or of
        the layer whose choice it uses."""
        if self.shape.is_full(layer):
            own = *self._asked(layer, y, vector, prompts.rope[0]), key
            index = Index(*(x.unflatten(0, (prompts.rows, -1)) for x in own), self.shape.top_k)
        else:
            index = prompts.indices[layer - 1]
        if self.shape.is_followed(layer):
            prompts.indices[layer] = index
        return index

    def mask(self, layer: int, y: Tensor, vector: Tensor, step: DecodeStep, key: Tensor) -> Tensor:
        """Return the mask [n, w, T] of a step without the keys [n, T, head_dim] that are not chosen."""
        if self.shape.is_full(layer):
            asked = (x.unflatten(0, (step.rows, -1)) for x in self._asked(layer, y, vector, step.rope[0]))
            index, mask = Index(*asked, key, self.shape.top_k), step.mask.view(step.rows, -1, step.longest)
            mask = mask.masked_fill(~chosen(index, mask == 0), -torch.inf)
        else:
            mask = step.masks[layer - 1]
        if self.shape.is_followed(layer):
            step.masks[layer] = mask
        return mask

    def _asked(self, layer: int, y: Tensor, vector: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return index queries [M, heads, head_dim] and their weights, float32 [M, heads]."""
        heads, d = self.shape.heads, self.shape.head_dim
        query = F.linear(vector, self.up[layer]).view(len(vector), heads, d)
        return self._rotated(query, rope), F.linear(y, self.weights[layer]).float() * (heads * d) ** -0.5

    def _rotated(self, x: Tensor, rope: Tensor) -> Tensor:
        rotated, plain = x.split([self.rotary, x.shape[2] - self.rotary], 2)
        return torch.cat([turned(rotated, rope, self.neighbours), plain], 2)


def turned(x: Tensor, rope: Tensor, neighbours: bool) -> Tensor:
    """Return x rotated in float32, in its own dtype."""
    out = x.float() if x.dtype != torch.float32 else x.clone()
    rotate(out, rope, neighbours)
    return out.to(x.dtype)
