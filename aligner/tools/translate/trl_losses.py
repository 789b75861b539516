"""Our settings for TRL's losses, generation and rewards."""

from __future__ import annotations

from typing import Any

from aligner.errors import ConfigError
from aligner.tools.translate.sheet import Sheet

# loss_type -> our policy_loss and aggregation
_LOSSES = {
    "dapo": ("ppo", "token_mean"),
    "bnpo": ("ppo", "token_mean"),
    "grpo": ("ppo", "seq_mean_token_mean"),
    "dr_grpo": ("ppo", "seq_mean_token_sum_norm"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "seq_mean_token_mean"),
}
_CORRECTIONS = {
    "token_truncate": ("tis_token", ""),
    "sequence_truncate": ("tis_sequence", ""),
    "sequence_mask": ("tis_sequence", "a sample above the bound gets the bound as weight, not 0"),
    "token_mask": ("icepop", ""),
}
_REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"path": "math", "args": {"field": "solution"}},
    "think_format_reward": {
        "path": "format",
        "args": {"pattern": r"\A<think>(?!.*<think>).*?</think>.*\Z"},
        "name": "think_format",
    },
    "get_soft_overlong_punishment": {"path": "length", "args": {"limit": 1280, "buffer": 256}},
}
_PAIR_LOSSES = [
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
]


def first_written(sheet: Sheet, *names: str) -> list[str]:
    """Return the first of these names that is in the file, else the last."""
    return next(([name] for name in names if sheet.written(name)), [names[-1]])


def generation(sheet: Sheet) -> None:
    sheet.take("max_completion_length")
    if sheet.written("max_prompt_length"):
        sheet.take("max_prompt_length", note="longer ones are dropped; TRL cut them on the left")
    else:
        sheet.without["no limit of prompts"] = "data.max_prompt_tokens=512 drops longer ones: write what the data needs"
    for name in ("temperature", "top_p", "top_k", "min_p", "mask_truncated_completions"):
        sheet.take(name)
    if sheet["repetition_penalty"] != 1:
        sheet.lack(("repetition_penalty",), "samples would no longer follow the policy's probabilities")
    if sheet["num_generations_eval"]:
        sheet.put("eval.samples", sheet["num_generations_eval"], "num_generations_eval")
    if sheet["chat_template_kwargs"]:
        sheet.put("data.template_arguments", sheet["chat_template_kwargs"], "chat_template_kwargs")
    if sheet["sync_ref_model"]:
        sheet.lack(("sync_ref_model",), "the reference of stage grpo stays as it is")
    if not sheet["use_vllm"]:
        return
    sheet.choose("engine", "vllm", "use_vllm")
    sheet.take("vllm_tensor_parallel_size")
    if sheet["vllm_max_model_length"]:
        sheet.put("engine.vllm.max_seq_len", sheet["vllm_max_model_length"], "vllm_max_model_length")
    if sheet["vllm_mode"] == "server":
        sheet.lack(("vllm_mode",), "engine.ranks=N: the last N ranks of the job generate; --ranks counts them, too")
    sheet.drop(("vllm_mode",), "engine.ranks=0: all ranks generate and train")


def _correction(sheet: Sheet) -> None:
    """Set the correction of the mismatch of vLLM and the trainer."""
    names = ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode")
    if not sheet["use_vllm"] or not sheet[names[0]]:
        sheet.put("mismatch.correction", "none", names[0])
        return
    low, cap = "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"
    cap = "vllm_importance_sampling_cap" if sheet.written("vllm_importance_sampling_cap") else cap
    method, note = _CORRECTIONS.get(sheet[names[1]], ("", ""))
    if not method:
        raise ConfigError(names[1], sheet[names[1]], "one of " + ", ".join(_CORRECTIONS))
    sheet.put("mismatch.correction", method, *names, note=note)
    if method == "icepop":
        sheet.put("mismatch.low", sheet[low] or 1e-6, low)
        sheet.put("mismatch.high", sheet[cap] or 1e6, cap)
    else:
        sheet.put("mismatch.cap", sheet[cap] or 1e6, cap)
        sheet.lack((low,), f"mismatch.correction={method} has no lower bound")


