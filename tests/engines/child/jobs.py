"""What the ranks run for the tests of this folder."""

from __future__ import annotations

import os
import time
from multiprocessing import Pipe
from threading import Thread
from unittest import mock

import torch
import torch.distributed as dist

import aligner.engines.child.engine as child
from aligner.config.sections.engine import EngineConfig
from aligner.engines.child.buckets import CudaMemory, MemoryFile
from aligner.engines.child.engine import ChildEngine
from tests.engines.contract import LLAMA, reference
from tests.tiny import hf_weights


class Engine(ChildEngine):
    """Of a package that is always there."""

    name, title, worker, block = "vllm", "stand-in", "", 32

    @classmethod
    def require(cls, config):
        pass

    def _device_name(self) -> str:
        return f"device {self.device.index}"


class Reader:
    """The child: of each bucket what lies in every rank's memory while its call is answered."""

    def __init__(self, connection):
        self.connection, self.arrived, self.devices = connection, [], []
        Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        name = ""
        while name != "close":
            name, arguments = self.connection.recv()
            answer = None
            if name == "start":
                (self.settings,) = arguments
                self.memories = [memory.tensor() for memory in self.settings.memories]
                answer = {"version": "1", "score_rows": 1}
            if name == "bucket":
                (slots,) = arguments
                for memory in self.memories:
                    self.arrived.append({slot.name: slot.view(memory).clone() for slot in slots})
                answer = len(slots)
            self.connection.send(("ok", answer))

    def ended(self) -> str:
        return ""

    def last_words(self) -> str:
        return ""

    def stop(self, wait_s: float) -> None: ...


def late(tensors, rank: int):
    """The first rank has them before the others."""
    for item in tensors:
        time.sleep(0.01 * rank)
        yield item


def shared(tp: int) -> dict | None:
    """An engine of `tp` ranks on GPUs, whose buffers are in host memory here: what its child has got, told by its
    first rank."""
    rank, files = dist.get_rank(), []

    def buffer(size, device):
        assert device == torch.device("cuda", rank)
        files.append(MemoryFile.create(size))
        return files[-1].tensor()

    ours, theirs = Pipe()
    readers = []

    def start(device, python):
        readers.append(Reader(theirs))
        return readers[-1], ours

    config = EngineConfig(name="vllm", tensor_parallel=tp)
    group = dist.new_group(list(range(tp)))
    more = {"device": torch.device("cuda", rank), "dtype": torch.float32, "pad_id": 0, "bucket_bytes": 2048}
    with mock.patch.object(child, "cuda_buffer", buffer), mock.patch.object(CudaMemory, "of", lambda _: files[-1]):
        engine = Engine(LLAMA, config, **more, group=group, start=start)
    model = reference(LLAMA)
    engine.begin_update(1)
    engine.update_weights(late(hf_weights(model).items(), rank))
    engine.finish_update()
    places = engine._places
    engine.close()
    if not readers:
        return None
    wanted = hf_weights(model)
    arrived, memories = readers[0].arrived, readers[0].settings.memories
    return {
        "pids": [memory.pid for memory in memories],
        "own": os.getpid(),
        "devices": list(places[0]),
        "buckets": len(arrived) // tp,
        "right": all(torch.equal(tensor, wanted[name]) for bucket in arrived for name, tensor in bucket.items()),
        "whole": [set().union(*arrived[rank::tp]) == set(wanted) for rank in range(tp)],
    }
