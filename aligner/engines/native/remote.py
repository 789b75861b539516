"""The native engines of other ranks, as seen by a trainer's rank. All trainer ranks make every call together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from aligner.config.engines import Capabilities
from aligner.config.sections.model.config import ModelConfig
from aligner.engines.base import RolloutEngine, require_finite
from aligner.engines.bridge import Answer, Bridge
from aligner.engines.native.fleet import Fleet, nothing
from aligner.errors import RefitError
from aligner.ops.packing.routing import no_routing
from aligner.ops.reduce import dealt, gathered
from aligner.types import Generations, Progress, SamplingParams, SeedLists, TokenLists


def fleet_of(bridge: Bridge) -> Fleet:
    return Fleet(bridge.width, bridge.trainers, bridge.group)


class RemoteEngine(RolloutEngine):
    """A `RolloutEngine` on the last ranks of the job, `tensor_parallel` to a replica. Weights come by the refit's
    plan (`order_update`), never as whole tensors. `reports_routing`: the model, if they report routing."""

    can = Capabilities(in_place=True, apart=True)

    def __init__(
        self, bridge: Bridge, tensor_parallel: int, dtype: torch.dtype, reports_routing: ModelConfig | None = None
    ):
        self.bridge, self.tensor_parallel, self.dtype = bridge, tensor_parallel, dtype
        self.no_routing = None if reports_routing is None else no_routing(reports_routing)
        self.weight_version = -1
        self._flight: Callable[[], Any] | None = None  # waits for the samples in generation

    def _order(self, name: str, *arguments: Any) -> None:
        """Give an order after waiting for the samples in generation, if any."""
        if self._flight is not None:
            self._flight()
        self.bridge.order(name, *arguments)

    @property
    def fleet(self) -> Fleet:
        return fleet_of(self.bridge)

    # --- weights

    def order_update(self, version: int, hold: bool) -> None:
        """Let the engines take part in a refit. With `hold` they keep their weights (a test hook)."""
        self._order("refit", version, hold)
        if not hold:
            self._pending, self.weight_version = version, -1

    def begin_update(self, version: int) -> None:
        assert version == self._pending, f"version {version} begins, {self._pending} was ordered"

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        raise RefitError("engines on other ranks take their weights by the plan, shard by shard")

    def finish_update(self) -> None:
        self.weight_version = self._pending  # assumed until the next answer

    def checksums(self) -> Mapping[str, int]:
        """Return the checksums of the first replica; -1 where another one disagrees."""
        self._order("checksums")
        first, *others = [answer.value for answer in self._answers()]
        return {name: value if all(o.get(name) == value for o in others) else -1 for name, value in first.items()}

    # --- generation

    def generate(
        self, prompts: TokenLists, seeds: SeedLists, sampling: SamplingParams, progress: Progress | None = None
    ) -> Generations:
        """See `RolloutEngine.generate`. Raises the errors of any rank on every rank. `progress` is not called."""
        return self.order(prompts, seeds, sampling)()

    def order(
        self, prompts: TokenLists, seeds: SeedLists, sampling: SamplingParams, begun: Sequence[int] | None = None
    ) -> Callable[[], Generations]:
        """See `RolloutEngine.order`."""
        self._order("generate", sampling)
        with self.bridge.contact():
            self.fleet.gather(prompts, seeds, begun)
        # cached: after an error they would answer with it again
        self._flight = flight = cache(partial(self._delivered, [len(s) for s in seeds], sampling.truncates))
        return lambda: require_finite(flight())

    def generate_trajectories(self, requests: Sequence[Any]) -> Callable[[], list[Any]]:
        """Order all ranks' requests from the engines' ranks (`OrderServer`); return, as `order` does, a function
        that gives each engine rank's results for this rank."""
        self._order("trajectories")
        with self.bridge.contact():
            gathered(list(requests), self.bridge.group)
        self._flight = flight = cache(self._trajectories)
        return flight

    def _delivered(self, wanted: list[int], cut: bool) -> Generations:
        self._deliver()
        with self.bridge.contact():
            none = nothing(cut, self.weight_version, self.no_routing)
            return self.fleet.deliver([], none, wanted, cut)

    def _trajectories(self) -> list[Any]:
        self._deliver()
        with self.bridge.contact():
            return dealt([None] * self.bridge.group.size(), self.bridge.group)[self.bridge.trainers :]

    def _deliver(self) -> None:
        """Have the engines send the results of their last order; raise their errors."""
        self._flight = None
        self.bridge.order("deliver")
        self._answers()

    def logprobs(self, tokens: Tensor, lengths: Tensor, temperature: float = 1.0) -> Tensor:
        """See `RolloutEngine.logprobs`: of the first replica, and of the same rows on every rank."""
        return self.logprobs_of_replicas(tokens, lengths, temperature)[0]

    def logprobs_of_replicas(self, tokens: Tensor, lengths: Tensor, temperature: float = 1.0) -> list[Tensor]:
        self._order("logprobs", tokens, lengths, temperature)
        return [answer.value for answer in self._answers()[:: self.tensor_parallel]]

    def top_logprobs(self, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `RolloutEngine.top_logprobs`: of the same rows on every rank."""
        self._order("top_logprobs", tokens, count)
        return self._answers()[0].value

    def decoded_of_replicas(self, tokens: Tensor, lengths: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
        """See `ChildEngine.decoded`: of each replica."""
        self._order("decoded", tokens, lengths, count)
        return [tuple(answer.value) for answer in self._answers()[:: self.tensor_parallel]]

    def _answers(self) -> list[Answer]:
        answers = self.bridge.answers()
        versions = {answer.version for answer in answers}
        self.weight_version = versions.pop() if len(versions) == 1 else -1
        return answers
