"""Verify after every refit that the engine holds the trainer's weights: version, sentinel prompts, and checksums on
request.

The sentinel compares the engine's logprobs with the trainer's CURRENT ones and with those of the PREVIOUS refit. A mere
tolerance would accept an engine that missed one small step in bfloat16; being nearer to the previous weights reveals
it.

Logprobs of given tokens come from one forward pass. Generation runs other code: decode steps, recorded graphs, a
sampler. Packages in a process of their own may hold stale weights there alone. So these also generate a few tokens
after each row, whose logprobs are compared in the same way. The trainer's logprobs of them at the previous refit are
known as far as the engine generated the same tokens then: a stale one generates the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aligner.config.sections.engine import RefitConfig
from aligner.engines.base import RolloutEngine
from aligner.errors import EngineError
from aligner.ops.reduce import gathered
from aligner.refit.transfer import Refit, fail_together
from aligner.types import ScalarMetrics

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # mean |logprob difference|, engine and trainer kernels differ
POWER = 5.0  # a verdict needs this many standard deviations of its noise as its margin


def staleness(engine: Tensor, current: Tensor, previous: Tensor, power: float = POWER) -> tuple[bool, float]:
    """Return whether `engine` [N] is nearer to `previous` than to `current`, and its progress (0 stale, 1 current).

    With d = current - previous, progress = <engine - previous, d> / |d|^2; nearer to previous means progress < 1/2.

    d has the trainer's own rounding in it, twice. So an engine with current weights comes only to (1 + signal) / 2,
    where signal = 1 - noise^2 / mean(d^2). The noise is the distance of engine and trainer with equal weights (both
    round). Progress varies by sqrt(3) / 2 * noise / |d| around that. The verdict is withheld (False) where this is
    less than `power` standard deviations from 1/2: a step smaller than the rounding shows nothing.
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


Generated = tuple[int, tuple[int, ...]]  # number of the row, and the tokens after it


@dataclass
class RefitVerdict:
    """The result of one kind of evidence: mean |logprob difference| of the worst engine, the least progress, and the
    errors."""

    error: float
    progress: float
    causes: list[str]


