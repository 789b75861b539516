import ctypes
import mmap
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aligner.cluster import pages
from aligner.engines.native import packs
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


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_a_step_of_an_engine_without_a_trainer_touches_few_new_pages():
    """A step takes 2.5 MB of logits, 600 pages, and as much again and again for what is made of them: in 12 steps
    29,620 new pages if they are given back, else 626, for what each rollout takes anew."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", GENERATES], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 12 * 600


def large_kib() -> int:
    """Of this process' memory in large pages."""
    return int(re.search(r"AnonHugePages:\s*(\d+)", Path("/proc/self/smaps_rollup").read_text()).group(1))


GIVES_WHERE_ASKED = pytest.mark.skipif(
    not pages.SETTING.exists() or "[madvise]" not in pages.SETTING.read_text(),
    reason="a system that gives where it is asked",
)


@GIVES_WHERE_ASKED
def test_what_every_step_reads_lies_in_large_pages(monkeypatch):
    before = large_kib()
    plain = zeros(12, 1024, 1024, dtype=torch.float32, device=torch.device("cpu"))
    assert large_kib() - before >= 40 << 10 and not plain.any()
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return
    monkeypatch.setattr(packs, "worth_packing", lambda matrix: True)
    plain[:, :, 0] = torch.arange(1024.0)
    wanted, packed = plain.clone(), packs.Packs({"a": plain})
    before = large_kib()
    packed.pack()  # the plain ones go
    assert large_kib() - before >= (40 - 48) << 10
    packed.unpack()
    assert torch.equal(plain, wanted)


@GIVES_WHERE_ASKED
def test_nothing_is_asked_of_a_system_that_gives_none(monkeypatch, tmp_path):
    """To gather small pages into large ones the kernel looks at no setting."""
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    there = mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    there.write(bytes(16 << 20))
    start = ctypes.addressof(ctypes.c_char.from_buffer(there))
    for setting, gained in ((tmp_path / "enabled", 0), (pages.SETTING, 14 << 10)):
        monkeypatch.setattr(pages, "SETTING", setting)
        before = large_kib()
        pages.ask_for_large_pages(start, start + len(there))
        assert gained <= large_kib() - before <= gained + (2 << 10)
