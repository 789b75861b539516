"""The doctor's try of one handle. Not run here: a GPU; host memory stands in for its buffer."""

from __future__ import annotations

import pytest
import torch

from aligner.config.sections.trtllm import TrtllmConfig
from aligner.engines.child.buckets import CudaMemory, MemoryFile
from aligner.tools import doctor_ipc


@pytest.fixture
def gpu(monkeypatch):
    """One device, whose buffers lie in host memory."""
    files = []

    def buffer(size, device):
        files.append(MemoryFile.create(size))
        return files[-1].tensor()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(doctor_ipc, "cuda_buffer", buffer)
    monkeypatch.setattr(CudaMemory, "of", lambda buffer: files[-1])
    yield files
    for file in files:
        file.close()


def rows(**options):
    return list(doctor_ipc.ipc_checks(TrtllmConfig(**options)))


def test_without_a_gpu_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor_ipc, "cuda_buffer", None)
    assert rows() == []


@pytest.mark.slow
def test_another_process_reads_it(gpu):
    assert rows() == [("cuda ipc", "ok", "an engine's process reads the trainer's memory")]


@pytest.mark.slow
def test_a_handle_that_cannot_be_opened_says_why(gpu, monkeypatch):
    def closed(buffer):
        gpu[-1].close()
        return MemoryFile(64, 999, gpu[-1].pid)

    monkeypatch.setattr(CudaMemory, "of", closed)
    ((name, status, detail),) = rows()
    assert (name, status) == ("cuda ipc", "fail") and "/fd/999: No such file" in detail and "--ipc=host" in detail


@pytest.mark.slow
def test_other_numbers_are_no_success(gpu, monkeypatch):
    def other(buffer):
        buffer[7] = 0
        return gpu[-1]

    monkeypatch.setattr(CudaMemory, "of", other)
    ((_, status, detail),) = rows()
    assert status == "fail" and "finds other numbers" in detail


def test_an_interpreter_that_is_none(gpu):
    ((_, status, detail),) = rows(python="/nowhere/python")
    assert status == "fail" and "engine.trtllm.python='/nowhere/python'" in detail
