"""A run with adapters, out as `peft` reads it and as one model, and in again as the start of another."""

import json
import shutil

import pytest
import torch

from aligner.__main__ import parser
from aligner.cluster.env import RankEnv
from aligner.errors import CheckpointError, ConfigError
from aligner.models.peft import CONFIG
from aligner.models.safetensors_io import open_hf
from aligner.tools.convert import main
from tests import stages

LORA = ["model.lora.rank=2", "model.lora.alpha=6", "model.lora.rslora=true", "checkpoint.every=2"]


def export(source, target, *options):
    main(parser().parse_args(["export", str(source), str(target), *options]), RankEnv())
    return target


@pytest.fixture(scope="module")
def run(tiny_data, tiny_runs, tmp_path_factory):
    """SFT with adapters; its export at the end is what its engine would have had."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    start = [f"model.init={tiny_runs['sft']}", "run.steps=4", "optim.lr=0.03", "run.export=true", *LORA]
    return stages.stage("sft", tiny_data, folder, *start)


@pytest.fixture(scope="module")
def adapter(run, tmp_path_factory):
    return export(run, tmp_path_factory.mktemp("adapter") / "out")


@pytest.mark.slow
def test_peft_computes_what_the_run_learnt(run, adapter, tiny_runs):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_runs["sft"] / "hf", dtype=torch.float32).eval()
    tokens = torch.randint(1, 200, (2, 15), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = base(tokens).logits
        ours = transformers.AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)(tokens).logits
        theirs = peft.PeftModel.from_pretrained(base, adapter)(tokens).logits
    assert (ours - before).abs().max() > 0.1
    assert (theirs - ours).abs().max() < 1e-5 * ours.abs().max()
    assert json.loads((adapter / CONFIG).read_text())["base_model_name_or_path"] == str(tiny_runs["sft"])


def test_merged_is_what_the_run_exported(run, tmp_path):
    merged, own = open_hf(export(run, tmp_path / "out", "--merge")), open_hf(run / "hf")
    assert set(merged) == set(own)
    for name in own:
        assert torch.allclose(merged[name], own[name], rtol=0, atol=1e-6), name
    assert (tmp_path / "out/tokenizer_config.json").exists()


def test_merged_experts_with_dora_are_what_the_run_exported(tiny_data, tmp_path):
    """Which has no peft folder."""
    experts = ["model.family=qwen3_moe", "model.qk_norm=true", "model.moe.num_experts=4", "model.moe.top_k=2"]
    overrides = [*LORA, "model.lora.dora=true", "run.steps=2", "optim.lr=0.03"]
    run = stages.stage("sft", tiny_data, tmp_path / "run", *experts, *overrides)
    merged, own = open_hf(export(run, tmp_path / "out", "--merge")), open_hf(run / "hf")
    assert set(merged) == set(own)
    assert all(torch.allclose(merged[name], own[name], rtol=0, atol=1e-6) for name in own)
    with pytest.raises(ConfigError, match=r"^model\.lora\.targets=.*peft folder with dora"):
        export(run, tmp_path / "adapter")


def test_merge_is_for_runs_with_adapters(tiny_runs, tmp_path):
    with pytest.raises(ConfigError, match=r"--merge=True: expected a run with model\.lora\.rank"):
        export(tiny_runs["sft"], tmp_path / "out", "--merge")


def test_an_adapter_goes_with_its_base(run, tiny_data, tiny_runs, adapter, tmp_path):
    other = stages.stage("sft", tiny_data, tmp_path / "other", "run.steps=1", f"model.init={tiny_runs['sft']}")
    with pytest.raises(ConfigError, match=r"model\.lora\.init=.*expected an adapter for model\.init=.*other"):
        go(tiny_data, tmp_path / "a", f"model.init={other}", f"model.lora.init={adapter}")
    copy = shutil.copytree(run, tmp_path / "run")
    frozen = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(frozen.replace(str(tiny_runs["sft"]), str(other)))
    with pytest.raises(CheckpointError, match="no longer has the weights they were trained with"):
        export(copy, tmp_path / "out", "--merge")


def go(data, folder, *more):
    return stages.records(stages.stage("dpo", data, folder, "run.steps=2", *LORA, *more))


def same(one, two, but=()):
    for a, b in zip(one, two, strict=True):
        for name in (n for n in a if n.startswith(("dpo/", "rewards/m", "logps/", "policy/"))):
            assert a[name] == pytest.approx(b[name], abs=1e-5), name


@pytest.mark.slow
def test_the_reference_is_the_model_without_its_adapters(tiny_data, tiny_runs, tmp_path):
    """reference=adapter (the default), model and stored: one run."""
    start = [f"model.init={tiny_runs['sft']}", "debug.first_step_checks=true"]
    own = go(tiny_data, tmp_path / "own", *start)
    frozen = (tmp_path / "own/config.yaml").read_text()
    assert "reference: adapter" in frozen
    for kind in ("model", "stored"):
        same(own, go(tiny_data, tmp_path / kind, *start, f"algorithm.preference.reference={kind}"))


@pytest.mark.slow
def test_training_from_an_adapter(tiny_data, tiny_runs, run, adapter, tmp_path):
    """The reference is that adapter: the run is that from the merged model, but for what the optimizer sees of it."""
    start = ["debug.first_step_checks=true"]
    inputs = go(tiny_data, tmp_path / "given", *start, f"model.init={tiny_runs['sft']}", f"model.lora.init={adapter}")
    merged = go(tiny_data, tmp_path / "merged", *start, f"model.init={run}")
    first, other = (next(r for r in records if r["step"]) for records in (inputs, merged))
    for name in ("dpo/loss", "logps/chosen", "logps/rejected"):
        assert first[name] == pytest.approx(other[name], abs=1e-5)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert inputs[-1]["rewards/margins"] > 0.01


REFUSED = {
    "rank": (["model.lora.rank=3"], "model.lora.rank"),
    "targets": (["model.lora.targets=[q_proj]"], "model.lora.targets"),
    "kind": (["model.lora.rslora=false"], "model.lora.rslora"),
    "reference": (["algorithm.preference.reference=stored"], "own model with model.lora.init"),
    "no rank": (["model.lora.rank=0"], "model.lora.init"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_of_another_kind_is_refused(tiny_data, tiny_runs, adapter, tmp_path, name):
    overrides, reported = REFUSED[name]
    with pytest.raises((ConfigError, CheckpointError), match=reported):
        go(tiny_data, tmp_path / "run", f"model.init={tiny_runs['sft']}", f"model.lora.init={adapter}", *overrides)
    assert not (tmp_path / "run/metrics.jsonl").exists()
