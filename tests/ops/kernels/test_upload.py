"""Tensors that travel together arrive as they were."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from aligner.ops.kernels.upload import ALIGNMENT, packed, unpacked, upload

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Inner:
    mask: Tensor | None
    width: int = 3


@dataclass(frozen=True)
class Outer:
    index: Tensor
    parts: list[Inner] = field(default_factory=list)
    again: Tensor | None = None


def item() -> Outer:
    index = torch.tensor([4, 5, 6])
    return Outer(index, [Inner(torch.rand(2, 3).bfloat16()), Inner(None)], index)


def test_a_buffer_gives_back_what_went_in():
    tensors = [
        torch.arange(5),
        torch.rand(3, 2, dtype=torch.bfloat16),
        torch.tensor([[True], [False]]),
        torch.rand(0, 4),
    ]
    tensors += [torch.tensor(2.5), torch.rand(4, 6).t()]
    buffer, places = packed(tensors)
    assert buffer.dtype == torch.uint8 and all(location % ALIGNMENT == 0 for location in places)
    for got, wanted in zip(unpacked(buffer, tensors, places), tensors, strict=True):
        assert torch.equal(got, wanted) and got.dtype == wanted.dtype and got.is_contiguous()


def test_only_tensors_change():
    before = item()
    there, nothing = upload([before, None], torch.device("meta"))
    assert nothing is None and there.index.shape == (3,) and there.parts[0].mask.shape == (2, 3)
    assert there.index.device.type == there.parts[0].mask.device.type == "meta"
    assert there.parts[1] == Inner(None) and there.again is there.index, "the same tensor travels once"
    assert upload(before, CPU).index is before.index


def test_one_copy_to_a_gpu(monkeypatch):
    """With the two calls that need one done by the host: everything is in the one tensor that is sent."""
    sent = []
    empty, to = torch.empty, Tensor.to
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **rest: empty(*size, **rest))

    def counted(self, device, *args, non_blocking=False, **kwargs):
        sent.append((self.nbytes, non_blocking))
        return to(self, CPU)

    monkeypatch.setattr(Tensor, "to", counted)
    before = item()
    after = upload(before, torch.device("cuda"))
    assert sent == [(2 * ALIGNMENT, True)]
    assert torch.equal(after.index, before.index) and torch.equal(after.parts[0].mask, before.parts[0].mask)
    assert after.index is after.again and after.index is not before.index
