"""Mixture-of-experts layers on the flat stream of tokens, with expert, tensor, context and pipeline parallelism.

Megatron's own layer supports no stream: its statistics see padding where sequence or pipeline parallelism loses the
mask, and its dispatchers do not all run without CUDA. The layer here replaces Megatron's MLP. It follows its rules
for parameters (`allreduce`, `tensor_model_parallel`, the expert data-parallel group), so gradient reductions,
optimizers and checkpoints are Megatron's.

Expert parallelism: E experts over the ranks of `pgs.ep`, neighbours among the tensor-, context- and data-parallel
ranks of a pipeline stage. Experts are whole (Megatron's expert_tensor_parallel_size = 1, "parallel folding", Liu et al.
2025, arXiv:2504.14960). Every rank routes its own tokens, of which tensor ranks have equal shares (`Times`). It sends
each once to each rank of its experts (`dispatch.py`); no token is dropped. With sequence parallelism the layer's input
is that share, and nothing else is exchanged. Without, all tensor ranks see all tokens, and sum what each has computed.

Auxiliary loss of a layer (Fedus et al. 2021, arXiv:2101.03961, eq. 4, with the fractions of top-k pairs as in
Megatron and Qwen): L = coef * E * sum_i f_i P_i, with f_i = pairs of expert i / (k T), held constant, P_i = sum_t
p_ti / T. The sum over layers is added to the gradient, not to the reported loss. `aux_over` says whose tokens T are:

- "minibatch": all of the optimizer step, on all ranks ("global batch", Qiu et al. 2025, arXiv:2501.11873), so the
  gradient does not depend on micro-batches or ranks. f is counted by a forward pass over the minibatch beforehand, or,
  where every rank has one micro-batch, in the pass itself.
- "running": f_i is that of the micro-batches so far of the optimizer step, on all data-parallel ranks where they have
  equally many, else on the rank's tensor- and context-parallel ranks.
- "micro_batch": f_i is that of the micro-batch (over its tensor- and context-parallel ranks), whose loss counts by its
  share of the minibatch's tokens.

A token that stands for several rows (`batch.share_prompts`) counts several times, padding not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from aligner.config.sections.model.config import ModelConfig
from aligner.families.rows import BRANCH_NORMS
from aligner.megatron.attention import GatedMLP
from aligner.megatron.dispatch import exchange_sizes, through
from aligner.megatron.groups import Layout
from aligner.megatron.sharing import LayerConfig, SharedLinear, checkpoint_entries, with_fields
from aligner.ops.kernels import elementwise as kernels
from aligner.ops.kernels.add_loss import add_loss
from aligner.ops.kernels.experts import (
    ReplayedExperts,
    Routing,
    add_bias,
    balance_loss,
    clamped_gate,
    grouped_linear,
    rerouted,
    root_softplus,
    route,
    route_by_groups,
)
from aligner.ops.kernels.frozen import held_by
from aligner.ops.packing.pack import Times

if TYPE_CHECKING:
    from aligner.megatron.lora import Adapters


GATES = {"silu": kernels.swiglu, "gelu_pytorch_tanh": kernels.geglu, "relu2": kernels.relu2}


class StreamLayer(TransformerLayer):
    """A layer that passes its MLP how often each token of the stream counts (`packed_seq_params.times`)."""

    def __init__(self, config: LayerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.recompute_mlp = config.recompute_granularity == "selective" and "moe" in config.recompute_modules

    def _forward_mlp(self, hidden_states, inference_context=None, padding_mask=None, packed_seq_params=None):
        return super()._forward_mlp(hidden_states, inference_context, packed_seq_params.times, packed_seq_params)


class Router(torch.nn.Module):
    """Router with weight [E, H] and, in some families, bias [E], the same on every rank. Other families have
    `expert_bias` [E], which affects only the choice, in float32; no gradient changes it. In some the first layers
    have in its place `table` int64 [V, k], the experts of each token id. Others have `expert_scale` [E], factors of the
    experts' weights."""

    def __init__(self, config: LayerConfig, model: ModelConfig, hashed: bool):
        super().__init__()
        num_experts, traits = model.moe.num_experts, model.traits
        self.weight = torch.nn.Parameter(torch.zeros(num_experts, config.hidden_size, dtype=config.params_dtype))
        bias = torch.nn.Parameter(torch.zeros(num_experts, dtype=config.params_dtype)) if traits.expert_bias else None
        self.register_parameter("bias", bias)
        biased = traits.sigmoid_router and not hashed
        choice = torch.nn.Parameter(torch.zeros(num_experts), requires_grad=False) if biased else None
        self.register_parameter("expert_bias", choice)
        size, table = (model.vocab_size, model.moe.top_k), None
        if hashed:
            table = torch.nn.Parameter(torch.zeros(size, dtype=torch.int64), requires_grad=False)
        self.register_parameter("table", table)
        scale = torch.nn.Parameter(torch.ones(num_experts, dtype=config.params_dtype)) if traits.branch_norms else None
        self.register_parameter("expert_scale", scale)
        for param in (self.weight, bias, scale):
            if param is not None:
                param.sequence_parallel = config.sequence_parallel


