"""Every stage, family and axis of layout, full width and reduced depth. All pairs: `python -m tests.rehearse.grid`."""

import pytest

from tests.rehearse.grid import FAMILIES, LAYOUTS, MORE, STAGES, cases, rehearsed

# a case each for all stages, families and layouts, of few operations where there is a choice
CHOSEN = [
    ("rm", "smollm3_3b", "tensor"),
    ("dpo", "phi4_mini", "sequence"),
    ("kto", "olmo2_1b", "pipeline"),
    ("distill", "gemma2_2b", "context"),
    ("grpo", "qwen3_1.7b", "heads"),
    ("online_dpo", "qwen2.5_7b", "engine"),
    ("distill", "gpt_oss_20b", "expert"),
    ("dpo", "deepseek_v3", "all"),  # the first stage has dense layers alone, and so another number of optimizers
    ("grpo", "qwen3_30b_a3b", "expert+tensor"),
    ("ppo", "llama3_8b", "data"),
    ("sft", "qwen3_next_80b_a3b", "all"),
]


@pytest.mark.slow
def test_no_fault_and_memory_as_planned(tmp_path):
    for case, found in rehearsed(CHOSEN, tmp_path).items():
        assert found.faults == [], case
        for rank, phases in found.planned.items():
            for phase, size in phases.items():
                there = found.records[rank]["phases"].get(phase)
                if there and phase != "build":
                    assert size == pytest.approx(there["peak_bytes"], rel=0.3), (case, rank, phase)


def test_the_cases_have_everything():
    assert {case[0] for case in CHOSEN} == set(STAGES)
    assert {case[1] for case in CHOSEN} == set(FAMILIES)
    assert {case[2] for case in CHOSEN} == set(LAYOUTS) | set(MORE)
    assert {(family, layout) for _, family, layout in cases()} > {case[1:] for case in CHOSEN[:8]}
