"""Our settings for OpenRLHF's values."""

from __future__ import annotations

from aligner.errors import ConfigError
from aligner.tools.translate.openrlhf import STAGES, command_of, current, vocabulary
from aligner.tools.translate.sheet import SCHEDULES, Sheet, share
from aligner.tools.translate.source import Source

_ADVANTAGES = {
    "gae": "gae",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}
_WHITENED = ("gae", "reinforce", "reinforce_baseline")
_ESTIMATOR, _CORRECTION = "algo.advantage.estimator", "algo.advantage.is_correction_"


def translate(source: Source, command: str, gpus: int) -> Sheet:
    command = command_of(source, command)
    (values, labels), stage = current(command, source.values), STAGES[command]
    if command == "train_ppo_ray" and values.get(_ESTIMATOR, "gae") != "gae":
        stage = "grpo"
    sheet = Sheet(vocabulary(command), values, stage, labels)
    if command == "train_ppo_ray":
        _reinforcement(sheet)
    else:
        _rows(sheet, command, gpus)
    _common(sheet)
    return sheet


def _optimizer(sheet: Sheet, prefix: str, ours: str = "optim") -> None:
    names = {"betas": "adam.betas", "eps": "adam.eps", "weight_decay": "adam.weight_decay", "lr": "adam.lr"}
    for key, name in names.items():
        sheet.put(f"{ours}.{key}", sheet[prefix + name], prefix + name)
    if sheet[f"{prefix}optim"] == "muon":
        sheet.put(f"{ours}.name", "muon", f"{prefix}optim")
        sheet.put(f"{ours}.muon_momentum", sheet[f"{prefix}muon.momentum"], f"{prefix}muon.momentum")
        sheet.lack((f"{prefix}muon.lr",), f"{ours}.lr is of all weights: with muon_scale=0.2 AdamW's fits")
    kind, lowest = f"{prefix}lr_scheduler", f"{prefix}min_lr_ratio"
    schedule = SCHEDULES.get(sheet[kind])
    if schedule is None:
        sheet.lack((kind,), "optim.schedule is constant, linear or cosine")
    else:
        sheet.put(f"{ours}.schedule", schedule, kind)
    if sheet[kind] == "cosine_with_min_lr":
        floor = share(sheet[f"{prefix}adam.lr"], sheet[lowest])
        sheet.put(f"{ours}.min_lr", floor, lowest, f"{prefix}adam.lr")
    sheet.put(f"{ours}.warmup_steps", sheet[f"{prefix}lr_warmup_ratio"], f"{prefix}lr_warmup_ratio")
    sheet.put(f"{ours}.clip_grad", sheet[f"{prefix}max_norm"], f"{prefix}max_norm")


def _common(sheet: Sheet) -> None:
    for name in ("train.seed", "train.full_determinism_enable", "ds.ring_attn_size", "ckpt.max_num"):
        sheet.take(name)
    sheet.take("ds.tensor_parallel_size")
    for name, key in (("ckpt.save_steps", "checkpoint.every"), ("eval.steps", "run.eval_every")):
        if (sheet[name] or 0) > 0:
            sheet.put(key, sheet[name], name)
        sheet.drop((name,), f"{key}=0: at the end")
    sheet.put("run.dir", sheet["ckpt.output_dir"], "ckpt.output_dir") if sheet["ckpt.output_dir"] else None
    if sheet["ds.param_dtype"] == "bf16":
        sheet.drop(("ds.param_dtype",), "model.dtype=auto: bfloat16 on a GPU")
    sheet.lack(("ds.param_dtype",) * (sheet["ds.param_dtype"] != "bf16"), "model.dtype is bfloat16 or float32")
    if sheet["ds.adam_offload"]:
        sheet.put("memory.offload", ["optimizer"], "ds.adam_offload")
    if sheet["ds.lora.rank"]:
        sheet.put("model.lora.rank", sheet["ds.lora.rank"], "ds.lora.rank")
        sheet.put("model.lora.alpha", sheet["ds.lora.alpha"], "ds.lora.alpha")
        sheet.put("model.lora.dropout", sheet["ds.lora.dropout"], "ds.lora.dropout")
        sheet.put("model.lora.targets", sheet["ds.lora.target_modules"], "ds.lora.target_modules")
        if sheet["ds.load_in_4bit"]:
            sheet.put("model.lora.quantize_base", "nf4", "ds.load_in_4bit")
    elif sheet["ds.load_in_4bit"]:
        sheet.lack(("ds.load_in_4bit",), "model.lora.quantize_base needs model.lora.rank")
    if sheet["logger.wandb.key"]:
        sheet.track("logger.wandb.key", ["wandb"], "logger.wandb.project")
        for key in ("logging.trackers", "logging.offline"):  # without the key itself
            sheet.settings[key].sources = ["logger.wandb.key, which belongs in WANDB_API_KEY"]
    if sheet["data.input_key"] and sheet.stage in ("ppo", "grpo"):
        sheet.put("data.columns.prompt", sheet["data.input_key"], "data.input_key")
    elif sheet["data.input_key"]:
        sheet.lack(("data.input_key",), "data.columns={prompt: ...} or {messages: ...}")
    if (template := sheet["data.input_template"]) and "{}" in template:
        key = sheet["data.input_key"] or "input"
        written = template.replace("\\n", "\n").replace("{}", f"{{{key}}}")
        sheet.put("data.prompt_template", written, "data.input_template", "data.input_key")
        sheet.settings.pop("data.columns.prompt", None)


