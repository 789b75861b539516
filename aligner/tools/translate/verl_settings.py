"""Our settings for veRL's values."""

from __future__ import annotations

from aligner.errors import ConfigError
from aligner.tools.translate.sheet import Sheet, share, sources
from aligner.tools.translate.source import Source
from aligner.tools.translate.verl import current, vocabulary
from aligner.tools.translate.verl_losses import correction, kl_term, policy_loss

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_ENGINES = {"vllm": "vllm", "sglang": "vllm", "trtllm": "trtllm_engine"}
_MATRICES = {  # Megatron-Core's names -> ours
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}


def translate(source: Source, command: str, gpus: int) -> Sheet:
    values, labels = current(source.values)
    sft = source.command.startswith("sft") or command == "sft_trainer"
    critic = values.get("algorithm.adv_estimator", "gae") == "gae"
    sheet = Sheet(vocabulary(sft), values, "sft" if sft else "ppo" if critic else "grpo", labels, source.added)
    nodes = ("trainer.nnodes", "trainer.n_gpus_per_node")
    sheet.put("cluster.gpus", gpus or sheet[nodes[0]] * sheet[nodes[1]], *nodes)
    _trainer(sheet)
    if sft:
        _supervised(sheet)
        return sheet
    updates = _batch(sheet)
    _model(sheet, _MODEL)
    _parallel(sheet, f"{_ACTOR}megatron.", f"{_ACTOR}fsdp_config.", f"{_ACTOR}ulysses_sequence_parallel_size")
    _data(sheet)
    _optimizer(sheet, f"{_ACTOR}optim.", "optim", updates)
    _engine(sheet)
    policy_loss(sheet)
    kl_term(sheet)
    correction(sheet)
    if critic:
        _critic(sheet, updates)
    _rewards(sheet)
    return sheet


def _trainer(sheet: Sheet) -> None:
    if sheet["trainer.total_training_steps"]:
        sheet.put("run.steps", sheet["trainer.total_training_steps"], "trainer.total_training_steps")
        sheet.drop(("trainer.total_epochs",), "run.steps decides")
    else:
        sheet.put("run.epochs", float(sheet["trainer.total_epochs"]), "trainer.total_epochs")
    for name, key in (("trainer.save_freq", "checkpoint.every"), ("trainer.test_freq", "run.eval_every")):
        if (sheet[name] or 0) > 0:
            sheet.put(key, sheet[name], name)
        sheet.drop((name,), f"{key}=0: at the end")
    for name, key in (("trainer.experiment_name", "run.name"), ("trainer.default_local_dir", "run.dir")):
        if sheet[name]:
            sheet.put(key, sheet[name], name)
    sheet.track("trainer.logger", sheet["trainer.logger"] or [], "trainer.project_name")
    sheet.drop(("trainer.logger", "trainer.project_name"), "logging.trackers=[tensorboard]")


def _batch(sheet: Sheet) -> int:
    """Set the sizes of a rollout; return its number of optimizer steps."""
    size, mini, group = "data.train_batch_size", f"{_ACTOR}ppo_mini_batch_size", f"{_ROLLOUT}n"
    if sheet[size] % sheet[mini]:
        raise ConfigError(mini, sheet[mini], f"a divisor of {size}={sheet[size]}")
    sheet.put("batch.prompts", sheet[size], size)
    sheet.put("batch.group", sheet[group], group)
    step = sheet[mini] * sheet[group]
    sheet.put("batch.minibatch_samples", step if sheet[mini] < sheet[size] else 0, mini, group, note="prompts x n")
    sheet.put("batch.epochs", sheet[f"{_ACTOR}ppo_epochs"], f"{_ACTOR}ppo_epochs")
    sheet.lack(("data.gen_batch_size",), "algorithm.filter_groups generates as many prompts again as are lacking")
    micro, tokens = f"{_ACTOR}ppo_micro_batch_size_per_gpu", f"{_ACTOR}ppo_max_token_len_per_gpu"
    if sheet[f"{_ACTOR}use_dynamic_bsz"]:
        sheet.put("batch.micro_batch_tokens", sheet[tokens], f"{_ACTOR}use_dynamic_bsz", tokens)
        sheet.drop((micro,), "batch.micro_batch_tokens decides")
    elif sheet[micro]:
        sheet.put("batch.micro_batch_samples", sheet[micro], micro)
    sheet.lack((f"{_ACTOR}ppo_micro_batch_size",), "batch.micro_batch_samples counts the rows of one rank")
    return sheet[size] // sheet[mini] * sheet[f"{_ACTOR}ppo_epochs"]


