"""One engine of several ranks: whose memory their children get, and when they read it. What is not run here
is a GPU: buffers lie in host memory, handles are theirs."""

import os
import subprocess
import sys
import time
import weakref
from contextlib import nullcontext
from multiprocessing import Pipe
from threading import Thread
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import aligner.engines.child.engine as child
from aligner.config.sections.engine import EngineConfig
from aligner.engines.child import buckets
from aligner.engines.child.buckets import CudaMemory, MemoryFile, Slot, fixed_segments
from aligner.engines.child.engine import ChildEngine
from aligner.engines.vllm.extension import Extension
from aligner.engines.vllm.in_place import InPlaceVllmEngine
from aligner.ops.kernels.checksum import tensor_checksum
from aligner.ops.reduce import gathered
from tests.engines.contract import LLAMA, reference
from tests.ranks import on_ranks
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
            if name == "listen":
                answer = 1, 2
            if name == "start":
                (self.settings,) = arguments
                self.memory = self.settings.memory.tensor()
                answer = {"version": "1", "score_rows": 1}
            if name == "bucket":
                (slots,) = arguments
                self.arrived.append({slot.name: slot.view(self.memory).clone() for slot in slots})
                answer = len(slots)
            if name == "checksums":
                hashed = self.settings.checksums
                answer = {n: tensor_checksum(t) for bucket in self.arrived for n, t in bucket.items()} if hashed else {}
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


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["GPU", "AA", "AAB", "ABB"])
@on_ranks(3)
def test_each_rank_writes_its_own_memory_before_a_child_is_notified(nodes):
    """Of ranks on GPUs, whose buffers are in host memory here; on CPUs that of its node's first rank."""
    rank, files, readers, gpu = dist.get_rank(), [], [], nodes == "GPU"
    world = len(nodes)
    group = dist.group.WORLD if world == 3 else dist.new_group([0, 1])
    if rank >= world:
        return

    def buffer(size, device):
        assert device == torch.device("cuda", rank)
        files.append(MemoryFile.create(size))
        return files[-1].tensor()

    ours, theirs = Pipe()

    def start(device, python):
        readers.append(Reader(theirs))
        return readers[-1], ours

    config = EngineConfig(name="vllm", tensor_parallel=world)
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    settings = {"device": device, "dtype": torch.float32, "pad_id": 0, "bucket_bytes": 2048}
    with (
        mock.patch.object(child, "cuda_buffer", buffer),
        mock.patch.object(CudaMemory, "of", lambda _: files[-1]),
        mock.patch.object(child, "node", lambda: "A" if gpu else nodes[rank]),
    ):
        engine = Engine(LLAMA, config, **settings, group=group, start=start)
    wanted = hf_weights(reference(LLAMA))
    engine.begin_update(1)
    engine.update_weights(late(wanted.items(), rank))
    engine.finish_update()
    assert engine.checksums() == {name: tensor_checksum(tensor) for name, tensor in wanted.items()}
    (reader,) = readers
    settings = reader.settings
    here = [0, 1, 2] if gpu else [other for other in range(world) if nodes[other] == nodes[rank]]
    assert (settings.rank, settings.device, settings.tensor_parallel) == (rank, here.index(rank), world)
    assert engine._devices == [f"device {other}" if gpu else "device None" for other in here]
    assert settings.checksums == (gpu or rank == here[0])
    source = rank if gpu else here[0]
    pids = gathered(os.getpid(), group)
    assert settings.memory.pid == pids[source]
    assert len(reader.arrived) > 3 and all(
        torch.equal(tensor, wanted[name]) for bucket in reader.arrived for name, tensor in bucket.items()
    )
    assert set().union(*reader.arrived) == set(wanted)
    engine.close()


def extension(rank=0, device="cpu", loader=None):
    actual = Extension()
    actual.rank, actual.model_config, actual.aligner_loading = rank, None, True
    actual.vllm_config = SimpleNamespace(speculative_config=None)
    actual.parallel_config = SimpleNamespace(tensor_parallel_size=2)
    model = torch.nn.Module()
    model.load_weights = loader
    actual.model_runner = SimpleNamespace(device=torch.device(device), get_model=lambda: model)
    return actual


@pytest.fixture
def vllm(monkeypatch):
    """Of the package what the extension imports around a bucket."""
    config = ModuleType("vllm.config")
    config.set_current_vllm_config = lambda config: nullcontext()
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", config)