class ExpertBias(torch.nn.Module):
    """`bias`, Megatron's name for a parameter without weight decay."""

    def __init__(self, config: LayerConfig, shape: tuple[int, ...]):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))


class Experts(torch.nn.Module):
    """This rank's experts: gate_up [E / ep, 2, F, H], down [E / ep, H, F], where H is the experts' own width. Without a
    gate the axis of gate and up has one entry. In some families with biases [E / ep, 2, F] and [E / ep, H]."""

    def __init__(self, config: LayerConfig, model: ModelConfig, layout: Layout):
        super().__init__()
        self.layout, self.has_bias, self.invariant = layout, model.traits.expert_bias, model.invariant
        self.gate = clamped_gate if model.traits.clamped_gate else GATES[model.traits.activation]
        if model.invariant:
            self.gate = partial(kernels.swiglu, by_rows=True)
        if model.moe.gate_limit:
            self.gate = partial(kernels.gated, activation=config.activation_func, limit=model.moe.gate_limit)
        local, width, hidden = model.moe.num_experts // layout.expert, model.expert_ffn, model.expert_hidden
        self.gate_up = torch.nn.Parameter(torch.zeros(local, model.mlp_parts, width, hidden, dtype=config.params_dtype))
        self.down = torch.nn.Parameter(torch.zeros(local, hidden, width, dtype=config.params_dtype))
        if self.has_bias:
            self.linear_fc1 = ExpertBias(config, (local, 2, width))
            self.linear_fc2 = ExpertBias(config, (local, hidden))
        for param in self.parameters():
            param.allreduce = False  # gradients are summed over the expert data-parallel ranks
        self.gate_up_adapters: Adapters | None = None  # `lora.attach` may give some
        self.down_adapters: Adapters | None = None

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        """Compute x [M, H] by expert, sizes int64 [E / ep] -> [M, H]."""
        mixed = self._product(x, self.gate_up, self.gate_up_adapters, sizes)
        if not self.has_bias:
            return self._product(self.gate(mixed), self.down, self.down_adapters, sizes)
        mixed = add_bias(mixed, self.linear_fc1.bias.flatten(1, 2), sizes)
        out = self._product(self.gate(mixed), self.down, self.down_adapters, sizes)
        return add_bias(out, self.linear_fc2.bias, sizes)

    def _product(self, x: Tensor, weight: Tensor, adapters: Adapters | None, sizes: Tensor) -> Tensor:
        """Multiply x [M, in] by expert with weight [E / ep, ..., in] -> [M, out]."""
        held = held_by(weight)

        def product(x: Tensor) -> Tensor:
            dense = weight if held is None else held.dense(x.dtype)
            return grouped_linear(x, dense.flatten(1, -2), sizes, self.invariant)

        # a frozen one is made dense again in backward, not kept until then
        out = product(x) if held is None else checkpoint(product, x, use_reentrant=False)
        return adapters.add_experts(x, out, sizes) if adapters is not None and adapters.on else out

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        """Shard axis 0 over expert ranks, after any axes that Megatron prepends."""
        layout, before, shards = self.layout, len(sharded_offsets), {}
        own, replica = (before, layout.ep_rank, layout.expert), (0, 0, layout.copies(True).rank())
        for name, param in self.named_parameters():
            shards[prefix + name] = ShardedTensor.from_rank_offsets(
                prefix + name, param, *sharded_offsets, own, replica_id=replica, prepend_axis_num=before
            )
        return shards