def _model(sheet: Sheet, prefix: str) -> None:
    sheet.model(f"{prefix}path")
    if sheet[f"{prefix}tokenizer_path"]:
        sheet.put("model.tokenizer", sheet[f"{prefix}tokenizer_path"], f"{prefix}tokenizer_path")
    if sheet.written(f"{prefix}enable_gradient_checkpointing"):
        name = f"{prefix}enable_gradient_checkpointing"
        sheet.put("model.recompute", "full" if sheet[name] else "none", name)
    if sheet[f"{prefix}lora_rank"]:
        sheet.put("model.lora.rank", sheet[f"{prefix}lora_rank"], f"{prefix}lora_rank")
        sheet.put("model.lora.alpha", sheet[f"{prefix}lora_alpha"], f"{prefix}lora_alpha")
        sheet.put("model.lora.targets", sheet[f"{prefix}target_modules"], f"{prefix}target_modules")
    elif sheet[f"{prefix}lora.rank"]:
        for key in ("rank", "alpha", "dropout"):
            sheet.put(f"model.lora.{key}", sheet[f"{prefix}lora.{key}"], f"{prefix}lora.{key}")
        names = sheet[f"{prefix}lora.target_modules"] or list(_MATRICES)
        targets = [ours for name in names for ours in _MATRICES.get(name, [name])]
        sheet.put("model.lora.targets", targets, f"{prefix}lora.target_modules")


def _parallel(sheet: Sheet, megatron: str, offloads: str, ulysses: str) -> None:
    for name, key in (
        ("tensor_model_parallel_size", "tensor"),
        ("pipeline_model_parallel_size", "pipeline"),
        ("context_parallel_size", "context"),
        ("expert_model_parallel_size", "expert"),
    ):
        sheet.put(f"parallel.{key}", sheet[megatron + name], megatron + name)
    tensor = sheet[f"{megatron}tensor_model_parallel_size"]
    if tensor > 1 and sheet[f"{megatron}sequence_parallel"] is not False:
        names = [f"{megatron}sequence_parallel"] * sheet.written(f"{megatron}sequence_parallel")
        sheet.put("parallel.sequence", True, *(names or [f"{megatron}tensor_model_parallel_size"]))
    virtual = f"{megatron}virtual_pipeline_model_parallel_size"
    if (sheet[virtual] or 1) > 1:
        sheet.put("parallel.virtual_stages", sheet[virtual], virtual)
    if sheet[ulysses] > 1:
        sheet.put("parallel.context", sheet[ulysses], ulysses)
        sheet.put("parallel.context_mode", "alltoall", ulysses)
    if sheet[f"{megatron}override_transformer_config.recompute_granularity"] == "full":
        sheet.put("model.recompute", "full", f"{megatron}override_transformer_config.recompute_granularity")
    kinds = {"grad_offload": "gradients", "optimizer_offload": "optimizer", "param_offload": "weights"}
    names = [(f"{p}{n}", ours) for p in dict.fromkeys((megatron, offloads)) for n, ours in kinds.items()]
    on = [(name, ours) for name, ours in names if name in sheet.vocabulary.defaults and sheet[name]]
    if on:
        sheet.put("memory.offload", sorted({ours for _, ours in on}), *(name for name, _ in on))
    sheet.drop((name for name, _ in names if name in sheet.vocabulary.defaults), "memory.offload=[]")


def _data(sheet: Sheet) -> None:
    _files(sheet)
    sheet.put("data.max_prompt_tokens", sheet["data.max_prompt_length"], "data.max_prompt_length")
    response = f"{_ROLLOUT}response_length"
    name = response if sheet[response] else "data.max_response_length"
    sheet.put("sampling.max_response_tokens", sheet[name], name)
    sheet.drop((f"{_ROLLOUT}prompt_length", "data.max_response_length"), "the same limit")
    if sheet["data.prompt_key"] != "prompt":
        sheet.put("data.columns.prompt", sheet["data.prompt_key"], "data.prompt_key")
    sheet.put("data.shuffle", sheet["data.shuffle"], "data.shuffle")
    if sheet["data.seed"]:
        sheet.put("seed", sheet["data.seed"], "data.seed")


