"""Large models on many GPUs: the pages have what `plan` says."""

import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.scale import cases, line, plan

ROOT = Path(__file__).parents[2]
CASES = {case.name: case for case in cases()}
planned = cache(plan)


def rows_of(page: str) -> dict[str, list[str]]:
    """Cells behind the name of each case in the tables of a page."""
    lines = (re.split(r" *\| *", text.strip("| \n")) for text in (ROOT / page).read_text().splitlines())
    return {first: cells for first, *cells in lines if first in CASES}


def numbers(*cells: str) -> list[float]:
    return [float(number) for cell in cells for number in re.findall(r"[\d.]+", cell)]


@pytest.mark.parametrize("name", CASES)
def test_the_page_has_the_plan_of_each_layout_and_each_fits(name):
    case, rows = CASES[name], rows_of("benchmarks/scale.md")
    _, *wanted = re.split(r" *\| *", line(case, planned(case), None).strip("| "))
    assert rows.keys() == CASES.keys() and rows[name][0] == wanted[0]
    assert rows[name][2].split()[1:] == wanted[2].split()[1:]  # the phase that needs most
    assert numbers(*rows[name][1:3]) == pytest.approx(numbers(*wanted[1:]), rel=0.02, abs=0.11)
    assert planned(case)["fits"] and "too much" in line(case, planned(case) | {"fits": False}, None)
    assert rows[name][5:] in (["0"], [])  # faults; nothing of what was not rehearsed


def test_the_explanation_compares_each_published_step():
    rows = rows_of("docs/explanation/memory.md")
    assert rows.keys() == {case.name for case in CASES.values() if case.published_s}
    for name, (published, step, parts) in rows.items():
        case, here = CASES[name], planned(CASES[name])
        assert float(published) == case.published_s
        assert numbers(step, parts) == pytest.approx([here["step_s"], *here["seconds"].values()], rel=0.02, abs=0.5)
