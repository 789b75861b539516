"""The published runs that the calculator is held to."""

import statistics

from benchmarks.plan_check import LATER, compare, published


def test_published_runs_fit_and_are_as_near_as_the_notes_say():
    """Odd ones are those to which constants were fitted."""
    runs = published()
    assert LATER == 28 and len({run.name for run in runs}) == len(runs) == 36
    compared = [compare(number, run) for number, run in enumerate(runs, start=1)]
    assert [row["case"] for row in compared if not row["fits"]] == []  # what peers ran is not refused
    errors = {half: [abs(row["error"]) for row in compared if row["half"] == half] for half in ("fit", "test", "later")}
    assert [len(of) for of in errors.values()] == [14, 14, 8]
    means = {half: statistics.mean(of) for half, of in errors.items()}
    assert means["fit"] < 0.08 and means["test"] < 0.16 and means["later"] < 0.27
