"""The CPU stand-in for CUDA."""

import importlib.metadata

import pytest
import torch

from aligner.errors import AlignerError
from tests.tiny import LLAMA

pytestmark = pytest.mark.multirank


@pytest.fixture
def cpu(monkeypatch):
    from aligner.megatron import cpu

    monkeypatch.setattr(cpu, "_installed", False)
    return cpu


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
def test_only_megatron_is_told_the_lie(ranks):
    told = ranks.run("tests.megatron.jobs:cpu_lies")[0]
    assert told["megatron.core.optimizer.made_up"] == "torch.cuda.FloatTensor"
    assert told["somebody.else"] == "torch.FloatTensor"
    assert told["again"] is True and told["cast"] == torch.float64 and told["world"] == 1
    assert set(told["made"]) == set(told["moved"]) == {"cpu"}


def test_a_model_trains(ranks):
    out = ranks.run("tests.megatron.jobs:train", cfg=LLAMA, steps=8)[0]
    losses = [m["loss"] for m in out["metrics"]]
    assert losses[-1] < 0.9 * losses[0] and out["version"] == 8
