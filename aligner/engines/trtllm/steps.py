"""Hooks into the steps of TensorRT-LLM's Python runtime, which take logprobs and may prescribe tokens.

The runtime calls a logits processor before it picks tokens. Its own logprobs are not used: their distribution
depends on the sampler's kernel. A processor is a plain callable here; nothing of the package is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aligner.engines.native.sampler import picked_logprobs
from aligner.types import SamplingParams

_NEVER = -1e30


class LogprobWatch:
    """A logits processor that takes logprobs of the picked tokens: of the distribution that `sampling` samples from,
    and of the whole tempered one. `lengths`: of the prompts."""

    def __init__(self, lengths: list[int], sampling: SamplingParams, vocab_size: int):
        self.lengths, self.sampling, self.vocab_size = lengths, sampling, vocab_size
        self._logits: Tensor | None = None  # of the step whose tokens are not known yet
        self._noted: list[tuple[Tensor, Tensor]] = []

    def __call__(self, step: int, ids: Tensor, scores: Tensor) -> Tensor:
        """Note the logprobs of the tokens picked last. ids int [n, T], prompts and the tokens so far, right-padded.
        Returns `scores` [n, V] itself: the engine writes the next step's scores into that object in any case."""
        if step:
            self._note(ids, step - 1)
        self._logits = scores[:, : self.vocab_size].float().clone()  # the sampler overwrites it
        return scores

    def _note(self, ids: Tensor, step: int) -> None:
        at = torch.tensor(self.lengths, device=ids.device)[:, None] + step
        # a row that has ended continues with an invalid id
        picked = ids.gather(1, at.clamp(max=ids.shape[1] - 1)).long().clamp(0, self.vocab_size - 1)
        self._noted.append(picked_logprobs(self._logits, picked[:, 0], self.sampling))

    def logprobs(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 [n, steps] twice: of the sampled-from distribution, of the full one. `ids` as at the end."""
        self._note(ids, len(self._noted))
        full, cut = (torch.stack(column, dim=1).cpu() for column in zip(*self._noted, strict=True))
        return cut, full


class PrescribedTokens(LogprobWatch):
    """A logits processor that makes the engine pick `wanted` int64 [n, steps] at any probability."""

    def __init__(self, lengths: list[int], wanted: Tensor, sampling: SamplingParams, vocab_size: int):
        super().__init__(lengths, sampling, vocab_size)
        self.wanted = wanted

    def __call__(self, step: int, ids: Tensor, scores: Tensor) -> Tensor:
        super().__call__(step, ids, scores)
        scores.fill_(_NEVER)
        scores.scatter_(1, self.wanted[:, step, None].to(scores.device), 0.0)
        return scores
