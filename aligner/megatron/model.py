"""Build one pipeline stage of a GPTModel with a language-model head or a scalar head, from the typed config."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import megatron.core.extensions.transformer_engine as te
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.kernels import te_lacks
from aligner.config.sections.optim import OptimConfig
from aligner.errors import ConfigError, MissingExtraError
from aligner.megatron import transformer_engine, varlen
from aligner.megatron.attention import GatedMLP, RMSNorm, Stream, StreamAttention, residual_adder
from aligner.megatron.entries import EntryAttention
from aligner.megatron.groups import Layout
from aligner.megatron.hyper import HyperLayer, JoiningNorm, begin_streams
from aligner.megatron.invariant import InvariantColumn, InvariantRow, use_invariant_products
from aligner.megatron.latent import LatentAttention
from aligner.megatron.linear_attention import LinearAttention
from aligner.megatron.moe import ExpertLayer, StreamLayer
from aligner.megatron.mtp import PredictingLayer
from aligner.megatron.sharing import LayerConfig, checkpoint_entries, with_fields
from aligner.megatron.transformer_engine import TE
from aligner.megatron.variants import (
    LayerInputs,
    NormedAttention,
    NormedMLP,
    ScaledLayer,
    ScaledStreamLayer,
    scale_embeddings,
)
from aligner.models.params import embedding_factor
from aligner.ops.kernels.elementwise import gelu_tanh, relu2
from aligner.ops.kernels.products import use_fast_products

if TYPE_CHECKING:
    from aligner.megatron.user_buffers import UserBuffers

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+\.")
ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu_pytorch_tanh": gelu_tanh, "relu2": relu2}

logging.getLogger("megatron.core").setLevel(logging.ERROR)  # GPTModel logs its deprecation at every construction


@dataclass(frozen=True)
class Head:
    """Layer on the last hidden state: "lm" (vocabulary logits) or "score" (`outputs` float32 numbers per token)."""

    kind: str = "lm"
    outputs: int = 1


@dataclass(frozen=True)
class Offset:
    """A stand-in for Megatron's layout of a pipeline, which would need global process groups."""

    layers: int  # before those of this stage

    def get_layer_offset(self, **unused: Any) -> int:
        return self.layers


def te_kinds(cfg: ModelConfig) -> dict[str, str]:
    """Return `te_lacks` on this machine, or nothing where TransformerEngine is not loaded."""
    return {} if TE.lacks else te_lacks(cfg, transformer_engine.unfused(cfg))