def grpo(sheet: Sheet) -> None:
    loss, level = sheet["loss_type"], sheet["importance_sampling_level"]
    policy_loss, aggregation = _LOSSES.get(loss, ("", ""))
    if not policy_loss:
        sheet.lack(("loss_type",), "algorithm.policy_loss stays ppo: choose one, or write a function")
        policy_loss, aggregation = "ppo", "token_mean"
    if level == "sequence" and policy_loss == "ppo":
        note = "" if loss == "grpo" else "every sequence weighs the same"
        sheet.put("algorithm.policy_loss", "gspo", "importance_sampling_level", "loss_type", note=note)
        sheet.put("algorithm.aggregation", "seq_mean_token_mean", "importance_sampling_level", "loss_type", note=note)
    else:
        note = "TRL: over a micro-batch, here over the optimizer step" * (loss == "bnpo")
        sheet.put("algorithm.policy_loss", policy_loss, "loss_type")
        sheet.put("algorithm.aggregation", aggregation, "loss_type", note=note)
        sheet.drop(("importance_sampling_level",), "token")
    if policy_loss == "cispo":
        sheet.put(
            "algorithm.ratio_cap",
            sheet["epsilon_high"] or sheet["epsilon"],
            *first_written(sheet, "epsilon_high", "epsilon"),
        )
    elif policy_loss == "sapo":
        sheet.put("algorithm.sapo.tau_pos", sheet["sapo_temperature_pos"], "sapo_temperature_pos")
        sheet.put("algorithm.sapo.tau_neg", sheet["sapo_temperature_neg"], "sapo_temperature_neg")
    else:
        _clip(sheet)
        if sheet["delta"]:
            sheet.put("algorithm.dual_clip", sheet["delta"], "delta")
    _scaled(sheet)
    _kl(sheet, importance_weighted=sheet["use_bias_correction_kl"])
    _correction(sheet)
    sheet.take("entropy_coef")
    if sheet["top_entropy_quantile"] != 1:
        sheet.lack(("top_entropy_quantile",), "all tokens are learned; clip_cov and kl_cov choose by covariance")
    if sheet["use_adaptive_entropy"]:
        sheet.lack(("use_adaptive_entropy",), "algorithm.entropy_coef is constant")
    sheet.lack(("off_policy_mask_threshold",), "mismatch.correction=geometric_mask drops samples by their ratio")


def _clip(sheet: Sheet) -> None:
    sheet.take("epsilon")
    high = first_written(sheet, "epsilon_high", "epsilon")[0]
    sheet.put("algorithm.clip_high", sheet[high], high)


def _scaled(sheet: Sheet) -> None:
    scale = {"true": "group", "false": "none"}.get(sheet["scale_rewards"].lower(), sheet["scale_rewards"])
    if sheet["multi_objective_aggregation"] == "normalize_then_sum":
        sheet.put("algorithm.advantage", "gdpo", "multi_objective_aggregation")
    elif scale == "none":
        sheet.put("algorithm.advantage", "dr_grpo", "scale_rewards")
        return
    elif scale == "group":
        sheet.put("algorithm.advantage", "grpo", "scale_rewards")
    else:
        sheet.lack(("scale_rewards",), "algorithm.advantage=grpo divides by the group's deviation")
    sheet.put("algorithm.group_eps", 1e-4, note="TRL adds 1e-4 to the deviation")


def _kl(sheet: Sheet, importance_weighted: bool) -> None:
    sheet.take("beta")
    if sheet["beta"] and importance_weighted:
        sheet.put("algorithm.kl.importance_weighted", True, "use_bias_correction_kl")


def rloo(sheet: Sheet) -> None:
    names = ("num_generations",)
    sheet.put("algorithm.advantage", "rloo", *names)
    sheet.put("algorithm.policy_loss", "ppo", note="TRL: one clipped ratio of the whole response")
    sheet.put("algorithm.aggregation", "seq_mean_token_sum")
    _clip(sheet)
    sheet.take("beta")
    if sheet["beta"]:
        sheet.put("algorithm.kl.estimator", "k1", "beta")
        sheet.put("algorithm.kl.placement", "reward", "beta")
    if sheet["normalize_advantages"]:
        sheet.put("algorithm.whiten", True, "normalize_advantages")
    if clip := sheet["reward_clip_range"]:
        sheet.put("reward.clip", max(abs(float(bound)) for bound in clip), "reward_clip_range")


def rewards(sheet: Sheet) -> None:
    weights = [float(weight) for weight in sheet["reward_weights"] or []]
    model, functions = sheet["reward_model_name_or_path"], sheet["reward_funcs"] or []
    if model:
        sheet.model("reward_model_name_or_path", "reward.model")
        sheet.without["reward_model_name_or_path"] = "reward.model is the folder `hf` of an rm run: train it here"
        if weights:
            sheet.put("reward.model_weight", weights.pop(0), "reward_weights")
    entries = []
    for at, name in enumerate(functions):
        entry = dict(_REWARDS.get(name) or {"path": ":".join(name.rsplit(".", 1))})
        if entry["path"] == "math" and "data" in sheet.groups:
            del entry["args"]  # our rows have an answer
        if name not in _REWARDS and "." not in name:
            sheet.without[f"reward_funcs: {name}"] = "no such built-in reward: write a function, or its module:name"
            continue
        entries.append(entry | ({"weight": weights[at]} if at < len(weights) else {}))
    if entries:
        sheet.put("reward.functions", entries, "reward_funcs", "reward_weights")
    elif not model:
        sheet.put("reward.functions", [{"path": "math"}])
        sheet.without["rewards of a Python script"] = "reward.functions is a guess: math, of the column `answer`"
    sheet.drop(("reward_funcs", "reward_weights"), "reward.functions")


