"""The one reader of JSON that others wrote."""

import json

import pytest

from aligner.errors import CheckpointError, DataError
from aligner.foreign import MAX_DEPTH, parse_json, read_json, read_record, record


def refused(call, *words, error=DataError):
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 300 and all(word in text for word in words), text


@pytest.mark.parametrize(
    "text, word",
    [
        ("{", "file:1: not valid JSON"),
        ('{"a": 1,\n"a": 2}', "'a' comes twice"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": -Infinity}', "Infinity is no number"),
        ('{"a": 1e999}', "1e999 is too large"),
        ("[" * 100_000, "nested at most"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested at most"),
        ('{"a": "\\ud800"}', "surrogate"),
        ("1" * 5000, "not valid JSON"),
        (b'{"a": "\xff"}', "utf-8"),
    ],
)
def test_what_is_no_json_is_one_line(text, word):
    refused(lambda: parse_json(text, "file", DataError), "file", word)


def test_what_is_json_is_as_it_was():
    value = {"a": [1, -2.5, None, True, "\N{GRINNING FACE} \u2028"], "b": {"c": []}}
    assert parse_json(json.dumps(value), "file", DataError) == value
    assert parse_json(b"\xef\xbb\xbf" + json.dumps(value).encode(), "file", DataError) == value
    assert parse_json('"[" ', "file", DataError) == "["
    assert parse_json(json.dumps("[" * 500), "file", DataError) == "[" * 500, "brackets in a text are no nesting"
    assert parse_json('{"a": Infinity}', "file", DataError, nan=True) == {"a": float("inf")}


def test_a_file_names_itself(tmp_path):
    path = tmp_path / "some.json"
    refused(lambda: read_json(path, CheckpointError), str(path), "No such file", error=CheckpointError)
    path.write_text("{\n\n?")
    refused(lambda: read_json(path, DataError), f"{path}:3: not valid JSON")
    path.write_text("[]")
    refused(lambda: read_record(path, DataError), str(path), "expected a JSON object, found []")


FIELDS = {"n": 3, "x": 2.5, "t": "word", "yes": True, "list": [1, 2], "words": ["a"], "in": {"side": {"deep": -1}}}


@pytest.mark.parametrize(
    "call, expected",
    [
        (lambda r: r.integer("x"), "x=2.5: expected an integer >= 0"),
        (lambda r: r.integer("yes"), "yes=True: expected an integer"),
        (lambda r: r.integer("n", low=4, high=9), "n=3: expected an integer from 4 to 9"),
        (lambda r: r.number("t"), "t='word': expected a finite number"),
        (lambda r: r.number("x", above=2.5), "expected a finite number > 2.5"),
        (lambda r: r.text("n"), "n=3: expected a string"),
        (lambda r: r.flag("n"), "n=3: expected true or false"),
        (lambda r: r.integers("words"), "expected a list of integers >= 0"),
        (lambda r: r.texts("list"), "expected a list of strings"),
        (lambda r: r.numbers("words"), "expected a list of finite numbers"),
        (lambda r: r.record("list"), "expected a JSON object"),
        (lambda r: r.text_map("in"), "expected a JSON object of strings"),
        (lambda r: r.record("in").record("side").integer("deep"), "in.side.deep=-1: expected"),
        (lambda r: r.record("in").text("absent"), "no value for in.absent"),
        (lambda r: r.need("n", "p", "q"), "no value for p, q"),
    ],
)
def test_a_value_of_another_kind_is_reported_with_its_place(call, expected):
    refused(lambda: call(record(FIELDS, "some.json", DataError)), "some.json: ", expected)


def test_values_and_defaults():
    actual = record(FIELDS | {"null": None}, "some.json", DataError)
    assert (actual.integer("n"), actual.number("n"), actual.number("x"), actual.text("t"), actual.flag("yes")) == (
        3,
        3.0,
        2.5,
        "word",
        True,
    )
    assert type(actual.number("n")) is float
    assert actual.integers("list") == [1, 2] and actual.texts("words") == ["a"]
    assert actual.record("in").record("side").integer("deep", low=-1) == -1
    for key in ("absent", "null"):
        assert actual.integer(key, 7) == 7 and actual.record(key, None) is None and key not in actual
