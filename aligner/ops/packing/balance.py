"""Deal rows of unequal cost to parts of equal number, so that the costliest part is as cheap as possible."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig


def row_costs(lengths: Tensor, model: ModelConfig) -> Tensor:
    """Return float64 [B]: operations of a forward pass by row of n tokens, per layer (of mixed ones on average). They
    are 2 P n for the matrix products with P parameters (the output layer's spread over the layers). Causal attention
    over heads of A = heads x head_dim numbers in all adds 2 n^2 A (scores and weighted sums, half of the square). Those
    of an indexer add n^2 A of its own."""
    n, h, latent = lengths.double(), model.hidden_size, model.latent
    scored = model.share("indexer") * model.indexer.heads * model.indexer.head_dim
    heads = [(share, model.of_kinds(kinds)) for kinds, share in model.head_kinds().items()]
    wide = sum(share * each.num_heads * each.kv_channels for share, each in heads)
    out = sum(share * each.num_heads * each.value_channels for share, each in heads)
    if latent.kv_rank:
        vectors = latent.query_rank + latent.kv_rank + latent.rotary_dim
        ups = wide * (latent.query_rank or h) + (model.num_heads * latent.plain_dim + out) * latent.kv_rank
        projections = h * vectors + ups + h * out + scored * latent.query_rank
    elif model.traits.entries:
        key, narrow = model.kv_channels, latent.output_groups * latent.output_rank
        made = 4 * model.share("indexer") * (key + model.indexer.head_dim) + 2 * model.share("heavy") * key
        projections = h * (latent.query_rank + key + made + narrow) + wide * (latent.query_rank + latent.output_rank)
        projections += scored * latent.query_rank + 2 * h * model.hyper.streams**2 * (model.hyper.streams + 2)
        scored /= model.entries.tokens  # of entries
    else:
        projections = 2 * h * wide + h * model.made_keys
    # matrices that compute a token
    each = (1 + model.mlp_parts) * h  # of an MLP, for one number between its matrices
    routed = (1 + model.mlp_parts) * model.expert_hidden * model.expert_ffn * model.moe.top_k
    beside = model.moe.num_experts + 2 * model.moe.latent_size
    sparse = routed + each * model.moe.shared_ffn_hidden_size + h * beside
    mlp = each * model.mean_ffn + sparse * model.share("sparse") + 3 * h * model.layer_input_size
    mixing = model.share("attention") if model.pattern else 1.0
    linear = model.linear.key_heads * model.linear.width + model.linear.value_heads * model.linear.value_head_dim
    projections = mixing * projections + (model.share("linear") * h * linear if model.pattern else 0.0)
    parameters = projections + mlp + h * model.vocab_size / model.num_layers
    return 2 * parameters * n + (mixing * (wide + out) + scored) * n.square()


def deal(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Return the numbers of the rows of each part, ascending. The parts have equally many rows (or differ by one).

    Largest first, each to the cheapest part that still has room, then exchanges between the costliest and the
    cheapest part while one helps. Greedy scheduling as in Graham 1969 (doi:10.1137/0117039), with equal numbers.
    """
    assert 1 <= parts <= len(costs), (parts, len(costs))
    room = [len(costs) // parts + (i < len(costs) % parts) for i in range(parts)]
    chosen: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0.0, i) for i in range(parts)]
    for row in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, cheapest = heapq.heappop(heap)
        chosen[cheapest].append(row)
        if len(chosen[cheapest]) < room[cheapest]:
            heapq.heappush(heap, (load + costs[row], cheapest))
    _exchange(costs, chosen)
    return [sorted(rows) for rows in chosen]


def _exchange(costs: Sequence[float], parts: list[list[int]]) -> None:
    loads = [sum(costs[row] for row in rows) for rows in parts]
    for _ in range(4 * len(parts)):
        high = max(range(len(parts)), key=lambda i: (loads[i], i))
        low = min(range(len(parts)), key=lambda i: (loads[i], i))
        gap = loads[high] - loads[low]
        a = torch.tensor([costs[row] for row in parts[high]], dtype=torch.float64)
        b = torch.tensor([costs[row] for row in parts[low]], dtype=torch.float64)
        gain = gap / 2 - (a[:, None] - b[None] - gap / 2).abs()  # of the costlier of the two parts
        best = int(gain.argmax())
        i, j = divmod(best, len(b))
        if float(gain.flatten()[best]) <= 1e-9 * max(loads[high], 1.0):
            return
        moved = float(a[i] - b[j])
        parts[high][i], parts[low][j] = parts[low][j], parts[high][i]
        loads[high] -= moved
        loads[low] += moved


def balance(costs: Sequence[float], parts: Sequence[Sequence[int]]) -> float:
    """Return the mean cost of the parts over the largest: 1 is perfect, and 1 - balance is the share of time the
    others wait."""
    loads = [sum(costs[row] for row in rows) for rows in parts]
    return sum(loads) / (len(loads) * max(loads)) if loads and max(loads) > 0 else 1.0