def _micro_batches(sheet: Sheet) -> None:
    if sheet.written("train.dynamic_batch_enable") and sheet["train.dynamic_batch_enable"]:
        names = ("train.dynamic_batch_enable", "train.max_tokens_per_gpu")
        sheet.put("batch.micro_batch_tokens", sheet["train.max_tokens_per_gpu"], *names)
    elif sheet["train.micro_batch_size"]:
        sheet.put("batch.micro_batch_samples", sheet["train.micro_batch_size"], "train.micro_batch_size")


def _rows(sheet: Sheet, command: str, gpus: int) -> None:
    if gpus:
        sheet.put("cluster.gpus", gpus)
    sheet.model("model.model_name_or_path")
    sheet.data("data.dataset")
    if "," in str(sheet["data.dataset"]):
        sheet.lack(("data.dataset_probs",), "data.sources with a weight each")
    if sheet["eval.dataset"]:
        sheet.put("data.eval", sheet.folder(sheet["eval.dataset"]), "eval.dataset")
    sheet.put("batch.sequences", sheet["train.batch_size"], "train.batch_size")
    if sheet["train.micro_batch_size"]:
        sheet.put("batch.micro_batch_samples", sheet["train.micro_batch_size"], "train.micro_batch_size")
    sheet.put("run.epochs", float(sheet["train.max_epochs"]), "train.max_epochs")
    sheet.put("data.max_tokens", sheet["data.max_len"], "data.max_len")
    _optimizer(sheet, "")
    if sheet["model.gradient_checkpointing_enable"]:
        sheet.put("model.recompute", "full", "model.gradient_checkpointing_enable")
    if sheet["model.aux_loss_coef"]:
        sheet.take("model.aux_loss_coef")
    if sheet["data.tokenizer_chat_template"]:
        sheet.lack(("data.tokenizer_chat_template",), "write it to a file, and data.chat_template=FILE")
    if command == "train_sft":
        if sheet["model.pretrain_mode_enable"]:
            sheet.put("data.loss_on", "all", "model.pretrain_mode_enable")
        if sheet["data.output_key"]:
            sheet.put("data.columns.completion", sheet["data.output_key"], "data.output_key")
        sheet.drop(("data.multiturn",), "all turns of the assistant are learned")
        return
    for name, column in (
        ("data.prompt_key", "prompt"),
        ("data.chosen_key", "chosen"),
        ("data.rejected_key", "rejected"),
    ):
        if sheet[name] and sheet[name] != column:
            sheet.put(f"data.columns.{column}", sheet[name], name)
        sheet.drop((name,), "the same column")
    if command == "train_rm":
        sheet.put("algorithm.reward_loss.margin", sheet["model.margin_loss_enable"], "model.margin_loss_enable")
        sheet.put("algorithm.reward_loss.center_coef", 0.0, note="none in OpenRLHF")
        sheet.drop(("model.loss_type",), "algorithm.reward_loss.kind=bradley_terry: -log sigmoid of the difference")
        return
    sheet.put("algorithm.preference.beta", sheet["model.beta"], "model.beta")
    sheet.put("algorithm.preference.loss", ["ipo" if sheet["model.ipo_enable"] else "sigmoid"], "model.ipo_enable")
    if sheet["model.ipo_enable"]:
        sheet.put("algorithm.preference.length", "sum", "model.ipo_enable", note="OpenRLHF adds up log-ratios")
    sheet.put("algorithm.preference.label_smoothing", sheet["model.label_smoothing"], "model.label_smoothing")
    sheet.put("algorithm.preference.nll_coef", sheet["model.nll_loss_coef"], "model.nll_loss_coef")
    if sheet["ref.model_name_or_path"] not in (None, sheet["model.model_name_or_path"]):
        sheet.lack(("ref.model_name_or_path",), "the reference is a copy of model.init")
    sheet.drop(("ref.model_name_or_path",), "algorithm.preference.reference=auto: model.init")


