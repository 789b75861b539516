"""Prove after every refit that the engine holds the trainer's weights: version, sentinel prompts, and checksums on
request.

The sentinel compares the engine's logprobs with the trainer's CURRENT ones and with those of the PREVIOUS refit. A bare
tolerance would pass an engine that missed one small step in bfloat16; being nearer to the previous weights gives it
away.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aligner.config.sections.engine import RefitConfig
from aligner.engines.base import RolloutEngine
from aligner.engines.native.remote import RemoteEngine
from aligner.errors import EngineError
from aligner.refit.transfer import Refit, fail_together
from aligner.types import ScalarMetrics

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # mean |logprob difference|, engine and trainer kernels differ
POWER = 5.0  # a verdict must be this many standard deviations of its noise away from what it would deny


def staleness(engine: Tensor, current: Tensor, previous: Tensor, power: float = POWER) -> tuple[bool, float]:
    """Whether `engine` [N] is nearer to `previous` than to `current`, and how far along it came (0 stale, 1 current).

    With d = current - previous, progress = <engine - previous, d> / |d|^2; nearer to previous means progress < 1/2.

    d has the trainer's own rounding in it, twice, so an engine with current weights comes only to (1 + signal) / 2,
    where signal = 1 - noise^2 / mean(d^2) and noise is the distance of engine and trainer with equal weights (both
    round). Progress varies by sqrt(3) / 2 * noise / |d| around that. The verdict is withheld (False) where this is less
    than `power` standard deviations from 1/2: a step smaller than the rounding says nothing.
    """
    step = (current - previous).double()
    squared = step.square().sum()
    if not squared > 0:
        return False, 1.0
    progress = float(((engine - previous).double() * step).sum() / squared)
    noise = min((engine - x).double().square().mean().sqrt() for x in (current, previous))
    signal = 1 - noise.square() * len(step) / squared
    powerful = bool(signal / 2 > power * 3**0.5 / 2 * noise / squared.sqrt())
    return powerful and progress < 0.5, progress


@dataclass
class Verifier:
    """Keeps the sentinel's last logprobs; `check` raises RefitError on every rank if any rank's engine disagrees."""

    refit: Refit
    tokens: Tensor  # int64 [B, T] sentinel rows
    lengths: Tensor  # int64 [B]
    trainer_logprobs: object  # callable (tokens, lengths) -> float32 [B, T], collective over the model's ranks
    previous: Tensor | None = field(default=None)
    power: float = POWER

    def state_dict(self) -> dict[str, Any]:
        """The last logprobs and the rows they are of, so that the first refit after a resume gets its verdict."""
        previous = None if self.previous is None else self.previous.tolist()
        return {"rows": self._rows(), "previous": previous}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Logprobs of other rows (the training set has changed) are forgotten."""
        known = state["previous"] is not None and state["rows"] == self._rows()
        self.previous = torch.tensor(state["previous"], dtype=torch.float32) if known else None

    def _rows(self) -> list[list[int]]:
        return [row[:n] for row, n in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]

    def check(self) -> ScalarMetrics:
        engine: RolloutEngine = self.refit.engine
        config: RefitConfig = self.refit.config
        mask = torch.arange(self.tokens.shape[1])[None] < self.lengths[:, None]
        mask[:, 0] = False
        current = self.trainer_logprobs(self.tokens, self.lengths).cpu()[mask]  # type: ignore[operator]
        views, cause = [current], ""
        try:
            views = [logprobs.cpu()[mask] for logprobs in self._logprobs(engine)]
        except EngineError as error:
            cause = str(error)
        fail_together(cause)
        causes = []
        if engine.weight_version != self.refit.model.step_count:
            causes.append(f"weight version: engine {engine.weight_version}, trainer {self.refit.model.step_count}")
        if config.verify == "checksum":
            held = engine.checksums()
            wrong = [name for name, value in self.refit.checksums.items() if held.get(name) != value]
            if wrong:
                causes.append(f"checksum of {len(wrong)} tensors differs, first {wrong[0]}")
        error = float(torch.stack([(found - current).abs().mean() for found in views]).max())  # NaN if one is
        coarser = max(TOLERANCE[dtype] for dtype in (engine.dtype, self.refit.model.dtype))
        tolerance = config.tolerance or coarser
        if not error <= tolerance:
            causes.append(f"sentinel: mean |logprob difference| {error:.3g} > refit.tolerance {tolerance:.3g}")
        progress = 1.0
        if self.previous is not None:
            verdicts = [staleness(found, current, self.previous, self.power) for found in views]
            progress = min(found for _, found in verdicts)
            if any(stale for stale, _ in verdicts):
                causes.append(
                    f"sentinel: nearer to the previous weights than to the current ones (progress {progress:.2f})"
                )
        self.previous = current
        fail_together("; ".join(causes))
        return {"refit/sentinel_error": error, "refit/sentinel_progress": progress}

    def _logprobs(self, engine: RolloutEngine) -> list[Tensor]:
        """Of this rank's engine, or of all replicas if they are on other ranks."""
        if isinstance(engine, RemoteEngine):
            return engine.logprobs_of_replicas(self.tokens, self.lengths)
        return [engine.logprobs(self.tokens, self.lengths)]