def sft(sheet: Sheet) -> None:
    _max_length(sheet, first_written(sheet, "max_seq_length", "max_length")[0])
    sheet.take("loss_type", {"nll": "nll", "chunked_nll": "nll", "dft": "dft"}.get)
    if sheet["completion_only_loss"] or sheet["assistant_only_loss"]:
        names = [name for name in ("completion_only_loss", "assistant_only_loss") if sheet[name]]
        sheet.put("data.loss_on", "assistant", *names)
    elif sheet.written("completion_only_loss"):
        sheet.put("data.loss_on", "all", "completion_only_loss")
    else:
        sheet.without["assistant_only_loss=false (default)"] = (
            "TRL learns all tokens of rows with `messages` or `text`: data.loss_on=all. Of `prompt` and `completion` "
            "it learns the completion, as data.loss_on=assistant does"
        )
    if sheet["packing"]:
        sheet.lack(("packing",), "batch.sequences counts rows, TRL's batch blocks of max_length tokens: raise it")
    sheet.drop(("packing",), "batch.packing=true, without a change of the result")
    _template(sheet)


def _max_length(sheet: Sheet, name: str = "max_length") -> None:
    if sheet[name] is None:
        sheet.without[f"{name}=null"] = "data.max_tokens=1024 drops longer rows: write what the data needs"
        return
    sheet.take(name)
    sheet.put("data.overlong", "truncate", name, note="TRL cuts longer rows")


def _template(sheet: Sheet) -> None:
    if sheet["chat_template_path"]:
        sheet.put("data.chat_template", sheet["chat_template_path"], "chat_template_path")


def dpo(sheet: Sheet) -> None:
    _max_length(sheet)
    names = ["aot" if name == "aot_pair" else name for name in sheet["loss_type"]]
    weights = [float(weight) for weight in sheet["loss_weights"] or [1.0] * len(names)]
    if "sigmoid_norm" in names:
        sheet.put("algorithm.preference.length", "mean", "loss_type")
    pairs = [("sigmoid" if n == "sigmoid_norm" else n, w) for n, w in zip(names, weights, strict=True) if n != "sft"]
    if wrong := [name for name, _ in pairs if name not in _PAIR_LOSSES]:
        raise ConfigError("loss_type", wrong[0], "one of " + ", ".join((*_PAIR_LOSSES, "sigmoid_norm", "sft")))
    sheet.put("algorithm.preference.loss", [name for name, _ in pairs], "loss_type")
    if any(weight != 1 for _, weight in pairs):
        sheet.put("algorithm.preference.weights", [weight for _, weight in pairs], "loss_weights")
    if "sft" in names:
        weight = weights[names.index("sft")]
        sheet.put("algorithm.preference.nll_coef", weight, *first_written(sheet, "loss_weights", "loss_type"))
    elif sheet["rpo_alpha"]:
        sheet.take("rpo_alpha")
    for name in ("beta", "ld_alpha", "label_smoothing"):
        sheet.take(name)
    kinds = {"js_divergence": "js", "alpha_divergence": "alpha"}
    sheet.put(
        "algorithm.preference.f_divergence",
        kinds.get(sheet["f_divergence_type"], sheet["f_divergence_type"]),
        "f_divergence_type",
    )
    if sheet["f_divergence_type"] == "alpha_divergence":
        sheet.put("algorithm.preference.f_alpha", sheet["f_alpha_divergence_coef"], "f_alpha_divergence_coef")
    if sheet["use_weighting"]:
        sheet.put("algorithm.preference.wpo", True, "use_weighting")
    if "discopop" in names:
        sheet.put("algorithm.preference.tau", sheet["discopop_tau"], "discopop_tau")
    if sheet["reference_free"]:
        sheet.take("reference_free")
    _stored(sheet)
    if sheet["sync_ref_model"]:
        sheet.put(
            "algorithm.preference.sync_every", sheet["ref_model_sync_steps"], "sync_ref_model", "ref_model_sync_steps"
        )
        sheet.take("ref_model_mixup_alpha")


def _stored(sheet: Sheet) -> None:
    if sheet["precompute_ref_log_probs"]:
        sheet.take("precompute_ref_log_probs")


def reward(sheet: Sheet) -> None:
    _max_length(sheet)
    sheet.put(
        "algorithm.reward_loss.center_coef", sheet["center_rewards_coefficient"] or 0.0, "center_rewards_coefficient"
    )
    _template(sheet)


def kto(sheet: Sheet) -> None:
    _max_length(sheet)
    sheet.take("loss_type", {"kto": "minibatch", "apo_zero_unpaired": "none"}.get)
    for name in ("beta", "desirable_weight", "undesirable_weight"):
        sheet.take(name)
    _stored(sheet)
    if sheet["sync_ref_model"]:
        sheet.lack(("sync_ref_model",), "the reference of stage kto stays as it is")
