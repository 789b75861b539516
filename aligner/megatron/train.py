"""A sharded model that runs forward passes and optimizer steps: Megatron's schedules, DDP and optimizer behind two
calls.

The one rule of loss scale lives here. A loss function returns its micro-batch's share of the minibatch loss, already
divided by the denominator of the WHOLE minibatch (over all data-parallel ranks). Micro-batches and ranks then simply
add: `calculate_per_token_loss` turns Megatron's own rescaling off, and `_finalize` never passes it a token count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from aligner.config.megatron_fields import DDP, OPTIMIZER, fields_of
from aligner.config.on_demand import on_demand
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.optim import OptimConfig
from aligner.errors import AlignerError
from aligner.megatron.attention import Stream
from aligner.megatron.collectives import sum_parts
from aligner.megatron.expert_load import ExpertLoad
from aligner.megatron.groups import Layout
from aligner.megatron.indexer_loss import IndexerLoss
from aligner.megatron.lora import AdaptedModel, MergedWeights, SplitWeights, attach
from aligner.megatron.model import Head, build_model, resolve_dtype
from aligner.megatron.mtp import AheadLoss
from aligner.megatron.optimizer_state import fuse
from aligner.megatron.pipeline import Pipeline
from aligner.megatron.quantized_base import hold, share_frozen
from aligner.megatron.update import know_norms_apart, use_few_passes
from aligner.megatron.weights import EMBEDDING, WeightSource, load_weights, local_parameters
from aligner.models.rope import attention_factor, inverse_frequencies, query_factors
from aligner.ops.kernels.frozen import Frozen
from aligner.ops.kernels.invariant import by_rows, linear
from aligner.ops.kernels.products import shape_step
from aligner.ops.kernels.scored_attention import scaled_logits
from aligner.ops.kernels.upload import upload
from aligner.ops.packing.needed import narrowed, without_unread
from aligner.ops.packing.pack import Packing, Times, pack
from aligner.ops.packing.routing import RoutingReplay
from aligner.ops.packing.windows import windowed
from aligner.ops.reduce import max_over
from aligner.ops.schedules import lr_at
from aligner.types import LossOutput, ScalarMetrics, TeacherTargets, TrainBatch

if TYPE_CHECKING:
    from aligner.megatron.ema import Ema
    from aligner.megatron.user_buffers import UserBuffers

# (what the last stage gives for each token of its stream, micro-batch with its `packing`): hidden states [N, H] for
# `over_logits` with a language-model head, [N, K] with a scalar head
LossFunction = Callable[[Tensor, TrainBatch], LossOutput]


FILLER = TrainBatch(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2]), torch.zeros(1, 0))


def last_hidden(hidden_states: Tensor, **unused) -> Tensor:
    """Return [N, 1, H] unchanged: Megatron's hook in place of its output layer."""
    return hidden_states


def _finalize(wrapped, model, num_tokens=None, pg_collection=None, force_all_reduce=False) -> None:
    """Reduce gradients as Megatron does, without its division by a token count: denominators are in the loss."""
    finalize_model_grads([wrapped], None, pg_collection=pg_collection, force_all_reduce=bool(force_all_reduce))