def modules_of(cfg: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return what the model's layers are made of, by the names of `LayerConfig`. Parameters are the same for all."""
    # on the meta device TransformerEngine's modules would take memory
    used = {kind for kind, reason in te_kinds(cfg).items() if not reason and device.type != "meta"}
    column, row = ColumnParallelLinear, RowParallelLinear
    if cfg.invariant:
        column, row = InvariantColumn, InvariantRow
    if "linear layers" in used:
        column, row = (partial(_summing, kind) for kind in (te.TEColumnParallelLinear, te.TERowParallelLinear))
    rows = varlen.flash if varlen.is_used(cfg, dtype, device) else None
    rows = transformer_engine.attend if "attention" in used else rows
    return {"column": column, "row": row, "norm": te.TENorm if "norms" in used else RMSNorm, "rows": rows}


def _summing(kind: type[torch.nn.Module], *sizes: int, config: LayerConfig, **options: Any) -> torch.nn.Module:
    """Make a linear module of TransformerEngine whose backward adds the weight's gradient straight to the sum over
    micro-batches. Other modules refuse these fields."""
    fields = {"gradient_accumulation_fusion": True, "disable_parameter_transpose_cache": True}
    options = {"skip_bias_add": False, "is_expert": False} | options  # which TransformerEngine's lack
    return kind(*sizes, config=with_fields(config, **fields), **options)


def resolve_dtype(name: str) -> torch.dtype:
    """Return the dtype of `name`. auto: bfloat16 where the hardware multiplies it fast (CUDA; CPUs with bf16 units),
    else float32."""
    if name == "auto":
        fast = torch.cuda.is_available() or cpu_has_bf16()
        return torch.bfloat16 if fast else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def cpu_has_bf16() -> bool:
    checks = (getattr(torch.cpu, "_is_amx_tile_supported", None), getattr(torch.cpu, "_is_avx512_bf16_supported", None))
    return any(check() for check in checks if check is not None)


def padded_vocab(vocab_size: int, tensor: int) -> int:
    return -(-vocab_size // tensor) * tensor


def transformer_config(
    cfg: ModelConfig, layout: Layout, dtype: torch.dtype, device: torch.device, overlaps: bool
) -> LayerConfig:
    family = cfg.traits
    config = LayerConfig(
        **modules_of(cfg, dtype, device),
        invariant=cfg.invariant,
        num_layers=cfg.num_layers,
        hidden_size=cfg.hidden_size,
        ffn_hidden_size=cfg.ffn_hidden_size,
        num_attention_heads=cfg.num_heads,
        num_query_groups=cfg.num_kv_heads,
        kv_channels=cfg.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=cfg.norm_eps,
        gated_linear_unit=not family.ungated,
        activation_func=ACTIVATIONS[family.activation],
        activation_func_clamp_value=cfg.moe.gate_limit or None,
        layernorm_zero_centered_gamma=family.offset_norms,
        add_bias_linear=cfg.output_bias,  # of attention; the MLP has its own (`GatedMLP`)
        add_qkv_bias=cfg.qkv_bias,
        qk_layernorm=cfg.qk_norm and not cfg.traits.wide_qk_norm,
        attention_output_gate=cfg.traits.gated_attention,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        sequence_parallel=layout.sequence,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        batch_p2p_comm=False,
        perform_initialization=False,  # weights come from `init.py`, the same ones for every layout
        use_cpu_initialization=not torch.cuda.is_available(),
        # One rule for the scale of a loss: micro-batches and data-parallel ranks ADD. Losses arrive divided by the
        # denominator of their whole minibatch; with this flag neither schedules nor DDP rescale them (see train.py).
        calculate_per_token_loss=True,
        recompute_granularity="full" if cfg.recomputed else "selective" if cfg.recomputed_modules else None,
        recompute_method="block" if cfg.recomputed else None,
        recompute_num_layers=cfg.recomputed or None,
        **cfg.megatron | {"tp_comm_overlap": overlaps},
    )
    return with_fields(config, pipeline_model_parallel_layout=Offset(cfg.stages(layout)[layout.pp_rank].start))


def layer_spec(cfg: ModelConfig, config: LayerConfig, layout: Layout, layers: range) -> TransformerBlockSubmodules:
    experts = partial(ExpertLayer, model=cfg, layout=layout) if cfg.moe.num_experts else None
    kinds = [cfg.layer_kinds(layer) for layer in layers]
    specs = {kind: _layer(cfg, config, kind, experts if "sparse" in kind else None) for kind in set(kinds)}
    norm = partial(JoiningNorm, model=cfg) if cfg.hyper.streams else config.norm
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in kinds], layer_norm=norm)


def ahead_spec(cfg: ModelConfig, config: LayerConfig, layout: Layout) -> ModuleSpec:
    """Return the layer behind the last. `model.moe.aux_coef` does not balance its experts."""
    own = replace(cfg, moe=replace(cfg.moe, aux_coef=0.0))
    experts = partial(ExpertLayer, model=own, layout=layout)
    kinds = own.layer_kinds(own.num_layers)
    return _layer(own, config, kinds, experts if "sparse" in kinds else None)


