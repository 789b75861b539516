"""Sizes that are `auto`: one answer for all ranks, kept in the run's record, and for every later start."""

from pathlib import Path

import pytest
import torch

from aligner.builders import sizes
from aligner.builders.stage import run_stage
from aligner.cluster.env import RankEnv
from aligner.config.freeze import PENDING_NAME, freeze, freeze_start, load_frozen
from aligner.config.resolve import compose
from aligner.megatron import transformer_engine
from aligner.megatron.transformer_engine import TE
from aligner.plan.devices import GIB
from tests import stages
from tests.stages import overrides, same_weights

AUTO = ["batch.micro_batch_samples=auto"]


def start(run_dir: Path, data: Path, *settings: str) -> None:
    """As `aligner run` does, in this process."""
    stages.settle()
    cfg = compose(overrides("sft", data, run_dir, *AUTO, "checkpoint.every=2", *settings))
    freeze_start(cfg)
    try:
        assert run_stage(cfg, RankEnv()) == 0
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def memory(monkeypatch):
    def set_bytes(size):
        monkeypatch.setattr(sizes, "memory_bytes", lambda device, ranks: size)

    return set_bytes


@pytest.mark.slow
def test_a_run_resumes_with_its_sizes_on_another_machine(tiny_data, tmp_path, memory, capsys):
    memory(48 * 1024 * 24)  # micro-batches of a few rows
    whole, parts, other = tmp_path / "whole", tmp_path / "parts", tmp_path / "other"
    start(whole, tiny_data, "run.steps=4")
    output = capsys.readouterr().out
    record = load_frozen(whole)
    few = record.batch.micro_batch_tokens
    assert 0 < few < 16384 and f"batch.micro_batch_tokens={few}" in output and "engine.kv_cache_bytes=" in output
    start(parts, tiny_data, "run.steps=2")
    memory(64 * GIB)
    start(parts, tiny_data, "run.steps=4")
    assert load_frozen(parts).batch == record.batch and not (parts / PENDING_NAME).exists()
    assert stages.differences(whole, parts) == [] and same_weights(whole, parts)
    start(other, tiny_data, f"run.resume={parts / 'checkpoints'}", "run.steps=6")  # begins with another run's
    assert load_frozen(other).batch == record.batch
    start(parts, tiny_data, "run.resume=never", "run.steps=1")  # anew
    assert load_frozen(parts).batch.micro_batch_tokens == 16384


def test_the_smallest_rank_decides(monkeypatch, tmp_path):
    cfg = compose(["stage=sft", "model=tiny", f"run.dir={tmp_path}", "batch.micro_batch_samples=4"])
    freeze(cfg, tmp_path)
    monkeypatch.setattr(sizes, "gathered", lambda own: [64 * GIB, 2 * GIB, 64 * GIB])
    line = sizes.decide(cfg, RankEnv(0, 0, 3, 3), torch.device("cpu"))
    assert cfg.engine.kv_cache_bytes == GIB // 4
    assert line == f"sizes for auto: engine.kv_cache_bytes={GIB // 4} batch.logprob_tokens=4096"
    assert load_frozen(tmp_path).engine.kv_cache_bytes == GIB // 4


def test_transformer_engine_needs_no_masks_and_gets_larger_micro_batches(memory, monkeypatch, tmp_path):
    memory(28 * GIB)
    line = ["stage=online_dpo", "model=qwen3_0.6b", "data.max_prompt_tokens=4096"]

    def tokens(lacks: str, *overrides: str) -> int:
        monkeypatch.setattr(TE, "lacks", lacks)
        monkeypatch.setattr(transformer_engine, "unfused", lambda cfg: "")
        cfg = compose([*line, f"run.dir={tmp_path}", *overrides])
        sizes.decide(cfg, RankEnv(), torch.device("cuda"))
        assert cfg.model == compose([*line, *overrides]).model
        return cfg.batch.micro_batch_tokens

    without = tokens("it is not installed")
    assert tokens("") == tokens("", "model.kernels=own") == without  # without masks, too
    masks = "model.varlen_attention=false"
    assert tokens("", masks) == without > tokens("it is not installed", masks)


def test_what_is_set_is_neither_asked_nor_told(monkeypatch, tmp_path):
    line = ["batch.micro_batch_samples=4", "batch.logprob_tokens=100", "engine.kv_cache_bytes=1000000"]
    cfg = compose(["stage=sft", "model=tiny", f"run.dir={tmp_path}", *line])
    monkeypatch.setattr(sizes, "gathered", None)
    assert sizes.decide(cfg, RankEnv(), torch.device("cpu")) == "" and cfg.batch.micro_batch_samples == 4


def test_ranks_share_a_nodes_memory(monkeypatch):
    monkeypatch.setattr(sizes, "node_bytes", lambda: 1 << 30)
    assert sizes.memory_bytes(torch.device("cpu"), 4) == 1 << 28
