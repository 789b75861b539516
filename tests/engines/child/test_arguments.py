"""Options of a user, as the types of a package's own fields."""

from dataclasses import dataclass
from enum import Enum

import pytest

from aligner.engines.child.arguments import checked_arguments
from aligner.errors import ConfigError


class Level(Enum):
    HIGH = 2


@dataclass
class Options:
    level: Level = Level.HIGH
    named: "dict[str, Unknown] | None" = None  # noqa: F821 (as a package writes a type that it imports for checkers)


def test_a_field_whose_type_is_a_text_takes_what_comes():
    values = {"named": {"a": 1}, "level": "HIGH"}
    assert checked_arguments("args", values, Options, "1") == {"named": {"a": 1}, "level": Level.HIGH}


@pytest.mark.parametrize("value", [[1], {"a": 1}])
def test_what_is_no_name_of_a_kind(value):
    with pytest.raises(ConfigError, match=r"args.level=.*: expected what 1 takes: Input should be 2"):
        checked_arguments("args", {"level": value}, Options, "1")
