"""Other trainers' names of keys, for users who type them: TRL and Hugging Face, veRL, OpenRLHF, NeMo-RL.

A name is looked up whole and then without its first parts: `actor_rollout_ref.rollout.n`, `rollout.n`, `n`. An answer
is a key, or with `=` a setting. Where it depends on the stage it is a mapping, whose "" is for all other stages.
"""

from __future__ import annotations

from collections.abc import Mapping

_ROLLOUTS = ("grpo", "ppo", "online_dpo", "sample")


def _rollouts(key: str, other: str) -> dict[str, str]:
    """Return `key` for stages that generate, `other` for those that read rows."""
    return dict.fromkeys(_ROLLOUTS, key) | {"": other}


_SIZE = _rollouts("batch.prompts", "batch.sequences")
_STEP = _SIZE | dict.fromkeys(("grpo", "ppo"), "batch.minibatch_samples")
_PASSES = {"grpo": "batch.epochs", "ppo": "batch.epochs", "": "run.epochs"}
_BETA = {
    "": "algorithm.kl.coef",
    "dpo": "algorithm.preference.beta",
    "online_dpo": "algorithm.preference.beta",
    "kto": "algorithm.kto.beta",
    "distill": "algorithm.distill.beta",
    "sft": "",
    "rm": "",
    "sample": "",
}
_LOSS = {
    "": "algorithm.policy_loss",
    "dpo": "algorithm.preference.loss",
    "online_dpo": "algorithm.preference.loss",
    "rm": "algorithm.reward_loss.kind",
    "distill": "algorithm.distill.kind",
    "kto": "algorithm.kto.kl",
    "sft": "algorithm.sft_loss",
    "sample": "",
}
_TEMPERATURE = _rollouts("sampling.temperature", "eval.temperature") | {"distill": "algorithm.distill.temperature"}
_WHOLE = _rollouts("sampling.max_response_tokens", "data.max_tokens")
_PROMPT = {"": "data.max_prompt_tokens"} | dict.fromkeys(("rm", "dpo", "kto"), "data.max_tokens")
_REFERENCE = {
    "": "algorithm.kl.coef",
    "dpo": "algorithm.preference.reference",
    "online_dpo": "algorithm.preference.reference",
    "kto": "algorithm.kto.reference",
}

