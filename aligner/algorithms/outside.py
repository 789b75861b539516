"""Functions of the user's own as `algorithm.policy_loss`, `algorithm.advantage`, `algorithm.kl.estimator` and
`algorithm.shaping`.

Such a function is called with what its parameters name, of `KEYS`, and with entries of `algorithm.args`. A loss and an
estimator of the KL return a number for each token, [B, T], which the run masks, weighs and aggregates. An advantage
returns a number for each sample [B] or each token [B, T], shaping a reward for each sample [B].

`check` calls them with made-up numbers before training. A result must not depend on how a minibatch is cut into
micro-batches, padded, or spread over ranks, as any layout trains the same.
"""

from __future__ import annotations

import gc
import inspect
import os
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.sections.algorithm import AlgorithmConfig
from aligner.errors import AlgorithmCodeError, ConfigError
from aligner.ops.rl.policy_term import PolicyTerm, log_ratio
from aligner.types import PolicyTargets, RolloutBatch
from aligner.user_code import load

LOSS = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "mask")  # float32 [B, T]
# float32 [B]: sums of token_rewards [B, T]; int64 [B]: the prompt; bool [B]; float32 [B, T]: 1 on response tokens
ADVANTAGE = ("rewards", "group", "valid", "token_rewards", "mask")
KL = ("logprobs", "ref_logprobs")  # float32 [B, T]
SHAPING = ("rewards", "lengths", "finished", "limit")  # float32, int64, bool, int64 [B]: response tokens, at most limit
KEYS = {
    "algorithm.policy_loss": LOSS,
    "algorithm.advantage": ADVANTAGE,
    "algorithm.kl.estimator": KL,
    "algorithm.shaping": SHAPING,
}
OF_TOKENS = ("algorithm.policy_loss", "algorithm.kl.estimator")
Values = dict[str, Tensor]
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ALL = slice(None)


class UserFunction:
    """The function at a key's path. `names`: the parameters that the run has values for."""

    def __init__(self, key: str, cfg: AlgorithmConfig):
        self.key, self.path = key, cfg.own_functions()[key]
        # a KL in the reward is no function of the weights
        self.learns = key == "algorithm.policy_loss" or (key in OF_TOKENS and cfg.kl.placement == "loss")
        function = load(self.path, key, "function", AlgorithmCodeError)
        self._function, self._parameters = function, inspect.signature(function).parameters
        if taken := [name for name in cfg.args if name in KEYS[key]]:
            raise ConfigError(f"algorithm.args.{taken[0]}", cfg.args[taken[0]], "no entry: the run gives this argument")
        names = [name for name in KEYS[key] if name != "ref_logprobs" or cfg.kl.coef > 0]
        own = {name: value for name, value in cfg.args.items() if name in self._parameters}
        missing = [p.name for p in self._parameters.values() if p.default is p.empty and p.kind not in _VARIADIC]
        if unknown := [name for name in missing if name not in names and name not in own]:
            expected = f"parameters among {', '.join(names)}, or entries of algorithm.args"
            hint = "ref_logprobs need algorithm.kl.coef > 0." if "ref_logprobs" in unknown else ""
            raise self.refused(f"{expected}; it has `{unknown[0]}`", hint)
        self.names, self._args = [name for name in names if name in self._parameters], own

    def refused(self, expected: str, hint: str = "") -> AlgorithmCodeError:
        text = f"{self.key}={self.path!r}: expected a function with {expected}"
        return AlgorithmCodeError(f"{text}. {hint}" if hint else text)

    def __call__(self, values: Values, *shapes: torch.Size) -> Tensor:
        """Return the function's result, of one of the shapes. Raises AlgorithmCodeError for any other, and for
        an exception of the function."""
        try:
            result = self._function(**{name: values[name] for name in self.names}, **self._args)
        except Exception as cause:
            raise self.refused(f"no exception: it raised {type(cause).__name__}: {cause}") from cause
        if not (isinstance(result, Tensor) and result.is_floating_point() and result.shape in shapes):
            form = f"{result.dtype} {[*result.shape]}" if isinstance(result, Tensor) else type(result).__name__
            wanted = " or ".join(str([*shape]) for shape in shapes)
            raise self.refused(f"a result of floating point numbers {wanted}, not {form}")
        return result


def user_loss(cfg: AlgorithmConfig) -> Callable[..., PolicyTerm]:
    """Return the loss at the path `algorithm.policy_loss` in the form of `ops.rl.policy_loss.POLICY_LOSSES`."""
    function = UserFunction("algorithm.policy_loss", cfg)

    def term(logprobs: Tensor, targets: PolicyTargets, mask: Tensor, cfg: AlgorithmConfig, noise: float) -> PolicyTerm:
        values = {name: getattr(targets, name) for name in function.names if name not in ("logprobs", "mask")}
        each = function(values | {"logprobs": logprobs, "mask": mask}, logprobs.shape)
        none = torch.zeros_like(each, dtype=torch.bool)
        ratio = log_ratio(logprobs, targets.old_logprobs).detach().exp()
        return PolicyTerm(each.float(), ratio, none, none)

    return term


