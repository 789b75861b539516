"""The section `curriculum`: which prompts rollouts take, by a column of the rows and by the run's own pass rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aligner.config.key import Section, key
from aligner.config.rule import rules


def _interval(values: list[float]) -> bool:
    return not values or (len(values) == 2 and -math.inf < values[0] <= values[1] < math.inf)


def _rates(values: list[float]) -> bool:
    return len(values) == 2 and 0 <= values[0] < values[1] <= 1


@dataclass
class CurriculumConfig(Section, key="curriculum"):
    column: str = key("", "Column with a number in each row: a difficulty, or a pass rate. Empty: none.")
    bounds: list[float] = key(
        [],
        "[least, largest] value of `column`. Other rows are left out. Empty: none are.",
        valid=(_interval, "two finite numbers, [least, largest]"),
    )
    steps: int = key(0, "Steps over which rows open, in the order of `column`. 0: all are open.", least=0)
    first: str = key("low", "Values of `column` that open first. high: of a pass rate.", choices=("low", "high"))
    skip_epochs: int = key(
        0, "Epochs in which a row is skipped after its pass rate was at an end of `pass_rates`. 0: off.", least=0
    )
    pass_rates: list[float] = key(
        [0.0, 1.0],
        "[low, high] pass rates: a row is skipped at or below low, and at or above high.",
        valid=(_rates, "[low, high] with 0 <= low < high <= 1"),
    )
    attempts: int = key(1, "Least samples of a row, the latest ones, from which its pass rate is taken.", least=1)
    learnability: bool = key(
        False, "Visit the other rows in proportion to 4p(1 - p) of their pass rate p, as p = 1/2 in every epoch."
    )

    RULES = rules("""
bounds !column => column | a column of the rows with curriculum.bounds
steps !column => column | a column of the rows with curriculum.steps
column !bounds !steps => column = | without curriculum.bounds and curriculum.steps
first=high !steps => first =low | without curriculum.steps
attempts>1 !skip_epochs => attempts =1 | without curriculum.skip_epochs
learnability !skip_epochs => learnability =false | without curriculum.skip_epochs
""")

    @property
    def on(self) -> bool:
        return bool(self.column or self.skip_epochs)
