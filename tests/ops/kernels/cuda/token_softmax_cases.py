"""`ops/kernels/cuda/token_softmax.py` against torch's operations in float64: in Triton's interpreter, or on the GPU.

python -m tests.ops.kernels.cuda.token_softmax_cases     # prints the greatest differences; exit 1 for a large one
"""

from __future__ import annotations

import itertools
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from tests.ops.kernels.cuda.interpreted import DEVICE, differ

RANKS, WIDTH = 2, 600  # columns of a rank


def cases():
    """(logits, targets, vocabulary): of odd widths, of several steps of columns, with padding, strides and infinities,
    large, and without rows."""
    g = torch.Generator().manual_seed(0)
    for rows, width, vocabulary in ((3, 12, 10), (1, 7, 7), (2, 4096 + 33, 4096 + 30), (2, 9001, 9001), (0, 5, 5)):
        yield torch.randn(rows, width, generator=g) * 3, torch.randint(vocabulary, (rows,), generator=g), vocabulary
    yield torch.randn(12, 5, generator=g).t(), torch.randint(11, (5,), generator=g), 11
    yield torch.randn(5, 40, generator=g)[::2, 7:30], torch.randint(23, (3,), generator=g), 23
    extreme = torch.randn(3, 20, generator=g)
    extreme[0, :4], extreme[1, 3], extreme[:, 19] = -torch.inf, 90.0, torch.nan
    yield extreme, torch.tensor([7, 3, 4]), 19


def wrong() -> int:
    from aligner.ops.kernels.logprobs import token_logprobs  # imports Triton

    bad, options = 0, ((torch.float32, torch.bfloat16), (1.0, 0.7), (False, True))
    for (dtype, temperature, entropy), case in itertools.product(itertools.product(*options), list(cases())):
        logits, targets, vocabulary = case[0].to(DEVICE, dtype), case[1].to(DEVICE), case[2]

        def read(x, targets=targets, vocabulary=vocabulary, temperature=temperature, entropy=entropy):
            return token_logprobs(x, targets, temperature=temperature, vocab_size=vocabulary, entropy=entropy)

        bad += differ(f"{[*logits.shape]} {temperature=} {entropy=}", read, read, logits)
    return bad


def wrong_of_rank(rank: int, folder: str) -> None:
    """Compare a rank's shard with the whole: padding columns on the last rank, none, and nothing else."""
    from aligner.ops.kernels.logprobs import token_logprobs

    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    for vocabulary in (RANKS * WIDTH - 5, RANKS * WIDTH, WIDTH):
        g = torch.Generator().manual_seed(vocabulary)
        logits, targets = torch.randn(4, RANKS * WIDTH, generator=g), torch.randint(vocabulary, (4,), generator=g)
        own, how = slice(rank * WIDTH, (rank + 1) * WIDTH), {"temperature": 0.7, "vocab_size": vocabulary}

        def sharded(x, targets=targets, own=own, how=how):
            return token_logprobs(x[:, own], targets, group=dist.group.WORLD, entropy=True, **how)

        def whole(x, targets=targets, own=own, how=how):
            others = x.detach().clone()
            others[:, own] = x[:, own]
            return token_logprobs(others, targets, entropy=True, **how)

        assert not differ(f"{vocabulary} of {RANKS} ranks", sharded, whole, logits)


if __name__ == "__main__":
    bad = wrong()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(wrong_of_rank, (folder,), RANKS)
    sys.exit(bad > 0)
