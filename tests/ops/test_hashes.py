"""Hashes that add up over parts show every change, and nothing of how a tensor is cut."""

import numpy as np
import pytest
import torch

from aligner.ops.kernels import hashes
from aligner.ops.kernels.hashes import odd_numbers, part_hash, row_hashes

ROWS, COLUMNS = odd_numbers(1, np.arange(6)), odd_numbers(2, np.arange(5))
MASK = (1 << 64) - 1


def whole(t: torch.Tensor) -> int:
    return int(part_hash(t, ROWS, COLUMNS)) & MASK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_the_hash_is_the_sum_of_its_definition_and_of_its_parts(dtype, monkeypatch):
    t = (torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    ints = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[t.element_size()]
    raw = t.view(torch.uint8).numpy().view(ints).reshape(6, 5).tolist()
    wanted = sum(raw[i][j] * int(ROWS[i]) * int(COLUMNS[j]) for i in range(6) for j in range(5)) & MASK
    assert whole(t) == wanted
    blocks = [(slice(0, 2), slice(0, 5)), (slice(2, 6), slice(0, 3)), (slice(2, 6), slice(3, 5))]
    parts = [int(part_hash(t[r, c].contiguous(), ROWS[r], COLUMNS[c])) for r, c in blocks]
    assert sum(parts) & MASK == wanted
    monkeypatch.setitem(hashes._CHUNK, "cpu", 7)
    assert whole(t) == wanted


def test_a_bit_a_swap_and_a_sign_show():
    t = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    by_name = {whole(t)}
    for bit in range(32):
        other = t.clone()
        other.view(torch.int32)[3, 2] ^= -(1 << 31) if bit == 31 else 1 << bit
        by_name.add(whole(other))
    rows, columns, zero = t[[1, 0, 2, 3, 4, 5]], t[:, [1, 0, 2, 3, 4]], t * 1
    zero[0, 0] = 0.0
    by_name |= {whole(rows), whole(columns), whole(t.T.reshape(6, 5)), whole(-t), whole(zero)}
    zero[0, 0] = -0.0
    by_name.add(whole(zero))
    assert len(by_name) == 1 + 32 + 6


def test_rows_count_in_any_order_without_padding():
    g = torch.Generator().manual_seed(0)
    tokens, lengths = torch.randint(0, 9, (4, 6), generator=g), torch.tensor([6, 3, 1, 4])

    def found(tokens, lengths):
        return row_hashes([tokens], torch.arange(tokens.shape[1]) < lengths[:, None], [lengths])

    there, order = found(tokens, lengths), [2, 0, 3, 1]
    assert there == found(tokens[order], lengths[order])
    padded = torch.nn.functional.pad(tokens, (0, 2), value=7)
    assert there == found(padded, lengths)
    apart = found(tokens[:1], lengths[:1]) + found(tokens[1:], lengths[1:])
    assert there == apart & MASK
    changed = tokens.clone()
    changed[3, 3] += 1
    assert there != found(changed, lengths)
    padding = tokens.clone()
    padding[2, 4] += 1
    assert there == found(padding, lengths)
    assert found(tokens[:0], lengths[:0]) == 0
