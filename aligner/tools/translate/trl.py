"""TRL's configs: fields of GRPOConfig, RLOOConfig, SFTConfig, DPOConfig, RewardConfig, KTOConfig, ModelConfig and the
scripts' arguments, as of TRL 1.16.0 with transformers 5.23. Fields of earlier versions: TRL 0.12 and later."""

from __future__ import annotations

from typing import Any

from aligner.errors import ConfigError
from aligner.tools.translate.sheet import Vocabulary, remarks
from aligner.tools.translate.source import EXPECTED, Source

VERSION = "TRL 1.16.0"
_BASE: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": dict,
    "warmup_steps": 0.0,
    "warmup_ratio": float,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "optim": str,
    "bf16": bool,
    "fp16": bool,
    "gradient_checkpointing": bool,
    "seed": int,
    "output_dir": str,
    "run_name": str,
    "report_to": list,
    "project": str,
    "eval_strategy": "no",
    "eval_steps": float,
    "save_strategy": "steps",
    "save_steps": float,
    "save_total_limit": int,
    "full_determinism": bool,
    "router_aux_loss_coef": float,
    "disable_dropout": bool,
    "label_smoothing_factor": float,
    "max_prompt_length": int,
    "model_name_or_path": str,
    "use_peft": False,
    "lora_r": 16,
    "lora_alpha": 32.0,
    "lora_dropout": 0.05,
    "lora_target_modules": list,
    "use_rslora": bool,
    "use_dora": bool,
    "load_in_8bit": False,
    "load_in_4bit": False,
    "dataset_name": str,
    "datasets": list,
    "dataset_mixture": dict,
}
_GENERATION: dict[str, Any] = {
    "num_generations": 8,
    "num_generations_eval": int,
    "max_completion_length": 512,
    "generation_batch_size": int,
    "steps_per_generation": int,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": float,
    "repetition_penalty": 1.0,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_tensor_parallel_size": 1,
    "vllm_max_model_length": int,
    "beta": 0.0,
    "num_iterations": 1,
    "epsilon": 0.2,
    "epsilon_high": float,
    "reward_weights": list,
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    "chat_template_kwargs": dict,
    "reward_funcs": list,
    "reward_model_name_or_path": str,
}
_PAIRS: dict[str, Any] = {
    "learning_rate": 1e-6,
    "max_length": 1024,
    "beta": 0.1,
    "precompute_ref_log_probs": False,
    "sync_ref_model": False,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": _GENERATION
    | {
        "learning_rate": 1e-6,
        "delta": float,
        "importance_sampling_level": "token",
        "loss_type": "dapo",
        "scale_rewards": "group",
        "multi_objective_aggregation": "sum_then_normalize",
        "sapo_temperature_neg": 1.05,
        "sapo_temperature_pos": 1.0,
        "entropy_coef": 0.0,
        "top_entropy_quantile": 1.0,
        "use_adaptive_entropy": False,
        "off_policy_mask_threshold": float,
        "use_bias_correction_kl": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
        "vllm_importance_sampling_clip_min": float,
        "vllm_importance_sampling_cap": float,
    },
    "rloo": _GENERATION
    | {
        "learning_rate": 1e-6,
        "num_generations": 2,
        "beta": 0.05,
        "normalize_advantages": False,
        "reward_clip_range": list,
    },
    "sft": {
        "learning_rate": 2e-5,
        "max_length": 1024,
        "max_seq_length": int,
        "packing": False,
        "completion_only_loss": bool,
        "assistant_only_loss": False,
        "loss_type": "nll",
        "chat_template_path": str,
    },
    "dpo": _PAIRS
    | {
        "loss_type": ["sigmoid"],
        "loss_weights": list,
        "ld_alpha": float,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "label_smoothing": 0.0,
        "use_weighting": False,
        "discopop_tau": 0.05,
        "ref_model_mixup_alpha": 0.6,
        "ref_model_sync_steps": 512,
        "rpo_alpha": float,
        "reference_free": bool,
    },
    "reward": {
        "learning_rate": 1e-4,
        "max_length": 1024,
        "center_rewards_coefficient": float,
        "chat_template_path": str,
    },
    "kto": _PAIRS | {"loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0},
}
RENAMED = {"evaluation_strategy": "eval_strategy", "activation_checkpointing": "gradient_checkpointing"}
STAGES = {"grpo": "grpo", "rloo": "grpo", "sft": "sft", "dpo": "dpo", "reward": "rm", "kto": "kto"}
_NEEDLESS = remarks(
    """
dtype torch_dtype bnb_4bit_quant_type => Megatron-Core keeps float32 copies of the weights; model.dtype=auto
per_device_eval_batch_size padding_free eval_packing packing_strategy => batch.packing=true lays rows end to end
pad_to_multiple_of remove_unused_columns group_by_length average_tokens_across_devices => rows have no padding
shuffle_dataset train_sampling_strategy => data.shuffle=true
vllm_gpu_memory_utilization => engine.kv_cache_bytes=auto takes what `plan` leaves free
vllm_enable_sleep_mode => memory.sleep=auto
gradient_checkpointing_kwargs activation_checkpointing_kwargs activation_offloading torch_empty_cache_steps
    => model.recompute and memory.offload
use_liger_kernel attn_implementation tf32 torch_compile* use_cache => kernels are chosen for the GPU (model.kernels)
logging_* log_* num_completions_to_print disable_tqdm => each step is logged; run.samples_every, logging.*
vllm_device vllm_dtype log_level dataset_num_proc dataloader_* ddp_* do_train do_eval local_rank use_cpu
    lora_task_type bf16_full_eval fp16_full_eval
    trust_remote_code ignore_bias_buffers remove_unused_columns overwrite_output_dir dataset_text_field
    truncation_mode include_* skip_memory_metrics => nothing to set
dataset_train_split dataset_test_split => data.train reads the split train, data.eval validation or test
ds3_gather_for_generation vllm_model_impl vllm_server_* vllm_group_port => weights go to the engine by messages
deepspeed fsdp fsdp_config accelerator_config => optim.distributed=true shards the optimizer; parallel.* the model
resume_from_checkpoint => run.resume=auto
cache_implementation use_transformers_* transformers_* => the engines have paged caches
ref_model_* => sync_ref_model decides
eval_do_concat_batches eval_use_gather_object do_predict eval_on_start eval_delay
    eval_accumulation_steps batch_eval_metrics => run.eval_every
"""
)
_MISSING = remarks(
    """
dataset_config streaming dataset_streaming test_split_size dataset_kwargs => write data.train, or data.sources for a
    mixture, for the downloaded folders
model_revision => download that revision
push_to_hub hub_* => upload the folder `hf` of the run yourself
load_best_model_at_end metric_for_best_model greater_is_better => checkpoint.keep_best, checkpoint.metric
lora_target_parameters lora_modules_to_save use_bnb_nested_quant bnb_4bit_quant_storage => model.lora has none
model_init_kwargs generation_kwargs optim_args optim_target_modules => write the single keys
vespo_* entropy_coef_* entropy_target => no such loss; algorithm.policy_loss takes a function of yours
neftune_noise_alpha liger_kernel_config eos_token pad_token cast_lm_head_to_fp32 vllm_structured_outputs_regex
    precompute_ref_batch_size parallelism_config data_seed ignore_data_skip auto_find_batch_size trackio_*
    length_column_name label_names debug restore_callback_states_from_checkpoint prediction_loss_only jit_mode_eval =>
    nothing here does this
max_tool_calling_iterations => environment.tools and environment.max_turns
enable_jit_checkpoint save_only_model save_on_each_node save_safetensors => checkpoint.*
"""
)


def vocabulary(command: str) -> Vocabulary:
    return Vocabulary(f"{VERSION} ({command})", _BASE | _DEFAULTS[command], _NEEDLESS, _MISSING)


def command_of(source: Source, asked: str) -> str:
    """Return TRL's command: of the file, the one asked for, or the only one that has all names. Raises ConfigError."""
    if command := source.named_command(asked, _DEFAULTS):
        return command
    own = {command: set(names) & set(source.values) for command, names in _DEFAULTS.items()}
    most = max(map(len, own.values()))
    best = [command for command, names in own.items() if len(names) == most]
    if not most and not set(_BASE) & set(source.values):
        raise ConfigError("FILE", ", ".join(list(source.values)[:5]), EXPECTED)
    if len(best) > 1:
        raise ConfigError("--command", "", f"one of {', '.join(best)}: the file fits {VERSION}'s configs of each")
    return best[0]
