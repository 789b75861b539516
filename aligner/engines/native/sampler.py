"""Sampling of tokens: temperature, top-k, top-p, min-p, greedy, with one uniform number per row and step."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.ops.kernels.checksum import GOLDEN, mix64_
from aligner.ops.kernels.logprobs import token_logprobs
from aligner.types import SamplingParams

BLOCK = 512  # tokens whose probabilities are added up together
_LOGIT_ELEMENTS = 1 << 26  # logits handled at once: bounds the float64 cumulative sums to 512 MiB


class SampledTokens(NamedTuple):
    tokens: Tensor  # int64 [n]
    logprobs: Tensor  # float32 [n], of the distribution that was sampled from
    full_logprobs: Tensor | None  # float32 [n], of the tempered full distribution, where something was cut


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return float64 [n] in [0, 1): a hash of (seed, position), int64 [n] each, with 53 random bits.

    Counter-based, so a row's numbers depend only on its own seed and position: not on the batch, the order, the rank
    or the device. The seed is mixed first: seeds s and s + golden would otherwise share their streams.
    """
    x = mix64_(mix64_(seeds.clone()).add_((positions + 1) * GOLDEN))
    return ((x >> 11) & ((1 << 53) - 1)).double().mul_(2.0**-53)


def sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, sampling: SamplingParams, invariant: bool = False
) -> SampledTokens:
    """Sample from logits float32 [n, V] (overwritten); seeds, positions int64 [n].

    Greedy (temperature 0) reports logprobs of the untempered distribution: those of a point mass carry no
    information. Ids from `sampling.vocabulary` on are never sampled. Without cuts the logprobs still are those of
    the distribution over all ids, which is the trainer's: the two stay comparable. `invariant`: they are computed as
    the trainer does. Where logits are not finite (NaN,
    or all infinite) the token means nothing and its logprob is NaN. Checking that here would wait for the device in
    every step. `batch.Batch` ends the row with the flags that it copies anyway; `engines.base.require_finite`
    refuses the samples.
    """
    rows = max(1, _LOGIT_ELEMENTS // logits.shape[1])
    if len(logits) <= rows:
        return _sample(logits, seeds, positions, sampling, invariant)
    cut = [t.split(rows) for t in (logits, seeds, positions)]
    parts = [_sample(*rows_cut, sampling, invariant) for rows_cut in zip(*cut, strict=True)]
    return SampledTokens(*(None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)))


def _sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, sampling: SamplingParams, invariant: bool
) -> SampledTokens:
    if invariant:
        plain = _sample(logits.clone(), seeds, positions, sampling, False)
        where = {"temperature": sampling.temperature or 1.0, "vocab_size": logits.shape[1]}
        trained, _ = token_logprobs(logits, plain.tokens, **where)
        if sampling.truncates:
            return plain._replace(full_logprobs=trained)
        return plain._replace(logprobs=trained)
    known = slice(sampling.vocabulary or None)
    if sampling.temperature == 0:
        tokens = logits[:, known].argmax(-1)
        return SampledTokens(tokens, _at(logits, tokens) - logits.logsumexp(-1), None)
    if sampling.temperature != 1:
        logits.div_(sampling.temperature)
    if not sampling.truncates:
        probs = logits.softmax(-1)
        tokens = _invert(probs[:, known], uniforms(seeds, positions))
        return SampledTokens(tokens, _at(probs, tokens).log(), None)
    total = logits.logsumexp(-1)
    kept = cut_logits(logits[:, known], sampling)
    tokens = _invert(kept.softmax(-1), uniforms(seeds, positions))
    picked = _at(kept, tokens)
    return SampledTokens(tokens, picked - kept.logsumexp(-1), picked - total)


def _at(table: Tensor, tokens: Tensor) -> Tensor:
    return table.gather(1, tokens[:, None]).squeeze(1)


def _invert(probs: Tensor, u: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds u x the total: never one of probability 0. Sums of
    blocks select the block, a cumulative sum within it the token: one over all tokens is slow in float64, and
    sequential."""
    whole = probs.shape[1] // BLOCK * BLOCK
    sums = [probs[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1, dtype=torch.float64)] if whole else []
    if whole < probs.shape[1]:
        sums.append(probs[:, whole:].sum(-1, keepdim=True, dtype=torch.float64))
    ends = torch.cat(sums, 1).cumsum(-1)
    threshold = u.mul_(ends[:, -1])[:, None]
    block = _first_above(ends, threshold)
    threshold -= F.pad(ends, (1, 0)).gather(1, block)
    places = block * BLOCK + torch.arange(BLOCK, device=probs.device)
    inside = places < probs.shape[1]
    within = probs.gather(1, places.clamp(max=probs.shape[1] - 1)).double().mul_(inside).cumsum(-1)
    tokens = (block * BLOCK + _first_above(within, threshold)).squeeze(1)
    return tokens.clamp_(max=probs.shape[1] - 1)  # NaN exceeds nothing


def _first_above(cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Return int64 [n, 1]: the first of each row [n, m] that exceeds its threshold [n, 1], else the last that adds
    something: another order of the same sums may differ in the last bit."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()).clamp_(max=cumulative.shape[1] - 1)
    return torch.searchsorted(cumulative, threshold, right=True).minimum(last)


def picked_logprobs(logits: Tensor, picked: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return float32 [n] twice, of tokens that another sampler picked from logits [n, V], int64 [n]: logprobs of the
    tempered full distribution, and of the one that was sampled from."""
    logits = logits / (sampling.temperature or 1.0)
    full = _at(logits, picked) - logits.logsumexp(-1)
    if not sampling.truncates:
        return full, full
    kept = cut_logits(logits, sampling)
    return full, _at(kept, picked) - kept.logsumexp(-1)


def cut_logits(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Set logits to -inf outside top-k, then top-p (Holtzman et al. 2020), then min-p (Nguyen et al. 2024), in this
    order.

    Tokens keep their indices: a near-tie that falls the other way in the sort moves no other token's interval.
    """
    if 0 < sampling.top_k < logits.shape[1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    if sampling.top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1, dtype=torch.float64) - probs  # mass of the tokens ahead
        drop = before >= sampling.top_p
        drop[:, 0] = False
        logits = logits.masked_fill(torch.empty_like(drop).scatter_(1, index, drop), -math.inf)
    if sampling.min_p > 0:
        floor = logits.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < floor, -math.inf)
    return logits
