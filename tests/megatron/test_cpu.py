"""The CPU stand-in for CUDA."""

import importlib.metadata

import pytest
import torch

from aligner.errors import AlignerError
from aligner.megatron import cpu as stand_in
from tests.megatron.models import train
from tests.ranks import on_ranks
from tests.tiny import LLAMA

pytestmark = pytest.mark.multirank


# ---- cpu.py


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(stand_in, "_installed", False)
    return stand_in


def test_inert_where_cuda_exists(cpu, monkeypatch):
    before = (torch.Tensor.to, torch.Tensor.type, torch.cuda.current_device, torch.zeros, torch.cuda.Stream)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu.install() is False
    assert before == (torch.Tensor.to, torch.Tensor.type, torch.cuda.current_device, torch.zeros, torch.cuda.Stream)


def test_refuses_a_version_that_was_not_tested(cpu, monkeypatch):
    before = torch.Tensor.to, torch.cuda.current_device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9.9")
    with pytest.raises(AlignerError, match=r"megatron-core 9\.9\.9 .*0\.19\.2"):
        cpu.install()
    assert before == (torch.Tensor.to, torch.cuda.current_device)


def test_the_tested_version_is_the_installed_one(cpu):
    assert importlib.metadata.version("megatron-core") in cpu.TESTED_VERSIONS


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA: nothing is redirected")
@on_ranks(1)
def test_only_megatron_is_told_the_lie():
    t, kinds = torch.zeros(2), []
    for name in ("megatron.core.optimizer.made_up", "somebody.else"):
        scope = {"__name__": name, "t": t}
        exec("kind = t.type()", scope)
        kinds.append(scope["kind"])
    assert kinds == ["torch.cuda.FloatTensor", "torch.FloatTensor"]
    assert stand_in.install() is True and t.type(torch.float64).dtype == torch.float64
    made = [f(2, device="cuda") for f in (torch.zeros, torch.empty, torch.arange)]
    moved = [t.to("cuda"), t.cuda(), t.to(device="cuda:0", dtype=torch.int8)]
    assert {x.device.type for x in (*made, *moved)} == {"cpu"}


@on_ranks(1)
def test_a_model_trains():
    out = train(LLAMA, steps=8)
    losses = [m["loss"] for m in out["metrics"]]
    assert losses[-1] < 0.9 * losses[0] and out["version"] == 8
