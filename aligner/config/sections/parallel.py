"""The section `parallel`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key
from aligner.config.rule import rules


@dataclass
class ParallelConfig(Section, key="parallel"):
    """Sizes of the layout. The remaining ranks share the data."""

    tensor: int = key(1, "Ranks that share each matrix.", least=1)
    pipeline: int = key(1, "Ranks that share the layers, in stages.", least=1)
    stage_layers: list[int] = key(
        [],
        "Layers of each stage, in the model's order. Empty: as even as possible, fewest in the first and the last. So "
        "is a reward model or critic of another depth.",
        least=1,
    )
    virtual_stages: int = key(
        1, "Stages on each rank of a pipeline: with more it waits less and exchanges more.", least=1
    )
    context: int = key(1, "Ranks that share the tokens of a row.", least=1)
    context_mode: str = key(
        "allgather",
        "Exchange of context ranks for attention: gather keys and values, or swap tokens for heads.",
        choices=("allgather", "alltoall"),
    )
    expert: int = key(
        1, "Ranks that share the experts, each of them whole, among the tensor, context and data ranks.", least=1
    )
    sequence: bool = key(False, "Shard tokens over tensor ranks between matrices.")

    RULES = rules("""
tensor=1 => sequence =false | when parallel.tensor=1: it shards over tensor ranks
pipeline=1 => virtual_stages =1 | when parallel.pipeline=1: nothing waits
""")

    @property
    def model_size(self) -> int:
        return self.tensor * self.pipeline * self.context
