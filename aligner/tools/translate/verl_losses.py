"""Our settings for veRL's losses."""

from __future__ import annotations

from typing import Any

from aligner.errors import ConfigError
from aligner.tools.translate.sheet import Sheet

_ACTOR = "actor_rollout_ref.actor."


_ADVANTAGES = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "grpo_passk": "pass_at_k",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "remax": "remax",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "gdpo": "gdpo",
}
_WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_LOSSES = {
    "vanilla": "ppo",
    "gspo": "gspo",
    "sapo": "sapo",
    "gpg": "gpg",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "gmpo",
    "cispo": "cispo",
}
_OF_SEQUENCES = ("gspo", "sapo", "gmpo")
_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def policy_loss(sheet: Sheet) -> None:
    name = "algorithm.adv_estimator"
    advantage = _ADVANTAGES.get(sheet[name])
    if advantage is None:
        sheet.lack((name,), f"algorithm.advantage=grpo is used instead; known: {', '.join(_ADVANTAGES)}")
    elif advantage == "grpo" and not sheet["algorithm.norm_adv_by_std_in_grpo"]:
        sheet.put("algorithm.advantage", "dr_grpo", name, "algorithm.norm_adv_by_std_in_grpo")
    else:
        sheet.put("algorithm.advantage", advantage, name)
        if advantage == "pass_at_k":
            sheet.put(
                "algorithm.pass_at_k_std",
                sheet["algorithm.norm_adv_by_std_in_grpo"],
                "algorithm.norm_adv_by_std_in_grpo",
            )
    if sheet[name] in _WHITENED:
        sheet.put("algorithm.whiten", True, name)
    for key in ("gamma", "lam"):
        if sheet[name] == "gae" or (key == "gamma" and advantage == "reinforce_pp"):
            sheet.put(f"algorithm.{key}", sheet[f"algorithm.{key}"], f"algorithm.{key}")
    mode = f"{_ACTOR}policy_loss.loss_mode"
    loss = _LOSSES.get(sheet[mode])
    if loss is None:
        sheet.lack((mode,), "algorithm.policy_loss stays ppo: choose one, or write a function")
    sheet.put("algorithm.policy_loss", loss or "ppo", mode)
    _clip(sheet, loss or "ppo")
    aggregation = f"{_ACTOR}loss_agg_mode"
    if loss in _OF_SEQUENCES:
        sheet.put("algorithm.aggregation", "seq_mean_token_mean", mode)
        sheet.drop((aggregation,), f"{sheet[mode]} has one of its own")
    elif sheet[aggregation] == "token-sum":
        sheet.lack((aggregation,), "algorithm.aggregation=token_mean is used instead")
    else:
        sheet.put("algorithm.aggregation", sheet[aggregation].replace("-", "_"), aggregation)
    sheet.lack((f"{_ACTOR}loss_scale_factor",), "seq_mean_token_sum_norm divides by sampling.max_response_tokens")
    sheet.put("algorithm.entropy_coef", sheet[f"{_ACTOR}entropy_coeff"], f"{_ACTOR}entropy_coeff")
    if sheet["algorithm.filter_groups.enable"]:
        sheet.put("algorithm.filter_groups", True, "algorithm.filter_groups.enable")
        rounds = sheet["algorithm.filter_groups.max_num_gen_batches"]
        if rounds:
            sheet.put("algorithm.filter_rounds", rounds, "algorithm.filter_groups.max_num_gen_batches")


