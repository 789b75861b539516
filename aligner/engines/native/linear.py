"""The native engine's layers of linear attention (`ops/kernels/linear_rules.py`), and their memories of running rows:
for each slot one matrix for each head and the last inputs of the mixing, for a row of any length.

A step with drafts leaves the memories as they were, and what it makes of each token beside them: far fewer numbers than
a state. Once it is known which tokens are kept, the memories go on by these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aligner.engines.native.block_inputs import BlockContext, DecodeStep, PrefillInputs, Product
from aligner.engines.native.states import RowStates
from aligner.families.matrices import rows_of_group
from aligner.families.table import family_table
from aligner.ops.kernels.linear_rules import RULES, vector_dtype


class LinearLayers:
    """This rank's share of the heads of all linear layers, from a layer's normed input to the input of its last
    product."""

    def __init__(self, kit: BlockContext):
        cfg, share, rank = kit.cfg, kit.peers.size, kit.peers.rank
        linear = self.linear = cfg.linear
        self.cfg, self.rule = cfg, RULES[linear.rule]
        self.index = {layer: i for i, layer in enumerate(cfg.layers_of("linear"))}
        self.eps, count, self.heads = cfg.norm_eps, len(self.index), linear.key_heads // share
        self.own = slice(rank * self.heads, (rank + 1) * self.heads)
        values = linear.value_heads // share

        def empty(*shape: int) -> Tensor:
            return kit.empty(count, *shape)

        self.into = empty(self.heads, linear.width, cfg.hidden_size)
        self.out = empty(cfg.hidden_size, values * linear.value_head_dim)
        self.conv = empty(linear.key_heads * linear.mixed_width, 1, linear.conv)  # every rank has the whole
        self.conv_bias = empty(linear.key_heads * linear.mixed_width) if self.rule.biased else None
        self.vectors = {x: kit.empty(count, values, dtype=vector_dtype(x, kit.dtype)) for x in self.rule.vectors}
        self.norm = empty((values if self.rule.wide_norm else 1) * linear.value_head_dim)

    def states(self, fed: int = 1) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a row's memory: layers, and the state of the rule [H, dk, dv], or the last K - 1 inputs
        of its mixing. Where a step has drafts also what it makes of a row's tokens, `fed` with them: the memory goes on
        by those that are kept (`advance`)."""
        linear, count = self.linear, len(self.index)
        heads = self.heads * linear.values_per_key
        state = heads, linear.key_head_dim, linear.value_head_dim
        shapes = {"state": (count, *state), "inputs": (count, linear.conv - 1, self.heads * linear.mixed_width)}
        return shapes | ({"fed": (count, fed, self.heads, linear.mixed_width + linear.numbers)} if fed > 1 else {})

    def matrices(self) -> Mapping[str, Sequence[Tensor]]:
        return {}

    def views(self) -> dict[str, Tensor]:
        own = {"conv1d.weight": self.conv, "conv1d.bias": self.conv_bias, "out_norm.weight": self.norm}
        own |= {"out_proj.weight": self.out} | self.vectors
        views = {}
        for spec in family_table(self.cfg):
            at, _, name = spec.canonical.partition(".self_attention.")
            i = self.index.get(int(at.rpartition(".")[2])) if name else None
            if i is not None and name == "in_proj.weight":
                views |= zip(spec.hf, self.into[i].split(rows_of_group(spec, self.cfg), 1), strict=True)
            elif i is not None:
                views[spec.hf[0]] = own[name][i]
        return views

    def out_of(self, layer: int) -> Product:
        return self.out[self.index[layer]], None

    def prefill(self, layer: int, y: Tensor, prompts: PrefillInputs) -> Tensor:
        """Return y [P * T, hidden] -> [P * T, H * dv]. The rows' memories behind their last real tokens are written
        to the staged ones of `prompts.memories` if given."""
        y, real, memories = y.view(prompts.rows, prompts.length, -1), prompts.real, prompts.memories
        i = self.index[layer]
        mixed, gate = self._split(y @ self.into[i].flatten(0, 1).t())
        rule_inputs = self.rule.prepared(mixed, self._weights(i), self.linear)
        out, state = self.rule.rows(*(rule_inputs if real is None else self.rule.still(rule_inputs, real)))
        if memories is not None:
            kept, inputs, *_ = (staged[i] for staged in memories.staged)
            kept.copy_(state)
            inputs.copy_(self._last_inputs(mixed, real))
        return self.rule.norm(out, gate, self.norm[i], self.eps, self.linear).flatten(2).flatten(0, 1)

    def decode(self, layer: int, y: Tensor, step: DecodeStep) -> Tensor:
        """Return y [n * w, hidden] of w new tokens for each of slots [0, n) -> [n * w, H * dv]. Their memories change
        by one token. If there are more, `advance` changes them when it is known which are kept."""
        i, rows = self.index[layer], step.rows
        state, inputs, *fed = (slots[i, :rows] for slots in step.cache.memories.slots)
        mixed, gate = self._split((y @ self.into[i].flatten(0, 1).t()).unflatten(0, (rows, -1)))
        rule_inputs = self.rule.prepared(mixed, self._weights(i), self.linear, before=inputs)
        alone = mixed.shape[1] == 1
        if alone:
            inputs.copy_(torch.cat([inputs[:, 1:], self._channels(mixed)], 1))
        else:
            fed[0].copy_(mixed)
        out = self.rule.steps(*rule_inputs, state, changes=alone)
        return self.rule.norm(out, gate, self.norm[i], self.eps, self.linear).flatten(2).flatten(0, 1)

    def advance(self, kept: Tensor, most: int, memories: RowStates) -> None:
        """Let the memories of slots [0, n) go on by the first `kept`, int64 [n], at most `most`, of the tokens that the
        last step fed. They take the bits of steps of one token each. Numbers of the others are not read, whatever they
        are."""
        real = torch.arange(most, device=kept.device) < kept[:, None]
        for i in self.index.values():
            state, inputs, fed = (slots[i, : len(kept)] for slots in memories.slots)
            mixed = fed[:, :most].masked_fill(~real[..., None, None], 0).to(self.into.dtype)
            rule_inputs = self.rule.prepared(mixed, self._weights(i), self.linear, before=inputs)
            self.rule.steps(*self.rule.still(rule_inputs, real), state)
            inputs.copy_(self._last_inputs(mixed, real, inputs))

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Return [B, T, G * width] -> (channels and numbers [B, T, G, ...], gates [B, T, H, dv])."""
        linear = self.linear
        heads = projected.unflatten(2, (self.heads, -1))
        gate = heads[..., linear.mixed_width : linear.gated_width].unflatten(3, (linear.values_per_key, -1))
        mixed = torch.cat([heads[..., : linear.mixed_width], heads[..., linear.gated_width :]], -1)
        return mixed, gate.flatten(2, 3)

    def _channels(self, mixed: Tensor) -> Tensor:
        return mixed[..., : self.linear.mixed_width].flatten(2)

    def _weights(self, i: int) -> dict[str, Tensor]:
        mixing = {"conv1d.weight": self.conv, "conv1d.bias": self.conv_bias}
        own = {k: self.rule.by_head(x[i], self.linear)[self.own] for k, x in mixing.items() if x is not None}
        return own | {name: vector[i] for name, vector in self.vectors.items()}

    def _last_inputs(self, mixed: Tensor, real: Tensor | None, before: Tensor | None = None) -> Tensor:
        """Return [P, K - 1, channels]: each row's last K - 1 real tokens, behind those `before`, or 0."""
        channels, count = self._channels(mixed), self.linear.conv - 1
        before = channels.new_zeros(len(channels), count, channels.shape[2]) if before is None else before
        padded = torch.cat([before.to(channels.dtype), channels], 1)
        length = channels.shape[1] if real is None else real.sum(1, keepdim=True)
        places = (length + torch.arange(count, device=channels.device)).expand(len(channels), -1)
        return padded.gather(1, places[..., None].expand(-1, -1, channels.shape[2]))
