"""The native engine's layers of linear attention (`ops/kernels/linear_rules.py`), and their memories of running rows:
for each slot one matrix for each head and the last inputs of the mixing, for a row of any length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.engines.native.block_inputs import BlockContext, DecodeStep, PrefillInputs, Product
from aligner.engines.native.scratch import Scratch
from aligner.families.matrices import rows_of_group
from aligner.families.table import family_table
from aligner.ops.kernels.linear_rules import RULES, vector_dtype


class LinearStates:
    """The memories of rows: the state of the rule in every linear layer [H, dk, dv] and the last K - 1 inputs of its
    mixing, in float32, [linear layer, slot, ...]. Both of running rows, and of prompts that wait for slots."""

    def __init__(self, cfg: ModelConfig, share: int, device: torch.device):
        linear = cfg.linear
        self.layers = len(cfg.layers_of("linear"))
        self.state = linear.value_heads // share, linear.key_head_dim, linear.value_head_dim
        self.inputs = linear.conv - 1, linear.key_heads // share * linear.mixed_width
        self.row_bytes = 4 * self.layers * (math.prod(self.state) + math.prod(self.inputs))
        self._scratch = Scratch(device, torch.float32)
        self._forget()

    @property
    def held_bytes(self) -> int:
        return self._scratch.held_bytes

    def needs(self, slots: int, prompts: int) -> int:
        """Return the bytes of so many rows and waiting prompts, including the memory that is held already."""
        wanted = {"slots": slots, "staged": prompts}
        per = {"state": math.prod(self.state), "inputs": math.prod(self.inputs)}
        held = self._scratch.size
        return 4 * sum(
            max(n * self.layers * size, held(f"{k} of {w}")) for w, n in wanted.items() for k, size in per.items()
        )

    def resize(self, slots: int) -> None:
        self.slots = ()
        self.slots = self._take("slots", slots)

    def stage(self, prompts: int) -> None:
        self.staged = ()
        self.staged = self._take("staged", prompts)

    def _take(self, where: str, rows: int) -> tuple[Tensor, Tensor]:
        state = self._scratch.take(f"state of {where}", self.layers, rows, *self.state)
        return state, self._scratch.take(f"inputs of {where}", self.layers, rows, *self.inputs)

    def admit(self, prompt: int, first: int, count: int) -> None:
        """Copy staged prompt `prompt` into slots [first, first + count)."""
        for slots, staged in zip(self.slots, self.staged, strict=True):
            slots[:, first : first + count].copy_(staged[:, prompt : prompt + 1])

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` to slots `target` (int64 [m] each)."""
        for slots in self.slots:
            slots[:, target] = slots[:, source]

    def release(self) -> None:
        self._scratch.clear()
        self._forget()

    def _forget(self) -> None:
        self.slots: tuple[Tensor, ...] = ()
        self.staged: tuple[Tensor, ...] = ()


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
            return torch.zeros(count, *shape, device=kit.device, dtype=kit.dtype)

        self.into = empty(self.heads, linear.width, cfg.hidden_size)
        self.out = empty(cfg.hidden_size, values * linear.value_head_dim)
        self.conv = empty(linear.key_heads * linear.mixed_width, 1, linear.conv)  # every rank has the whole
        self.conv_bias = empty(linear.key_heads * linear.mixed_width) if self.rule.biased else None
        self.vectors = {name: empty(values).to(vector_dtype(name, kit.dtype)) for name in self.rule.vectors}
        self.norm = empty((values if self.rule.wide_norm else 1) * linear.value_head_dim)

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
            kept, inputs = (staged[i] for staged in memories.staged)
            kept.copy_(state)
            inputs.copy_(self._last_inputs(mixed, real))
        return self.rule.norm(out, gate, self.norm[i], self.eps, self.linear).flatten(2).flatten(0, 1)

    def decode(self, layer: int, y: Tensor, step: DecodeStep) -> Tensor:
        """Return y [n, hidden] of one new token for each of slots [0, n) -> [n, H * dv]; their memories change."""
        i = self.index[layer]
        state, inputs = (slots[i, : len(y)] for slots in step.cache.memories.slots)
        mixed, gate = self._split((y @ self.into[i].flatten(0, 1).t())[:, None])
        rule_inputs = self.rule.prepared(mixed, self._weights(i), self.linear, before=inputs)
        inputs.copy_(torch.cat([inputs[:, 1:], self._channels(mixed)], 1))
        out = self.rule.step(*(x if x.dim() == 1 else x.squeeze(1) for x in rule_inputs), state)
        return self.rule.norm(out, gate.squeeze(1), self.norm[i], self.eps, self.linear).flatten(1)

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

    def _last_inputs(self, mixed: Tensor, real: Tensor | None) -> Tensor:
        """Return [P, K - 1, channels]: each row's last K - 1 real tokens; 0 before its first."""
        channels, count = self._channels(mixed), self.linear.conv - 1
        padded = torch.cat([channels.new_zeros(len(channels), count, channels.shape[2]), channels], 1)
        length = channels.shape[1] if real is None else real.sum(1, keepdim=True)
        places = (length + torch.arange(count, device=channels.device)).expand(len(channels), -1)
        return padded.gather(1, places[..., None].expand(-1, -1, channels.shape[2]))
