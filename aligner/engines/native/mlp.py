"""The layers behind attention: one MLP for all tokens, or experts of which a router chooses some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.engines.native.block_inputs import BlockContext, Product, of
from aligner.families.family import Family
from aligner.families.rows import BRANCH_NORMS
from aligner.families.table import family_table
from aligner.models.shards import own_experts
from aligner.models.slices import Shard, of_experts
from aligner.ops.kernels.elementwise import swiglu
from aligner.ops.kernels.experts import (
    add_bias,
    clamped_gate,
    combine,
    combine_own,
    expand,
    grouped_linear,
    root_softplus,
    route,
    route_by_groups,
    sort_own_pairs,
)


class DenseMlp:
    """This rank's share of the rows of these layers, which have an MLP for every token, all of one width. `name`: of
    their matrices."""

    def __init__(self, kit: BlockContext, layers: Sequence[int], name: str = ""):
        cfg = kit.cfg.of_kinds(kit.cfg.layer_kinds(layers[0]))
        self.kit, ffn, self.names = kit, cfg.ffn_hidden_size // kit.peers.size, (f"gate_up{name}", f"down{name}")
        self.index, count = {layer: i for i, layer in enumerate(layers)}, len(layers)
        self.gate_up = kit.matrices(count, cfg.mlp_parts * ffn, cfg.hidden_size)
        self.down = kit.matrices(count, cfg.hidden_size, ffn)
        self.gate_up_bias = kit.empty(count, 2 * ffn) if cfg.mlp_bias else None
        self.down_bias = kit.empty(count, cfg.hidden_size) if cfg.mlp_bias else None

    def matrices(self) -> Mapping[str, Sequence[Tensor]]:
        return dict(zip(self.names, (self.gate_up, self.down), strict=True))

    def out_of(self, layer: int) -> Product:
        index = self.index[layer]
        return self.kit.packs[self.names[1], index], of(self.down_bias, index)

    def views(self) -> dict[str, Tensor]:
        views, traits = {}, self.kit.cfg.traits
        for kind, gate_up, down in (
            ("weight", self.gate_up, self.down),
            ("bias", self.gate_up_bias, self.down_bias),
        ):
            for layer, i in self.index.items() if gate_up is not None else ():
                at, parts = traits.beside("mlp.linear_fc2.weight", layer), gate_up[i].chunk(self.kit.cfg.mlp_parts)
                names = ("gate_proj", "up_proj")[-len(parts) :]
                views |= {f"{at}{name}.{kind}": matrix for name, matrix in zip(names, parts, strict=True)}
                views[f"{at}down_proj.{kind}"] = down[i]
        return views

    def __call__(self, layer: int, y: Tensor) -> Tensor:
        """Return y [M, hidden] -> [M, ffn], the input of the last product."""
        index = self.index[layer]
        mixed = self.kit.product(self.names[0], index, y, of(self.gate_up_bias, index))
        return swiglu(mixed, by_rows=True) if self.kit.cfg.invariant else between(mixed, self.kit.cfg.traits)


class ExpertMlp:
    """This rank's experts, each of them whole, its share of the rows of the MLP for every token, and the router, of all
    layers with experts."""

    def __init__(self, kit: BlockContext):
        cfg, share = kit.cfg, kit.peers.size
        self.kit, self.traits, layers = kit, cfg.traits, cfg.layers_of("sparse")
        self.index, count, hidden = {layer: i for i, layer in enumerate(layers)}, len(layers), cfg.hidden_size
        experts, ffn, biased = cfg.moe.num_experts, cfg.expert_ffn, cfg.traits.expert_bias
        self.own = own_experts(experts, share, kit.peers.rank)
        own = len(self.own)
        self.router = kit.empty(count, experts, hidden)
        self.router_bias = kit.empty(count, experts) if biased else None
        width, latent = cfg.expert_hidden, cfg.moe.latent_size
        self.into = kit.empty(count, latent, hidden) if latent else None
        self.onto = kit.empty(count, hidden, latent) if latent else None
        made = [self._made(kit, cfg.mlp_parts, ffn, width) for _ in layers]
        self.gate_up, self._halves, self.down, self._downs = zip(*made, strict=True)
        self.gate_up_bias = kit.empty(count, own, 2 * ffn) if biased else None
        self.down_bias = kit.empty(count, own, hidden) if biased else None
        self.limit, table = cfg.moe.gate_limit or None, (cfg.moe.hash_layers, cfg.vocab_size, cfg.moe.top_k)
        self.table = kit.empty(*table, dtype=torch.int64) if cfg.moe.hash_layers else None
        # float32, as the scores of the choice are
        self.score_bias = kit.empty(count, experts, dtype=torch.float32) if cfg.traits.sigmoid_router else None
        wide = cfg.moe.shared_ffn_hidden_size // share
        self.shared_gate_up = kit.empty(count, cfg.mlp_parts * wide, hidden) if wide else None
        self.shared_down = kit.empty(count, hidden, wide) if wide else None
        self.shared_gate = kit.empty(count, 1, hidden) if cfg.traits.shared_gate else None
        self.scale = kit.empty(count, experts) if cfg.traits.branch_norms else None
        self.norms = {name: kit.empty(count, hidden) for name in BRANCH_NORMS if cfg.traits.branch_norms}

    def _made(self, kit: BlockContext, parts: int, ffn: int, width: int) -> tuple[Tensor, list[Tensor], Tensor, list]:
        """Return a layer's matrices, each with its views: gate and up of every expert. Before the first update they
        need memory only while views are made: they are most of a model."""
        experts = len(self.own)
        gate_up, down = kit.empty(experts, parts * ffn, width), kit.empty(experts, width, ffn)
        made = gate_up, [*gate_up.view(experts * parts, ffn, width)], down, [*down]
        for buffer in (gate_up, down):
            buffer.untyped_storage().resize_(0)
        return made

    def matrices(self) -> Mapping[str, Sequence[Tensor]]:
        return {}

    def views(self) -> dict[str, Tensor]:
        """Return the views, named by the family's table, which has one row for all experts of a layer."""
        parts = {"router.weight": self.router[:, None], "experts.gate_up": self._halves, "experts.down": self._downs}
        if self.traits.expert_bias:
            parts["router.bias"] = self.router_bias[:, None]
            parts["experts.linear_fc1.bias"] = self.gate_up_bias.unflatten(2, (2, -1)).flatten(1, 2)
            parts["experts.linear_fc2.bias"] = self.down_bias
        if self.scale is not None:
            parts["router.expert_scale"] = self.scale[:, None]
        parts |= {f"{name}.weight": weights[:, None] for name, weights in self.norms.items()}
        if self.into is not None:
            parts["fc1_latent_proj.weight"] = self.into[:, None]
            parts["fc2_latent_proj.weight"] = self.onto[:, None]
        if self.score_bias is not None:
            parts["router.expert_bias"] = self.score_bias[:, None]
        if self.table is not None:
            parts["router.table"] = self.table[:, None]
        if self.shared_gate_up is not None:
            parts["shared_experts.linear_fc1.weight"] = self.shared_gate_up.unflatten(1, (self.kit.cfg.mlp_parts, -1))
            parts["shared_experts.linear_fc2.weight"] = self.shared_down[:, None]
        if self.shared_gate is not None:
            parts["shared_experts.gate_weight"] = self.shared_gate[:, None]
        views, nothing = dict[str, Tensor](), self.router.new_empty(0)
        own = Shard(first=self.own.start, count=len(self.own))
        for spec in family_table(self.kit.cfg):
            at, _, kind = spec.canonical.partition(".mlp.")
            if kind in parts:
                views |= dict.fromkeys(spec.hf, nothing)  # of other ranks' experts
                views |= zip(of_experts(spec, own).hf, parts[kind][self.index[int(at.rpartition(".")[2])]], strict=True)
        return views

    def __call__(self, layer: int, y: Tensor, routes: Tensor | None, tokens: Tensor | None = None) -> Tensor:
        """Return y [M, hidden] -> the output of each row's experts; all rows of an expert in one product, on the rank
        that has it. The experts' numbers are written to `routes` [M, layer, top_k] if given. `tokens` int64 [M] choose
        experts in the first layers of some families."""
        moe, index = self.kit.cfg.moe, self.index[layer]
        if self.score_bias is None:
            bias, scale = of(self.router_bias, index), of(self.scale, index)
            x = y if scale is None else self._normed("router_layernorm", index, y) * y.shape[1] ** -0.5
            own = moe.top_k, moe.norm_topk_prob, bias, None, scale, self.kit.cfg.invariant
            routing = route(x, self.router[index], *own)
        else:
            own = None if index >= moe.hash_layers else self.table[index, tokens]
            score = root_softplus if self.traits.root_scores else torch.sigmoid
            routing = route_by_groups(y, self.router[index], self.score_bias[index], moe, score=score, own=own)
        if routes is not None:
            routes[:, index] = routing.experts
        x = self._normed("experts_layernorm", index, y)
        x = x if self.into is None else F.linear(x, self.into[index])
        pairs, counts = sort_own_pairs(routing.experts, moe.num_experts, self.own, x)
        mixed = self._product(expand(x, pairs), self.gate_up[index], counts, of(self.gate_up_bias, index))
        mixed = clamped_gate(mixed) if self.traits.clamped_gate else self._between(mixed)
        out = self._product(mixed, self.down[index], counts, of(self.down_bias, index))
        out = (combine if self.kit.peers.size == 1 else combine_own)(out, pairs, routing.weights)
        return self._with_shared(index, y, out if self.onto is None else F.linear(out, self.onto[index]))

    def _product(self, x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply rows by expert, and add each expert's bias. Rows behind all experts' get the last one's."""
        out, others = grouped_linear(x, weight, counts, self.kit.cfg.invariant), counts[:-1]
        if bias is None:
            return out
        return add_bias(out, bias, torch.cat([others, len(x) - others.sum(0, keepdim=True)]))

    def _between(self, mixed: Tensor) -> Tensor:
        if self.kit.cfg.invariant:
            return swiglu(mixed, by_rows=True)
        return between(mixed, self.traits, self.limit)

    def _normed(self, name: str, index: int, x: Tensor) -> Tensor:
        return self.kit.norm(x, self.norms[name][index]) if self.norms else x

    def _with_shared(self, index: int, y: Tensor, out: Tensor) -> Tensor:
        """Return the sum over all ranks' shares of `out` and of the output of the MLP for every token."""
        if not self.norms:
            return self.kit.peers.add(self._shared(index, y, out))
        shared = self._shared(index, self._normed("shared_layernorm", index, y), torch.zeros_like(out))
        out, shared = self.kit.peers.add(torch.stack([out, shared]))
        out = self._normed("experts_post_layernorm", index, out)
        return out.add_(self._normed("shared_post_layernorm", index, shared))

    def _shared(self, index: int, y: Tensor, out: Tensor) -> Tensor:
        """Add the output of the experts that all tokens share."""
        if self.shared_gate_up is None:
            return out
        hidden = between(F.linear(y, self.shared_gate_up[index]), self.traits, self.limit)
        if self.shared_gate is not None:
            hidden *= F.linear(y, self.shared_gate[index]).sigmoid()
        return out.addmm_(hidden, self.shared_down[index].t())


def between(mixed: Tensor, traits: Family, limit: float | None = None) -> Tensor:
    """Return the input of an MLP's last product from the output of its first, perhaps in place. `limit` as in
    `model.moe.gate_limit`."""
    if traits.ungated:
        return F.relu(mixed, inplace=True).square_()
    gate, up = mixed.chunk(2, dim=1)
    if limit is not None:
        gate.clamp_(max=limit)
        up.clamp_(-limit, limit)
    return (F.silu(gate, inplace=True) if traits.activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)
