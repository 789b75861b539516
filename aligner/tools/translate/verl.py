"""veRL's keys: verl.trainer.main_ppo and verl.trainer.sft_trainer, as of veRL 0.9.1 with FSDP or Megatron-Core, and
keys of versions since 0.4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aligner.tools.translate.sheet import Vocabulary, remarks

VERSION = "veRL 0.9.1"
_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_OPTIMIZER: dict[str, Any] = {
    "lr": 1e-6,
    "lr_warmup_steps_ratio": 0.0,
    "lr_warmup_steps": -1,
    "weight_decay": 0.01,
    "betas": [0.9, 0.999],
    "clip_grad": float,
    "min_lr_ratio": 0.0,
    "lr_scheduler_type": "constant",
    "warmup_style": str,
    "lr_decay_style": "constant",
    "min_lr": 0.0,
    "optimizer": str,
}
_MODEL_KEYS: dict[str, Any] = {
    "path": str,
    "tokenizer_path": str,
    "enable_gradient_checkpointing": bool,
    "lora_rank": 0,
    "lora_alpha": 16.0,
    "target_modules": ["all-linear"],
    "lora.rank": 0,
    "lora.alpha": 32.0,
    "lora.dropout": 0.0,
    "lora.target_modules": list,
}
_MEGATRON: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": int,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": bool,
    "param_offload": False,
    "optimizer_offload": False,
    "grad_offload": False,
    "override_transformer_config.recompute_granularity": str,
}


def _under(prefix: str, names: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in names.items()}


_TRAINER: dict[str, Any] = {
    "trainer.total_epochs": 30,
    "trainer.total_training_steps": int,
    "trainer.project_name": str,
    "trainer.experiment_name": str,
    "trainer.logger": list,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": int,
    "trainer.test_freq": int,
    "trainer.default_local_dir": str,
}
_PPO: dict[str, Any] = (
    _TRAINER
    | _under(f"{_ACTOR}optim.", _OPTIMIZER)
    | _under("critic.optim.", _OPTIMIZER | {"lr": 1e-5})
    | _under(_MODEL, _MODEL_KEYS)
    | _under(f"{_ACTOR}megatron.", _MEGATRON)
    | _under(f"{_ACTOR}fsdp_config.", {"param_offload": False, "optimizer_offload": False})
    | _under(
        _ACTOR,
        {
            "strategy": "fsdp",
            "ppo_mini_batch_size": 256,
            "ppo_micro_batch_size_per_gpu": int,
            "ppo_micro_batch_size": int,
            "use_dynamic_bsz": False,
            "ppo_max_token_len_per_gpu": 16384,
            "clip_ratio": 0.2,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.2,
            "clip_ratio_c": 3.0,
            "tau_pos": 1.0,
            "tau_neg": 1.05,
            "policy_loss.loss_mode": "vanilla",
            "policy_loss.clip_cov_ratio": 0.0002,
            "policy_loss.clip_cov_lb": 1.0,
            "policy_loss.clip_cov_ub": 5.0,
            "policy_loss.kl_cov_ratio": 0.0002,
            "policy_loss.ppo_kl_coef": 0.1,
            "loss_agg_mode": "token-mean",
            "loss_scale_factor": int,
            "entropy_coeff": 0.0,
            "use_kl_loss": False,
            "kl_loss_coef": 0.001,
            "kl_loss_type": "low_var_kl",
            "ppo_epochs": 1,
            "grad_clip": 1.0,
            "ulysses_sequence_parallel_size": 1,
        },
    )
    | _under(
        _ROLLOUT,
        {
            "name": "vllm",
            "temperature": 1.0,
            "top_k": -1,
            "top_p": 1.0,
            "prompt_length": int,
            "response_length": int,
            "enforce_eager": False,
            "tensor_model_parallel_size": 2,
            "max_model_len": int,
            "max_num_seqs": int,
            "n": 1,
            "val_kwargs.temperature": 0.0,
            "val_kwargs.n": 1,
            "val_kwargs.do_sample": False,
            "multi_turn.enable": False,
            "quantization": str,
            "enable_rollout_routing_replay": bool,
        },
    )
    | {
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": 1.0,
        "algorithm.lam": 1.0,
        "algorithm.norm_adv_by_std_in_grpo": True,
        "algorithm.filter_groups.enable": False,
        "algorithm.filter_groups.max_num_gen_batches": int,
        "algorithm.use_kl_in_reward": False,
        "algorithm.kl_penalty": "kl",
        "algorithm.kl_ctrl.type": "fixed",
        "algorithm.kl_ctrl.kl_coef": 0.001,
        "algorithm.kl_ctrl.horizon": 10000,
        "algorithm.kl_ctrl.target_kl": 0.1,
        "algorithm.rollout_correction.rollout_is": str,
        "algorithm.rollout_correction.rollout_is_threshold": object,
        "data.train_files": list,
        "data.val_files": list,
        "data.train_batch_size": 1024,
        "data.gen_batch_size": int,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "data.truncation": "error",
        "data.prompt_key": "prompt",
        "data.shuffle": True,
        "data.seed": int,
        "critic.model.path": str,
        "critic.cliprange_value": 0.5,
        "critic.grad_clip": 1.0,
        "trainer.critic_warmup": 0,
        "reward.custom_reward_function.path": str,
        "reward.custom_reward_function.name": "compute_score",
        "reward.reward_model.enable": bool,
        "reward.reward_model.model_path": str,
        "reward.reward_kwargs.overlong_buffer_cfg.enable": False,
        "reward.reward_kwargs.overlong_buffer_cfg.len": float,
        "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": 1.0,
    }
)
_SFT: dict[str, Any] = (
    _TRAINER
    | {"trainer.total_epochs": 4, "trainer.n_gpus_per_node": 1, "trainer.seed": int}
    | _under("optim.", _OPTIMIZER | {"lr": 1e-3, "clip_grad": 1.0})
    | _under("model.", _MODEL_KEYS)
    | _under("engine.", _MEGATRON | {"ulysses_sequence_parallel_size": 1})
    | {
        "data.train_files": list,
        "data.val_files": list,
        "data.train_batch_size": 256,
        "data.micro_batch_size_per_gpu": int,
        "data.max_token_len_per_gpu": int,
        "data.use_dynamic_bsz": True,
        "data.max_length": 1024,
        "data.truncation": "error",
        "data.messages_key": "messages",
    }
)
_NEEDLESS = remarks(
    """