def _clip(sheet: Sheet, loss: str) -> None:
    low, high = f"{_ACTOR}clip_ratio_low", f"{_ACTOR}clip_ratio_high"
    if loss == "cispo":
        sheet.put("algorithm.ratio_cap", 1 + sheet[high], high)
        return
    if loss == "sapo":
        for key in ("tau_pos", "tau_neg"):
            sheet.put(f"algorithm.sapo.{key}", sheet[_ACTOR + key], _ACTOR + key)
        return
    if loss in ("clip_cov", "kl_cov"):
        prefix = f"{_ACTOR}policy_loss."
        sheet.put("algorithm.cov.fraction", sheet[f"{prefix}{loss}_ratio"], f"{prefix}{loss}_ratio")
        pairs: dict[str, Any] = (
            {"low": "clip_cov_lb", "high": "clip_cov_ub"} if loss == "clip_cov" else {"kl_coef": "ppo_kl_coef"}
        )
        for key, name in pairs.items():
            sheet.put(f"algorithm.cov.{key}", sheet[prefix + name], prefix + name)
    sheet.put("algorithm.clip_low", sheet[low], low)
    sheet.put("algorithm.clip_high", sheet[high], high)
    if sheet.written(f"{_ACTOR}clip_ratio") and not sheet.written(low, high):
        sheet.lack((f"{_ACTOR}clip_ratio",), "veRL uses clip_ratio_low and clip_ratio_high, 0.2 by default: set both")
    if loss == "ppo":
        sheet.put("algorithm.dual_clip", sheet[f"{_ACTOR}clip_ratio_c"], f"{_ACTOR}clip_ratio_c")


def kl_term(sheet: Sheet) -> None:
    in_loss, in_reward = f"{_ACTOR}use_kl_loss", "algorithm.use_kl_in_reward"
    if sheet[in_loss] and sheet[in_reward]:
        sheet.lack((in_reward,), "algorithm.kl.placement is one of loss and reward: loss")
    if sheet[in_loss]:
        kind = sheet[f"{_ACTOR}kl_loss_type"]
        estimator = _ESTIMATORS.get(kind.removesuffix("+"))
        if estimator is None:
            raise ConfigError(f"{_ACTOR}kl_loss_type", kind, "one of " + ", ".join(_ESTIMATORS))
        both = estimator + ("+" if kind.endswith("+") and estimator in ("k1", "k3") else "")
        sheet.put("algorithm.kl.coef", sheet[f"{_ACTOR}kl_loss_coef"], in_loss, f"{_ACTOR}kl_loss_coef")
        sheet.put("algorithm.kl.estimator", both, f"{_ACTOR}kl_loss_type")
        sheet.put("algorithm.kl.placement", "loss", in_loss)
    elif sheet[in_reward]:
        sheet.put("algorithm.kl.coef", sheet["algorithm.kl_ctrl.kl_coef"], in_reward, "algorithm.kl_ctrl.kl_coef")
        sheet.put(
            "algorithm.kl.estimator", _ESTIMATORS.get(sheet["algorithm.kl_penalty"], "k1"), "algorithm.kl_penalty"
        )
        sheet.put("algorithm.kl.placement", "reward", in_reward)
        if sheet["algorithm.kl_ctrl.type"] == "adaptive":
            sheet.put("algorithm.kl.controller.kind", "adaptive", "algorithm.kl_ctrl.type")
            sheet.put(
                "algorithm.kl.controller.target", sheet["algorithm.kl_ctrl.target_kl"], "algorithm.kl_ctrl.target_kl"
            )
            sheet.put(
                "algorithm.kl.controller.horizon", sheet["algorithm.kl_ctrl.horizon"], "algorithm.kl_ctrl.horizon"
            )
    else:
        sheet.put("algorithm.kl.coef", 0.0, in_loss, in_reward)
        sheet.drop((f"{_ACTOR}kl_loss_coef", f"{_ACTOR}kl_loss_type", "algorithm.kl_ctrl.kl_coef"), "without a KL term")


def correction(sheet: Sheet) -> None:
    names = ("algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold")
    level, bound = sheet[names[0]], sheet[names[1]]
    if level not in ("token", "sequence"):
        sheet.put("mismatch.correction", "none", names[0])
        return
    low, _, high = str(bound or 2.0).rpartition("_")
    if low:
        sheet.put("mismatch.correction", "icepop", *names)
        sheet.put("mismatch.low", float(low), names[1])
        sheet.put("mismatch.high", float(high), names[1])
    else:
        sheet.put("mismatch.correction", f"tis_{level}", names[0])
        sheet.put("mismatch.cap", float(high), names[1])
