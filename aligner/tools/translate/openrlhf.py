"""OpenRLHF's arguments: openrlhf.cli.train_ppo_ray, train_sft, train_dpo, train_rm of OpenRLHF 0.11.2, and the names
without dots of versions up to 0.9."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aligner.errors import ConfigError
from aligner.tools.translate.sheet import Vocabulary, remarks
from aligner.tools.translate.source import EXPECTED, Source

VERSION = "OpenRLHF 0.11.2"
STAGES = {"train_ppo_ray": "ppo", "train_sft": "sft", "train_dpo": "dpo", "train_rm": "rm"}
_BASE: dict[str, Any] = {
    "ckpt.output_dir": str,
    "ckpt.save_steps": int,
    "ckpt.max_num": int,
    "eval.steps": int,
    "eval.dataset": str,
    "train.batch_size": 128,
    "train.micro_batch_size": int,
    "train.max_epochs": 1,
    "train.seed": int,
    "train.full_determinism_enable": bool,
    "ds.param_dtype": "bf16",
    "ds.adam_offload": bool,
    "ds.tensor_parallel_size": 1,
    "ds.ring_attn_size": 1,
    "ds.load_in_4bit": False,
    "ds.lora.rank": 0,
    "ds.lora.alpha": 16.0,
    "ds.lora.dropout": 0.0,
    "ds.lora.target_modules": ["all-linear"],
    "data.max_len": 2048,
    "data.input_key": str,
    "data.input_template": str,
    "logger.wandb.key": str,
    "logger.wandb.project": str,
    "logger.wandb.run_name": str,
}
_OPTIMIZER: dict[str, Any] = {
    "optim": "adam",
    "muon.lr": 0.02,
    "muon.momentum": 0.95,
    "adam.lr": 1e-6,
    "adam.betas": [0.9, 0.95],
    "adam.eps": 1e-8,
    "adam.weight_decay": 0.0,
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.03,
    "min_lr_ratio": 0.1,
    "max_norm": 1.0,
}
_ROWS: dict[str, Any] = _OPTIMIZER | {
    "model.model_name_or_path": str,
    "model.gradient_checkpointing_enable": bool,
    "model.aux_loss_coef": 0.0,
    "data.dataset": str,
    "data.dataset_probs": str,
    "data.tokenizer_chat_template": str,
}
_PAIRS: dict[str, Any] = {"data.prompt_key": str, "data.chosen_key": "chosen", "data.rejected_key": "rejected"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "train_sft": _ROWS
    | {
        "adam.lr": 5e-6,
        "train.max_epochs": 2,
        "model.pretrain_mode_enable": False,
        "data.output_key": str,
        "data.multiturn": bool,
    },
    "train_dpo": _ROWS
    | _PAIRS
    | {
        "adam.lr": 1e-5,
        "data.max_len": 512,
        "model.beta": 0.1,
        "model.ipo_enable": False,
        "model.label_smoothing": 0.0,
        "model.nll_loss_coef": 0.0,
        "ref.model_name_or_path": str,
    },
    "train_rm": _ROWS
    | _PAIRS
    | {"adam.lr": 9e-6, "data.max_len": 512, "model.loss_type": "sigmoid", "model.margin_loss_enable": False},
    "train_ppo_ray": {f"actor.{name}": value for name, value in _OPTIMIZER.items()}
    | {f"critic.{name}": value for name, value in _OPTIMIZER.items()}
    | {
        "critic.adam.lr": 9e-6,
        "actor.num_nodes": 1,
        "actor.num_gpus_per_node": 8,
        "actor.model_name_or_path": str,
        "actor.gradient_checkpointing_enable": bool,
        "actor.eps_clip": 0.2,
        "actor.eps_clip_low_high": list,
        "actor.dual_clip": float,
        "actor.policy_loss_type": "ppo",
        "actor.loss_agg_mode": "token-mean",
        "actor.aux_loss_coef": 0.0,
        "actor.entropy_coef": float,
        "critic.model_name_or_path": str,
        "critic.value_clip": 0.5,
        "critic.freezing_steps": -1,
        "reward.model_name_or_path": str,
        "reward.remote_url": str,
        "reward.normalize_enable": False,
        "reward.clip_range": [-10.0, 10.0],
        "reward.overlong_buffer_len": float,
        "reward.overlong_penalty_factor": 1.0,
        "reward.stop_properly_penalty_coef": float,
        "vllm.num_engines": int,
        "vllm.tensor_parallel_size": 1,
        "vllm.enforce_eager": bool,
        "vllm.enable_prefix_caching": bool,
        "algo.advantage.estimator": "gae",
        "algo.advantage.lambd": 1.0,
        "algo.advantage.gamma": 1.0,
        "algo.advantage.no_std_norm": False,
        "algo.advantage.is_correction_level": "off",
        "algo.advantage.is_correction_mode": "mask",
        "algo.advantage.is_correction_gating": "ratio",
        "algo.advantage.is_correction_threshold": [0.5, 5.0],
        "algo.kl.init_coef": 0.01,
        "algo.kl.target": float,
        "algo.kl.horizon": 10000,
        "algo.kl.estimator": "k1",
        "algo.kl.use_loss": False,
        "algo.kl.unbiased_gradient": bool,
        "algo.dynamic_filtering_enable": bool,
        "algo.dynamic_filtering_range": list,
        "rollout.batch_size": 1024,
        "rollout.n_samples_per_prompt": 1,
        "rollout.max_new_tokens": int,
        "rollout.temperature": 1.0,
        "rollout.top_p": 1.0,
        "rollout.max_tokens_per_gpu": int,
        "prompt_max_len": int,
        "train.num_episodes": 1,
        "train.max_tokens_per_gpu": 16192,
        "train.dynamic_batch_enable": False,
        "train.colocate_all": False,
        "train.async_enable": False,
        "train.enable_ema": False,
        "train.ema_beta": 0.992,
        "train.agent_func_path": str,
        "data.prompt_dataset": str,
        "data.prompt_probs": str,
        "data.label_key": str,
        "eval.temperature": 0.6,
        "eval.n_samples_per_prompt": 4,
    },
}
_NEEDLESS = remarks(
    """