def user_advantages(rollout: RolloutBatch, mask: Tensor, cfg: AlgorithmConfig) -> Tensor:
    """Return what the function at the path `algorithm.advantage` gives, float32 [B, T], 0 outside of the mask. Needs
    token_rewards."""
    function, rewards = UserFunction("algorithm.advantage", cfg), rollout.token_rewards
    assert rewards is not None
    values = {"rewards": rewards.sum(1), "token_rewards": rewards, "group": rollout.group, "valid": rollout.valid}
    result = function(values | {"mask": rollout.response_mask}, rewards.shape[:1], rewards.shape).detach().float()
    if not result[rollout.valid].isfinite().all():
        raise function.refused("finite advantages of valid samples")
    return torch.where(mask.bool(), result if result.dim() == 2 else result[:, None], 0.0)


def user_kl(cfg: AlgorithmConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function at the path `algorithm.kl.estimator` in the form of `ops.rl.kl.kl_estimator`."""
    function = UserFunction("algorithm.kl.estimator", cfg)

    def estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return function({"logprobs": logprobs, "ref_logprobs": ref_logprobs}, logprobs.shape).float()

    return estimate


def user_shaping(rewards: Tensor, lengths: Tensor, finished: Tensor, limit: int, cfg: AlgorithmConfig) -> Tensor:
    """Return what the function at the path `algorithm.shaping` gives, float32 [B]."""
    function = UserFunction("algorithm.shaping", cfg)
    values = {"rewards": rewards.float(), "lengths": lengths.long(), "finished": finished.bool()}
    result = function(values | {"limit": torch.full_like(values["lengths"], limit)}, rewards.shape).float()
    if not result.isfinite().all():
        raise function.refused("finite rewards")
    return result


# ---- checks before training


def check(cfg: AlgorithmConfig) -> list[str]:
    """Check the functions of the config. Return what was noticed of each. Raises AlgorithmCodeError for a function
    that training must not use, ConfigError for an argument that none takes."""
    functions = [UserFunction(key, cfg) for key in cfg.own_functions()]
    taken = {name for function in functions for name in function._args}
    for name, value in cfg.args.items():
        if name not in taken:
            expected = f"an entry that {' or '.join(f.path for f in functions) or 'a function of yours'} takes"
            raise ConfigError(f"algorithm.args.{name}", value, expected)
    return [f"{function.path}: {note}" for function in functions for note in _notes(function)]


def _notes(function: UserFunction) -> Iterator[str]:
    of_tokens = function.key in OF_TOKENS
    values = _loss_values() if of_tokens else _sample_values()
    sees = values["mask"] > 0 if of_tokens else values["valid"]

    def same(other: Values, what: str, rows: slice = _ALL, hint: str = "") -> None:
        """Compare the results for rows of `values` with those for `other`, whose rows are the same otherwise."""
        width = result.shape[1:] and (slice(0, result.shape[1]),)
        again, there = _result(function, other)[(_ALL, *width)], sees[rows]
        if not torch.allclose(result[rows][there], again[there], rtol=1e-4, atol=1e-5):
            raise function.refused(f"results that do not depend on {what}", hint)

    before = _random_states()
    result = _result(function, values)
    if not result[sees].isfinite().all():
        raise function.refused("finite results for ordinary numbers")
    same(values, "earlier calls")
    if before != _random_states():
        raise function.refused("no use of the process's random state: a rerun or a resumed run would differ")
    with patch.dict(os.environ, {"RANK": "1", "LOCAL_RANK": "1"}), patch.object(dist, "get_rank", lambda *_: 1):
        same(values, "the rank")
    whole_groups = (slice(0, 4), slice(4, 12))
    for rows in whole_groups if function.key != "algorithm.shaping" else (slice(0, 1), slice(1, 12)):
        hint = "Ranks and micro-batches have other rows. algorithm.whiten compares those of all ranks."
        same({name: x[rows] for name, x in values.items()}, "other prompts' rows", rows, hint)
    wide = {n: torch.cat([x, torch.zeros_like(x[:, :3])], 1) if x.dim() == 2 else x for n, x in values.items()}
    same(wide, "padding")
    if of_tokens:
        hidden = {n: torch.where(sees, x, -7.5) for n, x in values.items() if n != "mask"}
        same(hidden | {"mask": values["mask"]}, "tokens where mask is 0", hint="Multiply by mask before you add up.")
    _check_graph(function, values)
    if of_tokens:
        yield from _device_notes(function, values)
    yield f"the same for each micro-batch, padding and rank, at {int(sees.sum())} made-up places"
    if function.learns:
        yield from _gradient_notes(function, values)


def _result(function: UserFunction, values: Values) -> Tensor:
    first, own = values[KEYS[function.key][0]], {name: x.clone() for name, x in values.items()}
    shapes = [first.shape, values["mask"].shape] if function.key == "algorithm.advantage" else [first.shape]
    result = function(own, *shapes).detach()
    for name in function.names:
        if not torch.equal(own[name], values[name]):
            raise function.refused(f"its inputs left as they are: it changes `{name}`")
    return result


def _loss_values() -> Values:
    """Return rows of different lengths, one of them without tokens of the loss."""
    draw = torch.Generator().manual_seed(1)
    shape, lengths = (12, 9), torch.tensor([9, 4, 7, 0, 5, 9, 1, 6, 3, 8, 2, 9])
    noise = [torch.randn(shape, generator=draw) for _ in range(5)]
    logprobs = -noise[0].abs() - 0.05
    values = {"logprobs": logprobs, "old_logprobs": logprobs + 0.3 * noise[1]}
    values |= {"rollout_logprobs": logprobs + 0.3 * noise[2], "ref_logprobs": logprobs + noise[3]}
    values |= {"advantages": noise[4], "mask": (torch.arange(9) < lengths[:, None]).float()}
    return values


def _sample_values() -> Values:
    """Return the samples of three prompts: with an invalid one, with equal rewards, and with a single valid one."""
    mask = (torch.arange(9) < torch.tensor([9, 4, 7, 2, 5, 9, 1, 6, 3, 8, 2, 9])[:, None]).float()
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 1.0, 1.0, 2.0, 0.0, 1.0, 0.0])
    valid = torch.tensor([True, True, True, False] + [True] * 4 + [False, True, False, False])
    token_rewards = torch.zeros_like(mask)
    token_rewards[torch.arange(12), mask.sum(1).long() - 1] = rewards
    group = torch.tensor([3, 8, 5]).repeat_interleave(4)
    values = {"rewards": rewards, "group": group, "valid": valid, "token_rewards": token_rewards, "mask": mask}
    lengths = mask.sum(1).long()
    return values | {"lengths": lengths, "finished": lengths < 9, "limit": torch.full_like(lengths, 9)}


def _random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]


def _check_graph(function: UserFunction, values: Values) -> None:
    """Check that nothing of a call stays when its result is dropped."""
    names = [name for name in function.names if values[name].is_floating_point()]
    ours = {name: x.clone().requires_grad_(name == "logprobs") for name, x in values.items()}
    kept = [weakref.ref(ours[name]) for name in names]
    result = function(ours, values[names[0]].shape, values["mask"].shape) if names else None
    if function.learns and not ("logprobs" in names and result is not None and result.requires_grad):
        raise function.refused("a gradient of logprobs: nothing would be learned")
    if result is not None and result.requires_grad:
        torch.where(values["mask"] > 0, result, 0.0).sum().backward()
        if not ours["logprobs"].grad.isfinite().all():  # type: ignore[union-attr]
            raise function.refused("finite gradients, also of rows without a token of the loss (mask 0)")
    del ours, result
    gc.collect()
    if any(ref() is not None for ref in kept):
        raise function.refused("no tensor kept after the call: it would hold a whole graph in memory")


def _device_notes(function: UserFunction, values: Values) -> Iterator[str]:
    """Call the loss with tensors without data, which no host can read, and which mix with no CPU's."""
    try:
        function({name: x.to("meta") for name, x in values.items()}, values["mask"].shape)
    except AlgorithmCodeError as error:
        if "is not on the expected device" in str(error):
            raise function.refused("tensors made on the device of logprobs: it makes some on the CPU") from error
        yield "the host waits for the device at each call, as by .item() or a mask as index"


def _gradient_notes(function: UserFunction, values: Values) -> Iterator[str]:
    """Compare the gradient with finite differences, away from kinks."""
    logprobs, mask, step = values["logprobs"], values["mask"], 1e-2
    ours = logprobs.clone().requires_grad_(True)
    total = (function(values | {"logprobs": ours}, logprobs.shape) * mask).sum()
    (gradient,) = torch.autograd.grad(total, ours)
    compared, different = 0, 0
    for row, column in mask.nonzero().tolist():
        sums = []
        for change in (-step, 0.0, step):
            moved = logprobs.clone()
            moved[row, column] += change
            sums.append(float((_result(function, values | {"logprobs": moved}).double() * mask).sum()))
        below, above = (sums[1] - sums[0]) / step, (sums[2] - sums[1]) / step
        scale = 1 + abs(above)
        if abs(above - below) < 0.05 * scale:
            compared += 1
            different += abs((above + below) / 2 - float(gradient[row, column])) > 0.01 * scale
    detached = f"differs from finite differences at {different} of {compared} tokens, as where it is detached"
    yield f"its gradient {detached if different else f'equals finite differences at {compared} tokens'}"
