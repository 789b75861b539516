"""The GPU benchmark's own check, on whatever device is here."""

import pytest
import torch

from benchmarks import gpu, scaling


@pytest.mark.multirank
def test_every_section_runs_and_its_figures_add_up(ranks):
    (figures,) = ranks.run("benchmarks.gpu:check")
    assert figures.keys() >= {"generate.8.of_bound", "train.mfu", "refit.of_copy", "grpo.rl_mfu"}


def test_shapes_are_those_of_the_published_models():
    assert gpu.parameters(gpu.SHAPES["0.6b"]) == 596_049_920 and gpu.parameters(gpu.SHAPES["1.7b"]) == 1_720_574_976
    assert gpu.parameters(gpu.SHAPES["8b_width"]) == 2_795_573_248


@pytest.mark.parametrize("name", ["0.6b", "1.7b", "8b_width"])
def test_the_benchmark_fits_the_card_it_is_for(name):
    size = gpu.Size()
    job = gpu.job_for(gpu.SHAPES[name], size, size.micro_tokens[0], 2)
    assert gpu.plan_memory(job, gpu.DEVICES["h200"], gpu.Assumptions()).fits
    seconds = gpu.predict(job, gpu.DEVICES["h200"]).step_s
    # a shape runs four generations and updates, and five passes of logprobs; the plan is at most twice too fast
    assert 4 * 2 * seconds < 150


@pytest.mark.slow
@pytest.mark.multirank
def test_scaling_counts_the_bytes_of_the_formulas(ranks):
    parallel, world = scaling.CASES["tp2, sequence"]
    for result in ranks.run("benchmarks.scaling:measure", world=world, parallel=parallel, steps=1):
        assert result["bytes"] == scaling.formula_bytes(parallel, world, result["stage"]) > 0 and result["cpu_s"] > 0


def test_goals_are_told_from_measured_figures(capsys):
    report = gpu.Report({"train.mfu": 0.40, "refit.of_copy": 0.80, "grpo.update_s": 2.0}, {"grpo.update_s": 1.5})
    assert gpu.show("1.7b", report) == ["1.7b train.mfu"]
    out = capsys.readouterr().out
    assert "goal 0.47 MISSED" in out and "goal 0.50 met" in out and "plan 1.500" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_so(capsys):
    with pytest.raises(SystemExit) as caught:
        gpu.main([])
    assert caught.value.code == 2 and "no CUDA device" in capsys.readouterr().err