def _files(sheet: Sheet) -> None:
    files = sheet["data.train_files"]
    if not files:
        raise ConfigError("data.train_files", files, "the file to train on")
    if len(files) == 1:
        sheet.put("data.train", files[0], "data.train_files")
    else:
        sheet.put("data.sources", sources(files), "data.train_files")
    held_out = sheet["data.val_files"]
    if held_out:
        sheet.put("data.eval", held_out[0], "data.val_files", note="the first of them" if len(held_out) > 1 else "")
    if sheet["data.truncation"] == "error":
        sheet.drop(("data.truncation",), "data.overlong=drop")
    else:
        note = "veRL cuts " + {"left": "the beginning", "right": "the end"}.get(sheet["data.truncation"], "the middle")
        sheet.put("data.overlong", "truncate", "data.truncation", note=note)


def _optimizer(sheet: Sheet, prefix: str, ours: str, updates: int) -> None:
    """Set the optimizer. veRL's schedules count rollouts, ours optimizer steps: `updates` for each rollout."""
    for key in ("lr", "weight_decay", "betas"):
        sheet.put(f"{ours}.{key}", sheet[prefix + key], prefix + key)
    style = next((n for n in ("warmup_style", "lr_decay_style") if sheet.written(prefix + n)), "lr_scheduler_type")
    schedule = sheet[prefix + style]
    if schedule in ("constant", "cosine", "linear"):
        sheet.put(f"{ours}.schedule", schedule, prefix + style)
    else:
        sheet.lack((prefix + style,), f"{ours}.schedule is constant, linear or cosine")
    if schedule == "cosine" and style == "lr_decay_style":
        sheet.put(f"{ours}.min_lr", sheet[f"{prefix}min_lr"], f"{prefix}min_lr")
    elif schedule == "cosine":
        floor = share(sheet[f"{prefix}lr"], sheet[f"{prefix}min_lr_ratio"])
        sheet.put(f"{ours}.min_lr", floor, f"{prefix}min_lr_ratio", f"{prefix}lr")
    steps, ratio = f"{prefix}lr_warmup_steps", f"{prefix}lr_warmup_steps_ratio"
    if sheet[steps] > 0:
        note = f"x {updates} optimizer steps of a rollout" if updates > 1 else ""
        sheet.put(f"{ours}.warmup_steps", float(sheet[steps] * updates), steps, note=note)
        sheet.drop((ratio,), "the number of steps decides")
    else:
        sheet.put(f"{ours}.warmup_steps", sheet[ratio], ratio)
        sheet.drop((steps,), "the ratio decides")
    clip = f"{prefix}clip_grad"
    if not sheet.written(clip) and f"{prefix.removesuffix('optim.')}grad_clip" in sheet.vocabulary.defaults:
        clip = f"{prefix.removesuffix('optim.')}grad_clip"
    sheet.put(f"{ours}.clip_grad", sheet[clip], clip)
    if "adam" in (sheet[f"{prefix}optimizer"] or "adam").lower():
        sheet.drop((f"{prefix}optimizer",), "optim.name=adam is AdamW")


def _engine(sheet: Sheet) -> None:
    name = f"{_ROLLOUT}name"
    engine = _ENGINES.get(sheet[name], "")
    if engine:
        sheet.choose("engine", engine, name)
    if sheet[f"{_ROLLOUT}enforce_eager"]:
        sheet.put("engine.cuda_graphs", False, f"{_ROLLOUT}enforce_eager")
    sheet.put(
        "engine.tensor_parallel",
        sheet[f"{_ROLLOUT}tensor_model_parallel_size"],
        f"{_ROLLOUT}tensor_model_parallel_size",
    )
    if sheet[f"{_ROLLOUT}max_num_seqs"]:
        sheet.put("engine.max_batch", sheet[f"{_ROLLOUT}max_num_seqs"], f"{_ROLLOUT}max_num_seqs")
    if sheet[f"{_ROLLOUT}max_model_len"] and engine:
        section = "trtllm" if engine.startswith("trtllm") else engine
        sheet.put(f"engine.{section}.max_seq_len", sheet[f"{_ROLLOUT}max_model_len"], f"{_ROLLOUT}max_model_len")
    for key in ("temperature", "top_p"):
        sheet.put(f"sampling.{key}", sheet[_ROLLOUT + key], _ROLLOUT + key)
    sheet.put("sampling.top_k", max(0, sheet[f"{_ROLLOUT}top_k"]), f"{_ROLLOUT}top_k")
    if sheet[f"{_ROLLOUT}multi_turn.enable"]:
        sheet.lack((f"{_ROLLOUT}multi_turn.enable",), "environment.tools and environment.max_turns")
    if sheet[f"{_ROLLOUT}quantization"]:
        sheet.lack((f"{_ROLLOUT}quantization",), "engine.vllm.args, docs/how-to/quantisation.md")
    if sheet[f"{_ROLLOUT}enable_rollout_routing_replay"]:
        sheet.put("mismatch.replay_routing", True, f"{_ROLLOUT}enable_rollout_routing_replay")
    if "data.eval" in sheet.settings:
        sampled = sheet[f"{_ROLLOUT}val_kwargs.do_sample"]
        names = (f"{_ROLLOUT}val_kwargs.temperature", f"{_ROLLOUT}val_kwargs.do_sample")
        sheet.put("eval.temperature", sheet[names[0]] if sampled else 0.0, *names)
        sheet.put("eval.samples", sheet[f"{_ROLLOUT}val_kwargs.n"], f"{_ROLLOUT}val_kwargs.n")


