"""Fields of Megatron-Core's own config classes that a run may set, by their names there: `model.megatron` and
`optim.megatron`.

Names, types and choices are read from the installed sources. They are not imported: Megatron imports torch.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError, UnknownKeyError

TRANSFORMER, OPTIMIZER, DDP = "TransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig"
FILES = {
    TRANSFORMER: ("transformer/transformer_config.py", "model_parallel_config.py"),  # with the class that it extends
    OPTIMIZER: ("optimizer/optimizer_config.py",),
    DDP: ("distributed/distributed_data_parallel_config.py",),
}
# section -> its classes; a name is looked up in one after the other
CLASSES = {"model": (TRANSFORMER,), "optim": (OPTIMIZER, DDP)}
# fields that an update here reads. Others are refused: modules of this project, which replace Megatron's attention,
# MLP, experts and loss, do not ask for them. Nor may one model's fields change another's updates, as
# reduce_scatter_with_fp32_accumulation does
READ = {
    TRANSFORMER: (
        *("fp8", "fp8_recipe", "first_last_layers_bf16", "recompute_modules", "deallocate_pipeline_outputs"),
        *("tp_comm_overlap", "tp_comm_overlap_ag", "tp_comm_overlap_rs", "tp_comm_bootstrap_backend"),
    ),
    OPTIMIZER: ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype", "decoupled_weight_decay"),
    DDP: ("bucket_size", "pad_buckets_for_high_nccl_busbw"),
}
# what decides a field instead: a key, or what this project always does
DECIDED = {
    "model.family and the keys of its shape": (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization "
        "layernorm_epsilon layernorm_zero_centered_gamma gated_linear_unit activation_func activation_func_clamp_value "
        "add_bias_linear add_qkv_bias qk_layernorm attention_output_gate num_moe_experts moe_ffn_hidden_size "
        "moe_router_topk moe_shared_expert_intermediate_size window_size softmax_type rotary_interleaved "
        "multi_latent_attention"
    ),
    "model.dtype": "fp16 bf16 params_dtype pipeline_dtype enable_autocast autocast_dtype main_params_dtype",
    "model.init and model.init_std": "init_method init_method_std perform_initialization embedding_init_method_std",
    "model.recompute": "recompute_granularity recompute_method recompute_num_layers",
    "model.kernels": "transformer_impl attention_backend gradient_accumulation_fusion bias_activation_fusion",
    "model.moe": "moe_aux_loss_coeff moe_router_load_balancing_type moe_z_loss_coeff",
    "parallel": (
        "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
        "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel "
        "pipeline_model_parallel_layout num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
        "microbatch_group_size_per_vp_stage"
    ),
    "parallel.context_mode": "cp_comm_type",
    "memory.offload": "optimizer_cpu_offload optimizer_offload_fraction cpu_offloading",
    "run.deterministic": "deterministic_mode",
    "optim.lr": "lr decoupled_lr",
    "optim.min_lr": "min_lr decoupled_min_lr",
    "optim.weight_decay": "weight_decay",
    "optim.betas": "adam_beta1 adam_beta2",
    "optim.eps": "adam_eps",
    "optim.clip_grad": "clip_grad",
    "optim.distributed": "use_distributed_optimizer",
    "optim.gradient_dtype": "grad_reduce_in_fp32 main_grads_dtype",
    "optim.name": "optimizer",
    "optim.muon_momentum": "muon_momentum",
    "optim.muon_scale": "muon_extra_scale_factor muon_scale_mode",
    "optim.muon_precision": "muon_fp32_matmul_prec",
    "the loss, which is divided by the denominator of its minibatch": (
        "calculate_per_token_loss average_in_collective loss_scale initial_loss_scale grad_scale_func"
    ),
    "the check of the gradient's norm after each step": "check_for_nan_in_grad check_for_large_grads",
    "the refit, which reads whole bfloat16 weights after each step": (
        "overlap_param_gather fp8_param fp8_param_gather fp4_param fp4_param_gather store_param_remainders"
    ),
    "aligner, which always overlaps the reduction": "overlap_grad_reduce",
}
DTYPES = ("float32", "bfloat16")
MODULES = ("mlp", "moe")  # that layers here recompute by themselves
OWNERS = {name: key for key, names in DECIDED.items() for name in names.split()}


@cache
def annotations(name: str) -> dict[str, str]:
    """Return field -> type, as text, of one of Megatron's classes."""
    types, spec = dict[str, str](), find_spec("megatron")  # which imports nothing
    for file in FILES[name]:
        path = Path(next(iter(spec.submodule_search_locations))) / "core" / file
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name in (name, "ModelParallelConfig"):
                fields = (line for line in node.body if isinstance(line, ast.AnnAssign))
                types |= {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields}
    return types


def class_of(section: str, name: str) -> str:
    """Return which class has the field; "" if none."""
    return next((kind for kind in CLASSES[section] if name in annotations(kind)), "")


def fields_of(section: str, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a section's values that are fields of a class."""
    return {name: value for name, value in values.items() if class_of(section, name) == kind}


def check_fields(section: str, values: Mapping[str, Any]) -> None:
    """Check the values of `model.megatron` or `optim.megatron`. Raises ConfigError."""
    for name, value in values.items():
        key, kind = f"{section}.megatron.{name}", class_of(section, name)
        if not kind:
            names = [known for one in CLASSES[section] for known in annotations(one)]
            near = [f"{section}.megatron.{one}" for one in difflib.get_close_matches(name, names)]
            raise UnknownKeyError(key, "`, `".join(near) or None)
        if name in OWNERS:
            raise ConfigError(key, value, f"no value: it is decided by {OWNERS[name]}", "Remove it.")
        if name not in READ[kind]:
            read = ", ".join(one for kind in CLASSES[section] for one in READ[kind])
            raise ConfigError(key, value, f"a field that aligner uses: {read}")
        _check_value(key, value, annotations(kind)[name])


def _check_value(key: str, value: Any, annotation: str) -> None:
    plain = re.sub(r"^Optional\[(.*)\]$", r"\1", annotation)
    choices = DTYPES if plain == "torch.dtype" else re.findall(r"'(\w+)'", plain)
    fits, expected = {
        "bool": (isinstance(value, bool), "true or false"),
        "int": (type(value) is int and value > 0, "an integer >= 1"),
        "List[str]": (isinstance(value, list) and all(one in MODULES for one in value), "a list of mlp, moe"),
    }.get(plain, (value in choices, "one of " + ", ".join(choices)))
    if not fits and not (value is None and plain != annotation):
        raise ConfigError(key, value, expected)