@dataclass
class Verifier:
    """The verifier, with the sentinel's last logprobs. `check` raises RefitError on every rank if any rank's engine
    disagrees. `decoded`: tokens that the engine generates after each row; 0: none, the engine itself scores."""

    refit: Refit
    tokens: Tensor  # int64 [B, T] sentinel rows
    lengths: Tensor  # int64 [B]
    trainer_logprobs: object  # callable (tokens, lengths) -> float32 [B, T], collective over the model's ranks
    previous: Tensor | None = field(default=None)
    power: float = POWER
    decoded: int = 0
    generated: dict[Generated, Tensor] = field(default_factory=dict)  # at the last refit, with the trainer's logprobs

    def state_dict(self) -> dict[str, Any]:
        """Return the last logprobs and their rows, so that the first refit after a resume gets its verdict."""
        previous = None if self.previous is None else self.previous.tolist()
        generated = [[row, list(tokens), values.tolist()] for (row, tokens), values in self.generated.items()]
        return {"rows": self._rows(), "previous": previous, "generated": generated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state. Logprobs of other rows (the training set has changed) are forgotten."""
        known = state["previous"] is not None and state["rows"] == self._rows()
        self.previous = torch.tensor(state["previous"], dtype=torch.float32) if known else None
        kept = state.get("generated", []) if known else []  # earlier checkpoints have none
        self.generated = {(row, tuple(tokens)): torch.tensor(values) for row, tokens, values in kept}

    def _rows(self) -> list[list[int]]:
        return [row[:n] for row, n in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]

    def check(self) -> ScalarMetrics:
        engine: RolloutEngine = self.refit.engine
        config: RefitConfig = self.refit.config
        mask = torch.arange(self.tokens.shape[1])[None] < self.lengths[:, None]
        mask[:, 0] = False
        current = self.trainer_logprobs(self.tokens, self.lengths).cpu()[mask]  # type: ignore[operator]
        views, decoded, cause = [current], [], ""
        try:
            views = [logprobs.cpu()[mask] for logprobs in self._logprobs(engine)]
            decoded = self._decoded(engine)
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
        previous = [] if self.previous is None else [(scored, current, self.previous) for scored in views]
        verdicts = [self._verdict("sentinel", [(scored, current) for scored in views], previous)]
        if self.decoded:
            verdicts.append(self._of_generated(decoded))
        self.previous = current
        fail_together("; ".join(causes + [cause for verdict in verdicts for cause in verdict.causes]))
        return {
            "refit/sentinel_error": max(verdict.error for verdict in verdicts),
            "refit/sentinel_progress": min(verdict.progress for verdict in verdicts),
        }

    def _verdict(
        self, title: str, pairs: list[tuple[Tensor, Tensor]], steps: list[tuple[Tensor, Tensor, Tensor]]
    ) -> RefitVerdict:
        """Return the verdict. `pairs`: for each engine its logprobs and the trainer's; `steps`: where they are
        known, also those of the trainer's previous weights."""
        error = float(torch.stack([(own - current).abs().mean() for own, current in pairs]).max())  # NaN if one is
        coarser = max(TOLERANCE[dtype] for dtype in (self.refit.engine.dtype, self.refit.model.dtype))
        tolerance = self.refit.config.tolerance or coarser
        causes, progress = [], 1.0
        if not error <= tolerance:
            causes.append(f"{title}: mean |logprob difference| {error:.3g} > refit.tolerance {tolerance:.3g}")
        if steps:
            verdicts = [staleness(*step, self.power) for step in steps]
            progress = min(reached for _, reached in verdicts)
            if any(stale for stale, _ in verdicts):
                causes.append(
                    f"{title}: nearer to the previous weights than to the current ones (progress {progress:.2f})"
                )
        return RefitVerdict(error, progress, causes)

    def _of_generated(self, decoded: list[tuple[Tensor, Tensor]]) -> RefitVerdict:
        """Verify generated tokens. The trainer scores the tokens of any rank's engine: engines of one of its
        replicas may differ."""
        rows = [[(i, tuple(own)) for i, own in enumerate(tokens.tolist())] for tokens, _ in decoded]
        everyone = gathered({one for own in rows for one in own})
        current = self._trainers(sorted(set().union(*everyone)))
        pairs, steps = [], []
        for own, (_, logprobs) in zip(rows, decoded, strict=True):
            wanted = torch.stack([current[one] for one in own])
            pairs.append((logprobs, wanted))
            before = [self._known(one) for one in own]
            if any(len(values) > 1 for values in before):  # the prompt's pass makes the first token
                own, now = (torch.cat([x[i, 1 : len(b)] for i, b in enumerate(before)]) for x in (logprobs, wanted))
                steps.append((own, now, torch.cat([values[1:] for values in before])))
        self.generated = current
        return self._verdict("sentinel, generated tokens", pairs, steps)

    def _trainers(self, rows: Iterable[Generated]) -> dict[Generated, Tensor]:
        """Return the trainer's logprobs of the generated tokens. Collective over the model's ranks, which all ask
        for the same."""
        rows = list(rows)
        prompts = self._rows()
        whole = [torch.tensor([*prompts[i], *tokens]) for i, tokens in rows]
        lengths = torch.tensor([len(row) for row in whole])
        padded = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
        logprobs = self.trainer_logprobs(padded, lengths).cpu()  # type: ignore[operator]
        ends = enumerate(zip(rows, lengths.tolist(), strict=True))
        return {one: logprobs[at, n - len(one[1]) : n] for at, (one, n) in ends}

    def _known(self, one: Generated) -> Tensor:
        """Return the previous weights' logprobs of as many of the tokens as any engine generated then."""
        row, tokens = one
        best = torch.zeros(0)
        for (other, then), values in self.generated.items():
            ended = (i for i, (a, b) in enumerate(zip(tokens, then, strict=False)) if a != b)
            same = next(ended, min(len(tokens), len(then)))
            if other == row and same > len(best):
                best = values[:same]
        return best

    def _logprobs(self, engine: RolloutEngine) -> list[Tensor]:
        """Return the logprobs of this rank's engine, or of all replicas if they are on other ranks."""
        return engine.logprobs_of_replicas(self.tokens, self.lengths)

    def _decoded(self, engine: Any) -> list[tuple[Tensor, Tensor]]:
        """Return the generated tokens and their logprobs likewise, if the engines generate."""
        return engine.decoded_of_replicas(self.tokens, self.lengths, self.decoded) if self.decoded else []
