"""Running mean and standard deviation of rewards, the same on every data-parallel rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Reduce = Callable[[list[float]], list[float]]  # element-wise sum over data-parallel ranks


class RunningNormalizer:
    """Mean and population variance of all values ever seen, by Welford's update in the batched form of Chan, Golub
    and LeVeque (1979): with batch count n, mean m, squared deviations s and delta = m - mean,
    mean += delta*n/(N+n), m2 += s + delta^2*N*n/(N+n).

    A batch is the values of all ranks: `reduce` sums lists of floats over them. Two reductions (sums, then squared
    deviations from the common mean) keep the precision that a sum of squares would lose.
    """

    def __init__(self) -> None:
        self.count, self.mean, self.m2 = 0.0, 0.0, 0.0

    @property
    def std(self) -> float:
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    def update(self, values: Sequence[float], reduce: Reduce | None = None) -> None:
        """Add values. Collective if `reduce` is: every rank calls it, also with no values."""
        reduce = reduce or list
        count, total = reduce([float(len(values)), math.fsum(values)])
        mean = total / count if count else 0.0
        (squares,) = reduce([math.fsum((value - mean) ** 2 for value in values)])
        if not count:
            return
        delta, joint = mean - self.mean, self.count + count
        self.mean += delta * count / joint
        self.m2 += squares + delta * delta * self.count * count / joint
        self.count = joint

    def __call__(self, value: float) -> float:
        """Return (value - mean) / std; 0 while all values were equal."""
        if not self.count:
            return value
        # Rounding leaves a tiny std where all values are equal: dividing by it would make noise of size one.
        floor = 1e-8 * max(1.0, abs(self.mean))
        return (value - self.mean) / self.std if self.std > floor else 0.0

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.m2 = state["count"], state["mean"], state["m2"]
