"""The list of all keys against the schema."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from aligner.config.key import Section, key, section
from aligner.config.options import all_keys, key_type
from aligner.config.reference import keys, listing
from aligner.errors import ConfigError, UnknownKeyError

STAGES = Path(__file__).parents[2] / "conf/stage"


def test_every_key_is_there_and_says_what_it_means():
    by_name = {key.name: key for key in keys(whole=True)}
    sections = {name for name in all_keys() if hasattr(key_type(name), "__dataclass_fields__")}
    assert by_name.keys() == set(all_keys()) - sections
    assert [name for name, key in by_name.items() if not key.meaning] == []


@dataclass
class Inner(Section, key="inner"):
    size: int = key(3, "Its size.", least=1)


@dataclass
class Outer(Section):
    names: list[str] = key(["a"], "Some names.", choices=("a", "b"))
    on: bool = key(True, "Whether it is on.")
    share: float = key(0.5, "A share.", above=0, most=1, off=2)
    inner: Inner = section(Inner)
    many: list[Inner] = key([], "Many of them.")
    again: Inner = section(Inner, like="inner")


def test_what_a_field_declares_is_listed():
    rows = [(key.name, key.values, key.default, key.meaning) for key in keys(Outer)]
    assert rows == [
        ("names", "list of text: a, b", "['a']", "Some names."),
        ("on", "true, false", "true", "Whether it is on."),
        ("share", "number in (0, 1]", "0.5", "A share."),
        ("inner.size", "integer >= 1", "3", "Its size."),
        ("many", "list of sections", "[]", "Many of them."),
        ("many[].size", "integer >= 1", "3", "Its size."),
        ("again.*", "section", "", "The keys of `inner`, with the same defaults."),
    ]
    assert [key.name for key in keys(Outer, whole=True)][-1] == "again.size"


@pytest.mark.parametrize(
    ("cls", "values", "error"),
    [
        (Inner, {"size": 0}, "inner.size=0: expected a number >= 1"),
        (Outer, {"names": ["a", "c"]}, "names='c': expected one of a, b"),
        (Outer, {"share": 0.0}, r"share=0.0: expected a number in (0, 1], or 2 for off"),
        (Outer, {"share": float("nan")}, "share=nan: expected a number"),
    ],
)
def test_what_a_field_declares_is_checked(cls, values, error):
    with pytest.raises(ConfigError, match=re.escape(error)):
        cls(**values)
    assert Outer(share=2).names == ["a"] and Outer().names is not Outer().names


def test_keys_list_their_choices():
    by_name = {key.name: key.choices for key in keys(whole=True)}
    assert by_name["optim.schedule"] == ("constant", "linear", "cosine")
    assert by_name["critic.optim.schedule"] == by_name["optim.schedule"] and "veto" in by_name["mismatch.correction"]
    assert by_name["run.dir"] == by_name["optim.lr"] == by_name["run.steps"] == ()
    texts = [name for name, choices in by_name.items() if choices and "[]" not in name and key_type(name) is str]
    assert len(texts) > 40 and set(by_name["stage.name"]) == {path.stem for path in STAGES.glob("*.yaml")}


def test_a_section_is_listed_alone():
    lines = listing(["optim"]).splitlines()
    assert lines and all(line.startswith("optim.") for line in lines)
    assert len(listing([]).splitlines()) == len(list(keys()))
    with pytest.raises(UnknownKeyError, match=r"optim\.lr"):
        listing(["optim.lrr"])
