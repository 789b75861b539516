"""Windowed segments against the definition, for every way of laying rows out."""

import pytest
import torch

from aligner.ops.packing.pack import pack
from aligner.ops.packing.windows import windowed

STRIDE = 1000
LENGTHS = torch.tensor([40, 15, 23, 40])


def seen_pairs(packings, streams):
    """{code of a query: {codes of its keys}} over the ranks' segments; keys are those of all ranks' streams."""
    where = torch.cat(streams)  # of the streams of all ranks, one after the other
    results = {}
    for packing, own in zip(packings, streams, strict=True):
        done = 0
        for s in packing.segments:
            cells = s.rows * s.q_width
            index = torch.arange(cells) if packing.q_index is None else packing.q_index[done : done + cells]
            keys = own[index] if s.k_index is None else where[s.k_index]
            keys, queries = keys.view(s.rows, s.k_width), own[index].view(s.rows, s.q_width)
            mask = s.mask
            if mask is None:
                mask = torch.ones(1, 1, s.q_width, s.k_width, dtype=torch.bool).tril(s.k_width - s.q_width)
            mask = mask[:, 0].expand(s.rows, -1, -1)
            out = packing.out_index if packing.out_index is not None else torch.arange(packing.tokens)
            real = {int(i) - done for i in out if done <= i < done + cells}
            for cell in real:
                row, column = divmod(cell, s.q_width)
                cell_of = int(queries[row, column])
                results.setdefault(cell_of, set()).update(keys[row][mask[row, column]].tolist())
            done += cells
    return results


@pytest.mark.parametrize("window", [1, 7, 23, 64])
@pytest.mark.parametrize("how", ["packed", "padded", "shared", "context", "over_heads"])
def test_a_query_sees_the_last_tokens_of_its_row(how, window):
    width, rows = 40, len(LENGTHS)
    tokens = torch.randint(0, 9, (rows, width), generator=torch.Generator().manual_seed(0))
    tokens[1:, :12] = tokens[0, :12]
    tokens[1:, 12] = 10 + torch.arange(3)
    options = {
        "packed": [{}],
        "padded": [{"padded": True}],
        "shared": [{"share": tokens}],
        "context": [{"context": 2, "rank": r} for r in (0, 1)],
        "over_heads": [{"context": 2, "rank": r, "over_heads": True} for r in (0, 1)],
    }[how]
    plain = [pack(LENGTHS, width, **o) for o in options]
    packings = [windowed(p, window) for p in plain]
    assert (how == "shared") == (plain[0].outputs is not None)
    streams = [p.source // width * STRIDE + p.positions for p in packings]  # code: row and position
    if how == "over_heads":  # attention sees the tokens of all ranks
        packings, streams = packings[:1], [torch.cat(streams)]
    actual = seen_pairs(packings, streams)
    for cell, keys in actual.items():
        row, position = divmod(cell, STRIDE)
        wanted = {(row, k) for k in range(max(0, position - window + 1), position + 1)}
        # a shared beginning is that of the first row
        if how == "shared":
            wanted = {(0, k) if k < 12 and row else (r, k) for r, k in wanted}
        assert {divmod(k, STRIDE) for k in keys} == wanted or position >= int(LENGTHS[row]), (row, position)
    assert len(actual) >= int(LENGTHS.sum()) - (36 if how == "shared" else 0)