*log_prob_micro_batch_size* *log_prob_use_dynamic_bsz *log_prob_max_token_len_per_gpu critic.forward_* =>
    batch.logprob_tokens=auto
*gpu_memory_utilization *free_cache_engine *max_num_batched_tokens *enable_chunked_prefill =>
    engine.kv_cache_bytes=auto, memory.sleep=auto
*use_remove_padding *use_fused_kernels *use_liger *use_torch_compile *entropy_from_logits* *pad_to_length* => rows
    have no padding (batch.packing), logits are computed in parts (batch.logits_bytes)
engine optim model *@* *.veomni.* hydra.* *fsdp_config.* *model_engine *.strategy model_engine
    => optim.distributed=true shards the optimizer, parallel.* the
    model
*profiler* *checkpoint.* *rollout.agent.* *trace.* *prometheus.* *fused_kernel_options.* *rollout.mode
    *rollout.load_format *layered_summon *calculate_log_probs *enable_prefix_caching *logprobs_mode *rollout.dtype
    *rollout.ignore_eos *rollout.seed *scheduling_policy *rollout.do_sample *skip_tokenizer_init
    *rollout.disable_log_stats *rollout.data_parallel_size *rollout.nnodes *rollout.n_gpus_per_node
    *rollout.multi_stage_wake_up *hybrid_engine *nccl_timeout *cudagraph_capture_sizes *trust_remote_code *use_shm
    *external_lib *hf_config_path *rollout_n *shuffle *data_loader_seed data.return_* data.filter_overlong_prompts*
    data.reward_fn_key data.val_batch_size data.*num_workers data.validation_shuffle data.tokenizer data.pad_mode
    data.tools_key data.balance_dp_token engine.wrap_policy.* engine.offload_policy engine.reshard_after_forward
    engine.fsdp_size engine.forward_prefetch engine.model_dtype engine.use_* engine.seed engine.full_determinism
    engine.expert_tensor_parallel_size data.enable_thinking_* data.ignore_input_ids_mismatch *rollout.full_determinism
    *rollout.router_config_path *.checkpoint_engine.* *rollout.moe_load_balance* trainer.checkpoint_callback_class
    trainer.val_only reward*.rollout.* reward*.sandbox_fusion.* reward_model.n* reward.reward_model.n*
    reward_model.reward_loop_* *.enable_resource_pool => nothing to set