def _layer(cfg: ModelConfig, config: LayerConfig, kinds: tuple[str, ...], experts: partial | None) -> ModuleSpec:
    """Return a layer of these kinds."""
    submodules = get_gpt_layer_local_submodules(normalization="RMSNorm")
    family, wide = cfg.traits, cfg.traits.wide_qk_norm
    submodules.input_layernorm = submodules.pre_mlp_layernorm = config.norm if family.pre_norms else IdentityOp
    attention = submodules.self_attention.submodules
    if cfg.latent.kv_rank or family.entries:
        submodules.self_attention = ModuleSpec(module=EntryAttention if family.entries else LatentAttention)
    else:
        submodules.self_attention.module = NormedAttention if family.post_norms else StreamAttention
        attention.linear_qkv, attention.linear_proj = config.column, config.row
        attention.core_attention = IdentityOp  # which `StreamAttention` does not call
    heads = cfg.of_kinds(kinds)
    submodules.self_attention.params["model"] = heads
    if less := 2 - cfg.kv_matrices(kinds):
        attention.linear_qkv = partial(_narrower, config.column, less * heads.num_kv_heads * heads.kv_channels)
    submodules.self_attn_bda = residual_adder(cfg.scales.residual)
    if cfg.scales.residual != 1:
        submodules.mlp_bda = submodules.self_attn_bda
    dense = NormedMLP if family.post_norms else GatedMLP
    matrices = MLPSubmodules(config.column, config.row)
    if "hashed" in kinds:
        experts = partial(experts, hashed=True)
    sizes = {"add_bias_linear": cfg.mlp_bias, "ffn_hidden_size": heads.ffn_hidden_size}
    submodules.mlp = experts or partial(_dense, dense, sizes, submodules=matrices)
    if cfg.qk_norm and not wide:
        attention.q_layernorm, attention.k_layernorm = config.norm, IdentityOp if less == 2 else config.norm
    if "linear" in kinds:
        submodules.self_attention = ModuleSpec(module=LinearAttention, params={"linear": cfg.linear})
    if family.single:
        _remove_half(submodules, "mlp" if {"attention", "linear"} & set(kinds) else "self_attention")
    if family.branch_norms and experts:
        submodules.pre_mlp_layernorm = IdentityOp
    if family.hyper:
        return ModuleSpec(module=HyperLayer, submodules=submodules, params={"model": cfg})
    layers = (ScaledLayer, ScaledStreamLayer) if family.layer_scalar else (TransformerLayer, StreamLayer)
    params = {"input_size": cfg.layer_input_size} if family.layer_scalar else {}
    return ModuleSpec(module=layers[experts is not None], submodules=submodules, params=params)


def _narrower(column: Callable, less: int, size: int, width: int, **options: Any) -> torch.nn.Module:
    """Make a linear layer whose output is narrower than requested."""
    return column(size, width - less, **options)


def _remove_half(submodules: TransformerLayerSubmodules, half: str) -> None:
    """Make "mlp" or "self_attention" of a layer leave its input as it is."""
    norm, adder = ("pre_mlp_layernorm", "mlp_bda") if half == "mlp" else ("input_layernorm", "self_attn_bda")
    for name, kind in ((half, IdentityOp), (norm, IdentityOp), (adder, IdentityFuncOp)):
        setattr(submodules, name, kind)


def _dense(kind: type[GatedMLP], own: dict[str, Any], *, config: LayerConfig, **options: Any) -> GatedMLP:
    """Make an MLP with its own width and flag for biases: Megatron has one for those of attention's output and of the
    MLP."""
    return kind.as_mlp_submodule(config=with_fields(config, **own), **options)


class ScoreHead(torch.nn.Module):
    """Linear hidden -> `outputs` in float32, replicated over tensor ranks. Answers like Megatron's output layer."""

    def __init__(self, config: LayerConfig, outputs: int, tp_group: torch.distributed.ProcessGroup):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(outputs, config.hidden_size, dtype=torch.float32))
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group
        if torch.cuda.is_available():
            self.cuda()

    def forward(self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None):
        if self.sequence_parallel:
            # every tensor rank computes the whole head, so the gather's gradient is a split, not a reduce-scatter
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return torch.nn.functional.linear(hidden.float(), self.weight.float()), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        return checkpoint_entries(self, prefix, sharded_offsets, metadata, self.tp_group)


