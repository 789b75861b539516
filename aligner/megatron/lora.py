"""Low-rank adapters of a sharded model: y = W x + scale B A x with W frozen (LoRA, arXiv:2106.09685). With DoRA
(arXiv:2402.09353) each row of W + scale B A is scaled to its own trained norm.

The table of `models/adapters.py` says which matrices have adapters, and how tensor ranks share the factors. A hook on
the module of the frozen matrix computes their products. A x crosses tensor ranks, `rank` numbers per token. Of
factors that all ranks have whole

- A of a column-parallel matrix sees all tokens on every rank, or its own with sequence parallelism;
- B (and the magnitudes) of a row-parallel one meet the sum of all ranks' A x, or that of the rank's own tokens;

so without sequence parallelism their gradients are the same on all ranks, and with it Megatron sums those of
parameters marked `sequence_parallel`. Experts and their factors are whole on a tensor rank, and see tokens of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from torch import Tensor
from torch.nn.functional import dropout, linear, pad

from aligner.config.sections.model.config import ModelConfig
from aligner.errors import ConfigError
from aligner.families.rows import ParamSpec
from aligner.megatron.groups import Layout
from aligner.megatron.model import Head
from aligner.megatron.sharing import mark_shared
from aligner.megatron.weights import WeightSource, local_modules, local_parameters, own_shard
from aligner.models.adapters import AdaptedMatrix, Target, sites
from aligner.ops.kernels.experts import each_row, grouped_linear
from aligner.ops.kernels.frozen import dense
from aligner.ops.seeds import derive


class Factors(torch.nn.Module):
    """This rank's shards of one target's factors: a [rank, in], b [out, rank], with DoRA magnitude [out] in float32.
    For experts a [E / ep, rank, in], b [E / ep, out, rank] and [E / ep, out]."""

    def __init__(self, a: Tensor, b: Tensor, magnitude: Tensor | None):
        super().__init__()
        self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)
        self.register_parameter("magnitude", None if magnitude is None else torch.nn.Parameter(magnitude))


class Adapters(torch.nn.Module):
    """Adapters of one matrix, which may be several targets. One product uses all their A, one all their B, each with
    its own rows and columns."""

    def __init__(
        self, site: AdaptedMatrix, cfg: ModelConfig, layout: Layout, base: torch.nn.Parameter, source: WeightSource
    ):
        super().__init__()
        self.site, self.layout = site, layout
        self.on = True  # else the matrix is as it was
        self.scale, self.dropout = cfg.lora.scale, cfg.lora.dropout
        self.groups, self.sizes = site.rows(cfg, layout.share(site.base.experts)[0])
        self._base = [base]  # in a list: it stays the frozen module's parameter
        whole = dense(base)
        for target in site.targets:
            a, b = (own_shard(spec, source, layout).to(whole).clone() for spec in (target.a, target.b))
            magnitude = self._rows_of(target, self._norm(whole)) if target.magnitude else None
            factors = Factors(a, b, magnitude)
            self.add_module(target.name, factors)
            for spec, param in self._named(target, factors):
                self._mark(spec, param)

    @property
    def base(self) -> torch.nn.Parameter:
        return self._base[0]

    def _named(self, target: Target, factors: Factors) -> Iterator[tuple[ParamSpec, torch.nn.Parameter]]:
        yield target.a, factors.a
        yield target.b, factors.b
        if target.magnitude is not None:
            yield target.magnitude, factors.magnitude

    def named(self) -> Iterator[tuple[ParamSpec, torch.nn.Parameter]]:
        """Yield (row of the table, this rank's shard) of each factor."""
        for target in self.site.targets:
            yield from self._named(target, self.get_submodule(target.name))

    def _mark(self, spec: ParamSpec, param: torch.nn.Parameter) -> None:
        """Set Megatron's marks, by which it reduces gradients and computes their norms."""
        if spec.experts:
            param.allreduce = False
        elif spec.tp_axis is not None:
            mark_shared(param, spec.tp_axis)
        else:
            param.sequence_parallel = self.layout.sequence

    @torch.no_grad()
    def sent(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (canonical name, this rank's shard) of what an engine merges: each target's A, B and, instead of the
        magnitudes, the factors of its rows. With DoRA collective over tensor ranks."""
        rows = self.row_factor() if self.has_magnitude else None
        for target in self.site.targets:
            factors = self.get_submodule(target.name)
            yield target.a.canonical, factors.a
            yield target.b.canonical, factors.b
            if target.magnitude is not None:
                yield target.magnitude.canonical, self._rows_of(target, rows)

    # ---- the matrix

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [k rank, in] and B [rows, k rank] of the whole matrix, whose product is B A in its own rows."""
        factors = {target.index: self.get_submodule(target.name) for target in self.site.targets}
        return joined({index: (own.a, own.b) for index, own in factors.items()}, self.groups, self.sizes)

    @torch.no_grad()
    def merged(self, factor: Tensor | None = None) -> Tensor:
        """Return W + scale B A, with DoRA times `row_factor`: this rank's shard in its shape, computed in float32 and
        rounded once."""
        base, out = self.base, self._sum()
        if self.has_magnitude:
            out *= (self.row_factor() if factor is None else factor)[..., None]
        return out.view_as(base).to(base.dtype)

    @property
    def has_magnitude(self) -> bool:
        return self.site.targets[0].magnitude is not None

    def _sum(self) -> Tensor:
        product = change(*self.factors(), self.scale)
        return product.add_(dense(self.base).float().view(product.shape))

    def row_factor(self) -> Tensor:
        """Return float32 [rows], of experts [E / ep, rows]: magnitude / norm of the row, or 1 in rows of no target.
        Its gradient is only the magnitude's. Collective over tensor ranks that share the rows."""
        with torch.no_grad():
            norm = self._norm(self._sum())
        places = {target.index: self.get_submodule(target.name).magnitude for target in self.site.targets}
        norms = norm.unflatten(-1, (self.groups, -1)).split(self.sizes, -1)
        rows = [
            torch.ones_like(norm) if i not in places else places[i].view_as(norm) / norm for i, norm in enumerate(norms)
        ]
        return torch.cat(rows, -1).flatten(-2)

    def _norm(self, weight: Tensor) -> Tensor:
        """Return float32 [rows], of experts [E / ep, rows], of a matrix whose rows tensor ranks may share."""
        squares = weight.detach().float().square().sum(-1).flatten(int(self.site.base.experts))
        if self.site.split == "in" and self.layout.share(self.site.base.experts)[0] > 1:
            dist.all_reduce(squares, group=self.layout.pgs.tp)
        return squares.sqrt()

    def _rows_of(self, target: Target, whole: Tensor) -> Tensor:
        return whole.unflatten(-1, (self.groups, -1)).split(self.sizes, -1)[target.index].flatten(-2)

    # ---- the products

    def add(self, x: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
        """Return the adapted matrix's output from x [..., in] and the frozen matrix's output, with a bias or not."""
        a, b = self.factors()
        h = linear(self._dropped(x).flatten(0, -2), a) * self.scale  # two dimensions: torch makes one product of them
        out = out + linear(self._across(h), b).view_as(out)
        if not self.has_magnitude:
            return out
        out = out if bias is None else out - bias
        out = out + (self.row_factor() - 1).to(out.dtype) * out  # a factor near 1 has few bits of its own in bfloat16
        return out if bias is None else out + bias

    def _across(self, h: Tensor) -> Tensor:
        """Return A x of all tokens and all of the input; its gradient comes from all rows."""
        sequence, tp = self.layout.sequence, self.layout.pgs.tp
        if self.layout.tensor == 1 or self.site.split == "none":
            return h
        if self.site.split == "out":
            if sequence:
                return gather_from_sequence_parallel_region(h, tensor_parallel_output_grad=True, group=tp)
            return copy_to_tensor_model_parallel_region(h, group=tp)
        if sequence:
            return reduce_scatter_to_sequence_parallel_region(h, group=tp)
        return reduce_from_tensor_model_parallel_region(h, group=tp)

    def _dropped(self, x: Tensor) -> Tensor:
        if not (self.dropout and self.training):
            return x
        with _generator_of_experts() if self.site.base.experts else nullcontext():
            return dropout(x, self.dropout)

    def add_experts(self, x: Tensor, out: Tensor, sizes: Tensor) -> Tensor:
        """Return the adapted matrices' output [M, rows] from x [M, in] by expert and the frozen matrices' output."""
        a, b = self.factors()
        h = grouped_linear(self._dropped(x), a, sizes) * self.scale
        out = out + grouped_linear(h, b, sizes)
        if not self.has_magnitude:
            return out
        rows = each_row(self.row_factor() - 1, sizes, len(x))
        return out + rows.to(out.dtype) * out


@contextmanager
def _generator_of_experts() -> Iterator[None]:
    """Draw from Megatron's generator of experts, which a recomputed layer restores too. Torch's is then as before: how
    many tokens a rank's experts have does not change what tensor ranks draw next."""
    generators, own, name = get_cuda_rng_tracker(), torch.cuda.get_rng_state(), get_expert_parallel_rng_tracker_name()
    states = generators.get_states()
    torch.cuda.set_rng_state(states[name])
    yield
    generators.set_states(states | {name: torch.cuda.get_rng_state()})
    torch.cuda.set_rng_state(own)


def joined(pairs: Mapping[int, tuple[Tensor, Tensor]], groups: int, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Join A and B of a whole matrix, which has `groups` of rows, each with parts of `sizes`. `pairs` has A and B of
    some parts, by number."""
    firsts, k = [a for a, _ in pairs.values()], len(pairs)
    a = firsts[0] if k == 1 else torch.cat(firsts, -2)
    if k == len(sizes) == 1:
        return a, pairs[0][1]
    places, parts = {index: position for position, index in enumerate(pairs)}, []
    for index, size in enumerate(sizes):
        if index not in pairs:
            block = a.new_zeros(*a.shape[:-2], groups * size, a.shape[-2])
        else:
            b, position = pairs[index][1], places[index]
            rank = b.shape[-1]
            block = pad(b, (position * rank, (k - 1 - position) * rank))
        parts.append(block.unflatten(-2, (groups, size)))
    return a, torch.cat(parts, -2).flatten(-3, -2)


def change(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return scale B A in float32."""
    return (b.float() @ a.float()).mul_(scale)


def _hook(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
    """Add the adapters' product after a linear module's forward, which returns Megatron's pair of output and bias, or
    the output."""
    if not module.adapters.on:
        return None
    if not isinstance(output, tuple):
        return module.adapters.add(inputs[0], output, None)
    out, apart = output
    has_bias = apart is None and module.bias is not None and module.bias.numel() > 0  # TransformerEngine's may be empty
    return module.adapters.add(inputs[0], out, module.bias if has_bias else None), apart


@dataclass(frozen=True)
class AdaptedModel:
    """The adapters of a pipeline stage by the canonical name of their matrix."""

    adapters: dict[str, Adapters]
    layout: Layout
    device: torch.device
    dropout_seed: int | None  # None: nothing is dropped
    undo: list[Callable[[], object]]  # what `attach` did to the model
    start: list[Tensor] = field(default_factory=list)  # factors that were given, in the order of `named`

    def named(self) -> Iterator[tuple[ParamSpec, torch.nn.Parameter]]:
        """Yield (row of `adapter_table`, this rank's shard) of each factor, in the table's order."""
        for adapters in self.adapters.values():
            yield from adapters.named()

    @torch.no_grad()
    def start_from(self, source: WeightSource) -> None:
        """Copy the factors of `source`, and keep them for `as_at_start`."""
        for spec, param in self.named():
            param.copy_(own_shard(spec, source, self.layout))
            self.start.append(param.detach().clone())

    @contextmanager
    def as_at_start(self) -> Iterator[None]:
        """Use the model from which training began within the block, also after a resume: without adapters, or with
        those of `start_from`."""
        params = [param for _, param in self.named()] if self.start else []
        learnt = [param.data for param in params]
        try:
            for adapters in self.adapters.values():
                adapters.on = bool(self.start)
            for param, first in zip(params, self.start, strict=True):
                param.data = first
            yield
        finally:
            for param, own in zip(params, learnt, strict=True):
                param.data = own
            for adapters in self.adapters.values():
                adapters.on = True

    def sharded_state(self, module: torch.nn.Module) -> dict[str, ShardedTensor]:
        """Return each factor's local name -> its shard in a checkpoint, where it has its canonical name."""
        names, layout = {id(p): name for name, p in module.named_parameters()}, self.layout
        shards = {}
        for spec, param in self.named():
            offsets = [(0, layout.ep_rank, layout.expert)] if spec.experts else []
            ranks, rank = layout.share(spec.experts)
            if spec.tp_axis is not None:
                offsets, rank = [*offsets, (spec.tp_axis, rank, ranks)], 0
            replica = (0, rank, layout.copies(spec.experts).rank())
            shards[names[id(param)]] = ShardedTensor.from_rank_offsets(
                spec.canonical, param, *offsets, replica_id=replica
            )
        return shards

    def begin(self, step: int) -> None:
        """Seed dropout by the step and by whose tokens a rank has. Tensor ranks, who see the same tokens except in
        experts, drop alike, and so does a resumed run. Without a GPU Megatron seeds torch's generator by the tensor
        rank, and lets recomputed layers draw the same numbers again."""
        if self.dropout_seed is not None:
            words = "dropout", step, self.layout.pgs.dp_cp.rank(), self.layout.pp_rank
            torch.manual_seed(derive(self.dropout_seed, *words, self.layout.tp_rank))
            generators, name = get_cuda_rng_tracker(), get_expert_parallel_rng_tracker_name()
            generators.set_states(generators.get_states() | {name: torch.cuda.get_rng_state()})
            torch.manual_seed(derive(self.dropout_seed, *words))

    def dissolve(self) -> None:
        """Merge in place: the model is again as before `attach`, with other weights."""
        for adapters in self.adapters.values():
            adapters.base.data.copy_(adapters.merged())
        for undo in self.undo:
            undo()

    @torch.no_grad()
    def b_norm(self) -> float:
        """Return the norm of all B of the model. Collective over its ranks."""
        layout, sums = self.layout, []
        for experts, group in ((False, layout.pgs.mp), (True, layout.pgs.tp_ep_pp)):
            own = [(spec, p) for spec, p in self.named() if spec.experts == experts and spec.canonical.endswith(".b")]
            counted = [p for spec, p in own if spec.tp_axis is not None or layout.share(experts)[1] == 0]
            squares = torch.zeros((), dtype=torch.float64, device=self.device)
            if counted:
                squares += torch.stack(torch._foreach_norm(counted)).double().square().sum()
            dist.all_reduce(squares, group=group)
            sums.append(squares)
        return float(sum(sums).sqrt())


class MergedWeights(Mapping[str, Tensor]):
    """Canonical name -> this rank's shard as an engine or a file needs it. Adapted matrices are merged on access; the
    last one is kept. With DoRA construction is collective over tensor ranks."""

    def __init__(self, parameters: Mapping[str, Tensor], adapted: AdaptedModel):
        self._parameters, self._adapters = parameters, adapted.adapters
        with torch.no_grad():
            self._factors = {name: a.row_factor() for name, a in self._adapters.items() if a.has_magnitude}
        self._last = ("", torch.empty(0))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._adapters:
            return dense(self._parameters[name])
        if self._last[0] != name:
            self._last = name, self._adapters[name].merged(self._factors.get(name))
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


class SplitWeights(Mapping[str, Tensor]):
    """Canonical name -> this rank's shard of each frozen weight without adapters, and of its adapters
    (`Adapters.sent`). With DoRA construction is collective over tensor ranks."""

    def __init__(self, parameters: Mapping[str, Tensor], adapted: AdaptedModel):
        self._parameters = parameters
        self._factors = dict(pair for adapters in adapted.adapters.values() for pair in adapters.sent())

    def __getitem__(self, name: str) -> Tensor:
        return self._factors[name] if name in self._factors else dense(self._parameters[name])

    def __iter__(self) -> Iterator[str]:
        yield from self._parameters
        yield from self._factors

    def __len__(self) -> int:
        return len(self._parameters) + len(self._factors)


def _first_factors(seed: int) -> WeightSource:
    """Return the source of first factors. A is uniform in +-1 / sqrt(in), as kaiming_uniform(sqrt(5)) (and PEFT); B
    is zero. They depend on seed and name only, so that every layout begins alike."""

    def source(spec: ParamSpec) -> Tensor:
        if spec.canonical.endswith(".b"):
            return torch.zeros(spec.shape)
        word = hashlib.sha256(f"{seed}/{spec.canonical}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(word[:7], "big"))
        return (2 * torch.rand(spec.shape, generator=generator) - 1) * spec.shape[-1] ** -0.5

    return source


def check_adapters(cfg: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Check that the model and this machine support `cfg.lora`. Raises ConfigError."""
    experts = any(site.base.experts for site in sites(cfg))
    if experts and device.type == "cuda" and dtype == torch.bfloat16 and cfg.lora.rank % 8:
        expected = "a multiple of 8 for adapters of experts in bfloat16 on a GPU, whose product needs whole 16 bytes"
        raise ConfigError("model.lora.rank", cfg.lora.rank, expected)


def attach(model: GPTModel, cfg: ModelConfig, layout: Layout, head: Head, seed: int) -> AdaptedModel:
    """Freeze a stage whose weights are loaded, except for a score head, and give it adapters. Call it before
    gradients have buffers: frozen weights have none. Collective over tensor ranks. Raises ConfigError as `sites`."""
    undo: list[Callable[[], object]] = [partial(p.requires_grad_, p.requires_grad) for p in model.parameters()]
    model.requires_grad_(False)
    if head.kind == "score" and layout.is_last_stage:
        model.output_layer.requires_grad_(True)
    parameters, modules, source, adapted = local_parameters(model), local_modules(model), _first_factors(seed), {}
    for site in sites(cfg):
        if site.base.canonical not in parameters:
            continue
        module, attribute = modules[site.module], site.holder.rsplit(".", 1)[1]
        adapters = Adapters(site, cfg, layout, parameters[site.base.canonical], source)
        setattr(module, attribute, adapters)
        undo.append(partial(setattr, module, attribute, None))
        if not site.base.experts:
            undo.append(module.register_forward_hook(_hook).remove)
        adapted[site.base.canonical] = adapters
    if layout.is_first_stage and (layout.pipeline > 1 or cfg.recomputed or cfg.recomputed_modules):
        undo.append(model.embedding.register_forward_hook(_ask_for_gradient).remove)
    device = next(p.device for p in model.parameters() if not p.is_meta)
    return AdaptedModel(adapted, layout, device, seed if cfg.lora.dropout else None, undo)


def _ask_for_gradient(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
    """Make the input require a gradient: by it recomputed layers and pipeline stages decide whether there is anything
    to learn."""
    return output.detach().requires_grad_() if torch.is_grad_enabled() else None