def _reinforcement(sheet: Sheet) -> None:
    sheet.model("actor.model_name_or_path")
    sheet.data("data.prompt_dataset", bool(sheet["eval.dataset"]))
    if sheet["eval.dataset"]:
        sheet.put("data.eval", sheet.folder(sheet["eval.dataset"]), "eval.dataset")
        sheet.put("eval.temperature", sheet["eval.temperature"], "eval.temperature")
        sheet.put("eval.samples", sheet["eval.n_samples_per_prompt"], "eval.n_samples_per_prompt")
    prompts, group, step = sheet["rollout.batch_size"], sheet["rollout.n_samples_per_prompt"], sheet["train.batch_size"]
    sheet.put("batch.prompts", prompts, "rollout.batch_size")
    sheet.put("batch.group", group, "rollout.n_samples_per_prompt")
    if (prompts * group) % step:
        raise ConfigError("train.batch_size", step, f"a divisor of the {prompts} x {group} samples of a rollout")
    sheet.put("batch.minibatch_samples", step if step < prompts * group else 0, "train.batch_size")
    sheet.put("batch.epochs", sheet["train.max_epochs"], "train.max_epochs")
    sheet.put("run.epochs", float(sheet["train.num_episodes"]), "train.num_episodes")
    _micro_batches(sheet)
    _lengths(sheet)
    for name in ("rollout.temperature", "rollout.top_p"):
        sheet.take(name)
    _engine(sheet)
    _optimizer(sheet, "actor.")
    _loss(sheet)
    _kl(sheet)
    _critic(sheet)
    _rewards(sheet)
    if sheet["actor.gradient_checkpointing_enable"]:
        sheet.put("model.recompute", "full", "actor.gradient_checkpointing_enable")
    if sheet["actor.aux_loss_coef"]:
        sheet.take("actor.aux_loss_coef")
    if sheet["train.enable_ema"]:
        sheet.put("ema.decay", sheet["train.ema_beta"], "train.enable_ema", "train.ema_beta")


def _lengths(sheet: Sheet) -> None:
    total, response, prompt = sheet["data.max_len"], sheet["rollout.max_new_tokens"], sheet["prompt_max_len"]
    note = ""
    if response is None:
        response, note = total - prompt if prompt else total // 2, "OpenRLHF: whatever the prompt leaves"
    names = ("rollout.max_new_tokens",) if sheet.written("rollout.max_new_tokens") else ("data.max_len",)
    sheet.put("sampling.max_response_tokens", response, *names, note=note)
    names = ("prompt_max_len",) if prompt else ("data.max_len", *names)
    sheet.put("data.max_prompt_tokens", prompt or max(1, total - response), *dict.fromkeys(names))


