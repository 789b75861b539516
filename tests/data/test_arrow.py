"""Rows of every reader are those that were written: Arrow's nulls are not theirs."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aligner.data.arrow import table_rows
from aligner.data.readers import read_rows
from aligner.errors import DataError


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


ROWS = [  # no field is null, but each lacks some that another one has
    {
        "messages": [
            {"role": "user", "content": "2+3, and Rome?"},
            {"role": "assistant", "tool_calls": [call("add", a=2, b=3), call("look", city="Rome")]},
            {"role": "tool", "content": "5", "name": "add"},
        ],
        "tools": [
            tool("add", a={"type": "number"}, b={"type": "number", "enum": [1, None]}),
            tool("look", city={"type": "string"}),
        ],
        "reward_model": {"ground_truth": {"value": 5}},
        "steps": [[{"a": 1}, {"b": [1, None, 2]}], []],
    },
    {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "tool_calls": []}],
        "tools": [tool("now", zone={"type": "string", "required": ["x"]})],
        "reward_model": {"style": "rule", "extra": {"deep": {"er": [{"x": 1}, {"y": 2}]}}},
        "steps": [[{"c": 7}]],
    },
]


def test_rows_of_structs_are_those_that_were_written(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "x.parquet", row_group_size=1)
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    lines = read_rows(str(tmp_path / "x.jsonl"))
    for name in ("x.parquet", "saved"):
        rows = read_rows(str(tmp_path / name))
        assert list(rows) == ROWS and rows[1:] == ROWS[1:] and rows.content() == lines.content(), name


def test_nulls_that_arrow_does_not_add_stay():
    """Of a whole column, of lists, of maps, in texts; and of the JSON of a column of that type."""
    maps = pa.array([[("a", None), ("b", 1)], []], pa.map_(pa.string(), pa.int64()))
    schema = '{"default": null, "enum": [null]}'
    columns = {
        "column": pa.array([None, {"a": 1}], pa.struct({"a": pa.int64()})),
        "list": pa.array([[None, {"a": None}], None]),
        "map": maps,
        "text": [schema, None],
        "json": pa.array([schema, None], pa.json_()),
    }
    assert table_rows(pa.table(columns), "f") == [
        {
            "column": None,
            "list": [None, {}],
            "map": {"a": None, "b": 1},
            "text": schema,
            "json": {"default": None, "enum": [None]},
        },
        {"column": {"a": 1}, "list": None, "map": {}, "text": None, "json": None},
    ]


def test_jsonl_keeps_its_own_nulls(tmp_path):
    row = {"tools": [{"a": None}], "answer": {"b": None}}
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    assert list(read_rows(str(tmp_path / "x.jsonl"))) == [row]


def test_columns_of_json_are_read_as_that(tmp_path):
    """As `datasets` writes what has no common struct: a list of JSON texts, in Parquet."""
    rows = [{"a": [{"b": 0, "n": None}, {"c": "x"}]}, {"a": [{"b": "text"}]}]
    features = datasets.Features({"a": datasets.List(datasets.Json())})
    data = datasets.Dataset.from_dict({"a": [row["a"] for row in rows]}, features=features)
    data.to_parquet(tmp_path / "x.parquet")
    data.save_to_disk(tmp_path / "saved")
    assert list(read_rows(str(tmp_path / "x.parquet"))) == rows == list(read_rows(str(tmp_path / "saved")))
    with pytest.raises(DataError, match=r"f, column j:1: not valid JSON"):
        table_rows(pa.table({"j": pa.array(["{"], pa.json_())}), "f")


def test_tables_without_columns_or_rows():
    assert table_rows(pa.table({"a": pa.array([], pa.struct({"b": pa.int64()}))}), "f") == []
    assert table_rows(pa.table({"a": [1, 2]}).select([]), "f") == [{}, {}]
