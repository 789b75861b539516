"""Stages, families and axes of layout, at full width and reduced depth: one of seven cases of the grid, with every
family, in which each stage and axis meets several of the others; every pair: `python -m tests.rehearse.grid`."""

from itertools import product

import pytest

from aligner.config.stages import STAGES
from tests.rehearse.grid import BESIDE, EXPERTS, FAMILIES, LAYOUTS, MORE, STAGED, cases, rehearsed

CHOSEN = [case for number, case in enumerate(cases()) if number % 21 in (0, 7, 11)]


@pytest.mark.slow
def test_no_fault_and_memory_as_planned(tmp_path):
    for case, result in rehearsed(CHOSEN, tmp_path).items():
        assert result.faults == [] and not result.one_by_one, case
        for rank, phases in result.planned.items():
            for phase, size in phases.items():
                there = result.records[rank]["phases"].get(phase)
                if there:
                    assert size == pytest.approx(there["peak_bytes"], rel=0.1), (case, rank, phase)


def test_the_cases_have_every_pair():
    actual = cases()
    assert {case[:2] for case in actual} == {(stage, family) for stage in STAGES for family in FAMILIES}
    assert {case[::2] for case in actual} == {(stage, layout) for stage in STAGES for layout in {**LAYOUTS, **MORE}}
    pairs = {(family, layout) for family in FAMILIES for layout in LAYOUTS} - {*product(BESIDE, STAGED)}
    assert {case[1:] for case in actual} == pairs | {(family, layout) for family in EXPERTS for layout in MORE}


def test_what_is_chosen_has_each_beside_several_others():
    for name in (*STAGES, *LAYOUTS, *MORE):
        beside = [set(others) - {name} for others in zip(*(case for case in CHOSEN if name in case), strict=True)]
        assert all(len(others) >= 2 for others in beside if others), name
    assert {family for _, family, _ in CHOSEN} == {*FAMILIES}
