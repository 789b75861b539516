import datetime
import decimal
import hashlib
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aligner.data.readers import Rows, read_rows
from aligner.errors import DataError

ROWS = [
    {"prompt": "1 + 1 =", "answer": "2", "messages": [{"role": "user", "content": "a\u2028b"}]},
    {
        "prompt": "é",
        "answer": "",
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
    },
    {"prompt": "c", "answer": "3", "messages": [{"role": "user", "content": "\n"}]},
]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def stored(tmp_path):
    jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=1))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved_dict")
    (tmp_path / "folder").mkdir()
    jsonl(tmp_path / "folder" / "a.jsonl", ROWS[:2])
    pq.write_table(pa.Table.from_pylist(ROWS[2:]), tmp_path / "folder" / "b.parquet")
    (tmp_path / "folder" / "README.md").write_text("not data")
    return tmp_path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "saved", "saved_dict", "folder"])
def test_every_format_gives_the_same_rows(stored, name):
    rows = read_rows(str(stored / name))
    assert list(rows) == ROWS
    assert len(rows) == 3 and rows[1] == ROWS[1]


def test_where_names_file_and_row(stored):
    rows = read_rows(str(stored / "folder"))
    assert rows.where(1).endswith("a.jsonl, row 2")
    assert rows.where(2).endswith("b.parquet, row 1")


def test_blank_lines_and_byte_order_mark(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}')
    assert list(read_rows(str(tmp_path / "x.jsonl"))) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("path", ["", "absent.jsonl"])
def test_missing_file(tmp_path, path):
    with pytest.raises(DataError, match=r"data.eval=.*expected"):
        read_rows(path and str(tmp_path / path), key="data.eval")


@pytest.mark.parametrize("line", ['{"a": 1', "[1, 2]", "7"])
def test_malformed_jsonl_names_file_and_line(tmp_path, line):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n\n' + line + "\n")
    with pytest.raises(DataError, match=r"data\.train.*x\.jsonl:3"):
        read_rows(str(tmp_path / "x.jsonl"))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.json", b'[{"a": 1},\n{"a"]', r"x\.json:2: not valid JSON"),
        ("x.json", b'{"a": 1}', "expected a JSON list of objects"),
        ("x.jsonl", b'{"a": "\xff"}', "readable UTF-8"),
        ("x.parquet", b"no parquet at all", "expected a Parquet file"),
        ("x.csv", b"a,b\n1,2\n", "expected a file that ends in .jsonl, .json, .parquet"),
        ("x.jsonl", b"\n", "the dataset is empty"),
        ("x.json", b"[]", "the dataset is empty"),
    ],
)
def test_bad_content(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_rows(str(tmp_path / name))
    assert "data.train" in str(caught.value)


def test_folder_without_data_and_ambiguous_split(tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"expected a datasets.save_to_disk folder, or files"):
        read_rows(str(tmp_path / "none"))
    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "two")
    with pytest.raises(DataError, match=r"expected one split, found 2.*two/train"):
        read_rows(str(tmp_path / "two"))
    assert len(read_rows(str(tmp_path / "two" / "test"))) == 3


def test_content_is_of_values_alone(tmp_path):
    """Of what Parquet holds beside JSON's kinds it is the same in every process; an object that shows its address has
    none."""
    row = {"a": b"x", "b": datetime.date(2026, 1, 1), "c": decimal.Decimal("1.50"), "d": [datetime.timedelta(1)]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    written = {
        "a": "b'x'",
        "b": "datetime.date(2026, 1, 1)",
        "c": "Decimal('1.50')",
        "d": ["datetime.timedelta(days=1)"],
    }
    text = json.dumps(written) + "\n"
    assert read_rows(str(tmp_path / "x.parquet")).content() == hashlib.sha256(text.encode()).hexdigest()[:16]
    with pytest.raises(DataError, match=r"f\.parquet, row 2: expected text, .* found object. Leave that column out"):
        Rows([("f.parquet", [row, row | {"e": [object()]}])]).content()
