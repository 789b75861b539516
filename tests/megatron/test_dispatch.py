"""Numbers of rows that ranks send each other, against loops over tokens."""

import pytest
import torch

from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron import groups
from aligner.megatron.dispatch import exchange_sizes, through

pytestmark = pytest.mark.multirank
WORLD, EXPERTS, TOP_K = 4, 8, 3


def routed(rank: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(rank)
    return torch.rand(5 + rank, EXPERTS, generator=g).argsort(1)[:, :TOP_K]


def sent_off(node: int) -> tuple[list[int], list[int], torch.Tensor, torch.Tensor]:
    groups.ranks_per_node[0] = node
    layout = groups.build_layout(ParallelConfig(expert=WORLD))
    experts, rows = routed(layout.ep_rank), []
    sizes = exchange_sizes(experts, EXPERTS, layout.expert_groups)()

    def compute(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        rows.extend(counts.tolist())
        first = layout.ep_rank * EXPERTS // WORLD
        return x * (first + torch.arange(len(counts))).repeat_interleave(counts)[:, None]

    x, weights = torch.ones(len(experts), 2, requires_grad=True), torch.ones(experts.shape, requires_grad=True)
    out = through(x, weights, experts, EXPERTS, layout.expert_groups, sizes, compute)
    out.sum().backward()
    assert torch.equal(weights.grad, 2.0 * experts) and torch.equal(x.grad, out)
    return sizes, rows, out, experts


def tokens_of(rank: int, parts: list[set[int]]) -> list[int]:
    """How many of a rank's tokens have an expert of each part."""
    return [sum(bool(experts & set(token)) for token in routed(rank).tolist()) for experts in parts]


@pytest.mark.parametrize("node", [1, 2])
def test_a_token_is_sent_once(ranks, node):
    each, nodes = [{2 * r, 2 * r + 1} for r in range(WORLD)], [{0, 1, 2, 3}, {4, 5, 6, 7}]
    for rank, (sizes, rows, out, experts) in enumerate(ranks.run(sent_off, world=WORLD, node=node)):
        chosen = torch.cat([routed(r) for r in range(WORLD)])
        assert rows == [int((chosen == expert).sum()) for expert in each[rank]] and sizes[-1] == sum(rows)
        assert torch.equal(out[:, 0], experts.sum(1).float())
        if node == 1:
            assert sizes[:4] == tokens_of(rank, each)
            assert sizes[4:8] == [tokens_of(r, each)[rank] for r in range(WORLD)]
            continue
        first, other = rank // 2 * 2, (rank + 2) % WORLD  # of its node; in its place on the other node
        assert sizes[:2] == tokens_of(rank, nodes)
        assert sizes[2 + other // 2] == tokens_of(other, nodes)[rank // 2]
        near = [sum(tokens_of(r, [own])[0] for r in (rank, other)) for own in each[first : first + 2]]
        assert sizes[4:6] == near
