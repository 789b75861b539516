"""The sections `parallel` and `critic.parallel`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.checks import at_least, one_of
from aligner.errors import ConfigError


@dataclass
class ParallelConfig:
    """Data parallel = what is left of the world."""

    tensor: int = 1  # ranks that share each matrix
    pipeline: int = 1  # ranks that share the layers
    context: int = 1  # ranks that share the tokens of a row
    context_mode: str = "allgather"  # allgather (of keys and values), alltoall (over heads)
    expert: int = 1  # ranks, out of the data- and context-parallel ones, that share the experts
    sequence: bool = False  # between matrices, tensor ranks share the tokens

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context", "expert"):
            at_least(f"parallel.{name}", getattr(self, name), 1)
        one_of("parallel.context_mode", self.context_mode, ("allgather", "alltoall"))
        if self.sequence and self.tensor == 1:
            raise ConfigError("parallel.sequence", True, "false when parallel.tensor=1: it shards over tensor ranks")

    @property
    def model_size(self) -> int:
        return self.tensor * self.pipeline * self.context
