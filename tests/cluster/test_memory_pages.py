import ctypes
import mmap
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aligner.cluster import memory_pages
from aligner.engines.native.scratch import zeros

GENERATES = """
import resource
import torch
from aligner.engines.native import NativeEngine
from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.types import SamplingParams

size = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 32, "num_heads": 2, "num_kv_heads": 2}
model = ModelConfig(**size, vocab_size=40000)
engine = NativeEngine(model, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0)
engine.begin_update(0)
engine.update_weights((name, torch.ones(shape)) for name, shape in engine.model.shapes.items())
engine.finish_update()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    engine.generate([[1, 2, 3]], [list(range(16))], SamplingParams(12))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_a_step_of_an_engine_without_a_trainer_touches_few_new_pages():
    """A step takes 2.5 MB of logits, 600 pages, and as much again and again for what is made of them: in 12 steps
    29,620 new pages if they are given back, else 626, for what each rollout takes anew."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", GENERATES], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 12 * 600


def asked(start: int, stop: int) -> int:
    """Bytes of these addresses for which large pages are asked. Whether they are given is the system's."""
    count = 0
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        first, last = (int(position, 16) for position in mapping.partition(" ")[0].split("-"))
        flags = re.search(r"^VmFlags:(.*)", mapping, re.MULTILINE)
        if flags and "hg" in flags[1].split():
            count += max(0, min(last, stop) - max(first, start))
    return count


PACKS = """
import torch
from aligner.engines.native import packs
from tests.cluster.test_memory_pages import asked

packs.worth_packing = lambda matrix: True
packed = packs.PackedMatrices({"a": [torch.zeros(2048, 2048) for _ in range(3)]}, {})
packed.pack()
print(sum(asked(*packs.place_of(matrix)) for matrix in packed._packed.values()))
"""
MAY_BE_ASKED = pytest.mark.skipif(
    not memory_pages.SETTING.exists() or "[never]" in memory_pages.SETTING.read_text(),
    reason="a system that gives large pages",
)


@MAY_BE_ASKED
def test_large_pages_are_asked_for_what_every_step_reads():
    plain = zeros(12, 1024, 1024, dtype=torch.float32, device=torch.device("cpu"))
    start, stop = plain.data_ptr(), plain.data_ptr() + plain.nbytes
    assert asked(start, stop) >= plain.nbytes - (4 << 20) and not plain.any()


@pytest.mark.slow
@MAY_BE_ASKED
@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"),
    reason="a torch that packs",
)
def test_large_pages_are_asked_for_packed_matrices():
    """In a process of its own. Each may lie by itself, in a gap of the memory, and then fills all but its ends."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PACKS], check=True, capture_output=True, text=True)
    assert int(done.stdout) >= 3 * (16 - 4) << 20


@MAY_BE_ASKED
def test_nothing_is_asked_of_a_system_that_gives_none(monkeypatch, tmp_path):
    """To gather small pages into large ones the kernel looks at no setting."""
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    there = mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(there))
    for setting, expected in ((tmp_path / "enabled", 0), (memory_pages.SETTING, 14 << 20)):
        monkeypatch.setattr(memory_pages, "SETTING", setting)
        memory_pages.ask_for_large_pages(start, start + len(there))
        assert expected <= asked(start, start + len(there)) <= expected + (2 << 20)