ds.packing_samples => batch.packing=true
ds.attn_implementation ds.experts_implementation ds.use_liger_kernel ds.deepcompile => model.kernels=auto
ds.zero_stage ds.zpg ds.overlap_comm ds.grad_accum_dtype ds.use_universal_ckpt => optim.distributed=true shards the
    optimizer, parallel.tensor and parallel.pipeline the model
ds.enable_sleep vllm.enable_sleep vllm.gpu_memory_utilization => memory.sleep=auto, engine.kv_cache_bytes=auto
fsdp2_* ds.value_head_prefix ds.ring_attn_head_stride data.disable_fast_tokenizer data.dataloader_num_workers local_rank
    logger.logging_steps use_ms *muon.ns_steps *muon.nesterov *muon.no_nesterov => nothing to set
vllm.sync_backend vllm.sync_with_ray => weights go to the engine by messages
*.gradient_checkpointing_reentrant rollout.micro_batch_size rollout.vllm_generate_batch_size =>
    batch.logprob_tokens=auto
ref.num_nodes ref.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node critic.num_nodes
    critic.num_gpus_per_node train.colocate_actor_ref train.colocate_critic_reward => all models share the ranks
data.apply_chat_template => conversations go through the chat template (data.chat_template)
data.dataset_split data.prompt_split eval.split => data.train reads the split train, data.eval validation or test
ckpt.path ckpt.load_enable ckpt.save_hf ckpt.disable_ds ckpt.max_mem => run.dir, run.resume=auto, run.export=true
logger.tensorboard_dir critic.save_value_network model.compute_fp32_loss_enable => logging.trackers=[tensorboard]
"""
)
_MISSING = remarks(
    """
