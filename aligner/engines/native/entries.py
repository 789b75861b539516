"""Attention to a window and to entries of several tokens in the native engine (DeepSeek-V4, section 2.3).

Of a position the cache keeps the vector that all heads share as key and value, and beside it the entry whose last
token stands there, with what the indexer compares of it. The entries of a row so are every m-th position. Of the tokens
that will make the next entry, a row's memory has the vectors and gates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.engines.native.attention import prefill_attention
from aligner.engines.native.block_inputs import BlockContext, DecodeStep, PrefillInputs, Product
from aligner.engines.native.latent import turned
from aligner.families.table import family_table
from aligner.models.params import dtype_of
from aligner.models.rope import attention_factor, inverse_frequencies
from aligner.ops.kernels.entries import entries_seen, pooled, tokens_seen
from aligner.ops.kernels.indexed_attention import Index, chosen
from aligner.ops.kernels.scored_attention import ScoreRule


class EntryHeads:
    """This rank's heads in all layers, with what makes entries: weights and computation."""

    def __init__(self, kit: BlockContext):
        cfg, share = kit.cfg, kit.peers.size
        self.kit, self.width, self.index_width = kit, cfg.kv_channels, cfg.indexer.head_dim
        self.groups, self.rotary = cfg.latent.output_groups // share, cfg.rotary_dim
        self.tokens = [cfg.entry_tokens(layer) for layer in range(cfg.num_layers)]
        self.kinds = [cfg.entries_of(layer) for layer in range(cfg.num_layers)]
        ranks = self.groups * cfg.latent.output_rank
        self.out = kit.matrices(cfg.num_layers, cfg.hidden_size, ranks)
        self.weights: list[dict[str, Tensor]] = [{} for _ in self.tokens]
        self._views: dict[str, Tensor] = {}
        for spec in family_table(cfg):
            at, _, name = spec.canonical.partition(".self_attention.")
            if not name:
                continue
            layer, shape = int(at.rpartition(".")[2]), list(spec.shape)
            if spec.tp_axis is not None:
                shape[spec.tp_axis] //= share
            out = name == "linear_proj.weight"
            own = self.out[layer] if out else kit.empty(*shape, dtype=dtype_of(spec, kit.dtype))
            self.weights[layer][name] = self._views[spec.hf[0]] = own
        self._frequencies = inverse_frequencies(cfg).to(kit.device)
        self._factor = torch.tensor(attention_factor(cfg), device=kit.device)
        # of layers with each kind of entries, the number of a layer's memory
        self._rings = {k: [n for n, kinds in enumerate(self.kinds) if k in kinds] for k in ("indexer", "heavy")}

    @property
    def cached(self) -> tuple[int, int, int, int]:
        """The cache's layers, heads, numbers of a head, and planes."""
        return len(self.out), 1, 2 * self.width + self.index_width, 1

    def states(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a row's memory: layers, the last tokens that may be of entries to come, and their
        vectors and gates."""
        entries = self.kit.cfg.entries
        widths = {"indexer": 4 * (self.width + self.index_width), "heavy": 2 * self.width}
        tokens = {"indexer": 2 * entries.tokens, "heavy": entries.heavy_tokens}
        return {kind: (len(layers), tokens[kind], widths[kind]) for kind, layers in self._rings.items() if layers}

    def matrices(self) -> Mapping[str, Sequence[Tensor]]:
        return {"out": self.out}

    def out_of(self, layer: int) -> Product:
        return self.kit.packs["out", layer], None

    def views(self) -> dict[str, Tensor]:
        return self._views

    def prefill(self, layer: int, y: Tensor, prompts: PrefillInputs) -> Tensor:
        """Return y [P * T, hidden] -> [P * T, groups * output_rank]; kept numbers are written to the staged ones, and
        memories, if there are any."""
        assert prompts.behind is None, "rows with memories are computed whole"
        rows, length, m = prompts.rows, prompts.length, self.tokens[layer]
        rope = prompts.rope[not m]
        vector, query, kv = self._made(layer, y, rope)
        kv, query = kv.view(rows, length, -1), query.unflatten(0, (rows, length))
        positions = torch.arange(length, device=y.device)[None]
        seen, keys = tokens_seen(positions, length, self.kit.cfg.attention.window), kv
        if m:
            features = self._features(layer, y).unflatten(0, (rows, length))
            entries = self._entries(layer, features, torch.arange(length // m, device=y.device) * m)
            visible = entries_seen(positions, length // m, m)
            if "indexer" in self.kinds[layer]:
                asked = (x.unflatten(0, (rows, length)) for x in self._asked(layer, y, vector, rope))
                visible = chosen(Index(*asked, entries[..., self.width :], self.kit.cfg.indexer.top_k), visible)
            seen = torch.cat([seen.expand(len(visible), -1, -1), visible], 2)
            keys = torch.cat([kv, entries[..., : self.width]], 1)
            self._remember(layer, features, prompts)
        if prompts.staged is not None:
            staged = prompts.staged[0][layer, 0, :, 0].zero_()
            staged[..., : self.width].copy_(kv)
            if m:
                staged[:, m - 1 :: m, self.width : self.width + entries.shape[2]].copy_(entries)
        scores = ScoreRule(sinks=self.weights[layer]["sinks.weight"])
        out = prefill_attention(query, keys[:, :, None], keys[:, :, None], seen[:, None], scores)
        return self._output(layer, out.flatten(0, 1), rope)

    def decode(self, layer: int, y: Tensor, step: DecodeStep) -> Tensor:
        """Return y [n, hidden] -> [n, groups * output_rank]; kept numbers are written to the cache, and memories
        change."""
        n, m, width = len(y), self.tokens[layer], self.width
        rope = step.rope[not m]
        vector, query, kv = self._made(layer, y, rope)
        kept = torch.zeros(n, 2 * width + self.index_width, dtype=kv.dtype, device=kv.device)
        kept[:, :width] = kv
        if m:
            self._close(layer, self._features(layer, y), step, kept)
        step.cache.write(layer, step.places[0], kept[:, None])
        seen = step.kept(layer)[0, :, 0]
        parts = [(seen[..., :width], tokens_seen(step.positions, step.longest, self.kit.cfg.attention.window))]
        if m:
            entries = seen[:, m - 1 :: m]
            visible = entries_seen(step.positions, entries.shape[1], m)
            if "indexer" in self.kinds[layer]:
                asked = (x[:, None] for x in self._asked(layer, y, vector, rope))
                index = Index(*asked, entries[..., 2 * width :], self.kit.cfg.indexer.top_k)
                visible = chosen(index, visible[:, None])[:, 0]
            parts.append((entries[..., width : 2 * width], visible))
        return self._output(layer, self._attended(layer, query, parts), rope)

    def _attended(self, layer: int, query: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return [n, heads * d] of query [n, heads, d] and, of each kind of keys, them [n, T, d] and which are seen."""
        products = (torch.matmul(query, keys.transpose(1, 2)).float() * self.width**-0.5 for keys, _ in parts)
        scores = [x.masked_fill_(~seen[:, None], -torch.inf) for x, (_, seen) in zip(products, parts, strict=True)]
        sinks = self.weights[layer]["sinks.weight"].float()[:, None].expand(*query.shape[:2], 1)
        weights = torch.cat([*scores, sinks], 2).softmax(2).to(query.dtype)
        shares = weights[..., :-1].split([keys.shape[1] for keys, _ in parts], 2)
        outs = (torch.matmul(share, keys) for share, (keys, _) in zip(shares, parts, strict=True))
        return sum(outs).flatten(1)

    def _made(self, layer: int, y: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what queries are made of, [M, query_rank], queries [M, heads, d], and keys [M, d]."""
        own, norm = self.weights[layer], self.kit.norm
        vector = norm(F.linear(y, own["linear_q_down_proj.weight"]), own["q_layernorm.weight"])
        query = F.linear(vector, own["linear_q_up_proj.weight"]).view(len(y), -1, self.width)
        query = norm(query, query.new_ones(self.width))
        key = norm(F.linear(y, own["linear_kv_proj.weight"]), own["kv_norm.weight"])[:, None]
        return vector, self._turned(query, rope), self._turned(key, rope)[:, 0]

    def _turned(self, x: Tensor, rope: Tensor) -> Tensor:
        plain, last = x.split([x.shape[2] - self.rotary, self.rotary], 2)
        return torch.cat([plain, turned(last, rope, True)], 2)

    def _output(self, layer: int, out: Tensor, rope: Tensor) -> Tensor:
        out = self._turned(out.unflatten(1, (-1, self.width)), rope.conj().resolve_conj())
        down = self.weights[layer]["linear_o_down_proj.weight"].unflatten(0, (self.groups, -1))
        out = out.unflatten(1, (self.groups, -1)).flatten(2).transpose(0, 1)
        return torch.bmm(out, down.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _asked(self, layer: int, y: Tensor, vector: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return index queries [M, heads, head_dim] and their weights, float32 [M, heads]."""
        own, shape = self.weights[layer], self.kit.cfg.indexer
        query = F.linear(vector, own["indexer.linear_wq_b.weight"]).view(len(y), shape.heads, shape.head_dim)
        weight = F.linear(y, own["indexer.linear_weights_proj.weight"]) * (shape.heads * shape.head_dim) ** -0.5
        return self._turned(query, rope), weight.float()

    def _compressors(self, layer: int) -> list[tuple[str, int]]:
        """Return (beginning of its weights' names, width of an entry) of what a layer has."""
        both = [("", self.width), ("indexer.", self.index_width)]
        return both[:1] if "heavy" in self.kinds[layer] else both

    def _features(self, layer: int, y: Tensor) -> Tensor:
        """Return vectors and gates of tokens, of attention and of the indexer, [M, ...]."""
        own = self.weights[layer]
        names = [f"{at}compressor.linear_{x}.weight" for at, _ in self._compressors(layer) for x in ("kv", "gate")]
        return torch.cat([F.linear(y, own[name]) for name in names], 1)

    def _entries(self, layer: int, features: Tensor, positions: Tensor, fresh: Tensor | None = None) -> Tensor:
        """Return entries [B, n, d + index width] of the features of rows [B, T, ...]. They begin at `positions`, [n] or
        [B, n]. `fresh` bool [B]: there are no tokens before the last entry."""
        own, made, twice = self.weights[layer], [], "indexer" in self.kinds[layer]
        compressors = self._compressors(layer)
        sizes = [2 * width * (1 + twice) for _, width in compressors]
        angles = positions.expand(len(features), -1).reshape(-1, 1, 1).float() * self._frequencies
        rope = torch.polar(self._factor.expand_as(angles), angles)
        for (at, _), numbers in zip(compressors, features.split(sizes, 2), strict=True):
            kv, gate = numbers.chunk(2, 2)
            if fresh is not None:
                before = torch.arange(gate.shape[1], device=gate.device) < self.tokens[layer]
                gate = gate.masked_fill((fresh[:, None] & before)[..., None], -torch.inf)
            out = pooled(kv, gate, own[f"{at}compressor.position_bias"], twice)
            out = self.kit.norm(out, own[f"{at}compressor.norm.weight"])
            made.append(self._turned(out.reshape(-1, 1, out.shape[2]), rope).view_as(out))
        return torch.cat(made, 2)

    def _ring(self, layer: int) -> tuple[int, int, int]:
        """Return where a layer's memory is, and of how many tokens: number of the kind, layer among those of the kind,
        tokens."""
        kind = self.kinds[layer][1]
        return [*self.states()].index(kind), self._rings[kind].index(layer), self.states()[kind][1]

    def _remember(self, layer: int, features: Tensor, prompts: PrefillInputs) -> None:
        """Write the features [P, T, ...] of each prompt's last tokens to its memory: of the token at position p to p
        modulo its size."""
        if prompts.memories is None:
            return
        kind, index, size = self._ring(layer)
        last = prompts.real.sum(1, keepdim=True) - 1
        at = (last - (last - torch.arange(size, device=last.device)) % size).clamp_min(0)
        prompts.memories.staged[kind][index].copy_(features.gather(1, at[..., None].expand(-1, -1, features.shape[2])))

    def _close(self, layer: int, features: Tensor, step: DecodeStep, kept: Tensor) -> None:
        """Write the features [n, ...] of new tokens to the memories, and entries that they complete to `kept`."""
        m, (kind, index, size), n = self.tokens[layer], self._ring(layer), len(features)
        ring = step.cache.memories.slots[kind][index, :n]
        ring[torch.arange(n, device=ring.device), step.positions % size] = features.float()
        rows = step.closing(m)
        if len(rows):
            end = step.positions[rows, None] + 1
            order = (end + torch.arange(size, device=ring.device)) % size  # the oldest first
            count = size // m
            begins = end - m * torch.arange(count, 0, -1, device=ring.device)
            own = ring[rows[:, None], order].to(features.dtype)
            entries = self._entries(layer, own, begins, end[:, 0] < size)[:, -1]
            kept[rows, self.width : self.width + entries.shape[1]] = entries
