"""The page of public findings has the numbers of its script: wrong formulas are wrong, and ours are one rank's."""

import math

import pytest

from benchmarks import layout_findings

pytestmark = [pytest.mark.multirank, pytest.mark.slow]
NUMBERS = slice(3, 6)


@pytest.fixture(scope="module")
def findings(ranks):
    return layout_findings.measure(lambda function, world, **named: ranks.run(function, world=world, **named)[0])


def test_what_is_here_is_one_rank_and_the_wrong_formula_is_not(findings):
    for finding in findings:
        within = 1e-2 if "dropout" in finding.quantity or "choices" in finding.quantity else 1e-4
        assert math.isclose(finding.here, finding.one, rel_tol=within), finding
        assert abs(finding.wrong - finding.one) > 100 * abs(finding.here - finding.one), finding
        assert not math.isclose(finding.wrong, finding.one, rel_tol=1e-3), finding


def test_the_page_has_these_numbers(findings):
    """To 0.1 %: processors round in their own ways."""
    page = layout_findings.on_page()
    assert [row[:3] for row in page] == [list(finding.cells[:3]) for finding in findings], "--write"
    for row, finding in zip(page, findings, strict=True):
        for shown, cell in zip(row[NUMBERS], finding.cells[NUMBERS], strict=True):
            assert math.isclose(float(shown), float(cell), rel_tol=1e-3), (row, cell)
