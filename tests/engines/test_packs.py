"""A native engine whose matrices are laid out for oneDNN, beside one whose are not; on any machine."""

import platform
import re
from pathlib import Path

import pytest
import torch

from aligner.cluster.memory_pages import keep_freed_memory
from aligner.config.sections.engine import EngineConfig
from aligner.engines.native import NativeEngine, packs
from aligner.types import SamplingParams
from tests.engines.contract import MODELS, PROMPTS, fill, reference, responses, seeds_for

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture
def pair(monkeypatch):
    """Two engines for a model: one packs nothing, one everything."""

    def make(cfg):
        results = []
        for packed in (False, True):
            monkeypatch.setattr(packs, "worth_packing", lambda matrix, packed=packed: packed)
            results.append(NativeEngine(cfg, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0))
        return results

    return make


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "mixtral"])
def test_every_update_is_used_and_told_as_it_came(pair, name):
    cfg = MODELS[name]
    plain, packed = pair(cfg)
    for version in (1, 2):
        reports = [fill(engine, reference(cfg, version), version) for engine in (plain, packed)]
        outputs, wanted = (
            engine.generate(PROMPTS, seeds_for(PROMPTS, 3), SamplingParams(8)) for engine in reports[::-1]
        )
        assert responses(outputs) == responses(wanted)
        torch.testing.assert_close(outputs.logprobs, wanted.logprobs, rtol=1e-5, atol=1e-5)
        assert packed.model.packs.held_bytes > 0 == plain.model.packs.held_bytes
        rows, lengths = torch.tensor([[5, 9, 2, 7, 7], [1, 2, 3, 0, 0]]), torch.tensor([5, 3])
        scores = [engine.logprobs(rows, lengths) for engine in reports]
        torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)
        assert packed.checksums() == plain.checksums()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_one_layout_takes_the_place_of_the_other(pair, name):
    """But for a head that is the embedding as well."""
    cfg = MODELS[name]
    engine = fill(pair(cfg)[1], reference(cfg))
    before = engine.held_bytes()["weights"]
    engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(2))
    assert engine.held_bytes()["weights"] == before + cfg.tie_embeddings * engine.model.embedding.nbytes
    engine.checksums()
    assert engine.held_bytes()["weights"] == before and engine.model.packs.held_bytes == 0
    engine.close()
    assert engine.held_bytes()["weights"] == 0


def test_a_part_that_is_written_leaves_the_rest_as_it_was(pair):
    """As where only what changed is sent."""
    name, wanted = "model.layers.1.self_attn.q_proj.weight", reference(MODELS["llama"])
    engine = fill(pair(MODELS["llama"])[1], wanted)
    engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(2))
    held = wanted.get_parameter(name).detach().clone()
    engine.begin_update(2)
    engine.weight_view(name, 8, 16).fill_(7.0)
    held[8:16] = 7.0
    assert torch.equal(engine.model.views[name].reshape(held.shape), held)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_what_is_written_afresh_is_laid_out_where_the_last_was(pair, name):
    """Like an engine that never had other weights."""
    cfg = MODELS[name]
    engine, other = pair(cfg)[1], pair(cfg)[1]
    fill(engine, reference(cfg))
    engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(2))
    held = engine.model.packs
    places = {at: packs.place_of(held[at]) for at in held._packed}
    wanted = fill(other, reference(cfg, 1), 1)
    engine.begin_update(1)
    for tensor in engine.model.tensors.values():
        view = engine.weight_view(tensor.name, 0, tensor.shape[tensor.axis], True)
        view.copy_(other.model.views[tensor.name])
    engine.finish_update()
    outputs, expected = (e.generate(PROMPTS, seeds_for(PROMPTS, 3), SamplingParams(8)) for e in (engine, wanted))
    assert responses(outputs) == responses(expected) and torch.equal(outputs.logprobs, expected.logprobs)
    assert {at: packs.place_of(held[at]) for at in held._packed} == places and len(places) > 4
    assert engine.checksums() == other.checksums()


@pytest.fixture
def large(monkeypatch):
    """128 MB of matrices: what a process keeps of freed memory (`KEPT`, parts of large pages) is little beside it."""
    monkeypatch.setattr(packs, "worth_packing", lambda matrix: True)
    generator, plain = torch.Generator().manual_seed(0), [torch.empty(1024, 1024) for _ in range(32)]
    for matrix in plain:
        matrix.normal_(generator=generator)
    return plain, packs.PackedMatrices({"a": plain}, {f"a.{layer}": matrix for layer, matrix in enumerate(plain)})


def resident_kib() -> int:
    return int(re.search(r"VmRSS:\s*(\d+)", Path("/proc/self/status").read_text()).group(1))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's")
def test_packed_ones_are_no_memory_of_the_process_once_plain_ones_are_there(large):
    keep_freed_memory()
    before = resident_kib()
    for _ in range(3):
        large[1].pack()
        large[1].unpack()
    assert resident_kib() - before < 96 << 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's")
def test_memory_does_not_grow_with_refits(large):
    """Plain ones and packed ones, both there for that time, and no more."""
    plain, packed = large
    keep_freed_memory()
    before = resident_kib()
    for _ in range(4):
        packed.pack()
        for layer, matrix in enumerate(plain):
            packed.open(f"a.{layer}", True)
            matrix.fill_(1.0)
    assert resident_kib() - before < 208 << 10


def test_weights_outlast_a_lack_of_memory(large, monkeypatch):
    """A refit that fails so is made again."""
    plain, packed = large
    wanted, to_dense, asked = torch.stack(plain), torch.Tensor.to_dense, []

    def short(matrix):
        asked.append(matrix)
        if len(asked) == 5:
            raise RuntimeError("can't allocate memory")
        return to_dense(matrix)

    packed.pack()
    monkeypatch.setattr(torch.Tensor, "to_dense", short)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        packed.unpack()
    packed.unpack()
    assert torch.equal(torch.stack(plain), wanted)
