"""Alarms: signs that a run goes wrong, each reported once, in one line, with the likely cause."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FILE = "alarms.jsonl"
FAR = -100.0  # of the explained variance: an error ten times as large as the returns' spread, also in the warm-up
LONG_S = 10.0  # generation whose end is worth an alarm
STREAK = 3  # noisy metrics must be bad this many records in a row

TEXTS = {
    "entropy": "entropy collapsed to {value:.3g} nats from {first:.3g}: the policy repeats itself. If the reward is not"
    " near its maximum: lower optim.lr, raise sampling.temperature or algorithm.entropy_coef",
    "k3": "kl/ref_k3={value:.3g} is negative, which k3 cannot be: logprobs of policy and reference are of different"
    " tokens or temperatures, or the mask is wrong",
    "explained_variance": "critic/explained_variance={value:.3g} stays below 0 after warm-up: the critic predicts worse"
    " than a constant. Raise critic.warmup_steps or critic.optim.lr, or check reward.normalize",
    "far_values": "critic/explained_variance={value:.3g}: the critic's values are far from the returns, or the returns"
    " hardly differ. Lower critic.optim.lr, look at critic.init and the size of rewards, or set reward.normalize=true",
    "clip_fraction": "policy/clip_fraction={value:.3g} is above 0.4: the policy moves too far within one rollout. Lower"
    " optim.lr or batch.epochs, or raise batch.minibatch_samples; a mismatch of engine and trainer looks the same",
    "degenerate": "all groups are degenerate: every sample of a prompt has the same reward, {effect}."
    " The task is too hard or too easy, or the reward function does not distinguish answers",
    "no_eos": "no response ends in EOS: all are cut by {cuts}. The limit is too low, or"
    " the model never learned to stop (chat template, stop tokens)",
    "length": "responses are about as long as they may be: response/tokens_mean={value:.4g}, {limit}. Most are cut off"
    " before their end. Raise the limit if the task needs longer ones, else set algorithm.overlong.penalty",
    "equal": "preference/equal_answers={value:.3g}: most pairs have two equal answers, which have no gradient. Look at"
    " how the pairs were made, and at data.max_tokens with data.overlong=truncate",
    "one_label": "kto/desirable={value:.3g}: all answers of several minibatches in a row have one label. Set"
    " data.shuffle=true, raise batch.sequences, or look for more answers of the other label",
    "unmatched": "kto/unmatched={value:.3g}: the samples of several minibatches in a row answer one prompt each, so"
    " nothing is mismatched and z0 is 0. Set data.shuffle=true or raise batch.sequences, or set algorithm.kto.kl=none",
    "window_small": "window/waited_for={value:.3g}: each step waits for windows after the one that ran during the last:"
    " engine.window={window:.0f} is too small. About {fits:.0f} fits",
    "window_large": "no sample pauses: all samples in flight end before their window, and engines idle. At"
    " most the longest response, {fits:.0f}, fits engine.window={window:.0f}, or a larger engine.lag",
    "idle": "engine/idle_fraction={value:.3g}: engines spend this share of generation waiting for the longest responses"
    " of others. Set engine.window, with which long samples pause, or raise engine.tensor_parallel: fewer, faster ones",
    "hacking": "reward/mean rose from {reward_then:.3g} to {reward:.3g} while eval/accuracy fell from {best:.3g} to"
    " {value:.3g}: the policy may exploit the reward. Raise algorithm.kl.coef, or repair the reward",
}


class Alarms:
    """Alarms of a run. Call `check` once per step, on rank 0, with the step's reduced metrics. A NaN or missing
    metric raises no alarm."""

    def __init__(self, limits: Mapping[str, int] | None = None, critic_warmup_steps: int = 0):
        """Take `limits`: the limits of responses, by key; the first one is that of their tokens."""
        self.limits, self.critic_warmup_steps = limits or {}, critic_warmup_steps
        self._fired: list[str] = []
        self._streaks: dict[str, int] = {}
        self._entropies: list[float] = []  # of the first records
        self._rewards: list[float] = []  # since the last evaluation
        self._evals: list[list[float]] = []  # [eval/accuracy, mean reward since the evaluation before]

    def check(self, metrics: Mapping[str, float | None], step: int) -> list[str]:
        """Return the alarms raised now, each at most once in a run (also across resumes, by state_dict)."""
        known = {name: float(v) for name, v in metrics.items() if v is not None and math.isfinite(v)}
        limits, lines = [f"{key}={value}" for key, value in self.limits.items()], []
        critic = "critic/explained_variance" in metrics
        effect = "so only the critic's values differ" if critic else "so there is no gradient"
        texts = {"effect": effect, "cuts": " or ".join(limits), "limit": limits[0] if limits else ""}
        for name, values in self._signs(known, step):
            if name not in self._fired:
                self._fired.append(name)
                lines.append(f"alarm at step {step}: {TEXTS[name].format(**texts, **values)}")
        return lines

    def state_dict(self) -> dict[str, Any]:
        return {
            "fired": list(self._fired),
            "streaks": dict(self._streaks),
            "entropies": list(self._entropies),
            "rewards": list(self._rewards),
            "evals": [list(pair) for pair in self._evals],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._fired, self._streaks = list(state["fired"]), dict(state["streaks"])
        self._entropies, self._rewards = list(state["entropies"]), list(state["rewards"])
        self._evals = [list(pair) for pair in state["evals"]]

    def _signs(self, known: dict[str, float], step: int) -> list[tuple[str, dict[str, float]]]:
        raised: list[tuple[str, dict[str, float]]] = []

        def sign(name: str, metric: str, bad: bool, streak: int = 1, **values: float) -> None:
            if metric not in known:
                return
            self._streaks[name] = self._streaks.get(name, 0) + 1 if bad else 0
            if self._streaks[name] >= streak:
                raised.append((name, {"value": known[metric], **values}))

        entropy = known.get("policy/entropy")
        if entropy is not None and len(self._entropies) < STREAK:
            self._entropies.append(entropy)
        first = max(self._entropies, default=0.0)
        sign("entropy", "policy/entropy", entropy is not None and entropy < 0.1 * first, STREAK, first=first)
        # k3 = exp(d) - d - 1 >= 0; float32 rounding alone gives values around -1e-7.
        sign("k3", "kl/ref_k3", known.get("kl/ref_k3", 0) < -1e-5)
        variance = known.get("critic/explained_variance", 0)
        low = FAR <= variance < 0
        sign("explained_variance", "critic/explained_variance", low and step > self.critic_warmup_steps, STREAK)
        sign("far_values", "critic/explained_variance", variance < FAR)
        sign("clip_fraction", "policy/clip_fraction", known.get("policy/clip_fraction", 0) > 0.4)
        sign("equal", "preference/equal_answers", known.get("preference/equal_answers", 0) > 0.5, STREAK)
        sign("one_label", "kto/desirable", known.get("kto/desirable", 0.5) in (0.0, 1.0), STREAK)
        sign("unmatched", "kto/unmatched", known.get("kto/unmatched", 0) > 0, STREAK)
        sign("degenerate", "reward/degenerate_groups", known.get("reward/degenerate_groups", 0) >= 1)
        no_eos = known.get("response/eos_fraction", 1) <= 0
        sign("no_eos", "response/eos_fraction", no_eos)
        most = next(iter(self.limits.values()), math.inf)
        sign("length", "response/tokens_mean", known.get("response/tokens_mean", 0) >= 0.95 * most)
        window, waited = known.get("window/steps", 0.0), known.get("window/waited_for", 0.0)
        fits = {"window": window, "fits": window * (1 + waited)}
        sign("window_small", "window/waited_for", waited > 0, STREAK, **fits)
        paused = known.get("window/samples_paused", 1)
        idle = paused == 0 and window > known.get("response/tokens_max", math.inf)
        fits["fits"] = known.get("response/tokens_max", 0.0)
        sign("window_large", "window/samples_paused", idle, STREAK, **fits)
        waits = known.get("engine/idle_fraction", 0) > 0.3 and known.get("time/generate_s", 0) > LONG_S
        sign("idle", "engine/idle_fraction", waits, STREAK)
        return raised + self._hacking(known)

    def _hacking(self, known: dict[str, float]) -> list[tuple[str, dict[str, float]]]:
        """Check for two evaluations in a row clearly below the best one, at a higher reward than the best one had."""
        if "reward/mean" in known:
            self._rewards.append(known["reward/mean"])
        if "eval/accuracy" not in known or not self._rewards:
            return []
        reward = math.fsum(self._rewards) / len(self._rewards)
        self._rewards = []
        self._evals.append([known["eval/accuracy"], reward])
        best, reward_then = max(self._evals, key=lambda pair: pair[0])
        fell = [accuracy < best - 0.02 and r > reward_then for accuracy, r in self._evals[-2:]]
        if len(self._evals) < 3 or not all(fell):
            return []
        return [
            ("hacking", {"value": known["eval/accuracy"], "best": best, "reward": reward, "reward_then": reward_then})
        ]