data.max_samples => shorten the file, or set run.steps
data.image_key data.max_images_per_prompt actor.freeze_visual_encoder => text alone is trained
ref.offload reward.offload => memory.offload=[gradients,optimizer,weights] is of the policy's state
train.async_queue_size train.partial_rollout_enable => engine.ranks, engine.lag and engine.window
logger.wandb.org logger.wandb.group => logging.args
ckpt.best_metric_key => checkpoint.keep_best, checkpoint.metric
"""
)
# name of earlier versions -> name now, in which `model.` and `` stand for `actor.` of train_ppo_ray
_RENAMED = """
pretrain=model.model_name_or_path reward_pretrain=reward.model_name_or_path critic_pretrain=critic.model_name_or_path
ref_pretrain=ref.model_name_or_path remote_rm_url=reward.remote_url save_path=ckpt.output_dir ckpt_path=ckpt.path
save_steps=ckpt.save_steps max_ckpt_num=ckpt.max_num max_ckpt_mem=ckpt.max_mem save_hf_ckpt=ckpt.save_hf
disable_ds_ckpt=ckpt.disable_ds load_checkpoint=ckpt.load_enable eval_steps=eval.steps eval_dataset=eval.dataset
eval_split=eval.split eval_temperature=eval.temperature eval_n_samples_per_prompt=eval.n_samples_per_prompt
logging_steps=logger.logging_steps use_wandb=logger.wandb.key wandb_project=logger.wandb.project
wandb_run_name=logger.wandb.run_name wandb_org=logger.wandb.org wandb_group=logger.wandb.group
use_tensorboard=logger.tensorboard_dir train_batch_size=train.batch_size micro_train_batch_size=train.micro_batch_size
max_epochs=train.max_epochs num_episodes=train.num_episodes seed=train.seed
full_determinism=train.full_determinism_enable rollout_batch_size=rollout.batch_size
micro_rollout_batch_size=rollout.micro_batch_size vllm_generate_batch_size=rollout.vllm_generate_batch_size
n_samples_per_prompt=rollout.n_samples_per_prompt generate_max_len=rollout.max_new_tokens
temperature=rollout.temperature top_p=rollout.top_p max_len=data.max_len max_samples=data.max_samples
dataset=data.dataset dataset_probs=data.dataset_probs dataset_split=data.dataset_split prompt_data=data.prompt_dataset
prompt_data_probs=data.prompt_probs prompt_split=data.prompt_split input_key=data.input_key output_key=data.output_key
label_key=data.label_key prompt_key=data.prompt_key chosen_key=data.chosen_key rejected_key=data.rejected_key
input_template=data.input_template apply_chat_template=data.apply_chat_template
tokenizer_chat_template=data.tokenizer_chat_template multiturn=data.multiturn pretrain_mode=model.pretrain_mode_enable
disable_fast_tokenizer=data.disable_fast_tokenizer dataloader_num_workers=data.dataloader_num_workers
zero_stage=ds.zero_stage param_dtype=ds.param_dtype zpg=ds.zpg adam_offload=ds.adam_offload
flash_attn=ds.attn_implementation attn_implementation=ds.attn_implementation use_liger_kernel=ds.use_liger_kernel
grad_accum_dtype=ds.grad_accum_dtype overlap_comm=ds.overlap_comm deepcompile=ds.deepcompile
packing_samples=ds.packing_samples load_in_4bit=ds.load_in_4bit lora_rank=ds.lora.rank lora_alpha=ds.lora.alpha
lora_dropout=ds.lora.dropout target_modules=ds.lora.target_modules ds_tensor_parallel_size=ds.tensor_parallel_size
ring_attn_size=ds.ring_attn_size ring_head_stride=ds.ring_attn_head_stride deepspeed_enable_sleep=ds.enable_sleep
value_head_prefix=ds.value_head_prefix gradient_checkpointing=model.gradient_checkpointing_enable
aux_loss_coef=model.aux_loss_coef gradient_checkpointing_use_reentrant=model.gradient_checkpointing_reentrant
learning_rate=adam.lr actor_learning_rate=actor.adam.lr critic_learning_rate=critic.adam.lr adam_betas=adam.betas
l2=adam.weight_decay lr_warmup_ratio=lr_warmup_ratio lr_scheduler=lr_scheduler max_norm=max_norm beta=model.beta
ipo=model.ipo_enable label_smoothing=model.label_smoothing nll_loss_coef=model.nll_loss_coef loss=model.loss_type
margin_loss=model.margin_loss_enable compute_fp32_loss=model.compute_fp32_loss_enable ref_offload=ref.offload
ref_reward_offload=ref.offload reward_offload=reward.offload eps_clip=actor.eps_clip
eps_clip_low_high=actor.eps_clip_low_high dual_clip=actor.dual_clip value_clip=critic.value_clip
policy_loss_type=actor.policy_loss_type entropy_loss_coef=actor.entropy_coef
freezing_actor_steps=critic.freezing_steps save_value_network=critic.save_value_network
advantage_estimator=algo.advantage.estimator lambd=algo.advantage.lambd gamma=algo.advantage.gamma
no_advantage_std_norm=algo.advantage.no_std_norm init_kl_coef=algo.kl.init_coef kl_target=algo.kl.target
kl_horizon=algo.kl.horizon kl_estimator=algo.kl.estimator use_kl_loss=algo.kl.use_loss
dynamic_filtering=algo.dynamic_filtering_enable dynamic_filtering_reward_range=algo.dynamic_filtering_range
normalize_reward=reward.normalize_enable reward_clip_range=reward.clip_range
stop_properly_penalty_coef=reward.stop_properly_penalty_coef
overlong_buffer_len=reward.overlong_buffer_len overlong_penalty_factor=reward.overlong_penalty_factor
vllm_num_engines=vllm.num_engines vllm_tensor_parallel_size=vllm.tensor_parallel_size
vllm_sync_backend=vllm.sync_backend vllm_sync_with_ray=vllm.sync_with_ray vllm_enable_sleep=vllm.enable_sleep
vllm_gpu_memory_utilization=vllm.gpu_memory_utilization enable_prefix_caching=vllm.enable_prefix_caching
enforce_eager=vllm.enforce_eager colocate_all_models=train.colocate_all colocate_actor_ref=train.colocate_actor_ref
colocate_critic_reward=train.colocate_critic_reward use_dynamic_batch=train.dynamic_batch_enable
train_max_tokens_per_gpu=train.max_tokens_per_gpu rollout_max_tokens_per_gpu=rollout.max_tokens_per_gpu
async_train=train.async_enable async_queue_size=train.async_queue_size agent_func_path=train.agent_func_path
enable_ema=train.enable_ema ema_beta=train.ema_beta actor_num_nodes=actor.num_nodes
actor_num_gpus_per_node=actor.num_gpus_per_node critic_num_nodes=critic.num_nodes
critic_num_gpus_per_node=critic.num_gpus_per_node ref_num_nodes=ref.num_nodes
ref_num_gpus_per_node=ref.num_gpus_per_node reward_num_nodes=reward.num_nodes
reward_num_gpus_per_node=reward.num_gpus_per_node
"""

# how versions before 0.11 asked for a correction of the mismatch of vLLM and trainer
_LEVEL, _MODE = "algo.advantage.is_correction_level", "algo.advantage.is_correction_mode"
_CORRECTIONS = {
    "enable_vllm_is_correction": _LEVEL,
    "vllm_enable_is_correction": _LEVEL,
    "algo.advantage.is_correction_enable": _LEVEL,
    "use_icepop": _MODE,
    "vllm_is_correction_type": _MODE,
    "algo.advantage.is_correction_type": _MODE,
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
}
_CORRECTION_KINDS = {"tis": "clip", "icepop": "mask"}


def _pair(text: str) -> tuple[str, str]:
    earlier, _, name = text.partition("=")
    return earlier, name


_EARLIER = dict(map(_pair, _RENAMED.split()))


def vocabulary(command: str) -> Vocabulary:
    return Vocabulary(f"{VERSION} ({command})", _BASE | _DEFAULTS[command], _NEEDLESS, _MISSING)


def command_of(source: Source, asked: str) -> str:
    """Return the command: of the file, the one asked for, or the only one with these names. Raises ConfigError."""
    if command := source.named_command(asked, STAGES):
        return command
    names = {_EARLIER.get(name, name) for name in source.values}
    own = {command: len(names & set(_DEFAULTS[command])) for command in STAGES}
    best = [command for command, count in own.items() if count == max(own.values())]
    if len(best) > 1:
        expected = f"one of {', '.join(best)}: the arguments fit each" if max(own.values()) else EXPECTED
        raise ConfigError("--command" if max(own.values()) else "FILE", "", expected)
    return best[0]


def current(command: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values by the names of this version, and how the file calls them."""
    result: dict[str, Any] = {}
    labels: dict[str, str] = {}
    for earlier, value in values.items():
        if earlier in _CORRECTIONS:
            name, value = _CORRECTIONS[earlier], _CORRECTION_KINDS.get(str(value), value)
        else:
            name = "ds.param_dtype" if earlier == "bf16" else _EARLIER.get(earlier, earlier)
        if command == "train_ppo_ray" and "." not in earlier:
            if name.startswith("model."):
                name = f"actor.{name.removeprefix('model.')}"
            elif name in _OPTIMIZER:
                result.setdefault(f"critic.{name}", value)
                name = f"actor.{name}"
        if earlier == "bf16":
            value = "bf16"
        elif value is True and name in (_LEVEL, _MODE):
            value = "token" if name == _LEVEL else "mask"
        result[name], labels[name] = value, earlier
    if result.get(_LEVEL) == "token" and labels[_LEVEL] != _LEVEL:
        result.setdefault(_MODE, "clip")  # as before 0.11
    return result, labels
