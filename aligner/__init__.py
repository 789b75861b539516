"""Reinforcement learning and other alignment of language models on Megatron-Core.

    import aligner
    result = aligner.train("stage=sft data.train=train.jsonl ...", on_step=print)

`aligner.api` has the parts of stages. Importing this package imports nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Runs from Python
    from aligner.config.resolve import compose as compose
    from aligner.errors import AlignerError as AlignerError
    from aligner.errors import ConfigError as ConfigError
    from aligner.errors import RunFailedError as RunFailedError
    from aligner.training import RunResult as RunResult
    from aligner.training import train as train

_HOMES = {  # the host of a container reads this too, by a Python that may be old
    "RunResult": "aligner.training",
    "train": "aligner.training",
    "compose": "aligner.config.resolve",
    "AlignerError": "aligner.errors",
    "ConfigError": "aligner.errors",
    "RunFailedError": "aligner.errors",
}
__all__ = ["AlignerError", "ConfigError", "RunFailedError", "RunResult", "compose", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'aligner' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
