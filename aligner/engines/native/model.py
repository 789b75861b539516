"""The decoder that only infers: fused weights, rotary embeddings as complex products, no autograd.

Inside each head the two halves that rotary embeddings pair are stored interleaved, (x_0, x_{d/2}, x_1, ...), so that
the rotation is one complex product in place. Queries and keys are permuted alike, which no dot product sees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.engines.native.attention import Behind, decode_attention, prefill_attention, rotate
from aligner.engines.native.cache import SlotCache
from aligner.engines.native.latent import LatentHeads
from aligner.engines.native.linear import LinearLayers, Memories
from aligner.engines.native.packs import Packs, matrices
from aligner.engines.native.peers import Peers
from aligner.engines.native.routes import Routes
from aligner.engines.native.scratch import Scratch, zeros
from aligner.families.table import family_table
from aligner.models.params import embedding_factor, expected_hf_shapes
from aligner.models.rope import attention_factor, inverse_frequencies
from aligner.models.shards import HfTensor, hf_tensors
from aligner.ops.kernels.experts import (
    add_bias,
    clamped_gate,
    combine,
    expand,
    grouped_linear,
    route,
    route_by_groups,
    sort_pairs,
)
from aligner.ops.kernels.packed_products import packed_linear
from aligner.ops.kernels.products import add_linear, linear, product_into, use_fast_products
from aligner.ops.kernels.scored_attention import Scores, scaled_logits
from aligner.ops.reduce import sum_halves

# before attention, before the MLP, behind either: a family has some of them
NORMS = BEFORE, BEFORE_MLP, BEHIND, BEHIND_MLP = (
    "input_layernorm",
    "pre_mlp_layernorm",
    "self_attention.post_layernorm",
    "mlp.post_layernorm",
)
Attend = Callable[[int, Tensor], Tensor]  # (layer, normalised hidden states [M, H]) -> [M, heads * d of values]


class NativeModel:
    def __init__(self, cfg: ModelConfig, device: torch.device, dtype: torch.dtype, peers: Peers | None = None):
        self.cfg, self.device, self.dtype, self.peers = cfg, device, dtype, peers or Peers(None)
        use_fast_products(device, dtype)
        share = self.peers.size  # of heads, FFN rows and vocabulary a rank has 1 / share
        self.heads, self.groups, self.head_dim = cfg.num_heads // share, cfg.num_kv_heads // share, cfg.kv_channels
        self.rotated = self.heads + self.groups  # query and key heads
        self.family, self.traits, attention = cfg.traits, cfg.traits, cfg.attention
        # halves are interleaved unless a part of a head alone is rotated, its neighbours together, or gates lie between
        own_order = self.family.interleaved_rotary or self.traits.gated_attention
        self.interleaves = cfg.rotary_dim == self.head_dim and not own_order
        self.turns = [layer not in attention.nope_layers for layer in range(cfg.num_layers)]
        self.local = [attention.is_local(layer) for layer in range(cfg.num_layers)]
        self.scores = Scores(attention.scale, attention.softcap)
        self.shapes = expected_hf_shapes(cfg)
        self.tensors = {tensor.name: tensor for tensor in hf_tensors(cfg)}
        self.intervals = {name: tensor.interval(share, self.peers.rank) for name, tensor in self.tensors.items()}
        layers, hidden, ffn = cfg.num_layers, cfg.hidden_size, cfg.ffn_hidden_size // share
        dense, sparse = cfg.layers_of("dense"), cfg.layers_of("sparse")
        self.sparse = set(sparse)
        self.place = {layer: i for kind in (dense, sparse) for i, layer in enumerate(kind)}  # among those of its kind
        attention = cfg.layers_of("attention")
        self.attends = {layer: i for i, layer in enumerate(attention)}
        # queries, keys, values and, in some families, gates of the queries' outputs
        self.gated, made = self.traits.gated_attention, self.rotated + self.groups
        width = 0 if cfg.latent.kv_rank else (made + (self.heads if self.gated else 0)) * self.head_dim

        def empty(*shape: int) -> Tensor:
            return zeros(*shape, dtype=dtype, device=device)

        packable = partial(matrices, dtype=dtype, device=device)
        low, high = self.interval(self.tensors["model.embed_tokens.weight"])
        self.first_token = low
        self.embedding = empty(high - low, hidden)
        self.head = self.embedding if cfg.tie_embeddings else empty(high - low, hidden)
        table = {spec.canonical for spec in family_table(cfg)}
        # of those that the family has: which row
        self.norm_rows = [name for name in NORMS if f"decoder.layers.0.{name}.weight" in table]
        self.norms = empty(layers, len(self.norm_rows), hidden)
        self.final_norm = empty(hidden)
        self.qkv = packable(len(attention), width, hidden)
        self.qkv_bias = empty(len(attention), width) if cfg.qkv_bias else None
        self.wide = self.traits.wide_qk_norm  # one norm over all query heads of a token, one over its key heads
        wide = empty(len(attention), self.rotated * self.head_dim) if self.wide else None
        self.qk_norm = wide if self.wide else empty(len(attention), 2, self.head_dim) if cfg.qk_norm else None
        self.latent = LatentHeads(cfg, self.heads, device, dtype) if cfg.latent.kv_rank else None
        # of each position: planes, heads, numbers of a head
        self.cached = (2, self.groups, self.head_dim) if self.latent is None else (1, 1, self.latent.width)
        self.linear = LinearLayers(cfg, share, self.peers.rank, device, dtype) if cfg.layers_of("linear") else None
        self.out = packable(len(attention), hidden, self.heads * cfg.value_channels)
        self.sinks = empty(len(attention), self.heads) if self.traits.sinks else None
        self.gate_up = packable(len(dense), 2 * ffn, hidden)
        self.down = packable(len(dense), hidden, ffn)
        self.out_bias = empty(len(attention), hidden) if cfg.output_bias else None
        self.gate_up_bias = empty(len(dense), 2 * ffn) if cfg.mlp_bias else None
        self.down_bias = empty(len(dense), hidden) if cfg.mlp_bias else None
        experts, ffn, biased = cfg.moe.num_experts, cfg.expert_ffn // share, self.traits.expert_bias
        self.router = empty(len(sparse), experts, hidden)
        self.router_bias = empty(len(sparse), experts) if biased else None
        self.expert_gate_up = empty(len(sparse), experts, 2 * ffn, hidden)
        self.expert_gate_up_bias = empty(len(sparse), experts, 2 * ffn) if biased else None
        self.expert_down = empty(len(sparse), experts, hidden, ffn)
        self.expert_down_bias = empty(len(sparse), experts, hidden) if biased else None
        self.score_bias = None  # float32, as the scores of the choice are
        if self.traits.sigmoid_router:
            self.score_bias = torch.zeros(len(sparse), experts, device=device)
        wide_ffn = cfg.moe.shared_ffn_hidden_size // share
        self.shared_gate_up = empty(len(sparse), 2 * wide_ffn, hidden) if wide_ffn else None
        self.shared_down = empty(len(sparse), hidden, wide_ffn) if wide_ffn else None
        self.shared_gate = empty(len(sparse), 1, hidden) if self.traits.shared_gate else None
        self._views = self._hf_views()
        assert self._views.keys() == self.shapes.keys(), self._views.keys() ^ self.shapes.keys()
        plain = {"qkv": self.qkv, "out": self.out, "gate_up": self.gate_up, "down": self.down, "head": [self.head]}
        self.packs = Packs(plain, self._views, ("head",) if cfg.tie_embeddings else ())
        self.scratch = Scratch(device, dtype)
        self._rope = torch.empty(0, device=device)
        self._embedding_factor = embedding_factor(cfg, dtype)
        wide_sizes = [heads * self.peers.size * self.head_dim for heads in (self.heads, self.groups)]
        self._wide_sizes = torch.tensor(wide_sizes, device=device)
        self._head_kind = torch.tensor([0] * self.heads + [1] * self.groups, device=device)

    @property
    def views(self) -> dict[str, Tensor]:
        """To read and to write weights, until rows are computed again."""
        self.packs.unpack()
        return self._views

    @property
    def weight_bytes(self) -> int:
        storages = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in self._views.values()}
        return self.packs.held_bytes + sum(storage.nbytes() for storage in storages.values())

    def _hf_views(self) -> dict[str, Tensor]:
        """Hugging Face name -> view into the fused buffers whose elements are in Hugging Face's order."""
        views = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        if not self.cfg.tie_embeddings:
            views["lm_head.weight"] = self.head
        parts = [n * self.head_dim for n in (self.heads, self.groups, self.groups)]
        for layer, i in self.attends.items():
            at = f"model.layers.{layer}."
            fused = {"weight": self.qkv, "bias": self.qkv_bias}
            if self.latent is not None:
                views |= self.latent.views(layer)
                fused = {}
            for kind, buffer in fused.items():
                if buffer is not None:
                    q, k, v = buffer[i][: sum(parts)].split(parts)
                    q = self._with_gates(buffer[i]) if self.gated else self._halves(q)
                    views[at + f"self_attn.q_proj.{kind}"] = q
                    views[at + f"self_attn.k_proj.{kind}"] = self._halves(k)
                    views[at + f"self_attn.v_proj.{kind}"] = v
            if self.qk_norm is not None:
                rows = self.qk_norm[i].split(parts[:2]) if self.wide else self.qk_norm[i]
                for x, row in zip("qk", rows, strict=True):
                    views[at + f"self_attn.{x}_norm.weight"] = self._halves(row)
            for kind, out in (("weight", self.out), ("bias", self.out_bias)):
                if out is not None:
                    views[at + f"self_attn.o_proj.{kind}"] = out[i]
            if self.sinks is not None:
                views[at + "self_attn.sinks"] = self.sinks[i]
        for layer in range(self.cfg.num_layers):
            at = f"model.layers.{layer}."
            dense = (("weight", self.gate_up, self.down), ("bias", self.gate_up_bias, self.down_bias))
            for kind, gate_up, down in () if layer in self.sparse else dense:
                if gate_up is not None:
                    gate, up = gate_up[self.place[layer]].chunk(2)
                    views[at + f"mlp.gate_proj.{kind}"], views[at + f"mlp.up_proj.{kind}"] = gate, up
                    views[at + f"mlp.down_proj.{kind}"] = down[self.place[layer]]
        linear = {} if self.linear is None else self.linear.views()
        return views | self._norm_views() | self._expert_views() | linear

    def _norm_views(self) -> dict[str, Tensor]:
        """Named by the family's table."""
        hf = {spec.canonical: spec.hf[0] for spec in family_table(self.cfg)}
        return {
            hf[f"decoder.layers.{layer}.{name}.weight"]: row
            for layer, rows in enumerate(self.norms)
            for name, row in zip(self.norm_rows, rows, strict=True)
        }

    def _expert_views(self) -> dict[str, Tensor]:
        """Named by the family's table, which has one row for all experts of a layer."""
        if not self.sparse:
            return {}
        halves = self.expert_gate_up.unflatten(2, (2, -1)).flatten(1, 2)  # gate and up of every expert
        parts = {"router.weight": self.router[:, None], "experts.gate_up": halves, "experts.down": self.expert_down}
        if self.traits.expert_bias:
            parts["router.bias"] = self.router_bias[:, None]
            parts["experts.linear_fc1.bias"] = self.expert_gate_up_bias.unflatten(2, (2, -1)).flatten(1, 2)
            parts["experts.linear_fc2.bias"] = self.expert_down_bias
        if self.score_bias is not None:
            parts["router.expert_bias"] = self.score_bias[:, None]
        if self.shared_gate_up is not None:
            parts["shared_experts.linear_fc1.weight"] = self.shared_gate_up.unflatten(1, (2, -1))
            parts["shared_experts.linear_fc2.weight"] = self.shared_down[:, None]
        if self.shared_gate is not None:
            parts["shared_experts.gate_weight"] = self.shared_gate[:, None]
        views = {}
        for spec in family_table(self.cfg):
            at, _, part = spec.canonical.partition(".mlp.")
            if part in parts:
                views |= zip(spec.hf, parts[part][self.place[int(at.rpartition(".")[2])]], strict=True)
        return views

    def _halves(self, t: Tensor) -> Tensor:
        """[heads * d, ...] as it is stored -> row-major in Hugging Face's order: the strided view [heads, 2, d/2, ...]
        where halves are interleaved."""
        if not self.interleaves:
            return t
        return t.unflatten(0, (-1, self.head_dim // 2, 2)).transpose(1, 2)

    def _with_gates(self, t: Tensor) -> Tensor:
        """[queries, keys, values, gates] -> [heads, 2, d, ...]: each head's queries, then its gates."""
        each = self.head_dim * t.stride(0)
        strides = each, (self.rotated + self.groups) * each, *t.stride()
        return t.as_strided((self.heads, 2, self.head_dim, *t.shape[1:]), strides, t.storage_offset())

    def load(self, name: str, tensor: Tensor) -> None:
        """A whole tensor, of which this rank keeps its share."""
        view, spec = self.views[name], self.tensors[name]
        low, high = self.interval(spec)
        tensor = tensor.narrow(spec.axis, low, high - low)
        view.copy_(tensor.detach().reshape(view.shape), non_blocking=True)

    def interval(self, tensor: HfTensor) -> tuple[int, int]:
        """The entries of `tensor.axis` that this rank holds."""
        return self.intervals[tensor.name]

    def part(self, tensor: HfTensor, start: int, stop: int, afresh: bool = False) -> Tensor:
        """A view of entries [start, stop), which this rank holds; elements in Hugging Face's order. With `afresh` it
        may have any content, and so may what lies beside it."""
        self.packs.open(tensor.name, afresh)
        view, (low, high) = self._views[tensor.name], self.interval(tensor)
        if tensor.axis:
            return view[..., start - low : stop - low]
        each = (high - low) // view.shape[0]  # more than one where heads are split into halves
        return view[(start - low) // each : (stop - low) // each]

    def checksums(self) -> dict[str, int]:
        """Of the whole tensors; every rank hashes its share, replicated ones are hashed by the first."""
        halves = torch.zeros(len(self.tensors), 2, dtype=torch.int64)
        for row, (name, tensor) in zip(halves, self.tensors.items(), strict=True):
            low, high = self.interval(tensor)
            if low < high and (tensor.sharded or self.peers.rank == 0):
                value = tensor.checksum(self.views[name], low, high)
                row += torch.tensor([value & 0xFFFFFFFF, value >> 32])
        return dict(zip(self.tensors, sum_halves(halves, self.peers.group), strict=True))

    def release(self) -> None:
        """Give back all memory; the model is of no use afterwards."""
        self.scratch.clear()
        self._views.clear()
        self.packs.clear()
        self.embedding = self.head = self.qkv = self.out = self.gate_up = self.down = self.router = self.final_norm
        self.expert_gate_up = self.expert_down = self.shared_gate_up = self.shared_down = self.final_norm
        self.latent = self.linear = self.expert_gate_up_bias = self.expert_down_bias = None

    # ---- forward

    def rotations(self, positions: Tensor, longest: int) -> Tensor:
        """complex64 [K, M, 1, rotary_dim / 2] for positions int64 [M] below `longest`: of all layers, or of global
        and of local ones."""
        self.extend_rotations(longest)
        return self._rope[:, positions, None]

    @property
    def rotations_at(self) -> int:
        """The address of their table."""
        return self._rope.data_ptr()

    def extend_rotations(self, longest: int) -> None:
        """Make the table of rotations long enough for positions below `longest`."""
        if self._rope.dim() == 1 or self._rope.shape[1] < longest:
            longest = max(longest, 2 * self._rope.shape[1] if self._rope.dim() > 1 else 0)
            kinds = (False, True) if self.cfg.attention.local_rope_base else (False,)
            frequencies = torch.stack([inverse_frequencies(self.cfg, local) for local in kinds])
            angles = torch.arange(longest).float()[:, None] * frequencies[:, None]
            scales = torch.tensor([attention_factor(self.cfg, local) for local in kinds])
            self._rope = torch.polar(scales[:, None, None].expand_as(angles), angles).to(self.device)

    def _near(self, query: Tensor, keys: int) -> Tensor | None:
        """bool [M, keys]: what queries at positions int64 [M] see in local layers; None: all up to their own."""
        window = self.cfg.attention.window
        if not window or keys <= window:
            return None
        key = torch.arange(keys, device=self.device)
        return (key <= query[:, None]) & (key > query[:, None] - window)

    def prefill(
        self,
        tokens: Tensor,
        staged: Tensor | None = None,
        routes: Tensor | None = None,
        memories: Memories | None = None,
        lengths: Tensor | None = None,
        held: Tensor | None = None,
    ) -> Tensor:
        """tokens int64 [P, T] right-padded -> normalised hidden states [P, T, hidden].

        Keys and values go to staged [layer, plane, P, kv_head, T, d] if given, each token's experts to routes [P, T,
        layer, top_k]; what linear layers remember behind the `lengths` int64 [P] of the rows to the staged `memories`.
        With `held` int64 [P] (not for linear layers) the tokens are those behind so many, which are staged already.
        """
        rows, length = tokens.shape
        positions, reach = torch.arange(length, device=self.device).repeat(rows), length
        behind = None
        if held is not None:
            reach = staged.shape[-2]
            positions += held.repeat_interleave(length)
            seen = torch.arange(reach, device=self.device) <= positions[:, None]
            which = torch.arange(rows, device=self.device).repeat_interleave(length)
            behind = Behind(which, positions, seen.view(rows, 1, length, reach))
        causal = None if behind is None else behind.seen
        near = self._near(positions[:length] if causal is None else positions, reach)
        near = near if causal is None or near is None else near.view_as(causal)
        rope = self.rotations(positions, reach)
        real = None if lengths is None else positions[:length] < lengths[:, None]

        def attend(layer: int, y: Tensor) -> Tensor:
            if layer not in self.attends:
                return self.linear.prefill(layer, y.view(rows, length, -1), real, memories)
            if self.latent is not None:
                kept = None if staged is None else staged[layer, 0, :, 0]
                return self.latent.prefill(layer, y, rope[0], rows, kept, behind)
            heads, place = self._heads(layer, y, rope).view(rows, length, -1, self.head_dim), self.attends[layer]
            q, k, v, gates = self._parts(heads)
            if behind is not None:
                for part, new in zip(staged[place], (k, v), strict=True):
                    part[behind.rows, :, behind.positions] = new.flatten(0, 1)
                k, v = staged[place].transpose(2, 3)
            elif staged is not None:
                staged[place, 0].copy_(k.transpose(1, 2))
                staged[place, 1].copy_(v.transpose(1, 2))
            seen = near if self.local[layer] and near is not None else causal
            out = prefill_attention(q, k, v, seen, self._scores(place))
            return _gated(out, gates).flatten(0, 1)

        flat = None if routes is None else routes.flatten(0, 1)
        return self._forward(tokens.reshape(-1), attend, flat).view(rows, length, -1)

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: SlotCache, longest: int, routes: Routes | None = None
    ) -> Tensor:
        """One token per slot [0, n): tokens, positions int64 [n], all positions < longest -> float32 logits [n, V]."""
        n = len(tokens)
        places = cache.places(positions)
        beyond = torch.arange(longest, device=self.device) > positions[:, None]
        mask = torch.zeros(n, longest, device=self.device).masked_fill_(beyond, float("-inf"))[:, None, None]
        near = self._near(positions, longest)
        if near is not None:
            near = torch.zeros(n, longest, device=self.device).masked_fill_(~near, float("-inf"))[:, None, None]

        rope = self.rotations(positions, longest)

        def attend(layer: int, y: Tensor) -> Tensor:
            if layer not in self.attends:
                return self.linear.decode(layer, y, cache.memories)
            if self.latent is not None:
                query, kept = self.latent.absorbed(layer, y, rope[0])
                cache.write(layer, places, kept[:, None])
                return self.latent.decode(layer, query, cache.kv[layer, 0, :n, 0, :longest], mask[:, 0])
            heads, place = self._heads(layer, y, rope), self.attends[layer]
            cache.write(place, places, heads[:, self.heads : self.rotated + self.groups])
            keys, values = cache.kv[place, :, :n, :, :longest]
            seen = mask if near is None or not self.local[layer] else near
            out = decode_attention(heads[:, : self.heads], keys, values, seen, self.scratch, self._scores(place))
            return _gated(out, self._parts(heads)[3])

        routing = None if routes is None else routes.empty(n)
        hidden = self._forward(tokens, attend, routing)
        if routes is not None:
            routes.write(positions, routing)
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [..., V] on every rank."""
        logits = scaled_logits(linear(hidden, self.packs["head", 0]), self.cfg.scales)
        return self.peers.join(logits, self.cfg.vocab_size).float()

    def _embed(self, tokens: Tensor) -> Tensor:
        if self.peers.size == 1:
            return self.embedding[tokens]
        local = tokens - self.first_token
        mine = (local >= 0) & (local < len(self.embedding))
        rows = self.embedding[local.where(mine, 0)] if len(self.embedding) else self.embedding.new_zeros(1, 1)
        return self.peers.add(rows.expand(len(tokens), self.cfg.hidden_size) * mine[:, None])

    def _heads(self, layer: int, y: Tensor, rope: Tensor) -> Tensor:
        """Queries, keys, values and, in some families, gates [M, heads + 2 kv_heads (+ heads), d], in a buffer that the
        next layer uses again."""
        place = self.attends[layer]
        heads = self._product("qkv", place, y, _of(self.qkv_bias, place)).view(len(y), -1, self.head_dim)
        self._norm_and_rotate(layer, heads[:, : self.rotated], rope[-1 if self.local[layer] else 0])
        return heads

    def _scores(self, place: int) -> Scores:
        return self.scores._replace(sinks=_of(self.sinks, place))

    def _parts(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """[..., heads, d] -> queries, keys, values, gates."""
        q, k, v, gates = heads.tensor_split([self.heads, self.rotated, self.rotated + self.groups], dim=-2)
        return q, k, v, gates if self.gated else None

    def _forward(self, tokens: Tensor, attend: Attend, routes: Tensor | None = None) -> Tensor:
        """tokens int64 [M] -> [M, hidden] after the final norm; their experts to routes [M, layer, top_k] if given.
        Large intermediates live in scratch buffers."""
        x = self._embed(tokens)
        if self._embedding_factor != 1:
            x *= self._embedding_factor
        for layer in range(self.cfg.num_layers):
            y = self._normed(x, layer, BEFORE)
            if layer in self.attends:
                out, bias = self.packs["out", self.attends[layer]], _of(self.out_bias, self.attends[layer])
            else:
                out, bias = self.linear.out_of(layer), None
            x = self._add(x, attend(layer, y), out, bias, layer, BEHIND)
            y = self._normed(x, layer, BEFORE_MLP)
            place = self.place[layer]
            if layer in self.sparse:
                x += self.peers.add(self._mix(place, y, routes))
                continue
            gate, up = self._product("gate_up", place, y, _of(self.gate_up_bias, place)).chunk(2, dim=1)
            y = self._gate(gate).mul_(up)
            x = self._add(x, y, self.packs["down", place], _of(self.down_bias, place), layer, BEHIND_MLP)
        return self._norm(x, self.final_norm)

    def _product(self, name: str, place: int, y: Tensor, bias: Tensor | None) -> Tensor:
        """y W^T + bias, perhaps in a buffer that the next layer uses again."""
        weight = self.packs[name, place]
        if weight.is_mkldnn:
            return packed_linear(y, weight, bias)
        return product_into(self.scratch.take(name, len(y), len(weight)), y, weight.t(), bias)

    def _normed(self, x: Tensor, layer: int, name: str) -> Tensor:
        """As it is in families without this norm."""
        return self._norm(x, self.norms[layer, self.norm_rows.index(name)]) if name in self.norm_rows else x

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        size, eps = weight.shape, self.cfg.norm_eps
        if self.family.offset_norms:
            return F.rms_norm(x.float(), size, 1 + weight.float(), eps).to(x.dtype)
        return F.rms_norm(x, size, weight, eps)

    def _add(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, layer: int, norm: str) -> Tensor:
        """x [M, hidden] + y weight^T + bias, of all ranks' shares of y and weight; in some families normalised first,
        or times a factor. Perhaps in place of x."""
        scale = self.cfg.scales.residual
        if self.peers.size == 1 and not self.family.post_norms and scale == 1:
            x = add_linear(x, y, weight)
            return x if bias is None else x.add_(bias)
        out = self.peers.add(linear(y, weight))
        if bias is not None:
            out += bias
        out = self._normed(out, layer, norm)
        return x.add_(out if scale == 1 else out * scale)

    def _gate(self, x: Tensor) -> Tensor:
        return F.silu(x, inplace=True) if self.family.activation == "silu" else F.gelu(x, approximate="tanh")

    def _mix(self, place: int, y: Tensor, routes: Tensor | None) -> Tensor:
        """y [M, hidden] -> what each row's experts make of it, of layer `place` with experts; all rows of an expert in
        one product."""
        moe = self.cfg.moe
        if self.score_bias is None:
            routing = route(y, self.router[place], moe.top_k, moe.norm_topk_prob, _of(self.router_bias, place))
        else:
            routing = route_by_groups(y, self.router[place], self.score_bias[place], moe)
        if routes is not None:
            routes[:, place] = routing.experts
        pairs = sort_pairs(routing.experts, moe.num_experts)
        mixed = grouped_linear(expand(y, pairs), self.expert_gate_up[place], pairs.counts)
        if self.expert_gate_up_bias is not None:
            mixed = add_bias(mixed, self.expert_gate_up_bias[place], pairs.counts)
        if self.family.clamped_gate:
            mixed = clamped_gate(mixed)
        else:
            gate, up = mixed.chunk(2, dim=1)
            mixed = F.silu(gate, inplace=True).mul_(up)
        out = grouped_linear(mixed, self.expert_down[place], pairs.counts)
        if self.expert_down_bias is not None and self.peers.rank == 0:  # of all ranks' sum
            out = add_bias(out, self.expert_down_bias[place], pairs.counts)
        out = combine(out, pairs, routing.weights)
        if self.shared_gate_up is None:
            return out
        gate, up = F.linear(y, self.shared_gate_up[place]).chunk(2, dim=1)
        hidden = F.silu(gate).mul_(up)
        if self.shared_gate is not None:
            hidden *= F.linear(y, self.shared_gate[place]).sigmoid()
        return out.addmm_(hidden, self.shared_down[place].t())

    def _norm_and_rotate(self, layer: int, qk: Tensor, rope: Tensor) -> None:
        """In place on the query and key heads [M, rotated, d]; the rotation is done in float32."""
        y = self._norm_heads(layer, qk) if self.qk_norm is not None else qk
        if self.turns[layer]:
            y = y.float()
            part = y[..., : self.cfg.rotary_dim]
            rotate(part, rope, self.interleaves or self.family.interleaved_rotary)
        if y.data_ptr() != qk.data_ptr():
            qk.copy_(y)

    def _norm_heads(self, layer: int, qk: Tensor) -> Tensor:
        if self.wide:
            return self._norm_wide(layer, qk)
        y, weight = qk, self.qk_norm[self.attends[layer]][self._head_kind]
        if self.family.offset_norms:
            y, weight = y.float(), 1 + weight.float()
        return F.rms_norm(y, (self.head_dim,), None, self.cfg.norm_eps) * weight

    def _norm_wide(self, layer: int, qk: Tensor) -> Tensor:
        """Queries, and keys, each over all heads of a token, on whatever ranks they are."""
        y = qk.float()
        squares, parts = y.square().sum(-1), [self.heads, self.groups]
        sums = self.peers.add(torch.stack([part.sum(1) for part in squares.split(parts, 1)], 1))
        factors = (sums / self._wide_sizes + self.cfg.norm_eps).rsqrt()[:, self._head_kind]  # [M, rotated]
        return (y * factors[..., None] * self.qk_norm[self.attends[layer]].view(-1, self.head_dim)).to(qk.dtype)


def _gated(out: Tensor, gates: Tensor | None) -> Tensor:
    """out [..., heads * d], gates [..., heads, d]."""
    return out if gates is None else out * gates.flatten(-2).sigmoid()


def _of(biases: Tensor | None, layer: int) -> Tensor | None:
    return None if biases is None else biases[layer]