transfer_queue.* ray_kwargs.* ray_init.* skip.* *update_weights_bucket_megabytes => one program, without Ray
trainer.balance_batch => batch.balance=true
trainer.resume_mode trainer.resume_from_path trainer.device trainer.use_v1 trainer.*log_val_generations
    trainer.default_hdfs_dir trainer.val_before_train trainer.del_local_ckpt_after_load trainer.*_dir trainer.ray_*
    trainer.esi_* trainer.profile_interval trainer.v1.* => run.resume=auto, run.eval_every, run.dir
*override_transformer_config.* *override_ddp_config.* *override_optimizer_config.* *override_mcore_model_config.*
    *optim.lr_warmup_init *optim.lr_decay_steps *optim.total_training_steps *optim.num_cycles *optim.optimizer_impl
    *optim.zero_indexed_step => model.megatron, optim.megatron: fields by name
critic.*fsdp*.* critic.megatron.* critic.model.* critic.ppo_* critic.use_dynamic_bsz critic.loss_* critic.ulysses*
    critic.enable critic.fsdp.* actor_rollout_ref.ref.* => critic and reference have the policy's layout and batches
*optim.muon_* *optim.exp_* *optim.main_grads_dtype *optim.use_* *optim.lr_wsd_* *optim.weight_decay_incr_style
    *.override_*config *megatron.use_* *.dist_c* *.distrib_* *megatron.expert_tensor_parallel_size *.vanilla_mbridge
    *.dynamic_context_parallel *.max_seqlen_per_dp_cp_rank *megatron.seed *.pad_bshd* *.forward_only *.dtype
    *.entropy_checkpointing => optim.megatron, model.megatron: Megatron-Core's fields by name
reward*.reward_manager* reward*.num_workers --config-name reward*.launch_reward_fn_async => as the policy's
"""
)
_MISSING = remarks(
    """
data.train_max_samples data.val_max_samples => shorten the file, or set run.steps
*max_actor_ckpt_to_keep *max_critic_ckpt_to_keep trainer.max_ckpt_to_keep => checkpoint.keep_last
data.image_* data.video_* data.audio_* *freeze_vision_tower data.mm_* => text alone is trained
*custom_cls.* *custom_chat_template *apply_chat_template_kwargs* => data.template_arguments, data.chat_template
*multi_turn.* *tool_config_path *function_tool_path => environment.tools, environment.max_turns
*engine_kwargs* *rollout.pipeline_model_parallel_size *quantization_config_file *expert_parallel_size
    *moe_tensor_parallel_size => engine.vllm.args takes options by name
*rollout_correction.* => mismatch.correction
*.mtp *.qat *mtp.* *qat.* *turbo_config.* *tiled_mlp.* *disaggregation.* distillation.* *router_replay.* => nothing
    here does this; teachers: stage distill
*policy_loss.* *use_prefix_grouper *calculate_* algorithm.pf_ppo.* algorithm.use_pf_ppo *val_kwargs.*
    algorithm.filter_groups.* *over_sample_rate *override_config* *exclude_modules *lora.* *lora_* => nothing
    here does this
sandbox_fusion.* => reward.functions, data.*
*enable_activation_offload *overlap* => nothing here does this
"""
)
_EARLIER = (
    ("reward_model.model.path", "reward.reward_model.model_path"),
    ("reward_model.enable", "reward.reward_model.enable"),
    ("reward_model.reward_kwargs.", "reward.reward_kwargs."),
    ("reward_model.overlong_buffer.", "reward.reward_kwargs.overlong_buffer_cfg."),
    ("custom_reward_function.", "reward.custom_reward_function."),
    ("optim.warmup_steps_ratio", "optim.lr_warmup_steps_ratio"),
)


def vocabulary(sft: bool) -> Vocabulary:
    command = "sft_trainer" if sft else "main_ppo"
    return Vocabulary(f"{VERSION} ({command})", _SFT if sft else _PPO, _NEEDLESS, _MISSING)


def current(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values by the names of this version, and how the file calls them."""
    result: dict[str, Any] = {}
    labels: dict[str, str] = {}
    for earlier, value in values.items():
        name = earlier
        for before, after in _EARLIER:
            if name.startswith(before):
                name = after + name.removeprefix(before)
                break
        if value is not None or name not in result:
            result[name], labels[name] = value, earlier
    return result, labels
