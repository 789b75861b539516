"""What a token meets behind attention: one MLP for all, or experts of which a router chooses some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.engines.native.kit import Kit, Product, of
from aligner.families.table import family_table
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


class DenseMlp:
    """This rank's share of the rows of all layers with an MLP for every token."""

    def __init__(self, kit: Kit):
        cfg = kit.cfg
        self.kit, layers, ffn = kit, cfg.layers_of("dense"), cfg.ffn_hidden_size // kit.peers.size
        self.place, count = {layer: i for i, layer in enumerate(layers)}, len(layers)
        self.gate_up = kit.matrices(count, 2 * ffn, cfg.hidden_size)
        self.down = kit.matrices(count, cfg.hidden_size, ffn)
        self.gate_up_bias = kit.empty(count, 2 * ffn) if cfg.mlp_bias else None
        self.down_bias = kit.empty(count, cfg.hidden_size) if cfg.mlp_bias else None

    def matrices(self) -> Mapping[str, Sequence[Tensor]]:
        return {"gate_up": self.gate_up, "down": self.down}

    def out_of(self, layer: int) -> Product:
        place = self.place[layer]
        return self.kit.packs["down", place], of(self.down_bias, place)

    def views(self) -> dict[str, Tensor]:
        views = {}
        for kind, gate_up, down in (
            ("weight", self.gate_up, self.down),
            ("bias", self.gate_up_bias, self.down_bias),
        ):
            for layer, i in self.place.items() if gate_up is not None else ():
                at, (gate, up) = f"model.layers.{layer}.mlp.", gate_up[i].chunk(2)
                views |= {f"{at}gate_proj.{kind}": gate, f"{at}up_proj.{kind}": up, f"{at}down_proj.{kind}": down[i]}
        return views

    def __call__(self, layer: int, y: Tensor) -> Tensor:
        """y [M, hidden] -> [M, ffn], what the last product takes."""
        place = self.place[layer]
        gate, up = self.kit.product("gate_up", place, y, of(self.gate_up_bias, place)).chunk(2, dim=1)
        silu = self.kit.cfg.traits.activation == "silu"
        return (F.silu(gate, inplace=True) if silu else F.gelu(gate, approximate="tanh")).mul_(up)


class ExpertMlp:
    """This rank's share of the rows of every expert, and the router, of all layers with experts."""

    def __init__(self, kit: Kit):
        cfg, share = kit.cfg, kit.peers.size
        self.kit, self.traits, layers = kit, cfg.traits, cfg.layers_of("sparse")
        self.place, count, hidden = {layer: i for i, layer in enumerate(layers)}, len(layers), cfg.hidden_size
        experts, ffn, biased = cfg.moe.num_experts, cfg.expert_ffn // share, cfg.traits.expert_bias
        self.router = kit.empty(count, experts, hidden)
        self.router_bias = kit.empty(count, experts) if biased else None
        self.gate_up = kit.empty(count, experts, 2 * ffn, hidden)
        self.gate_up_bias = kit.empty(count, experts, 2 * ffn) if biased else None
        self.down = kit.empty(count, experts, hidden, ffn)
        self.down_bias = kit.empty(count, experts, hidden) if biased else None
        # float32, as the scores of the choice are
        self.score_bias = torch.zeros(count, experts, device=kit.device) if cfg.traits.sigmoid_router else None
        wide = cfg.moe.shared_ffn_hidden_size // share
        self.shared_gate_up = kit.empty(count, 2 * wide, hidden) if wide else None
        self.shared_down = kit.empty(count, hidden, wide) if wide else None
        self.shared_gate = kit.empty(count, 1, hidden) if cfg.traits.shared_gate else None

    def matrices(self) -> Mapping[str, Sequence[Tensor]]:
        return {}

    def views(self) -> dict[str, Tensor]:
        """Named by the family's table, which has one row for all experts of a layer."""
        halves = self.gate_up.unflatten(2, (2, -1)).flatten(1, 2)  # gate and up of every expert
        parts = {"router.weight": self.router[:, None], "experts.gate_up": halves, "experts.down": self.down}
        if self.traits.expert_bias:
            parts["router.bias"] = self.router_bias[:, None]
            parts["experts.linear_fc1.bias"] = self.gate_up_bias.unflatten(2, (2, -1)).flatten(1, 2)
            parts["experts.linear_fc2.bias"] = self.down_bias
        if self.score_bias is not None:
            parts["router.expert_bias"] = self.score_bias[:, None]
        if self.shared_gate_up is not None:
            parts["shared_experts.linear_fc1.weight"] = self.shared_gate_up.unflatten(1, (2, -1))
            parts["shared_experts.linear_fc2.weight"] = self.shared_down[:, None]
        if self.shared_gate is not None:
            parts["shared_experts.gate_weight"] = self.shared_gate[:, None]
        views = {}
        for spec in family_table(self.kit.cfg):
            at, _, part = spec.canonical.partition(".mlp.")
            if part in parts:
                views |= zip(spec.hf, parts[part][self.place[int(at.rpartition(".")[2])]], strict=True)
        return views

    def __call__(self, layer: int, y: Tensor, routes: Tensor | None) -> Tensor:
        """y [M, hidden] -> what each row's experts make of it, of this rank's share; all rows of an expert in one
        product. Which they are goes to `routes` [M, layer, top_k] if given."""
        moe, place = self.kit.cfg.moe, self.place[layer]
        if self.score_bias is None:
            routing = route(y, self.router[place], moe.top_k, moe.norm_topk_prob, of(self.router_bias, place))
        else:
            routing = route_by_groups(y, self.router[place], self.score_bias[place], moe)
        if routes is not None:
            routes[:, place] = routing.experts
        pairs = sort_pairs(routing.experts, moe.num_experts)
        mixed = grouped_linear(expand(y, pairs), self.gate_up[place], pairs.counts)
        if self.gate_up_bias is not None:
            mixed = add_bias(mixed, self.gate_up_bias[place], pairs.counts)
        if self.traits.clamped_gate:
            mixed = clamped_gate(mixed)
        else:
            gate, up = mixed.chunk(2, dim=1)
            mixed = F.silu(gate, inplace=True).mul_(up)
        out = grouped_linear(mixed, self.down[place], pairs.counts)
        if self.down_bias is not None and self.kit.peers.rank == 0:  # of all ranks' sum
            out = add_bias(out, self.down_bias[place], pairs.counts)
        return self._shared(place, y, combine(out, pairs, routing.weights))

    def _shared(self, place: int, y: Tensor, out: Tensor) -> Tensor:
        """With what the experts that all tokens share add to it."""
        if self.shared_gate_up is None:
            return out
        gate, up = F.linear(y, self.shared_gate_up[place]).chunk(2, dim=1)
        hidden = F.silu(gate).mul_(up)
        if self.shared_gate is not None:
            hidden *= F.linear(y, self.shared_gate[place]).sigmoid()
        return out.addmm_(hidden, self.shared_down[place].t())
