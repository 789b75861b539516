"""Whole toy runs with a quantised engine: what it does is seen where it belongs, and the trainer stays as it is."""

import pytest
import torch

from aligner.engines.native import NativeEngine
from aligner.engines.quantized import MATRIX, QuantizedEngine, quantize_rows
from aligner.errors import RefitError
from aligner.refit.transfer import Refit
from tests import stages

MORE = ["run.steps=3", "logging.progress=false", "refit.verify=checksum"]


@pytest.fixture
def held(monkeypatch):
    """The engine of the run, and the weights it had after the last refit, with the trainer's."""
    results, refit = {}, Refit.__call__

    def called(self):
        out = refit(self)
        assert isinstance(self.engine, QuantizedEngine)
        results["engine"] = {n: v.clone().reshape(-1) for n, v in self.engine.engine.model.views.items()}
        results["trainer"] = {n: t.clone() for bucket in self.stream for n, t in bucket}
        return out

    monkeypatch.setattr(Refit, "__call__", called)
    return results


@pytest.mark.parametrize("kind, overrides", [("int8", ["memory.offload=[gradients,weights]"]), ("fp8", [])])
def test_a_run_with_quantised_rollouts(tiny_data, tiny_runs, tmp_path, held, capsys, kind, overrides):
    overrides = [*MORE, f"model.init={tiny_runs['sft']}", f"engine.quantization={kind}", *overrides]
    run = stages.stage("grpo", tiny_data, tmp_path / "run", *overrides)
    out = capsys.readouterr().out
    assert f"engine.quantization={kind}" in out and "mismatch.correction=tis_token" in out
    moved = 0
    for name, tensor in held["trainer"].items():
        wanted = quantize_rows(tensor, kind) if MATRIX.search(name) else tensor
        assert torch.equal(held["engine"][name], wanted.reshape(-1)), name
        moved += not torch.equal(wanted, tensor)
    assert moved == 14  # seven matrices of each of two layers
    for record in stages.records(run):
        if "mismatch/gen_kl" in record:
            assert 1e-9 < record["mismatch/gen_kl"] < 0.05 and record["mismatch/weight_mean"] != 1
            assert 1e-5 < record["refit/sentinel_error"] < 0.2
    weights = stages.weights(run)
    assert any(not torch.equal(t, quantize_rows(t, kind)) for n, t in weights.items() if MATRIX.search(n))


def test_an_engine_that_holds_something_else_is_refused(tiny_data, tiny_runs, tmp_path, monkeypatch):
    """Checksums see through the quantisation."""
    finish = NativeEngine.finish_update

    def finished(self):
        finish(self)
        self.model.views["model.layers.1.mlp.up_proj.weight"].mul_(1 + 1e-6)

    monkeypatch.setattr(NativeEngine, "finish_update", finished)
    overrides = [*MORE, f"model.init={tiny_runs['sft']}", "engine.quantization=int8"]
    with pytest.raises(RefitError, match=r"checksum of 1 tensors differs, first model.layers.1.mlp.up_proj.weight"):
        stages.stage("grpo", tiny_data, tmp_path / "run", *overrides)