class StageModel(GPTModel):
    """GPTModel that uses its own process groups for the checkpoint of tied embeddings, where Megatron uses the global
    ones."""

    mixed_layers = False  # then each layer's parameters are tensors of their own in a checkpoint, else all layers' one
    lengths: tuple[int, ...] = ()  # layers of each stage
    ahead: PredictingLayer | None  # behind the last layer, for training

    def _preprocess(self, input_ids: Tensor, *args: Any, packed_seq_params: Stream, **kwargs: Any) -> tuple:
        """Put what tokens give the layers into the stream."""
        out = super()._preprocess(input_ids, *args, packed_seq_params=packed_seq_params, **kwargs)
        if self.pre_process and (layer_inputs := getattr(self.embedding, "layer_inputs", None)):
            packed_seq_params.inputs.extend(layer_inputs(input_ids, out[0]))
        return out

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        marked = (metadata or {}) | {"non_homogeneous_layers": self.mixed_layers}
        state = super().sharded_state_dict(prefix, sharded_offsets, marked)
        # Megatron takes layers for neighbours, and names a layer here by how far it is from the first one
        numbers = [layer.layer_number for layer in self.decoder.layers]
        index = {f"{number - numbers[0]}.": f"{i}." for i, number in enumerate(numbers)}
        return {_LAYER.sub(lambda match: index[match[0]], name): item for name, item in state.items()}

    def stages(self) -> list[StageModel]:
        """Return a view of each stage of this rank, of the same modules."""
        views, ends = [], [0, *accumulate(self.lengths)]
        for first, end in pairwise(ends):
            view, block = copy.copy(self), copy.copy(self.decoder)
            view._modules, block._modules = dict(self._modules), dict(self.decoder._modules)
            view._modules["decoder"], block._modules["layers"] = block, self.decoder.layers[first:end]
            view.pre_process = block.pre_process = self.pre_process and not first
            view.post_process = block.post_process = self.post_process and end == ends[-1]
            if not view.post_process:
                block._modules["final_layernorm"] = None
            block.num_layers_per_pipeline_rank = end - first
            views.append(view)
        return views

    def tie_embeddings_and_output_weights_state_dict(
        self, sharded_state_dict: dict, output_layer_weight_key: str, first_stage_word_emb_key: str, metadata: dict
    ) -> None:
        if self.pre_process or not self.post_process:
            return
        dp_cp = metadata["dp_cp_group"]
        sharded_state_dict[output_layer_weight_key] = make_tp_sharded_tensor_for_checkpoint(
            tensor=self.shared_embedding_or_output_weight(),
            key=first_stage_word_emb_key,
            replica_id=(1, 0, dp_cp.rank()),  # a copy of the first stage's
            allow_shape_mismatch=True,
            tp_group=self.tp_group,
            dp_cp_group=dp_cp,
        )