def test_a_rank_opens_its_memory_on_its_own_device():
    opened = []
    memory = SimpleNamespace(tensor=lambda device: opened.append(device) or torch.zeros(1))
    for rank in range(3):
        extension(rank, f"cuda:{rank}").aligner_open(memory, lasting=False)
    assert opened == [0, 1, 2]


def test_sinks_are_written_before_an_update_ends(vllm):
    """Kernels that keep a copy make it at the end. Each rank writes those of its heads to the parameter of the start,
    which is not in the model while an update goes on."""
    memory, name = MemoryFile.create(64), "model.layers.0.attn.sinks"
    slots = [Slot("model.layers.0.self_attn.sinks", (4,), torch.float32, 0)]
    memory.tensor()[:16].view(torch.float32).copy_(torch.arange(4.0))
    for rank in range(4):  # of two shares with requests of their own
        worker = extension(rank, loader=list)
        model, sinks = worker.model_runner.get_model(), torch.nn.Parameter(torch.zeros(2))
        model.named_parameters = lambda sinks=sinks: [(name, sinks)]
        mapper = {"orig_to_new_suffix": [".gate_up_proj_bias"], "map_name": lambda n: n.replace("self_attn", "attn")}
        model.hf_to_vllm_mapper = SimpleNamespace(**mapper)
        worker.aligner_open(memory, lasting=True)
        worker.aligner_take(slots, False)
        assert sinks.tolist() == [2.0 * (rank % 2), 2.0 * (rank % 2) + 1]
    memory.close()


@pytest.mark.parametrize("lasting", [False, True])
def test_tensors_come_one_after_the_other_and_are_copied_where_the_next_bucket_takes_their_place(vllm, lasting):
    memory, copies = MemoryFile.create(4096), []

    def load(tensors):
        for i, (name, tensor) in enumerate(tensors):
            assert name == f"w{i}" and torch.equal(tensor, torch.full((8,), float(i)))
            assert all(copy() is None for copy in copies)  # as a loader leaves it that needs it no more
            if not lasting:
                copies.append(weakref.ref(tensor.untyped_storage()))
            inside = worker.aligner_buffer.data_ptr() <= tensor.data_ptr() < worker.aligner_buffer.data_ptr() + 4096
            assert inside == lasting
            del tensor

    worker = extension(loader=load)
    worker.aligner_open(memory, lasting)
    slots = [Slot(f"w{i}", (8,), torch.float32, 256 * i) for i in range(10)]
    for i, slot in enumerate(slots):
        slot.view(worker.aligner_buffer).fill_(i)
    worker.aligner_take(slots, False)
    memory.close()


@pytest.mark.parametrize(("limit", "sizes"), [(1, [1, 1, 1, 1]), (512, [2, 2]), (300, [1, 1, 1, 1]), (5000, [4])])
def test_a_whole_model_is_read_in_buckets(limit, sizes):
    engine = InPlaceVllmEngine.__new__(InPlaceVllmEngine)
    engine._bucket_bytes = limit
    engine._slots = {f"w{i}": Slot(f"w{i}", (64,), torch.float32, 256 * i) for i in range(4)}
    actual = list(engine._buckets())
    assert [len(bucket) for bucket in actual] == sizes
    assert [slot.name for bucket in actual for slot in bucket] == list(engine._slots)


@pytest.mark.parametrize(
    ("variables", "within"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:False"),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512, expandable_segments: True"},
            "max_split_size_mb:512,expandable_segments:False",
        ),
        (  # torch reads the first alone
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            None,
        ),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, None),
        ({}, None),
    ],
)
def test_a_buffer_lies_in_no_expandable_segment(monkeypatch, variables, within):
    """Torch's settings are those of the environment before and after, also where there is no memory."""
    for name in buckets.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    calls = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    with pytest.raises(MemoryError), fixed_segments():
        calls.append("made")
        raise MemoryError
    before = [] if within is None else ["empty", within]
    assert calls == [*before, "made", *([] if within is None else [variables[next(iter(variables))]])]


@pytest.mark.slow
def test_torch_takes_such_settings():
    program = "from aligner.engines.child.buckets import fixed_segments\nwith fixed_segments(): pass"
    environ = dict(os.environ) | {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environ)