def _engine(sheet: Sheet) -> None:
    names = ("actor.num_nodes", "actor.num_gpus_per_node")
    trainers, engines = sheet[names[0]] * sheet[names[1]], 0
    sheet.choose("engine", "vllm", "vllm.num_engines")
    sheet.put("engine.tensor_parallel", sheet["vllm.tensor_parallel_size"], "vllm.tensor_parallel_size")
    if sheet["vllm.num_engines"] and not sheet["train.colocate_all"]:
        engines = sheet["vllm.num_engines"] * sheet["vllm.tensor_parallel_size"]
        sheet.put("engine.ranks", engines, "vllm.num_engines", "vllm.tensor_parallel_size")
    sheet.drop(("train.colocate_all",), "engine.ranks=0: all ranks generate and train")
    sheet.put("cluster.gpus", trainers + engines, *names)
    if sheet["train.async_enable"]:
        sheet.put("engine.lag", 1, "train.async_enable")
    if sheet.written("vllm.enforce_eager") and sheet["vllm.enforce_eager"]:
        sheet.put("engine.cuda_graphs", False, "vllm.enforce_eager")
    sheet.drop(("vllm.enable_prefix_caching",), "engine.vllm.prefix_reuse=true")


def _loss(sheet: Sheet) -> None:
    estimator = sheet[_ESTIMATOR]
    advantage = _ADVANTAGES.get(estimator)
    if advantage is None:
        sheet.lack((_ESTIMATOR,), f"algorithm.advantage=grpo is used instead; known: {', '.join(_ADVANTAGES)}")
    else:
        sheet.put("algorithm.advantage", advantage, _ESTIMATOR)
    if estimator in _WHITENED:
        sheet.put("algorithm.whiten", True, _ESTIMATOR)
    if sheet["algo.advantage.no_std_norm"] and estimator in _WHITENED:
        sheet.lack(("algo.advantage.no_std_norm",), "algorithm.whiten divides by the deviation, too")
    if advantage == "grpo":
        sheet.put("algorithm.group_eps", 1e-9, note="OpenRLHF adds 1e-9 to the deviation")
    if estimator in ("gae", "reinforce"):
        sheet.put("algorithm.gamma", sheet["algo.advantage.gamma"], "algo.advantage.gamma")
    if estimator == "gae":
        sheet.put("algorithm.lam", sheet["algo.advantage.lambd"], "algo.advantage.lambd")
    sheet.drop(("algo.advantage.gamma", "algo.advantage.lambd"), f"1 for {estimator}")
    mode, kind = "actor.loss_agg_mode", "actor.policy_loss_type"
    sheet.put("algorithm.policy_loss", sheet[kind], kind)
    aggregation = "seq-mean-token-mean" if sheet[kind] == "gspo" else sheet[mode]
    sheet.put("algorithm.aggregation", aggregation.replace("-", "_"), *((mode,) if sheet[kind] == "ppo" else (kind,)))
    low, high = sheet["actor.eps_clip_low_high"] or [sheet["actor.eps_clip"]] * 2
    clip = "actor.eps_clip_low_high" if sheet["actor.eps_clip_low_high"] else "actor.eps_clip"
    sheet.put("algorithm.clip_low", float(low), clip)
    sheet.put("algorithm.clip_high", float(high), clip)
    if sheet["actor.dual_clip"]:
        sheet.put("algorithm.dual_clip", sheet["actor.dual_clip"], "actor.dual_clip")
    if sheet["actor.entropy_coef"] is not None:
        sheet.put("algorithm.entropy_coef", sheet["actor.entropy_coef"], "actor.entropy_coef")
    if sheet["algo.dynamic_filtering_enable"]:
        sheet.take("algo.dynamic_filtering_enable")
        bounds = [float(bound) for bound in sheet["algo.dynamic_filtering_range"] or [0, 1]]
        if bounds != [0, 1]:
            sheet.lack(("algo.dynamic_filtering_range",), "groups of equal rewards are replaced, whatever they are")
        sheet.drop(("algo.dynamic_filtering_range",), "groups of equal rewards are replaced")
    _correction(sheet)


def _correction(sheet: Sheet) -> None:
    names = [_CORRECTION + name for name in ("level", "mode", "gating", "threshold")]
    level, mode, gating, bounds = (sheet[name] for name in names)
    if level == "off":
        sheet.put("mismatch.correction", "none", names[0])
    elif gating != "ratio" or level == "seq":
        sheet.lack(names, "mismatch.correction: geometric_mask drops samples, icepop tokens, by their ratio")
    else:
        method = "icepop" if mode == "mask" else "tis_token"
        sheet.put("mismatch.correction", method, *names[:3])
        high = float(bounds[-1])
        if method == "tis_token":
            sheet.put("mismatch.cap", high, names[3], note="without a lower bound" if len(bounds) > 1 else "")
        else:
            sheet.put("mismatch.low", float(bounds[0]) if len(bounds) > 1 else 1e-6, names[3])
            sheet.put("mismatch.high", high, names[3])