class ShardedModel:
    """One model on one layout; with `optim` also its gradients and optimizer."""

    def __init__(
        self,
        cfg: ModelConfig,
        layout: Layout,
        head: Head,
        dtype: torch.dtype,
        device: torch.device,
        source: WeightSource | ShardedModel,
        optim: OptimConfig | None = None,
        total_steps: int = 0,
        packed: bool = True,
        share: bool = False,
        seed: int = 0,
        restore: Callable[[ShardedModel], None] | None = None,
        factors: WeightSource | None = None,
        buffers: UserBuffers | None = None,
        logits_bytes: int = 1 << 28,  # of a layer that predicts further tokens (`over_logits`)
    ):
        """Build the model and load its weights.

        `restore` loads weights over those of `source`. `seed` is that of adapters, which a model with `optim` has if
        `cfg.lora` says so, unless they start with `factors`. If `source` is a model with adapters, this one shares its
        frozen parameters, and a score head starts at zero. `buffers` are those of its linear layers' messages.
        """
        self.cfg, self.layout, self.head, self.device, self.dtype = cfg, layout, head, device, dtype
        self.module, self.buffers = build_model(cfg, layout, head, dtype, device, buffers), buffers
        self.trunk = source if isinstance(source, ShardedModel) else None  # whose frozen weights these are
        if self.trunk is None:
            load_weights(self.module, cfg, layout, head, source)
        else:
            share_frozen(self.module, self.trunk.module)
        self.optim, self.total_steps, self.packed, self.share = optim, total_steps, packed, share
        self.optimizer: MegatronOptimizer | None = None
        self.ema: Ema | None = None  # of the weights, from the step after which it is set
        self.adapted: AdaptedModel | None = None  # instead of all weights its adapters are trained
        self.step_count = 0  # optimizer steps taken: the weight version
        if restore is not None:
            restore(self)
        holds = optim is not None and cfg.lora.quantize_base != "none" and self.trunk is None
        self.held: list[Frozen] = hold(self.module, cfg) if holds else []  # matrices in 4 or 8 bits
        if optim is not None and cfg.lora.rank:
            self.adapted = attach(self.module, cfg, layout, head, seed)
            if factors is not None:
                self.adapted.start_from(factors)
        self.load = ExpertLoad(self.module.decoder, cfg.moe, layout)
        self.indexer_loss, self.ahead = IndexerLoss(self.module, cfg, layout), AheadLoss(self, logits_bytes)
        self._frequencies = {local: inverse_frequencies(cfg, local).to(device) for local in (False, True)}
        # Megatron's plain optimizer cannot save float32 parameters beside bfloat16 ones, its distributed one can
        mixed = head.kind == "score" or (cfg.lora.dora if self.adapted else cfg.traits.trains_float32)
        self._distributed = optim is not None and optim.is_sharded(mixed and dtype == torch.bfloat16)
        if optim is None:
            self.module.eval().requires_grad_(False)
            self.wrapped = self.module
        else:
            self.wrapped = self._wrap(optim)
            self.optimizer = self._build_optimizer(optim)
        # in these layouts a row is on several ranks
        self._narrows = not (layout.context > 1 or layout.sequence) and cfg.narrows
        in_turns = layout.virtual_stages if layout.virtual_stages > 1 else None
        self._schedule = get_forward_backward_func(pp_size=layout.pipeline, vp_size=in_turns)

    @property
    def exchanges(self) -> bool:
        """Whether data-parallel ranks need each other in every forward pass: each has a share of the experts."""
        return self.layout.expert > 1 and bool(self.cfg.moe.num_experts)

    def weights(self) -> Mapping[str, Tensor]:
        """Return canonical name -> this rank's shard as engines and files need it, with adapters merged. Collective
        over tensor ranks."""
        named = self._own_weights()
        return named if self.adapted is None else MergedWeights(named, self.adapted)

    def split_weights(self) -> Mapping[str, Tensor]:
        """Return the same of a model with adapters: the frozen weights, and the factors that change them. Collective
        over tensor ranks."""
        assert self.adapted is not None, "a model without adapters has no factors"
        return SplitWeights(self._own_weights(), self.adapted)

    def _own_weights(self) -> dict[str, torch.nn.Parameter]:
        named = local_parameters(self.module)
        if self.module.share_embeddings_and_output_weights and not self.module.pre_process:
            named.pop(EMBEDDING, None)  # the last stage's copy
        return named

    def _wrap(self, optim: OptimConfig) -> DistributedDataParallel:
        self.module.train()
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=optim.gradient_dtype == "float32",
            use_distributed_optimizer=self._distributed,
            overlap_grad_reduce=True,  # each bucket travels while the last micro-batch's backward goes on
            check_for_nan_in_grad=False,  # `step` refuses a gradient norm that is not finite
            **fields_of("optim", DDP, optim.megatron),
        )
        config = self.module.config
        wrapped = DistributedDataParallel(config, ddp, self.module, pg_collection=self.layout.pgs)
        config.finalize_model_grads_func = partial(_finalize, wrapped)
        config.no_sync_func = wrapped.no_sync
        return wrapped

    def _build_optimizer(self, optim: OptimConfig) -> MegatronOptimizer:
        own = fields_of("optim", OPTIMIZER, optim.megatron)
        own |= {name: resolve_dtype(value) for name, value in own.items() if name.endswith("_dtype")}
        if own.get("use_precision_aware_optimizer"):
            # turns off use_precision_aware_optimizer_no_fp8_or_ds_fp8, by which Adam would have the float32 weights too
            own["fp8_recipe"] = "tensorwise"
        fields = own | {
            "lr": optim.lr,
            "min_lr": optim.min_lr,
            "weight_decay": optim.weight_decay,
            "adam_beta1": optim.betas[0],
            "adam_beta2": optim.betas[1],
            "adam_eps": optim.eps,
            "clip_grad": optim.clip_grad,
            "bf16": self.dtype == torch.bfloat16,
            "params_dtype": self.dtype,
            "use_distributed_optimizer": self._distributed,
        }
        if optim.name == "adam":
            config, pgs = OptimizerConfig(optimizer="adam", **fields), self.layout.pgs
            optimizer = get_megatron_optimizer(config, [self.wrapped], use_gloo_process_groups=False, pg_collection=pgs)
        else:
            optimizer = on_demand(f"optim.name={optim.name}")(self, optim, **fields)
        fuse(optimizer)
        use_few_passes()
        know_norms_apart(optimizer, self.ahead.learns and self.cfg.mtp.detach)
        return optimizer

    def _prepare(self, micro_batch: TrainBatch) -> tuple[TrainBatch, Stream]:
        """Return a micro-batch on the device with its `packing`, and what attention needs of it."""
        batch = micro_batch.trim()
        packing, window = self._pack(batch), self.cfg.attention.window
        near = windowed(packing, window).additive(self.dtype) if window else None
        each = times = None
        if self.cfg.moe.num_experts:  # once for all layers, by the host
            each = packing.times()
            times = self._times(batch, packing, each)
            if micro_batch is FILLER:
                each, times = torch.zeros_like(each), replace(times, count=torch.zeros_like(times.count))
        ahead = self.ahead.pairs(packing, batch)
        packing, batch = packing.additive(self.dtype), replace(batch, routing=None)
        if not self.layout.is_last_stage:
            batch = batch.without(TeacherTargets)
        batch, packing, near, times, each, ahead = upload([batch, packing, near, times, each, ahead], self.device)
        local = None if near is None else self._rotated(near, True)
        stream = replace(self._rotated(packing, False), local=local, times=times, each=each, ahead=ahead)
        return replace(batch, packing=packing), stream

    def _times(self, batch: TrainBatch, packing: Packing, each: Tensor) -> Times:
        """Return this tensor rank's share of the stream: with sequence parallelism of all tokens, of which its layers
        see no others, else of those that are no padding."""
        ranks, rank, first = self.layout.tensor, self.layout.tp_rank, 0
        if self.layout.sequence:
            each = each.chunk(ranks)[rank]
            first, ranks, rank = rank * len(each), 1, 0
        times = Times.of(each, ranks, rank)
        sent = first + (torch.arange(len(each)) if times.real is None else times.real)  # in the stream
        if self.cfg.moe.hash_layers:
            times = replace(times, tokens=batch.tokens.view(-1)[packing.source[sent]])
        if batch.routing is None:
            return times
        own = self.cfg.rank_layers(self.layout)[self.layout.pp_rank]
        here = batch.routing[:, :, torch.tensor([layer in own for layer in self.cfg.layers_of("sparse")])]
        return replace(times, replay=RoutingReplay.of(packing, here, batch.lengths, sent))

    def _pack(self, batch: TrainBatch) -> Packing:
        layout = self.layout
        laid = partial(
            pack,
            batch.lengths,
            batch.tokens.shape[1],
            padded=not self.packed,
            context=layout.context,
            rank=layout.pgs.cp.rank(),
            over_heads=layout.over_heads,
            # the last token that rows share has several next ones
            share=batch.tokens if self.share and not self.ahead.learns else None,
            routing=batch.routing,
            ragged=self.module.config.rows is not None,
            segments=bool(self.cfg.linear.key_heads),
        )
        own = self._round(int(batch.lengths.sum()))
        packing = laid(multiple=layout.tensor * self.cfg.fp8_step if layout.sequence else own)
        if self.buffers is not None and self.buffers.lacks_few(packing.tokens):
            packing = laid(multiple=self.buffers.tokens)
        if batch.wanted is not None and layout.is_last_stage:
            packing = without_unread(packing, batch.wanted, self._round)
            less = narrowed(packing, batch.wanted, self._round) if self._narrows else packing
            if less.final is None or len(less.final.kept) % self.cfg.fp8_step == 0:
                packing = less
        return packing

    def _round(self, count: int) -> int:
        """Return the number of which `count` tokens should be a multiple."""
        # ranks that compute a row together must agree, whatever processors they have
        alone = self.layout.tensor * self.layout.context * self.layout.pipeline == 1
        return max(shape_step(count, self.device, self.dtype) if alone else 1, self.cfg.fp8_step)  # powers of two

    def _rotated(self, packing: Packing, local: bool) -> Stream:
        angles = packing.positions[:, None].float() * self._frequencies[local]
        scale = attention_factor(self.cfg, local)
        functions = (partial(by_rows, f) if self.cfg.invariant else f for f in (torch.cos, torch.sin))
        cos, sin = ((f(angles) * scale).to(self.dtype)[:, None] for f in functions)
        factors = query_factors(self.cfg, packing.positions[:, None, None])
        group = self.layout.pgs.cp if self.layout.context > 1 else None
        return Stream(packing, cos, sin, group, self.layout.over_heads, factors=factors)

    def over_logits(
        self,
        hidden: Tensor,
        batch: TrainBatch,
        read: Callable[..., Tensor],
        budget_bytes: int,
        beside: Sequence[Tensor] = (),
        numbers: int = 3,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Apply `read(logits [n, V_local], targets [n], ...) -> [n, ...]` to all predictions. Returns [B, T, ...] on
        every context rank (index t: of tokens[t]; 0 where the token before it is not `wanted`). `read` also gets, of
        each [B, T, ...] in `beside`, the entries at its predictions, [n, ...].

        Logits, with the softmax and the gradient made of them (`numbers` float32 for each), take at most
        `budget_bytes` at a time. They are made in parts, and if more than one, again in backward.

        hidden [N, H] of the last stage (a 1/TP share with sequence parallelism; [K, H] with a `Final`). `weight`: in
        place of the model's output matrix.
        """
        weight = self.head_weight if weight is None else weight
        if not self.layout.sequence:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.layout.pgs.tp)
        hidden = self._predicting(hidden, batch)
        others = [batch.tokens, *beside]
        others = [x.flatten(0, 1).index_select(0, batch.packing.targets) for x in others]

        def read_chunk(hidden: Tensor, targets: Tensor, *beside: Tensor) -> Tensor:
            return read(scaled_logits(product(hidden, weight), scales), targets, *beside)

        scales, product = self.cfg.scales, linear if self.cfg.invariant else torch.nn.functional.linear
        numbers += 2 * bool(scales.logits_softcap)
        step = max(1, budget_bytes // (4 * numbers * len(weight)))
        parts = list(zip(*(x.split(step) for x in (hidden, *others)), strict=True))
        if len(parts) == 1 or not torch.is_grad_enabled():
            outputs = [read_chunk(*p) for p in parts]
        else:
            outputs = [checkpoint(read_chunk, *p, use_reentrant=False) for p in parts]
        return self._everywhere(batch.packing.predictions(outputs[0] if len(outputs) == 1 else torch.cat(outputs)))

    def over_hidden(self, hidden: Tensor, batch: TrainBatch) -> Tensor:
        """Return the hidden states from which `over_logits` makes logits, [B, T, H] likewise."""
        return self._everywhere(batch.packing.predictions(self._predicting(hidden, batch)))

    def _predicting(self, hidden: Tensor, batch: TrainBatch) -> Tensor:
        """Return the hidden states of the pairs, or of all tokens of the stream, with sequence parallelism from all
        tensor ranks."""
        if self.layout.sequence:
            group = self.layout.pgs.tp
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
        return hidden if batch.packing.outputs is None else hidden.index_select(0, batch.packing.outputs)

    @property
    def head_weight(self) -> Tensor:
        """[V_local, H], of the last stage."""
        tied = self.module.share_embeddings_and_output_weights
        return self.module.shared_embedding_or_output_weight() if tied else self.module.output_layer.weight

    def to_rows(self, x: Tensor, packing: Packing, shift: bool) -> Tensor:
        """Return x [N, ...] of this rank's stream as [B, T, ...] on every context rank, with the shift of
        `Packing.to_rows`."""
        return self._everywhere(packing.to_rows(x, shift))

    def _everywhere(self, rows: Tensor) -> Tensor:
        return sum_parts(rows, self.layout.pgs.cp if self.layout.context > 1 else None)

    def _run(self, micro_batches: Sequence[TrainBatch], collect: Callable, forward_only: bool, non_loss: bool) -> list:
        def forward_step(iterator, model):
            batch, stream = next(iterator)
            packing = batch.packing
            tokens = batch.tokens.view(-1)[packing.source]
            language = self.head.kind == "lm"
            options = {"output_processor": last_hidden} if language else {}
            output = model(tokens[None], packing.positions[None], None, packed_seq_params=stream, **options)
            if model is self.wrapped or model.post_process:  # not one of several stages of a rank before the last
                output = self.ahead.attached(output, batch, stream)
            return output, lambda output, **kwargs: collect(output[:, 0] if language else output[0], batch, **kwargs)

        arguments = {
            "forward_step_func": forward_step,
            "data_iterator": map(self._prepare, micro_batches),
            "model": [self.wrapped],
            "num_microbatches": len(micro_batches),
            "seq_length": micro_batches[0].tokens.shape[1],
            "micro_batch_size": micro_batches[0].tokens.shape[0],
            "forward_only": forward_only,
            "collect_non_loss_data": non_loss,
            "pg_collection": self.layout.pgs,
        }
        if self.layout.pipeline == 1:
            return self._schedule(**arguments)
        prepared, streams = arguments["data_iterator"], self.cfg.hyper.streams or 1
        pipeline = Pipeline(self.layout, self.module.config, prepared, len(micro_batches), streams)
        feeds = pipeline.feeds()
        arguments |= {"data_iterator": feeds[0], "p2p_communicator": pipeline}
        if len(feeds) > 1:
            arguments |= {"data_iterator": feeds, "model": self.module.stages()}
        outputs = self._schedule(**arguments)
        self.module.set_input_tensor([None])  # else the stage keeps what it received last, with its gradient
        return outputs

    @torch.no_grad()
    def forward(
        self, micro_batches: Sequence[TrainBatch], read: Callable[[Tensor, TrainBatch], Tensor]
    ) -> list[Tensor]:
        """Return `read(head output, micro-batch)` of every micro-batch, without gradient; empty on all but the last
        stage. With `exchanges` collective over data-parallel ranks too; they may pass different numbers of
        micro-batches."""

        def collect(output: Tensor, batch: TrainBatch, non_loss_data: bool) -> Tensor:
            return read(output, batch)

        padded = [*micro_batches, *self._fillers(len(micro_batches), self._most(len(micro_batches))[0])]
        was_training = self.wrapped.training
        self.wrapped.eval()
        try:
            return self._run(padded, collect, forward_only=True, non_loss=True)[: len(micro_batches)]
        finally:
            self.wrapped.train(was_training)

    def _fillers(self, own: int, most: int) -> list[TrainBatch]:
        """Return micro-batches of one short row, as many as this rank has fewer than others that it exchanges tokens
        with. Stages that take turns do so after as many as there are ranks."""
        if self.layout.virtual_stages > 1:
            most = -(-most // self.layout.pipeline) * self.layout.pipeline
        return [FILLER] * (most - own)

    def _most(self, *counts: int) -> list[int]:
        """Return the largest of each count over the ranks that this one exchanges tokens with. It runs on the CPU:
        nobody waits for the device."""
        if not self.exchanges:
            return list(counts)
        return max_over(torch.tensor(counts), self.layout.pgs.dp).tolist()

    def _look(self, micro_batches: Sequence[TrainBatch]) -> None:
        """Run a forward pass for its side effects."""
        padded = [*micro_batches, *self._fillers(len(micro_batches), len(micro_batches))]
        self._run(padded, lambda output, batch, non_loss_data: None, forward_only=True, non_loss=True)

    def step(self, micro_batches: Sequence[TrainBatch], loss: LossFunction) -> ScalarMetrics:
        """Run forward, backward and one optimizer step over this rank's micro-batches of one minibatch.

        Returns the reduced `means` and `maxima` of the loss function, `loss`, `grad_norm` and `lr`, the same on every
        rank. Raises AlignerError on every rank if the gradient is not finite.
        """
        assert self.optimizer is not None, "this model was built without an optimizer"
        most, least = self._most(len(micro_batches), -len(micro_batches))
        assert most == -least, f"{len(micro_batches)} micro-batches here, elsewhere {-least} to {most}"
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.adapted is not None:
            self.adapted.begin(self.step_count)

        self.load.begin(micro_batches, lambda: self._look(micro_batches))
        self.indexer_loss.begin(micro_batches)
        self.ahead.begin(micro_batches)

        # first, as gradients are reduced while those of the last one come, which has all
        fillers, numbers = self._fillers(most, most), count()

        def collect(output: Tensor, batch: TrainBatch):
            if next(numbers) < len(fillers):
                return output.sum() * 0, torch.zeros((), dtype=torch.int, device=output.device), None
            out = loss(output, batch)
            return out.loss, torch.zeros((), dtype=torch.int, device=output.device), out.detached()

        outputs: list[LossOutput] = self._run([*fillers, *micro_batches], collect, forward_only=False, non_loss=False)
        outputs = outputs[len(fillers) :]
        lr = lr_at(self.step_count, self.optim, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.optim.weight_decay * group.get("wd_mult", 1.0)
        applied, grad_norm, _ = self.optimizer.step()
        assert applied, "the optimizer refused the step"
        self.step_count += 1
        norm = 0.0 if grad_norm is None else float(grad_norm)  # with TransformerEngine it is on the device
        stats = (
            self._reduce(outputs) | self.load.metrics() | self.indexer_loss.metrics() | {"grad_norm": norm, "lr": lr}
        ) | self.ahead.metrics()
        if self.adapted is not None:
            stats["lora/b_norm"] = self.adapted.b_norm()
        if not math.isfinite(stats["grad_norm"]):  # the same on every rank, and the weights are lost
            raise AlignerError(
                f"gradient norm {stats['grad_norm']} at optimizer step {self.step_count} (loss {stats['loss']}, lr "
                f"{lr:g}): expected a finite number. Resume from the last checkpoint with a lower optim.lr"
            )
        if self.ema is not None:
            self.ema.update()
        return stats

    def _reduce(self, outputs: list[LossOutput]) -> ScalarMetrics:
        """Sum micro-batches and data-parallel ranks, then hand the last stage's numbers to the other stages."""
        metrics: list[ScalarMetrics | None] = [None]
        if self.layout.is_last_stage:
            metrics = [reduce_outputs(outputs, self.layout.pgs.dp)]
        if self.layout.pipeline > 1:
            dist.broadcast_object_list(metrics, src=self.layout.last_stage_rank, group=self.layout.pgs.pp)
        assert metrics[0] is not None
        return metrics[0]

    def broadcast_from_last_stage(self, tensor: Tensor) -> Tensor:
        """Broadcast the last stage's `tensor` to every pipeline stage (other stages pass one of the same shape and
        dtype)."""
        if self.layout.pipeline > 1:
            dist.broadcast(tensor, src=self.layout.last_stage_rank, group=self.layout.pgs.pp)
        return tensor


def reduce_outputs(outputs: list[LossOutput], group: dist.ProcessGroup) -> ScalarMetrics:
    """Reduce over micro-batches and `group`: means as sum of numerators over sum of denominators (0/0 is NaN), maxima
    by max. Micro-batches of different losses have different names; each kind is on every rank."""
    means = list(dict.fromkeys(name for out in outputs for name in out.means))
    maxima = list(dict.fromkeys(name for out in outputs for name in out.maxima))
    zero = torch.zeros((), device=outputs[0].loss.device)
    none, least = (zero, zero), zero - math.inf
    rows = [[out.loss.float()] + [term.float() for n in means for term in out.means.get(n, none)] for out in outputs]
    sums = torch.stack([torch.stack(row) for row in rows]).sum(0)
    each = [[out.maxima.get(n, least).float() for n in maxima] for out in outputs]
    tops = torch.stack([torch.stack(row) for row in each]).amax(0) if maxima else None
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
        if tops is not None:
            dist.all_reduce(tops, op=dist.ReduceOp.MAX, group=group)
    both = sums if tops is None else torch.cat([sums, tops])
    values = both.tolist()  # the host waits for the device: these are the metrics of the step
    result = {"loss": values[0]}
    for i, name in enumerate(means):
        result[name] = values[1 + 2 * i] / values[2 + 2 * i] if values[2 + 2 * i] else math.nan
    return result | dict(zip(maxima, values[len(sums) :], strict=True))
