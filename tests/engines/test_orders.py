"""Orders and answers between ranks survive their way, and can be nothing but data."""

from __future__ import annotations

import pytest
import torch

from aligner.engines.orders import decode, encode
from aligner.types import SamplingParams


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(2, 3),
        torch.randn(3, 0, 2),
        torch.tensor(2.5),
        torch.randn(4, 4).T,
        torch.randn(5).bfloat16(),
        torch.tensor([float("nan"), float("inf"), -0.0]),
    ],
)
def test_tensors_keep_their_bits(tensor):
    actual = decode(encode(tensor))
    assert actual.dtype == tensor.dtype and actual.shape == tensor.shape
    assert actual.contiguous().view(torch.uint8).equal(tensor.contiguous().view(torch.uint8)) if tensor.dim() else True
    assert actual.equal(tensor) or bool(tensor.isnan().any())


def test_values_keep_type_and_precision():
    sampling = SamplingParams(7, 0.1, 0.9, 3, 0.05, (1, 2), ("\n\n", "ü"))
    assert decode(encode(("generate", (sampling, None, True, 1 << 80, 0.1, "ü")))) == [
        "generate",
        [sampling, None, True, 1 << 80, 0.1, "ü"],
    ]
    checksums = {"layer.0": -3, "tensor": 1 << 62}
    assert decode(encode(checksums)) == checksums


@pytest.mark.parametrize("value", [object(), print, {1, 2}, b"bytes", lambda: 0])
def test_nothing_else_can_be_said(value):
    with pytest.raises(AssertionError):
        encode(["order", [value]])


@pytest.mark.parametrize(
    "data", [b'{"call": ["os.system", "id"]}', b'{"tensor": 1, "map": 2}', b'{"map": 3}', b"\x80\x04."]
)
def test_nothing_else_is_built(data):
    with pytest.raises((AssertionError, ValueError, TypeError)):
        decode(data)
