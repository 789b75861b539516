"""An update of an engine of several ranks, to each of which a share of every tensor comes."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from aligner.engines.base import UpdateLedger
from aligner.errors import RefitError


def shares(lacking: int) -> list[str]:
    """Of two updates, in the first of which rank `lacking` gets too little: how they ended here."""
    rank, messages = dist.get_rank(), []
    ledger = UpdateLedger({"w": (8, 2), "b": (8,)}, dist.group.WORLD)
    for short in (rank == lacking, False):
        ledger.begin(1)
        for name in ("w", "b"):
            ledger.accept_shard(name, 4 * rank, 4 * rank + 4 - short)
            ledger.settle_shards(name, 4 * rank, 4 * rank + 4)
        try:
            ledger.finish(lambda: messages.append("loaded"))
        except RefitError as error:
            messages.append(str(error))
    return messages


@pytest.mark.multirank
@pytest.mark.parametrize("lacking", [0, 1])
def test_what_one_rank_lacks_all_refuse(ranks, lacking):
    text = f"incomplete: w [{4 * lacking + 3}:{4 * lacking + 4}], b [{4 * lacking + 3}:{4 * lacking + 4}]"
    for refused, then in ranks.run("tests.engines.test_ledger:shares", world=2, lacking=lacking):
        assert text in refused and then == "loaded"
