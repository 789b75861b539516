import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.ops.kernels import checksum
from aligner.ops.kernels.checksum import mix64_, signed64, tensor_checksum


def slow_mix(x: int) -> int:
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_mix_is_splitmix64():
    values = [0, 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15, 12345678901234567]
    got = mix64_(torch.tensor([signed64(v) for v in values]))
    assert [int(g) % 2**64 for g in got] == [slow_mix(v) for v in values]
    assert slow_mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # first output of splitmix64 with seed 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_any_changed_bit_or_swap_shows(dtype):
    t = torch.randn(7, 11).mul_(50).to(dtype)
    base = tensor_checksum(t)
    assert base == tensor_checksum(t.clone()) == tensor_checksum(t.t().contiguous().t())
    flat = t.clone().view(-1)
    for i in range(flat.numel()):
        changed = flat.clone()
        changed.view(torch.uint8)[i * t.element_size()] ^= 1
        assert tensor_checksum(changed) != base
    swapped = flat.clone()
    swapped[0], swapped[1] = flat[1], flat[0] + (1 if flat[0] == flat[1] else 0)
    assert tensor_checksum(swapped) != base


def test_signed_zero_and_chunks(monkeypatch):
    assert tensor_checksum(torch.tensor([0.0])) != tensor_checksum(torch.tensor([-0.0]))
    t = torch.randn(1000)
    base = tensor_checksum(t)
    monkeypatch.setattr(checksum, "_CHUNK", 33)
    assert tensor_checksum(t) == base


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(0, 5), st.integers(1, 7))
def test_parts_add_up(outer, length, inner, cut, chunk):
    """Along any axis, whatever is hashed at once."""
    t, cut = torch.randn(outer, length, inner), min(cut, length)
    old, checksum._CHUNK = checksum._CHUNK, chunk
    try:
        parts = [
            checksum.part_checksum(t[:, a:b], (b - a) * inner, length * inner, a * inner)
            for a, b in ((0, cut), (cut, length))
            if a < b
        ]
        assert sum(parts) % 2**64 == checksum.tensor_checksum(t)
    finally:
        checksum._CHUNK = old