def _kl(sheet: Sheet) -> None:
    coef = sheet["algo.kl.init_coef"]
    sheet.take("algo.kl.init_coef")
    if not coef:
        return
    sheet.put("algorithm.kl.placement", "loss" if sheet["algo.kl.use_loss"] else "reward", "algo.kl.use_loss")
    sheet.put("algorithm.kl.estimator", sheet["algo.kl.estimator"], "algo.kl.estimator")
    if sheet["algo.kl.unbiased_gradient"] and sheet["algo.kl.use_loss"]:
        sheet.take("algo.kl.unbiased_gradient")
    if sheet["algo.kl.target"]:
        sheet.put("algorithm.kl.controller.kind", "adaptive", "algo.kl.target")
        sheet.take("algo.kl.target")
        sheet.take("algo.kl.horizon")


def _critic(sheet: Sheet) -> None:
    if sheet.stage != "ppo":
        return
    _optimizer(sheet, "critic.", "critic.optim")
    sheet.put("critic.clip", sheet["critic.value_clip"], "critic.value_clip")
    sheet.put("critic.warmup_steps", max(0, sheet["critic.freezing_steps"]), "critic.freezing_steps")
    if sheet["critic.model_name_or_path"]:
        sheet.model("critic.model_name_or_path", "critic.init")
    elif not sheet["reward.model_name_or_path"]:
        sheet.put("critic.init", sheet.settings["model.init"].value, "actor.model_name_or_path")


def _rewards(sheet: Sheet) -> None:
    url = sheet["reward.remote_url"]
    if sheet["reward.model_name_or_path"]:
        sheet.model("reward.model_name_or_path", "reward.model")
        sheet.without["reward.model_name_or_path"] = "reward.model is the folder `hf` of an rm run: train it here"
    elif url and url.endswith(".py"):
        sheet.put("reward.functions", [{"path": f"{url}:reward_func"}], "reward.remote_url")
        sheet.without["reward_func(queries, prompts, labels)"] = "write it as f(samples), docs/how-to/rewards.md"
    elif url:
        label = {"label": sheet["data.label_key"]} if sheet["data.label_key"] else {}
        urls = url.split(",")
        address = urls if len(urls) > 1 else url
        sheet.put("reward.functions", [{"path": "http", "args": {"url": address} | label}], "reward.remote_url")
    elif sheet["train.agent_func_path"]:
        sheet.lack(("train.agent_func_path",), "environment.path, a class of yours (docs/how-to/environments.md)")
    if "reward.functions" not in sheet.settings and "reward.model" not in sheet.settings:
        sheet.put("reward.functions", [{"path": "math"}], note="a guess: math, of the column `answer`")
    if sheet["data.label_key"] and not (url and not url.endswith(".py")):
        sheet.put("data.columns.answer", sheet["data.label_key"], "data.label_key")
    sheet.put("reward.normalize", sheet["reward.normalize_enable"], "reward.normalize_enable")
    low, high = (float(bound) for bound in sheet["reward.clip_range"])
    note = "" if low == -high else "the same bound on both sides"
    sheet.put("reward.clip", max(abs(low), abs(high)), "reward.clip_range", note=note)
    if length := sheet["reward.overlong_buffer_len"]:
        names = ("reward.overlong_buffer_len", "reward.overlong_penalty_factor")
        if sheet[names[1]] == 1:
            whole = sheet.settings["sampling.max_response_tokens"].value
            sheet.put("algorithm.overlong.soft_fraction", length / whole, *names, note=f"of {whole} tokens")
        else:
            sheet.lack(names, "algorithm.overlong.soft_fraction has the factor 1; or the reward `length` with a weight")
    sheet.lack(("reward.stop_properly_penalty_coef",), "algorithm.overlong.penalty is subtracted instead")
    sheet.drop(("data.label_key",), "")
