"""One engine of several ranks: whose memory its child is told of, when it reads it, and which of its ranks opens
which. What is not run here is a GPU: buffers lie in host memory, handles are theirs."""

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
from aligner.engines.child.process import clean_environment, spawn
from aligner.engines.vllm.extension import Extension
from aligner.engines.vllm.in_place import InPlaceVllmEngine
from aligner.engines.vllm.worker import VllmWorker
from aligner.errors import RefitError
from aligner.ops.kernels.checksum import tensor_checksum
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


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_each_rank_writes_its_own_memory_before_the_child_is_notified(world):
    """An engine of ranks on GPUs, whose buffers are in host memory here."""
    rank, files, readers = dist.get_rank(), [], []

    def buffer(size, device):
        assert device == torch.device("cuda", rank)
        files.append(MemoryFile.create(size))
        return files[-1].tensor()

    ours, theirs = Pipe()

    def start(device, python):
        readers.append(Reader(theirs))
        return readers[-1], ours

    config = EngineConfig(name="vllm", tensor_parallel=world)
    settings = {"device": torch.device("cuda", rank), "dtype": torch.float32, "pad_id": 0, "bucket_bytes": 2048}
    with mock.patch.object(child, "cuda_buffer", buffer), mock.patch.object(CudaMemory, "of", lambda _: files[-1]):
        engine = Engine(LLAMA, config, **settings, group=dist.group.WORLD, start=start)
    wanted = hf_weights(reference(LLAMA))
    engine.begin_update(1)
    engine.update_weights(late(wanted.items(), rank))
    engine.finish_update()
    assert list(engine._places[0]) == [f"device {rank}" for rank in range(world)]
    settings = engine._settings([])
    assert (settings.rank, settings.device, settings.tensor_parallel) == (rank, rank, world)
    engine.close()
    assert len(readers) == (rank == 0)  # one child, of the first rank
    for reader in readers:
        pids = [memory.pid for memory in reader.settings.memories]
        assert len(set(pids)) == world and pids[0] == os.getpid()  # in the order of the ranks
        assert len(reader.arrived) > 3 * world
        assert all(torch.equal(t, wanted[name]) for bucket in reader.arrived for name, t in bucket.items())
        assert all(set().union(*reader.arrived[rank::world]) == set(wanted) for rank in range(world))


class Handle:
    """A memory that notes who opened it, and on which device."""

    def __init__(self, number):
        self.number, self.opened = number, []

    def tensor(self, device=0):
        self.opened.append(device)
        return torch.full((64,), self.number, dtype=torch.uint8)


def extension(rank=0, device="cpu", loader=None):
    actual = Extension()
    actual.rank, actual.vllm_config, actual.aligner_loading = rank, None, True
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


def test_a_rank_opens_its_own_memory_on_its_own_device():
    handles = [Handle(rank) for rank in range(3)]
    for rank in range(3):
        worker = extension(rank, f"cuda:{rank}")
        worker.aligner_open(handles, lasting=False)
        assert int(worker.aligner_buffer[0]) == rank and worker.aligner_hashes
    assert [handle.opened for handle in handles] == [[0], [1], [2]]


def test_of_one_memory_for_all_ranks_the_first_makes_the_checksums(vllm):
    memory = MemoryFile.create(64)
    slots = [Slot("w", (4,), torch.float32, 0)]
    for rank in range(2):
        worker = extension(rank, loader=list)
        worker.aligner_open([memory] * 2, lasting=True)
        wanted = {"w": tensor_checksum(torch.zeros(4))} if rank == 0 else {}
        assert worker.aligner_take(slots, True) == wanted and worker.aligner_take(slots, False) == {}
    memory.close()


def test_sinks_are_written_before_an_update_ends(vllm):
    """Kernels that keep a copy make it at the end. Each rank writes those of its heads to the parameter of the start,
    which is not in the model while an update goes on."""
    memory, name = MemoryFile.create(64), "model.layers.0.attn.sinks"
    slots = [Slot("model.layers.0.self_attn.sinks", (4,), torch.float32, 0)]
    memory.tensor()[:16].view(torch.float32).copy_(torch.arange(4.0))
    for rank in range(2):
        worker = extension(rank, loader=list)
        model, sinks = worker.model_runner.get_model(), torch.nn.Parameter(torch.zeros(2))
        model.named_parameters = lambda sinks=sinks: [(name, sinks)]
        mapper = {"orig_to_new_suffix": [".gate_up_proj_bias"], "map_name": lambda n: n.replace("self_attn", "attn")}
        model.hf_to_vllm_mapper = SimpleNamespace(**mapper)
        worker.aligner_open([memory] * 2, lasting=True)
        worker.aligner_take(slots, False)
        assert sinks.tolist() == [2.0 * rank, 2.0 * rank + 1]
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
    worker.aligner_open([memory], lasting)
    slots = [Slot(f"w{i}", (8,), torch.float32, 256 * i) for i in range(10)]
    for i, slot in enumerate(slots):
        slot.view(worker.aligner_buffer).fill_(i)
    worker.aligner_take(slots, False)
    memory.close()


def test_ranks_that_got_other_numbers_are_reported():
    worker = VllmWorker.__new__(VllmWorker)
    worker.settings, worker._checksums = SimpleNamespace(checksums=True), {}
    answers = [{"a": 1, "b": 2}, {"a": 1, "b": 2}]
    worker.engine = SimpleNamespace(collective_rpc=lambda name, args: answers)
    assert worker.bucket([None] * 2) == 2 and worker.checksums() == {"a": 1, "b": 2}
    answers[1] = {"a": 1, "b": 3}
    with pytest.raises(RefitError, match="the ranks of the engine received different values of b"):
        worker.bucket([None] * 2)
    answers[1] = {}
    assert worker.bucket([None] * 2) == 2  # one memory for all


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


@pytest.mark.slow
def test_a_child_computes_on_the_cores_of_all_its_ranks():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # as a launcher binds this rank
    try:
        child, connection = spawn(
            "aligner.engines.trtllm.torch_worker:Worker", clean_environment(os.environ, {}), cores=allowed
        )
        assert os.sched_getaffinity(child.process.pid) == allowed
        other, line = spawn("aligner.engines.trtllm.torch_worker:Worker", clean_environment(os.environ, {}))
        assert os.sched_getaffinity(other.process.pid) == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)
    for each, pipe in ((child, connection), (other, line)):
        pipe.close()
        each.stop(60)
