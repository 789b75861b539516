"""Attention of plain heads: queries, keys, values and, in some families, gates of attention's output.

Inside each head the two halves that rotary embeddings pair are stored interleaved, (x_0, x_{d/2}, x_1, ...), so that
the rotation is one complex product in place. Queries and keys are permuted alike, which changes no dot product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.engines.native.attention import decode_attention, prefill_attention, rotate
from aligner.engines.native.block_inputs import BlockContext, DecodeStep, PrefillInputs, Product, of
from aligner.models.rope import score_scale
from aligner.ops.kernels import elementwise
from aligner.ops.kernels.scored_attention import ScoreRule

WIDEST = 256  # head that the fused kernel takes


class PlainHeads:
    """This rank's share of the heads of all layers with attention, or of those of these kinds alone
    (`ModelConfig.heads_of`). They may have no keys and values of their own: `lenders` have those that they use."""

    def __init__(self, kit: BlockContext, kinds: tuple[str, ...] = (), lenders: PlainHeads | None = None):
        cfg, traits, share = kit.cfg.of_kinds(kinds), kit.cfg.traits, kit.peers.size
        self.kit, self.cfg, self.traits, attention = kit, cfg, traits, cfg.attention
        # number of its kind in the cache
        self.cached_as = int("global" in kinds and bool(cfg.layers_of("local")))
        self.qkv_name, self.out_name = (" ".join((name, *kinds)) for name in ("qkv", "out"))
        self.heads, self.groups = cfg.num_heads // share, max(1, cfg.num_kv_heads // share)  # ranks may repeat a group
        self.head_dim = cfg.kv_channels
        self.rotated = self.heads + self.groups  # query and key heads
        # halves are interleaved unless a part of a head alone is rotated, its neighbours together, or gates lie between
        own_order = traits.interleaved_rotary or traits.gated_attention
        self.made = cfg.kv_matrices(kinds)  # of keys and of values
        shares_keys = attention.key_is_value and "global" in kinds  # values are keys, whose order is the output's
        own_order |= cfg.invariant  # the trainer's, in which its products sum
        self.interleaves = cfg.rotary_dim == self.head_dim and not own_order and not shares_keys
        self.scaled_queries = cfg.rope_scaling.llama_4_scaling_beta > 0
        self.turns = [cfg.is_rotated(layer) for layer in range(cfg.num_layers)]
        self.local = [attention.is_local(layer) for layer in range(cfg.num_layers)]
        self.scores = ScoreRule(score_scale(cfg), attention.softcap, invariant=cfg.invariant)
        layers = [layer for layer in cfg.layers_of("attention") if set(kinds) <= set(cfg.layer_kinds(layer))]
        self.index, count = {layer: i for i, layer in enumerate(layers)}, len(layers)
        # of each layer, the number in the cache of the layer whose keys and values it uses
        self.cache_index = {layer: (lenders or self).index[cfg.keys_of(layer)] for layer in layers}
        self.lends = {layer for layer in layers if cfg.lends_keys(layer)}
        made = self.heads + self.made * self.groups + (self.heads if traits.gated_attention else 0)
        width, hidden = made * self.head_dim, cfg.hidden_size
        self.qkv = kit.matrices(count, width, hidden)
        self.qkv_bias = kit.empty(count, width) if cfg.qkv_bias else None
        self.out = kit.matrices(count, hidden, self.heads * cfg.value_channels)
        self.out_bias = kit.empty(count, hidden) if cfg.output_bias else None
        self.sinks = kit.empty(count, self.heads) if traits.sinks else None
        # wide norms: one over all query heads of a token and one over its key heads
        norms = (self.rotated * self.head_dim,) if traits.wide_qk_norm else (1 + bool(self.made), self.head_dim)
        self.qk_norm = kit.empty(count, *norms) if cfg.qk_norm or traits.wide_qk_norm else None
        wide_sizes = [heads * share * self.head_dim for heads in (self.heads, self.groups)]
        self._wide_sizes = torch.tensor(wide_sizes, device=kit.device)
        self._head_kind = torch.tensor([0] * self.heads + [1] * self.groups, device=kit.device)

    @property
    def cached(self) -> tuple[int, int, int, int]:
        """The cache's layers, heads, numbers of a head, and planes."""
        return len(self.index) if self.made else 0, self.groups, self.head_dim, 2

    def matrices(self) -> Mapping[str, Sequence[Tensor]]:
        return {self.qkv_name: self.qkv, self.out_name: self.out}

    def out_of(self, layer: int) -> Product:
        index = self.index[layer]
        return self.kit.packs[self.out_name, index], of(self.out_bias, index)

    def views(self) -> dict[str, Tensor]:
        return {name: view for layer in self.index for name, view in self._views(layer)}

    def _views(self, layer: int) -> list[tuple[str, Tensor]]:
        i, views = self.index[layer], []
        at = self.traits.beside("self_attention.linear_proj.weight", layer)
        parts = [n * self.head_dim for n in (self.heads, *[self.groups] * self.made)]
        for kind, buffer in (("weight", self.qkv), ("bias", self.qkv_bias)):
            if buffer is not None:
                q, *own = buffer[i][: sum(parts)].split(parts)
                q = self._with_gates(buffer[i]) if self.traits.gated_attention else self._halves(q)
                views += [(f"q_proj.{kind}", q), *((f"k_proj.{kind}", self._halves(k)) for k in own[:1])]
                views += [(f"v_proj.{kind}", rows) for rows in own[1:]]
        if self.qk_norm is not None:
            rows = self.qk_norm[i].split(parts[:2]) if self.traits.wide_qk_norm else self.qk_norm[i]
            views += [(f"{x}_norm.weight", self._halves(row)) for x, row in zip("qk", rows, strict=False)]
        views += [("o_proj.weight", self.out[i])]
        views += [] if self.out_bias is None else [("o_proj.bias", self.out_bias[i])]
        views += [] if self.sinks is None else [("sinks", self.sinks[i])]
        return [(at + name, view) for name, view in views]

    def _halves(self, t: Tensor) -> Tensor:
        """Return [heads * d, ...] as it is stored -> row-major in Hugging Face's order: the strided view [heads, 2,
        d/2, ...] where halves are interleaved."""
        if not self.interleaves:
            return t
        return t.unflatten(0, (-1, self.head_dim // 2, 2)).transpose(1, 2)

    def _with_gates(self, t: Tensor) -> Tensor:
        """Return [queries, keys, values, gates] -> [heads, 2, d, ...]: each head's queries, then its gates."""
        each = self.head_dim * t.stride(0)
        strides = each, (self.rotated + self.groups) * each, *t.stride()
        return t.as_strided((self.heads, 2, self.head_dim, *t.shape[1:]), strides, t.storage_offset())

    # ---- computation

    def prefill(self, layer: int, y: Tensor, prompts: PrefillInputs) -> Tensor:
        """Return y [P * T, hidden] -> [P * T, heads * d]; keys and values are written to the staged ones, if there
        are any."""
        heads = self._heads(layer, y, prompts.rope).view(prompts.rows, prompts.length, -1, self.head_dim)
        (q, k, v, gates), index, staged = self._parts(heads), self.index[layer], prompts.staged
        staged = None if staged is None else staged[self.cached_as]
        if not self.made:
            k, v = prompts.keys[self.cfg.keys_of(layer)]
        elif prompts.behind is not None:
            for plane, new in zip(staged[index], (k, v), strict=True):
                plane[prompts.behind.rows, :, prompts.behind.positions] = new.flatten(0, 1)
            k, v = staged[index].transpose(2, 3)
        elif staged is not None:
            staged[index, 0].copy_(k.transpose(1, 2))
            staged[index, 1].copy_(v.transpose(1, 2))
        if layer in self.lends:  # the last layer that writes to their buffer
            prompts.keys[layer] = k, v
        seen = prompts.near if self.local[layer] and prompts.near is not None else prompts.causal
        return _gated(prefill_attention(q, k, v, seen, self._scores(index)), gates).flatten(0, 1)

    def decode(self, layer: int, y: Tensor, step: DecodeStep) -> Tensor:
        """Return y [M, hidden] -> [M, heads * d]; keys and values are written to the cache."""
        heads, index = self._heads(layer, y, step.rope), self.cache_index[layer]
        cache, places = step.cache.kinds[self.cached_as], step.places[self.cached_as]
        if self.made:
            cache.write(index, places, heads[:, self.heads : self.rotated + self.groups])
        gates = self._parts(heads)[3]
        return _gated(self._attended(layer, heads[:, : self.heads], step), gates)

    def _attended(self, layer: int, queries: Tensor, step: DecodeStep) -> Tensor:
        """Return queries [M, heads, d] -> [M, heads * d]."""
        index, local, cached = self.index[layer], self.local[layer], self.cache_index[layer]
        scores = self._scores(index)
        if step.fused and self.head_dim <= WIDEST and not scores.invariant:
            from aligner.ops.kernels.cuda.decode import attend  # imports Triton

            window, cache = self.cfg.attention.window if local else 0, step.cache.kinds[self.cached_as]
            rows = step.positions, cache.table.pages, step.longest
            return attend(queries, *cache.kv[cached], *rows, scores, window, len(queries) // step.rows).flatten(1)
        keys, values = step.kept(cached, self.cached_as)
        seen = step.near if local and step.near is not None else step.mask
        return decode_attention(queries, keys, values, seen, self.kit.scratch, scores)

    def _scores(self, index: int) -> ScoreRule:
        return self.scores._replace(sinks=of(self.sinks, index))

    def _parts(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return [..., heads, d] -> queries, keys, values, gates."""
        q, k, v, gates = heads.tensor_split([self.heads, self.rotated, self.rotated + self.groups], dim=-2)
        return q, k, v, gates if self.traits.gated_attention else None

    def _heads(self, layer: int, y: Tensor, rope: tuple[Tensor, ...]) -> Tensor:
        """Return queries, keys, values and, in some families, gates [M, heads + 2 kv_heads (+ heads), d], in a
        buffer that the next layer uses again."""
        index = self.index[layer]
        heads = self.kit.product(self.qkv_name, index, y, of(self.qkv_bias, index)).view(len(y), -1, self.head_dim)
        if self.made == 1:
            heads = torch.cat([heads, heads[:, self.heads :]], 1)
        if self.traits.value_norm and self.made:
            values = heads[:, self.rotated : self.rotated + self.groups]
            values.copy_(F.rms_norm(values, (self.head_dim,), None, self.cfg.norm_eps))
        self._norm_and_rotate(layer, heads[:, : self.rotated], rope)
        return heads

    def _norm_and_rotate(self, layer: int, qk: Tensor, rope: tuple[Tensor, ...]) -> None:
        """Normalise and rotate the query and key heads [M, rotated, d] in place; the rotation is done in float32."""
        if self.cfg.invariant:
            return self._as_trained(layer, qk, rope[-1 if self.local[layer] else 0])
        y = qk if self.qk_norm is None else self._normed(self.qk_norm[self.index[layer]], qk)
        if self.turns[layer]:
            y = y.float()
            turned = y[..., : self.cfg.rotary_dim]
            turns = [(turned, rope[-1 if self.local[layer] else 0])]
            if self.scaled_queries:
                turns = [(turned[:, : self.heads], rope[1]), (turned[:, self.heads :], rope[0])]
            for heads, by in turns:
                rotate(heads, by, self.interleaves or self.traits.interleaved_rotary)
        if y.data_ptr() != qk.data_ptr():
            qk.copy_(y)

    def _as_trained(self, layer: int, qk: Tensor, rope: Tensor) -> None:
        """Normalise and rotate by the trainer's functions, in its dtype."""
        for kind, heads in enumerate(qk.split([self.heads, self.groups], 1)):
            y = heads.contiguous()
            if self.qk_norm is not None:
                y = elementwise.rms_norm(y, self.qk_norm[self.index[layer]][kind], self.cfg.norm_eps)
            if self.turns[layer]:
                cos, sin = (x.to(y.dtype).contiguous() for x in (rope.real, rope.imag))
                y = elementwise.rotate(y, cos, sin, self.traits.interleaved_rotary)
            heads.copy_(y)

    def _normed(self, weight: Tensor, qk: Tensor) -> Tensor:
        if self.traits.wide_qk_norm:
            return self._normed_wide(weight, qk)
        y, weight = qk, weight[self._head_kind[: qk.shape[1]]]
        if self.traits.offset_norms:
            y, weight = y.float(), 1 + weight.float()
        return F.rms_norm(y, (self.head_dim,), None, self.cfg.norm_eps) * weight

    def _normed_wide(self, weight: Tensor, qk: Tensor) -> Tensor:
        """Normalise queries, and keys, each over all heads of a token on all ranks."""
        y = qk.float()
        squares, parts = y.square().sum(-1), [self.heads, self.groups]
        sums = self.kit.peers.add(torch.stack([shard.sum(1) for shard in squares.split(parts, 1)], 1))
        factors = (sums / self._wide_sizes + self.cfg.norm_eps).rsqrt()[:, self._head_kind]  # [M, rotated]
        return (y * factors[..., None] * weight.view(-1, self.head_dim)).to(qk.dtype)


def _gated(out: Tensor, gates: Tensor | None) -> Tensor:
    """Return out [..., heads * d] times the sigmoid of gates [..., heads, d], if there are any."""
    return out if gates is None else out * gates.flatten(-2).sigmoid()
