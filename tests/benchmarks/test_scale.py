"""Large models on many GPUs: the layouts of the page are plans that fit."""

from benchmarks.scale import cases, line, plan


def test_layouts_of_the_page_fit_and_take_no_longer_than_published():
    some = [case for case in cases() if case.gpus in (128, 256) and case.device == "h100"]
    assert len(some) == 3 and len({case.name for case in cases()}) == len(cases())
    for case in some:
        planned = plan(case)
        assert planned["fits"] and ", too much" not in line(case, planned, None)
        assert "too much" in line(case, planned | {"fits": False}, None)
        # NeMo-RL's own fixed seconds a step are not in it
        assert case.published_s is None or 0.3 * case.published_s < planned["step_s"] < 1.3 * case.published_s
