"""The list of all keys against the schema, and its page."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from aligner.config.options import all_keys, key_type
from aligner.config.reference import keys, listing, page
from aligner.errors import UnknownKeyError

PAGE = Path(__file__).parents[2] / "docs/keys.md"
STAGES = Path(__file__).parents[2] / "conf/stage"


def test_the_page_is_what_the_schema_says():
    hint = "python -c 'from aligner.config.reference import page; print(page(), end=\"\")' > docs/keys.md"
    assert PAGE.read_text() == page(), f"write it anew: {hint}"


def test_every_key_is_there_and_says_what_it_means():
    found = {key.name: key for key in keys()}
    sections = {name for name in all_keys() if hasattr(key_type(name), "__dataclass_fields__")}
    assert found.keys() == set(all_keys()) - sections
    assert [name for name, key in found.items() if not key.meaning] == []


@dataclass
class Inner:
    size: int = 3  # of it


@dataclass
class Outer:
    # two lines
    # above
    names: list[str] = field(default_factory=lambda: ["a"])
    on: bool = True  # behind
    inner: Inner = field(default_factory=Inner)
    many: list[Inner] = field(default_factory=list)  # some


def test_comments_defaults_and_names():
    rows = [(key.name, key.kind, key.default, key.meaning) for key in keys(Outer)]
    assert rows == [
        ("names", "list of text", "['a']", "two lines above"),
        ("on", "true, false", "true", "behind"),
        ("inner.size", "integer", "3", "of it"),
        ("many", "list of sections", "[]", "some"),
        ("many[].size", "integer", "3", "of it"),
    ]


def test_choices_are_those_that_a_check_takes():
    found = {key.name: key.choices for key in keys()}
    assert found["optim.schedule"] == ("constant", "linear", "cosine")
    assert found["critic.optim.schedule"] == found["optim.schedule"] and "veto" in found["mismatch.correction"]
    assert found["run.dir"] == found["optim.lr"] == found["run.steps"] == ()
    texts = [name for name, choices in found.items() if choices and "[]" not in name and key_type(name) is str]
    assert len(texts) > 40 and set(found["stage.name"]) == {path.stem for path in STAGES.glob("*.yaml")}


def test_a_section_is_listed_alone():
    lines = listing(["optim"]).splitlines()
    assert lines and all(line.startswith("optim.") for line in lines)
    assert len(listing([]).splitlines()) == len(list(keys()))
    with pytest.raises(UnknownKeyError, match=r"optim\.lr"):
        listing(["optim.lrr"])