def _critic(sheet: Sheet, updates: int) -> None:
    _optimizer(sheet, "critic.optim.", "critic.optim", updates)
    sheet.put("critic.clip", sheet["critic.cliprange_value"], "critic.cliprange_value")
    sheet.put("critic.warmup_steps", sheet["trainer.critic_warmup"], "trainer.critic_warmup")
    if sheet["critic.model.path"]:
        sheet.model("critic.model.path", "critic.init")
    else:
        sheet.put("critic.init", sheet.settings["model.init"].value, f"{_MODEL}path")


def _rewards(sheet: Sheet) -> None:
    path, function = "reward.custom_reward_function.path", "reward.custom_reward_function.name"
    model = "reward.reward_model.model_path"
    if sheet[path]:
        sheet.put("reward.functions", [{"path": f"{sheet[path]}:{sheet[function]}"}], path, function)
        sheet.without["compute_score(data_source, solution_str, ground_truth)"] = (
            "write it as f(samples), docs/how-to/rewards.md"
        )
    elif sheet[model] and sheet["reward.reward_model.enable"] is not False:
        sheet.model(model, "reward.model")
        sheet.drop(("reward.reward_model.enable",), "reward.model")
        sheet.without[model] = "reward.model is the folder `hf` of an rm run: train it here"
    else:
        sheet.put("reward.functions", [{"path": "math"}], note="a guess: veRL scores by the row's data_source")
    sheet.put("data.columns.answer", "reward_model.ground_truth", note="veRL's column")
    prefix = "reward.reward_kwargs.overlong_buffer_cfg."
    if sheet[f"{prefix}enable"]:
        length, factor = f"{prefix}len", f"{prefix}penalty_factor"
        whole = sheet.settings["sampling.max_response_tokens"].value
        if sheet[factor] == 1 and sheet[length]:
            sheet.put("algorithm.overlong.soft_fraction", sheet[length] / whole, f"{prefix}enable", length, factor)
        else:
            sheet.lack((f"{prefix}enable", length, factor), "the reward `length` with a weight")


def _supervised(sheet: Sheet) -> None:
    sheet.put("batch.sequences", sheet["data.train_batch_size"], "data.train_batch_size")
    if sheet["data.use_dynamic_bsz"] and sheet["data.max_token_len_per_gpu"]:
        names = ("data.use_dynamic_bsz", "data.max_token_len_per_gpu")
        sheet.put("batch.micro_batch_tokens", sheet["data.max_token_len_per_gpu"], *names)
    elif sheet["data.micro_batch_size_per_gpu"]:
        sheet.put("batch.micro_batch_samples", sheet["data.micro_batch_size_per_gpu"], "data.micro_batch_size_per_gpu")
    _model(sheet, "model.")
    _parallel(sheet, "engine.", "engine.", "engine.ulysses_sequence_parallel_size")
    _files(sheet)
    sheet.put("data.max_tokens", sheet["data.max_length"], "data.max_length")
    if sheet["data.messages_key"] != "messages":
        sheet.put("data.columns.messages", sheet["data.messages_key"], "data.messages_key")
    if sheet["trainer.seed"]:
        sheet.put("seed", sheet["trainer.seed"], "trainer.seed")
    _optimizer(sheet, "optim.", "optim", 1)
