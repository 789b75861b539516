"""Multi-head latent attention of the native engine (DeepSeek-V2, arXiv:2405.04434, section 2.1).

The cache keeps two things of a position: the normalised latent vector c, from which all heads' plain keys and values
are computed, and the rotated key that the heads share. These are kv_rank + rotary_dim numbers, the same on every rank
of an engine. Prompts compute keys and values from them.

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
from aligner.models.rope import LATENT_EPS, score_scale
from aligner.ops.kernels.scored_attention import ScoreRule


class LatentHeads:
    """This rank's heads of latent attention in all layers: their weights and computation."""

    def __init__(self, kit: BlockContext):
        cfg, heads = kit.cfg, kit.cfg.num_heads // kit.peers.size
        self.kit, self.shape, self.heads = kit, cfg.latent, heads
        self.scale = score_scale(cfg) or cfg.kv_channels**-0.5
        layers, hidden, latent = cfg.num_layers, cfg.hidden_size, cfg.latent

        def empty(*shape: int) -> Tensor:
            return torch.zeros(layers, *shape, device=kit.device, dtype=kit.dtype)

        rank = latent.query_rank
        self.query_down, self.query_norm = (empty(rank, hidden), empty(rank)) if rank else (None, None)
        self.query_up = empty(heads * latent.head_dim, rank or hidden)
        self.down, self.norm = empty(self.width, hidden), empty(latent.kv_rank)
        self.up = empty(heads * (latent.plain_dim + latent.value_dim), latent.kv_rank)
        self.out = kit.matrices(layers, hidden, heads * cfg.value_channels)

    @property
    def width(self) -> int:
        """The numbers that are kept of a position."""
        return self.shape.kv_rank + self.shape.rotary_dim

    @property
    def cached(self) -> tuple[int, int, int, int]:
        """The cache's layers, heads, numbers of a head, and planes."""
        return len(self.out), 1, self.width, 1

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
        return {f"model.layers.{layer}.self_attn.{name}.weight": buffer[layer] for name, buffer in named.items()}

    def prefill(self, layer: int, y: Tensor, prompts: PrefillInputs) -> Tensor:
        """Return y [P * T, hidden] -> [P * T, heads * value_dim]; kept numbers are written to the staged ones, if
        there are any."""
        rope, rows, behind = prompts.rope[0], prompts.rows, prompts.behind
        staged = None if prompts.staged is None else prompts.staged[0][layer, 0, :, 0]  # [P, T, width]
        latent, (plain, rotated) = self.shape, self._queries(layer, y, rope)
        kept = self._kept(layer, y, rope)
        if behind is not None:
            staged[behind.rows, behind.positions] = kept
            kept = staged.flatten(0, 1)
        elif staged is not None:
            staged.copy_(kept.view(rows, -1, self.width))
        c, shared = kept.split([latent.kv_rank, latent.rotary_dim], 1)
        both = F.linear(c, self.up[layer]).view(len(kept), self.heads, -1)
        key, value = both.split([latent.plain_dim, latent.value_dim], 2)
        key = torch.cat([key, shared[:, None].expand(-1, self.heads, -1)], 2)
        q, k, v = (x.unflatten(0, (rows, -1)) for x in (torch.cat([plain, rotated], 2), key, value))
        seen = None if behind is None else behind.seen
        return prefill_attention(q, k, v, seen, ScoreRule(self.scale)).flatten(0, 1)

    def decode(self, layer: int, y: Tensor, step: DecodeStep) -> Tensor:
        """Return y [n, hidden] -> [n, heads * value_dim]; kept numbers are written to the cache."""
        query, kept = self._absorbed(layer, y, step.rope[0])
        step.cache.write(layer, step.places[0], kept[:, None])
        seen = step.cache.kv[layer, 0, : len(y), 0, : step.longest]
        return self._attended(layer, query, seen, step.mask[:, 0])

    def _absorbed(self, layer: int, y: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return y [n, hidden] -> queries of kept numbers [n, heads, width], and the numbers to keep [n, width]."""
        plain, rotated = self._queries(layer, y, rope)
        keys, _ = self._ups(layer)
        query = torch.bmm(plain.transpose(0, 1), keys).transpose(0, 1)
        return torch.cat([query, rotated], 2), self._kept(layer, y, rope)

    def _attended(self, layer: int, query: Tensor, kept: Tensor, mask: Tensor) -> Tensor:
        """Return query [n, heads, width], kept [n, T, width], mask float32 [n, 1, T] (0 or -inf) -> [n, heads *
        value_dim]."""
        scores = torch.add(mask, torch.matmul(query, kept.transpose(1, 2)).float(), alpha=self.scale)
        mixed = torch.matmul(scores.softmax(-1).to(kept.dtype), kept[..., : self.shape.kv_rank])
        _, values = self._ups(layer)
        return torch.bmm(mixed.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _ups(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return K [heads, plain_dim, kv_rank] and V [heads, value_dim, kv_rank]."""
        both = self.up[layer].unflatten(0, (self.heads, -1))
        return both.split([self.shape.plain_dim, self.shape.value_dim], 1)

    def _queries(self, layer: int, y: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return [M, heads, plain_dim] and, rotated, [M, heads, rotary_dim]."""
        if self.query_down is not None:
            y = F.linear(y, self.query_down[layer])
            y = F.rms_norm(y, y.shape[1:], self.query_norm[layer], LATENT_EPS)
        heads = F.linear(y, self.query_up[layer]).view(len(y), self.heads, -1)
        plain, rotated = heads.split([self.shape.plain_dim, self.shape.rotary_dim], 2)
        return plain, self._rotated(rotated, rope)

    def _kept(self, layer: int, y: Tensor, rope: Tensor) -> Tensor:
        c, shared = F.linear(y, self.down[layer]).split([self.shape.kv_rank, self.shape.rotary_dim], 1)
        c = F.rms_norm(c, c.shape[1:], self.norm[layer], LATENT_EPS)
        return torch.cat([c, self._rotated(shared[:, None], rope)[:, 0]], 1)

    def _rotated(self, x: Tensor, rope: Tensor) -> Tensor:
        """Return x rotated in float32, in its own dtype."""
        turned = x.float() if x.dtype != torch.float32 else x.clone()
        rotate(turned, rope, self.shape.neighbours)
        return turned.to(x.dtype)
