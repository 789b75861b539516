"""Layers of linear attention by flash-linear-attention: which tensors it gets, and what happens without it."""

import sys

import torch

from aligner.ops.kernels import fused


def test_only_16_bits_on_a_gpu_go_to_the_package(monkeypatch):
    module = object()
    monkeypatch.setattr(fused, "_linear", lambda: module)
    monkeypatch.setattr(fused, "DEVICES", {"meta"})
    taken = {
        (device, dtype)
        for device in ("cpu", "meta")
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        if fused.linear(torch.empty(2, device=device, dtype=dtype)) is module
    }
    assert taken == {("meta", torch.bfloat16), ("meta", torch.float16)}


def test_without_the_package_a_line_names_it_once(monkeypatch, capsys):
    for name in ("fla", "fla.modules.convolution"):
        monkeypatch.setitem(sys.modules, name, None)  # an import then fails, whatever is installed
    monkeypatch.delitem(sys.modules, "aligner.ops.kernels.cuda.linear", raising=False)
    monkeypatch.setattr(fused, "DEVICES", {"cpu"})
    fused._linear.cache_clear()
    for _ in range(2):
        assert fused.linear(torch.empty(2, dtype=torch.bfloat16)) is None
    fused._linear.cache_clear()
    (line,) = capsys.readouterr().out.splitlines()
    assert (
        line.startswith("linear attention without flash-linear-attention")
        and "fla.modules" in line
        and "torch's operations" in line
    )
    assert line.endswith("pip install 'aligner[linear]'")
