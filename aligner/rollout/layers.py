"""Which layer first computes other bits in the engine than in the trainer (`mismatch.expect=zero`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aligner.engines.native.engine import NativeEngine
from aligner.engines.native.replay import layer_states
from aligner.errors import RefitError
from aligner.roles.policy import Policy
from aligner.types import TrainBatch

EQUAL = (
    "Read alone, the sample has the same states behind all layers: look behind them (the last norm, the output matrix, "
    "softmax, temperature), and at what depends on the rows beside it"
)


def first_layer(policy: Policy, engine: NativeEngine, tokens: list[int], prompt: int) -> str:
    """Let both sides read a sample again, up to the token whose logprobs differ. Name the first layer."""
    try:
        states = layer_states(engine, tokens, prompt)
    except RefitError:
        return "The layer is not known: the engine's weights are released (memory.sleep=never keeps them)"
    differ = (states != trainer_states(policy, tokens)).any(2)
    layers = differ.any(1).nonzero().flatten().tolist()
    if not layers:
        return EQUAL
    name = f"layer {layers[0] - 1} (of 0 to {len(states) - 2})" if layers[0] else "the embedding"
    return f"Read alone, it differs first in the output of {name}, at token {int(differ[layers[0]].nonzero()[0])}"


def trainer_states(policy: Policy, tokens: list[int]) -> Tensor:
    """Return what `layer_states` does, of the trainer. One pass of its own, which no other rank takes part in."""
    layers, states = policy.model.module.decoder.layers, list[Tensor]()

    def note(x: Any) -> None:
        x = x[0] if isinstance(x, tuple) else x
        states.append(x[: len(tokens) - 1, 0].detach().cpu())

    hooks = [layers[0].register_forward_pre_hook(lambda m, args, kwargs: note(_hidden(args, kwargs)), with_kwargs=True)]
    hooks += [layer.register_forward_hook(lambda m, args, output: note(output)) for layer in layers]
    try:
        policy.logprobs(_row(tokens))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(states)


def _hidden(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _row(tokens: list[int]) -> TrainBatch:
    row = torch.tensor([tokens])
    return TrainBatch(row, torch.tensor([len(tokens)]), torch.ones(row.shape))