_BY_OURS: dict[str, str] = {
    "optim.lr": "adam.lr learning_rate max_lr actor_learning_rate",
    "critic.optim.lr": "critic.adam.lr critic_learning_rate critic.learning_rate critic.lr",
    "optim.min_lr": "min_learning_rate min_lr_ratio",
    "optim.schedule": "lr_scheduler lr_scheduler_type lr_decay_style warmup_style",
    "optim.decay_from": "lr_scheduler_kwargs",
    "optim.warmup_steps": "lr_warmup_steps lr_warmup_steps_ratio lr_warmup_ratio num_warmup_steps "
    "warmup_ratio lr_warmup_iters",
    "optim.betas": "adam.betas adam_beta1 adam_beta2 adam_betas",
    "optim.eps": "adam.eps adam_epsilon",
    "memory.offload=[optimizer]": "adam_offload optimizer_offload",
    "memory.offload=[weights]": "param_offload",
    "optim.weight_decay": "adam.weight_decay l2",
    "optim.clip_grad": "max_grad_norm grad_clip max_norm gradient_clipping",
    "optim.distributed": "zero_stage use_distributed_optimizer deepspeed fsdp",
    "ema.decay": "ema_decay ema_beta",
    "run.epochs": "num_train_epochs num_epochs max_epochs max_num_epochs total_epochs num_episodes epochs epoch",
    "run.steps": "max_steps num_steps total_steps train_steps max_num_steps total_training_steps train_iters",
    "batch.micro_batch_samples": "per_device_train_batch_size per_device_eval_batch_size "
    "micro_train_batch_size micro_batch_size train_micro_batch_size ppo_micro_batch_size "
    "ppo_micro_batch_size_per_gpu micro_batch_size_per_gpu",
    "batch.logprob_tokens": "micro_rollout_batch_size log_prob_micro_batch_size_per_gpu logprob_batch_size",
    "batch.micro_batch_tokens": "ppo_max_token_len_per_gpu max_tokens_per_gpu use_dynamic_bsz",
    "batch.balance": "balance_batch",
    "batch.packing": "sequence_packing packing_samples padding_free use_remove_padding",
    "batch.group": "num_generations n_samples_per_prompt num_generations_per_prompt num_return_sequences "
    "rollout.n rloo_k group_size",
    "sampling.max_response_tokens": "max_completion_length max_response_length max_new_tokens "
    "generate_max_len response_length",
    "sampling.stop": "stop_strings stop_sequences",
    "algorithm.overlong.penalty": "missing_eos_penalty",
    "algorithm.overlong.mask_truncated": "mask_truncated_completions",
    "data.overlong": "truncation",
    "data.train": "dataset dataset_name dataset_path train_file train_files train_data prompt_data",
    "data.eval": "val_files eval_dataset eval_file validation_file",
    "data.columns.prompt": "input_key prompt_key",
    "data.columns.completion": "label_key",
    "data.chat_template": "apply_chat_template",
    "data.loss_on": "completion_only_loss assistant_only_loss train_on_inputs",
    "algorithm.kl.coef": "kl.init_coef kl_ctrl.kl_coef kl_beta kl_coef init_kl_coef init_kl_coeff kl_loss_coef",
    "algorithm.kl.estimator": "kl_penalty kl_loss_type kl_estimator",
    "algorithm.kl.placement=loss": "use_kl_loss kl.use_loss",
    "algorithm.kl.placement=reward": "use_kl_in_reward",
    "algorithm.kl.controller.target": "kl.target kl_target target_kl",
    "algorithm.kl.controller.horizon": "kl_horizon kl.horizon",
    "algorithm.kl.importance_weighted": "unbiased_gradient use_bias_correction_kl",
    "algorithm.clip_low": "epsilon epsilon_low eps_clip eps_clip_low_high cliprange clip_ratio "
    "clip_ratio_low ratio_clip_min",
    "algorithm.clip_high": "epsilon_high clip_ratio_high ratio_clip_max",
    "algorithm.dual_clip": "clip_ratio_c",
    "reward.normalize": "normalize_reward normalize_enable",
    "critic.clip": "cliprange_value value_clip",
    "algorithm.advantage": "adv_estimator advantage_estimator estimator scale_rewards",
    "algorithm.sft_loss": "enable_dft_loss",
    "algorithm.lam": "lambd gae_lambda lambda",
    "algorithm.entropy_coef": "entropy_coeff entropy_loss_coef ent_coef",
    "algorithm.aggregation": "loss_agg_mode token_level_loss",
    "algorithm.whiten": "whiten_rewards normalize_advantages",
    "algorithm.preference.label_smoothing": "label_smoothing_factor",
    "algorithm.preference.gamma": "simpo_gamma",
    "algorithm.preference.nll_coef": "rpo_alpha nll_loss_coef sft_loss_weight",
    "algorithm.preference.reference=none": "reference_free",
    "algorithm.preference.sync_every": "sync_ref_model ref_model_sync_steps",
    "algorithm.preference.sync_alpha": "ref_model_mixup_alpha",
    "algorithm.kto.desirable_weight": "desirable_weight",
    "algorithm.kto.undesirable_weight": "undesirable_weight",
    "algorithm.reward_loss.center_coef": "center_rewards_coefficient",
    "algorithm.distill.teacher": "teacher_model teacher_model_name_or_path",
    "algorithm.distill.on_policy": "lmbda",
    "algorithm.filter_groups": "dynamic_filtering_enable dynamic_filtering filter_groups.enable use_dynamic_sampling",
    "critic.warmup_steps": "critic.freezing_steps critic_warmup freezing_actor_steps",
    "reward.functions": "remote_url reward_funcs reward_function reward_fn custom_reward_function.path "
    "custom_reward_function.name remote_rm_url",
    "reward.functions[].weight": "reward_weights",
    "reward.model": "reward.model_name_or_path reward_model_path reward_model.path reward_pretrain "
    "reward_model.model.path",
    "critic.init": "critic.model_name_or_path critic_pretrain critic.model.path value_model_path",
    "environment.max_turns": "max_turns max_rollout_turns",
    "model.init": "model_name_or_path model_name model_path model.path pretrain",
    "model.tokenizer": "tokenizer_name tokenizer_path",
    "model.dtype=bfloat16": "bf16",
    "model.dtype": "fp16 torch_dtype precision",
    "model.recompute": "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing",
    "model.varlen_attention": "attn_implementation flash_attn",
    "model.lora.rank": "use_peft lora_r lora_rank",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.targets": "lora_target_modules target_modules",
    "model.lora.dora": "use_dora",
    "model.lora.rslora": "use_rslora",
    "model.lora.quantize_base=nf4": "load_in_4bit",
    "model.lora.quantize_base=int8": "load_in_8bit",
    "model.moe.aux_coef": "aux_loss_coef router_aux_loss_coef",
    "parallel.tensor": "tensor_model_parallel_size tensor_parallel_size",
    "parallel.pipeline": "pipeline_model_parallel_size",
    "parallel.stage_layers": "pipeline_model_parallel_layout num_layers_in_first_pipeline_stage",
    "parallel.context": "context_parallel_size ring_attn_size ulysses_sequence_parallel_size",
    "parallel.expert": "expert_model_parallel_size expert_tensor_parallel_size",
    "parallel.sequence": "sequence_parallel",
    "engine.tensor_parallel": "vllm.tensor_parallel_size rollout.tensor_model_parallel_size vllm_tensor_parallel_size",
    "engine=vllm": "use_vllm",
    "engine.name": "rollout.name",
    "engine.kv_cache_bytes": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "engine.max_batch": "max_num_seqs",
    "engine.page_tokens": "block_size page_size tokens_per_block",
    "engine.draft_tokens": "num_speculative_tokens speculative_num_draft_tokens prompt_lookup_num_tokens",
    "engine.cuda_graphs": "enforce_eager",
    "memory.sleep": "vllm_enable_sleep free_cache_engine",
    "run.dir": "output_dir save_path ckpt_path default_local_dir checkpoint_dir",
    "run.name": "run_name experiment_name exp_name",
    "run.resume": "resume_from_checkpoint load_checkpoint resume_mode",
    "run.deterministic": "full_determinism_enable full_determinism",
    "run.eval_every": "eval.steps eval_steps eval_strategy val_period test_freq eval_interval",
    "logging.progress": "logging_steps",
    "run.samples_every": "log_completions",
    "checkpoint.every": "save_steps save_freq save_period save_interval",
    "checkpoint.keep_last": "ckpt.max_num save_total_limit max_ckpt_num keep_top_k",
    "checkpoint.keep_best": "load_best_model_at_end",
    "checkpoint.metric": "metric_for_best_model",
    "logging.trackers": "report_to use_wandb wandb_enabled",
    "logging.project": "wandb_project project_name",
    "logging.args": "logging.wandb.entity wandb_entity",
    "seed": "random_seed",
}
_BY_STAGE: list[tuple[Mapping[str, str], str]] = [
    (_PASSES, "ppo_epochs num_ppo_epochs num_iterations batch.epochs"),
    (_STEP, "gradient_accumulation_steps grad_accumulation_steps global_batch_size train_global_batch_size"),
    (_STEP, "train.batch_size mini_batch_size ppo_mini_batch_size num_mini_batches"),
    (_SIZE, "batch_size train_batch_size rollout_batch_size gen_batch_size num_prompts_per_step batch.prompts"),
    (_SIZE, "batch.sequences"),
    (_TEMPERATURE, "temperature"),
    (_WHOLE, "max_length max_seq_length max_seq_len max_len cutoff_len max_total_sequence_length max_tokens"),
    (_PROMPT, "data.max_tokens max_prompt_tokens max_prompt_length max_input_seq_length prompt_max_len"),
    (_BETA, "beta reference_policy_kl_penalty"),
    (_LOSS, "loss_type loss_fn"),
    (_REFERENCE, "ref_model"),
    (
        {"": "algorithm.preference.reference=stored", "kto": "algorithm.kto.reference=stored"},
        "precompute_ref_log_probs",
    ),
]
NAMES: dict[str, str | Mapping[str, str]] = {name: key for key, names in _BY_OURS.items() for name in names.split()}
NAMES |= {name: key for key, names in _BY_STAGE for name in names.split()}


def known_elsewhere(name: str, stage: str = "") -> str:
    """Return our key, or setting, for another trainer's name; "" if none is known."""
    parts = name.lstrip("-+").replace("-", "_").lower().split(".")
    for first in range(len(parts)):
        answer = NAMES.get(".".join(parts[first:]))
        if answer is not None:
            return answer if isinstance(answer, str) else answer.get(stage, answer.get("", ""))
    return ""