class ExpertLayer(torch.nn.Module):
    """Replacement of Megatron's MLP: hidden [N, 1, H] (a 1/TP share of N with sequence parallelism) -> the same
    shape, without bias. In some families one more MLP computes every token (`shared_experts`). In some, one matrix
    narrows this rank's tokens before they go to experts, and another widens the experts' output again. In some, router,
    experts and that MLP have norms of their own (`rows.BRANCH_NORMS`), and see what no other norm changed."""

    def __init__(self, config: LayerConfig, model: ModelConfig, layout: Layout, hashed: bool = False, **unused: Any):
        super().__init__()
        self.model, self.moe, self.layout = model, model.moe, layout
        self.router = Router(config, model, hashed)
        self.experts = Experts(config, model, layout)
        width, latent = model.moe.shared_ffn_hidden_size, model.moe.latent_size
        self.fc1_latent_proj = SharedLinear(config, model.hidden_size, latent) if latent else None
        self.fc2_latent_proj = SharedLinear(config, latent, model.hidden_size) if latent else None
        self.shared_experts = None
        if width:
            kind = GatedShared if model.traits.shared_gate else GatedMLP
            matrices = MLPSubmodules(linear_fc1=config.column, linear_fc2=config.row)
            own = with_fields(config, ffn_hidden_size=width)
            self.shared_experts = kind(own, matrices, tp_group=layout.pgs.tp)
        norms = BRANCH_NORMS if model.traits.branch_norms else ()
        for name in (*norms, "post_layernorm") if model.traits.post_norms else norms:
            setattr(self, name, config.norm(config, config.hidden_size, config.layernorm_epsilon))
        self.counting = False  # also in passes without gradient
        # f of the auxiliary loss; None: of each micro-batch or the step so far, with those that the ranks of `peers`
        # compute meanwhile
        self.fractions: Tensor | None = None
        self.peers = layout.pgs.tp_cp
        self.tokens = 0.0  # T of the minibatch
        self.set_layer_number(1)
        self.reset()

    def set_layer_number(self, number: int) -> None:
        """Take the layer's number, which Megatron counts from 1 over all pipeline stages."""
        own = self.model.rank_layers(self.layout)[self.layout.pp_rank]
        # among the layers with experts of this stage
        self.position = sum("sparse" in self.model.layer_kinds(i) for i in own if i < number - 1)

    def reset(self) -> None:
        """Forget the counts."""
        self.pairs: Tensor | float = 0.0  # float64 [E]: pairs by expert, a token as often as it counts
        self.probs: Tensor | float = 0.0  # float64 [E]: sum of p over tokens
        self.routed, self.computed = 0, torch.zeros((), dtype=torch.int64)  # pairs sent off, pairs that experts got
        # float64 [2]: tokens with experts of the engine's choice, and those that the router would have sent elsewhere
        self.replays: Tensor | None = None

    def forward(self, hidden: Tensor, padding_mask: Times, **unused: Any) -> tuple[Tensor, None]:
        """Compute the layer. `padding_mask` (Megatron's name) is of the tokens that this rank sends to experts."""
        times, traits = padding_mask, self.model.traits
        routed, entering, shared = hidden[:, 0], None, hidden
        if self.fc1_latent_proj is not None:
            entering = self.fc1_latent_proj(routed)
        if traits.branch_norms:
            entering, shared = self.experts_layernorm(hidden)[:, 0], self.shared_layernorm(hidden)
            routed = self.router_layernorm(hidden)[:, 0] * hidden.shape[2] ** -0.5
        x = self._own(routed, times)
        y = x if entering is None else self._own(entering, times)
        routing, sizes = self._route(x, times)
        weights = self._balance(routing, times.count)
        if self.shared_experts is not None:  # before the host waits
            shared = self.shared_experts(shared)[0]
        groups, number, rows = self.layout.expert_groups, self.moe.num_experts, sizes()
        if groups and self.training and not torch.is_grad_enabled():
            times.sent[self] = routing.experts, rows
        out = through(y, weights, routing.experts, number, groups, rows, self._compute)
        if times.real is not None:
            out = out.new_zeros(len(hidden), out.shape[1]).index_copy(0, times.real, out)
        if self.divides:
            out = reduce_from_tensor_model_parallel_region(out, group=self.layout.pgs.tp)
        out = (out if self.fc2_latent_proj is None else self.fc2_latent_proj(out))[:, None]
        if self.shared_experts is not None:
            if traits.branch_norms:
                out, shared = self.experts_post_layernorm(out), self.shared_post_layernorm(shared)
            out = out + shared
        return self.post_layernorm(out) if traits.post_norms else out, None

    @property
    def divides(self) -> bool:
        """Whether every tensor rank sees all tokens, of which each sends some to experts."""
        return self.layout.tensor > 1 and not self.layout.sequence

    def _own(self, x: Tensor, times: Times) -> Tensor:
        """Return x of the tokens that this rank sends to experts."""
        x = self._copied(x)
        return x if times.real is None else kernels.collect(x, times.real)

    def _copied(self, x: Tensor) -> Tensor:
        """Return x, whose gradient is the sum of the tensor ranks' where they divide the tokens. With sequence
        parallelism Megatron sums those of the router at the end of the step."""
        return copy_to_tensor_model_parallel_region(x, group=self.layout.pgs.tp) if self.divides else x

    def _route(self, x: Tensor, times: Times) -> tuple[Routing, Callable[[], list[int]]]:
        """Route x [n, H] of own tokens -> their routing, and what returns `exchange_sizes`. A layer that is recomputed
        has the experts of its first pass, as other ranks know their numbers."""
        replay, learns = times.replay, self._learns()
        replayed = None if replay is None else ReplayedExperts(replay.experts[self.position], replay.known)
        experts, rows = times.sent.pop(self, (None, None)) if learns else (None, None)
        again = experts is not None and ReplayedExperts(experts, torch.ones_like(experts[:, 0], dtype=torch.bool))
        routing = self._choose(x, times, again or replayed)
        if replayed is not None and (self.counting or learns):
            both = torch.stack([replayed.known, replayed.known & rerouted(routing)]).double() @ times.count.double()
            self.replays = both if self.replays is None else self.replays + both
        if self.counting or learns:
            self.routed += routing.experts.numel()
        if not self.layout.expert_groups:
            rows = [routing.experts.numel()]
        if rows is not None:
            return routing, lambda: rows
        return routing, exchange_sizes(routing.experts, self.moe.num_experts, self.layout.expert_groups)

    def _choose(self, x: Tensor, times: Times, replayed: ReplayedExperts | None) -> Routing:
        own = self.router.weight, self.router.bias, self.router.expert_scale
        router, bias, scale = [x if x is None else self._copied(x) for x in own]
        if not self.model.traits.sigmoid_router:
            settings = self.moe.top_k, self.moe.norm_topk_prob, bias, replayed, scale, self.model.invariant
            return route(x, router, *settings)
        own = None if self.router.table is None else self.router.table[times.tokens]
        score = root_softplus if self.model.traits.root_scores else torch.sigmoid
        return route_by_groups(x, router, self.router.expert_bias, self.moe, replayed, score, own)

    def _compute(self, x: Tensor, counts: Tensor) -> Tensor:
        """Compute x [M, H] by expert, counts int64 [E / ep]."""
        if self.counting or self._learns():
            self.computed = self.computed + counts.sum()
        return self.experts(x, counts)

    @property
    def chooses(self) -> bool:
        """Whether scores choose the experts, not the table of token ids."""
        return self.router.table is None

    def _learns(self) -> bool:
        return self.training and torch.is_grad_enabled()  # recomputed layers: only the second time

    def _balance(self, routing: Routing, times: Tensor) -> Tensor:
        """Count pairs, and attach the auxiliary loss to the routing weights."""
        if not (self.counting or self._learns()):
            return routing.weights
        chosen = torch.zeros(self.moe.num_experts, dtype=torch.float64, device=times.device)
        chosen.index_add_(0, routing.experts.flatten(), times.double().repeat_interleave(self.moe.top_k))
        self.pairs = self.pairs + chosen
        self.probs = self.probs + times.double() @ routing.probs.detach().double()
        if not self.moe.aux_coef or not self._learns() or not self.chooses:
            return routing.weights
        fractions = self.fractions
        if fractions is None:
            if self.moe.aux_over == "running":
                chosen = self.pairs.clone()
            if self.peers.size() > 1:
                dist.all_reduce(chosen, group=self.peers)
            fractions = (chosen / chosen.sum().clamp_min(1)).float()
        loss = balance_loss(times @ routing.probs / self.tokens, fractions)
        return add_loss(routing.weights, self.moe.aux_coef * loss)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        entries: dict[str, Any] = {}
        whole = "router", "fc1_latent_proj", "fc2_latent_proj", *BRANCH_NORMS, "post_layernorm"  # on every tensor rank
        for name in whole:
            if (module := getattr(self, name, None)) is not None:
                at = f"{prefix}{name}."
                entries |= checkpoint_entries(module, at, sharded_offsets, metadata, self.layout.pgs.tp)
        for name in ("experts", "shared_experts"):
            if (module := getattr(self, name)) is not None:
                entries |= module.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return entries


class GatedShared(GatedMLP):
    """An MLP whose output is multiplied by the sigmoid of one more product, `gate_weight` [1, H] on every rank."""

    def __init__(self, config: LayerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.gate_weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.gate_weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor, **unused: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(hidden)
        return out * torch.nn.functional.linear(hidden, self.gate_weight).sigmoid(), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        """Add the gate, as Megatron's method covers only the modules inside."""
        gate = checkpoint_entries({"gate_weight": self.gate_weight}, prefix, sharded_offsets, metadata, self.tp_group)
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | gate
