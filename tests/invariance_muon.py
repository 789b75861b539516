"""Cases of `tests.invariance` whose last two steps are Muon's."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.tools.layouts.cases import LayoutCase


@dataclass(frozen=True)
class MuonCase(LayoutCase):
    """Measure `adam` is of Muon."""

    distributed: bool = False
