"""Engines behind quantised weights: the grids, what is quantised, checksums, and the contract's part about weights."""

import pytest
import torch

from aligner.config.sections.engine import EngineConfig
from aligner.engines.native import NativeEngine
from aligner.engines.quantized import MATRIX, QuantizedEngine, has_modelopt, make_quantizer, quantize_rows
from aligner.models.params import expected_hf_shapes
from aligner.ops.kernels.checksum import tensor_checksum
from aligner.types import SamplingParams
from tests.engines import contract
from tests.engines.contract import (
    LLAMA,
    MODELS,
    PROMPTS,
    EngineContract,
    fill,
    hf_weights,
    reference,
    responses,
    seeds_for,
)

KINDS = ("int8", "fp8")


def make_engine(cfg, decode=None, kind="int8", hashes=True, **engine_config):
    inner = NativeEngine(
        cfg, EngineConfig(**engine_config), device="cpu", dtype=torch.float32, pad_id=0, decode=decode
    )  # fmt: skip
    return QuantizedEngine(inner, make_quantizer(kind, modelopt=False)[0], hashes)


def grid(kind: str) -> torch.Tensor:
    """All values at scale 1, from the formats' definitions."""
    if kind == "int8":
        return torch.arange(-127, 128).double()
    values = [0.0]
    for exponent in range(16):
        for mantissa in range(8):
            if (exponent, mantissa) != (15, 7):  # NaN
                values.append((mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7))
    return torch.tensor(sorted({s * v for v in values for s in (1, -1)})).double()


def test_the_bytes_of_its_weights_are_those_of_the_inner_engine():
    engine = make_engine(LLAMA)
    assert engine.weight_bytes == engine.engine.weight_bytes > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_nearest_values_of_the_format_row_by_row(kind, dtype):
    weight = (torch.randn(7, 40, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(-3, 4)[:, None]).to(
        dtype
    )
    weight[3] = 0
    held = quantize_rows(weight, kind)
    assert held.dtype == dtype and not held[3].any()
    values, largest = grid(kind), grid(kind).max()
    for row, got in zip(weight.double(), held.double(), strict=True):
        scale = row.abs().max() / largest
        if not scale:
            continue
        off = (row[:, None] - values * scale).abs().amin(1)  # the least error there can be
        rounding = row.abs() * (2**-8 if dtype == torch.bfloat16 else 2**-22)
        assert ((row - got).abs() <= off + rounding + 1e-6 * scale).all()
        assert len((got / scale).round(decimals=2).unique()) > 10  # not collapsed


def test_matrices_of_the_layers_and_nothing_else():
    for cfg in MODELS.values():
        shapes = expected_hf_shapes(cfg)
        chosen = {name for name in shapes if MATRIX.search(name)}
        layer = {n for n in shapes if ".layers." in n and len(shapes[n]) == 2}
        assert layer - chosen == {n for n in shapes if n.endswith(".gate.weight")}  # routers
        assert all(len(shapes[name]) == 2 for name in chosen) and len(chosen) >= 7 * cfg.num_layers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_the_engine_generates_with_the_held_weights(kind, name):
    cfg, model = MODELS[name], reference(MODELS[name])
    engine = fill(make_engine(cfg, kind=kind), model)
    plain = NativeEngine(cfg, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0)
    plain.begin_update(1)
    inputs = hf_weights(model)
    held = {n: quantize_rows(t, kind) if MATRIX.search(n) else t for n, t in inputs.items()}
    plain.update_weights(held.items())
    plain.finish_update()
    sampling = SamplingParams(8)
    a, b = (e.generate(PROMPTS, seeds_for(PROMPTS, 2), sampling) for e in (engine, plain))
    assert responses(a) == responses(b) and torch.equal(a.logprobs, b.logprobs)
    exact = fill(NativeEngine(cfg, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0), model)
    assert not torch.equal(exact.logprobs(a.tokens, a.lengths), engine.logprobs(a.tokens, a.lengths))
    # checksums: of what was given, while the engine holds what that became
    assert dict(engine.checksums()) == {n: tensor_checksum(t) for n, t in inputs.items()}
    assert plain.checksums() != engine.checksums()
    wrong = next(n for n in inputs if MATRIX.search(n))
    engine.engine.model.views[wrong].mul_(1.01)
    reported = dict(engine.checksums())
    assert [n for n, t in inputs.items() if reported[n] != tensor_checksum(t)] == [wrong]


def test_another_update_forgets_the_checksums_of_the_last():
    engine, first = make_engine(LLAMA), reference(LLAMA)
    fill(engine, first)
    fill(engine, reference(LLAMA, 1), 2)
    reported = dict(engine.checksums())
    assert not any(reported[n] == tensor_checksum(t) for n, t in hf_weights(first).items() if MATRIX.search(n))


class TestTheContract:
    """Its part about weights, updates, scoring and sleep; generation is the inner engine's, unchanged."""

    table = MODELS
    make_engine = staticmethod(make_engine)
    test_refuses = EngineContract.test_refuses_until_an_update_is_complete
    test_faults = EngineContract.test_every_fault_is_named_and_poisons
    test_during = EngineContract.test_refuses_during_an_update
    test_copied = EngineContract.test_the_given_tensors_are_copied
    test_new = EngineContract.test_new_weights_take_effect
    test_progress = EngineContract.test_progress_counts_up_to_all
    test_stop = EngineContract.test_stop_strings
    test_sleep = EngineContract.test_sleep_and_wake_keep_the_weights

    @pytest.fixture(autouse=True)
    def on_the_grid(self, monkeypatch):
        """Models whose weights int8 can hold, so that what the contract compares with is what the engine has."""

        def held(cfg, seed=0):
            model = reference(cfg, seed)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if MATRIX.search(name):
                        p.copy_(quantize_rows(p, "int8"))
            return model

        monkeypatch.setattr(contract, "reference", held)

    def test_it_can_be_measured(self):
        engine = fill(make_engine(LLAMA), reference(LLAMA))
        assert engine.held_bytes() == engine.engine.held_bytes()


@pytest.mark.slow
@pytest.mark.skipif(not has_modelopt(), reason="needs the extra modelopt")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modelopt_gives_the_same_bits(kind, dtype):
    """The contract with nvidia-modelopt: one call takes the scales of this weight, keeps none, and rounds as we do."""
    quantize, by = make_quantizer(kind, modelopt=True)
    assert by.startswith("nvidia-modelopt ")
    for seed in range(3):
        weight = (torch.randn(9, 33, generator=torch.Generator().manual_seed(seed)) * 0.02 * 10**seed).to(dtype)
        weight[4] = 0
        with torch.no_grad():
            assert torch.equal(quantize(weight), quantize_rows(weight, kind))
