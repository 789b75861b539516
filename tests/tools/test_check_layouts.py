"""`aligner check layouts`: tiny models keep what matters of a model, and a dependence on the layout is a fault."""

import json

import pytest

from aligner.__main__ import main
from aligner.config.resolve import compose
from aligner.config.sections.parallel import ParallelConfig
from aligner.tools.layouts import check
from aligner.tools.layouts.cases import TOLERANCES, LayoutCase, cases_of, tolerances
from aligner.tools.layouts.tiny import tiny_model
from tests.tiny import MODELS, MORE, WINDOWS
from tests.tools.layout_jobs import updated

PRESETS = ("deepseek_v4_flash", "gemma4_e4b", "glm5", "nemotron3_nano_30b_a3b", "qwen3_next_80b_a3b")
SEQUENCE = ParallelConfig(tensor=2, sequence=True)


def kinds(model):
    """The kinds of a model's layers."""
    attention, shared = model.attention, model.indexer.shared_layers
    return {
        (*model.layer_kinds(n), attention.is_local(n), n in attention.nope_layers, n in shared)
        for n in range(model.num_layers)
    }


@pytest.mark.parametrize("model", (MODELS | WINDOWS | MORE).values(), ids=(MODELS | WINDOWS | MORE))
def test_a_tiny_model_has_the_kinds_of_layers_and_the_options(model):
    tiny = tiny_model(model)
    assert kinds(tiny) == kinds(model) and (tiny.hidden_size, tiny.dtype) == (32, "float32")
    for name in ("family", "tie_embeddings", "qk_norm", "qkv_bias", "mlp_bias", "double_mlp", "scales", "rope_base"):
        assert getattr(tiny, name) == getattr(model, name)


def test_a_large_model_becomes_a_tiny_one():
    for name in PRESETS:
        model = compose([f"model={name}"]).model
        tiny = tiny_model(model)
        assert kinds(tiny) == kinds(model) and tiny.num_layers <= 8 < model.num_layers, name


def test_the_layouts_are_each_axis_and_all_of_the_own_one_together():
    cfg = compose(["stage=sft", "model=qwen3_30b_a3b", "parallel.tensor=8", "parallel.pipeline=4", "parallel.expert=4"])
    cases, refused = cases_of(cfg, tiny_model(cfg.model))
    assert {"micro 2", "dp2", "tp2", "tp2 seq", "pp2", "pp2 vp2", "cp2", "cp2 a2a", "ep2", "ep2 tp2"} < set(cases)
    own = cases["yours"]
    assert (own.world, own.parallel) == (8, ParallelConfig(tensor=2, pipeline=2, expert=2)) and not refused
    cfg = compose(["stage=sft", "model=gemma4_e4b"])
    cases, refused = cases_of(cfg, tiny_model(cfg.model))
    assert "yours" not in cases and "parallel.pipeline=2" in refused["pp2"]


def test_the_tolerance_is_that_of_layout_and_family():
    plain = tiny_model(MODELS["qwen3"])
    assert tolerances(LayoutCase(), plain) == TOLERANCES
    assert tolerances(LayoutCase(2, ParallelConfig(context=2)), plain)["gradient"] == 1e-4
    assert tolerances(LayoutCase(), tiny_model(MORE["deepseek_v4"]))["norm"] == 1e-3


@pytest.mark.multirank
def test_gradients_that_nobody_sums_are_a_fault(ranks):
    """Megatron's own code without its sum over tensor ranks, as in a model that forgets to mark its norms."""
    model = tiny_model(MODELS["qwen3"])
    cases = {name: LayoutCase(2, SEQUENCE, model=model) for name in ("right", "wrong")}
    results = {check.ONE: ranks.run(updated, case=LayoutCase(model=model))[0]}
    for name, case in cases.items():
        results[name] = ranks.run(updated, world=2, case=case, unsummed=name == "wrong")[0]
    table = check.compared(results)
    (line,) = check.faults(table, cases, model)
    assert line.startswith("wrong: ") and "norm.weight" in line
    assert {name for name, x in table["wrong"].items() if x > 1e-3 and "norm" not in name} == set()


@pytest.mark.multirank
def test_a_loss_of_micro_batches_ends_with_exit_code_1(ranks, monkeypatch, capsys):
    """A load-balancing loss that is defined over micro-batches differs by their number: real numbers, and the lost
    result of a rank that failed."""

    def compute(cfg, cases):
        every = {check.ONE: LayoutCase(model=cases["dp2"].model), **{n: cases[n] for n in ("micro 2", "dp2")}}
        results = {name: ranks.run(updated, world=case.world, case=case)[0] for name, case in every.items()}
        return {"likelihood": results | {"tp2": None}}

    monkeypatch.setattr(check, "compute", compute)
    keys = ["stage=sft", "model=tiny_moe", "model.moe.aux_coef=1"]
    assert main(["check", "layouts", *keys, "model.moe.aux_over=micro_batch"]) == 1
    shown = capsys.readouterr().out
    assert "FAULT likelihood: micro 2: " in shown and "FAULT likelihood: dp2: " in shown and "3 faults" in shown
    assert "inf !" in shown and "FAULT likelihood: tp2: " in shown


@pytest.mark.multirank
@pytest.mark.slow
def test_every_layout_of_a_model_passes(tmp_path, capfd, monkeypatch):
    """With its own ranks, as `aligner launch` starts them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as the command does, for the ranks
    own = ["parallel.tensor=4", "parallel.pipeline=2", "batch.share_prompts=false"]
    file = tmp_path / "table.json"
    assert main(["check", "examples/own_loss.py:capped_sequence", "model=tiny", *own, "--json", str(file)]) == 0
    shown, (table,) = capfd.readouterr().out, json.loads(file.read_text()).values()
    assert "examples/own_loss.py:capped_sequence: the same for each micro-batch" in shown
    assert "passed" in shown and "left out: ep2: " in shown and "model.layers.*.mlp.up_proj.weight" in shown
    assert set(table) == {"micro 2", "dp2", "tp2", "tp2 seq", "pp2", "pp2 vp2", "cp2", "cp2 a2a", "yours"}
    assert 0 < max(table["yours"].values()) < 1e-5 and len(table["yours"]) > 30


def test_a_folder_that_is_not_there_is_refused(capsys):
    assert main(["check", "layouts", "stage=sft", "model.init=nowhere"]) == 2
    assert "model.init='nowhere'" in capsys.readouterr().err


def test_what_else_might_be_checked_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["check", "everything"])
    assert caught.value.code == 2 and "layouts" in capsys.readouterr().err