def check_kernels(cfg: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Check that this machine and this model support what the config requests. Raises ConfigError."""
    reason, fp8 = TE.lacks or te_kinds(cfg)["attention"], cfg.megatron.get("fp8")
    if cfg.kernels == "te" and reason:
        raise ConfigError("model.kernels", "te", "auto or own", f"TransformerEngine is not used here: {reason}.")
    if fp8 and (reason := transformer_engine.lacks_fp8(cfg.megatron["fp8_recipe"])):
        raise ConfigError("model.megatron.fp8", fp8, "a device with FP8, and TransformerEngine", f"Here: {reason}.")
    if cfg.megatron.get("tp_comm_overlap") and (reason := transformer_engine.lacks_buffers()):
        raise ConfigError("model.megatron.tp_comm_overlap", True, "false without TransformerEngine", f"{reason}.")
    varlen.is_used(cfg, dtype, device)


def check_optimizer(key: str, optim: OptimConfig) -> None:
    """Check that there is Muon, or an Adam with moments of other dtypes, if the section requests it. Raises
    MissingExtraError, ConfigError."""
    if optim.name == "muon" and find_spec("emerging_optimizers") is None:
        raise MissingExtraError("emerging-optimizers", "muon", f"{key}.name=muon")
    if TE.lacks and optim.megatron.get("use_precision_aware_optimizer"):
        name, reason = "megatron.use_precision_aware_optimizer", f"TransformerEngine is not used here: {TE.lacks}."
        raise ConfigError(f"{key}.{name}", True, "false without TransformerEngine's Adam", reason)


def _with_plain_strides(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Give the output [N, 1, H] plain strides. In Megatron's transposed view the axis of one has a stride for which
    torch makes N products with a frozen matrix instead of one."""
    return output.view(output.shape)


def build_model(
    cfg: ModelConfig,
    layout: Layout,
    head: Head,
    dtype: torch.dtype,
    device: torch.device,
    buffers: UserBuffers | None = None,
) -> StageModel:
    """Build this rank's stage of the model, weights not yet set. `cfg.vocab_size` must be known."""
    assert cfg.vocab_size > 0, "model.vocab_size must be resolved from the tokenizer first"
    check_kernels(cfg, dtype, device)
    use_fast_products(device, dtype)
    if cfg.invariant:
        use_invariant_products(cfg, device)
    tp_rank = layout.tp_rank
    model_parallel_cuda_manual_seed(0, tp_rank=tp_rank, ep_rank=0, etp_rank=tp_rank, force_reset_rng=True)
    config = transformer_config(cfg, layout, dtype, device, buffers is not None)
    stages = cfg.stages(layout)[layout.pp_rank :: layout.pipeline]
    model = StageModel(
        config=config,
        transformer_layer_spec=layer_spec(cfg, config, layout, stages[0]),
        vocab_size=padded_vocab(cfg.vocab_size, layout.tensor),
        max_sequence_length=cfg.max_position,
        pre_process=layout.is_first_stage,
        post_process=layout.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=cfg.tie_embeddings and head.kind == "lm",
        position_embedding_type="none",  # the stream brings its own rotary angles (see attention.py)
        pg_collection=layout.pgs,
    )
    for layers in stages[1:]:
        own = with_fields(config, pipeline_model_parallel_layout=Offset(layers.start))
        spec = layer_spec(cfg, own, layout, layers)
        block = TransformerBlock(own, spec, pre_process=False, post_process=False, pg_collection=layout.pgs)
        model.decoder.layers.extend(block.layers)
    if layout.virtual_stages > 1:  # for the schedule; before, GPTModel would take itself for one of the stages
        config.virtual_pipeline_model_parallel_size = layout.virtual_stages
        config.microbatch_group_size_per_vp_stage = layout.pipeline
    predicts = cfg.mtp.layers and head.kind == "lm" and layout.is_last_stage
    model.ahead = PredictingLayer(config, cfg, layout, ahead_spec(cfg, config, layout)) if predicts else None
    model.mixed_layers, model.lengths = cfg.mixed_layers, tuple(map(len, stages))
    if layout.is_first_stage:
        model.embedding.register_forward_hook(_with_plain_strides)
        scale_embeddings(model.embedding, embedding_factor(cfg, dtype))
        if cfg.layer_input_size:
            model.embedding.layer_inputs = LayerInputs(config, cfg, padded_vocab(cfg.vocab_size, layout.tensor), layout)
        if cfg.hyper.streams:
            begin_streams(model.embedding, cfg.hyper.streams)
    if head.kind == "score" and layout.is_last_stage:
        model.output_layer = ScoreHead(config, head.outputs, layout.pgs.tp)
    if buffers is not None:
        buffers.watch(model)
    return model.to(device)
