"""`engine.quantization`, or quantisation by vLLM itself, and the defaults of other keys that depend on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aligner.config.derived import old_logprobs_in_update

if TYPE_CHECKING:
    from aligner.config.schema import Config

KINDS = ("none", "int8", "fp8")
CORRECTION = "tis_token"  # `mismatch.correction` with a quantised engine, or with lag
# `refit.tolerance` with one, if it is 0: mean |logprob difference| on the sentinel prompts, about ten times the
# measured one (benchmarks/notes-quantisation.md)
TOLERANCE = {"int8": 0.05, "fp8": 0.2}


def emulated(cfg: Config) -> bool:
    return cfg.engine.quantization != "none"


def of_package(cfg: Config) -> str:
    """Return the type to which an engine in a child process quantises the weights that it gets; "" if it does not."""
    args = {} if cfg.engine.child is None else cfg.engine.child.args
    return str(args.get("quantization") or args.get("quantization_config") or "")


def matrix_bytes(cfg: Config) -> float:
    """Return the bytes of a number of the layers' matrices in such an engine; 0: as all others, or not known."""
    return float("fp8" in of_package(cfg))


def quantized(cfg: Config) -> bool:
    return emulated(cfg) or bool(of_package(cfg))


def settle(cfg: Config) -> None:
    """Settle `mismatch.correction=auto` and `refit.tolerance=0`, and `algorithm.old_logprobs=auto` for an engine with
    lag. There a ratio to the policy before the step never leaves 1 in a rollout's only update, so only the weight's
    cap would limit it (benchmarks/notes-ahead.md compares both)."""
    a = cfg.algorithm
    if cfg.mismatch.correction == "auto":
        stale = cfg.engine.lag and not quantized(cfg) and old_logprobs_in_update(cfg)
        if stale and a.policy_loss == "ppo" and a.old_logprobs == "auto":
            a.old_logprobs = "engine"
        weighs = (quantized(cfg) or cfg.engine.lag) and not a.ratio_to_engine
        cfg.mismatch.correction = CORRECTION if weighs else "none"
    if quantized(cfg) and not cfg.refit.tolerance:
        cfg.refit.tolerance = TOLERANCE.get(cfg.engine.quantization, TOLERANCE["fp8"])


def describe(cfg: Config, by: str) -> str:
    """Return lines for the start of a run; `by`: whose functions quantise, if it is emulated."""
    kind, correction = cfg.engine.quantization, cfg.mismatch.correction
    text = (
        f"engine.quantization={kind}: emulated, by {by}: rollouts and evaluations come from weights rounded to {kind} "
        "and computed in the engine's dtype, which saves neither memory nor time; training does not. "
    )
    if not by:
        text = f"{cfg.engine.child.KEY}.args: the engine quantises the weights it gets ({of_package(cfg)}). "
    text += f"mismatch.correction={correction}, refit.tolerance={cfg.refit.tolerance:g}"
    if correction == "none" and not cfg.algorithm.ratio_to_engine:
        text += f"\nwarning: a quantised engine without mismatch.correction; {CORRECTION} is the default (auto) for it"
    return text
