import contextlib
import datetime
import decimal
import errno
import gzip
import hashlib
import io
import json
import tracemalloc
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.data_files import get_data_patterns, resolve_pattern

from aligner.data import files
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


PACKED = ("rows.jsonl.gz", "rows.jsonl.zst")


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
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    whole = (tmp_path / "rows.jsonl").read_bytes()
    parts = whole[:40], whole[40:]  # frames of a .zst may follow each other, as members of a .gz may
    (tmp_path / "rows.jsonl.zst").write_bytes(b"".join(pa.compress(piece, "zstd", asbytes=True) for piece in parts))
    (tmp_path / "folder" / "README.md").write_text("not data")
    return tmp_path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "saved", "saved_dict", "folder", *PACKED])
def test_every_format_gives_the_same_rows(stored, name):
    rows = read_rows(str(stored / name))
    assert list(rows) == ROWS and rows.content() == read_rows(str(stored / "rows.jsonl")).content()
    assert len(rows) == 3 and rows[1] == ROWS[1] and rows[-1] == ROWS[2]
    for piece in (slice(0, 2), slice(1, 3), slice(None), slice(0, 0), slice(None, None, 2)):
        assert rows[piece] == ROWS[piece]


def test_where_names_file_and_row(stored):
    rows = read_rows(str(stored / "folder"))
    assert rows.where(1).endswith("a.jsonl, row 2")
    assert rows.where(2).endswith("b.parquet, row 1")


def test_where_names_the_line_too_where_it_is_another(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n\n \n{"a": 2}\n')
    rows = read_rows(str(tmp_path / "x.jsonl"))
    assert rows.where(0).endswith("x.jsonl, row 1") and rows.where(1).endswith("x.jsonl, row 2 (line 4)")


@pytest.mark.parametrize("name", PACKED)
def test_damaged_archives_are_refused(stored, name):
    path = stored / name
    whole = path.read_bytes()
    read = lambda: list(read_rows(str(path), "data.eval"))  # noqa: E731
    message = (
        rf"^data.eval='.*{name}': expected a whole \{path.suffix} archive \(damaged after byte \d+ of its content: "
    )
    for damaged in (whole[:-5], whole[:20], b"no archive", whole + b"more"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=message) as caught:
            read()
        assert "\n" not in str(caught.value)
    path.write_bytes(gzip.compress(b'{"a": 1}\n{') if path.suffix == ".gz" else pa.compress(b'{"a": 1}\n{', "zstd"))
    with pytest.raises(DataError, match=rf"{name}:2: not valid JSON"):
        read()


def test_no_room_to_unpack(stored, monkeypatch):
    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    temporary = type("Full", (io.BytesIO,), {"writelines": full})
    monkeypatch.setattr(files.tempfile, "TemporaryFile", temporary)
    with pytest.raises(DataError, match=r"rows.jsonl.gz': cannot be unpacked to .*TMPDIR.*No space left"):
        read_rows(str(stored / "rows.jsonl.gz"))


def test_row_groups_are_read_one_at_a_time(tmp_path):
    rows = [{"n": i, "t": "x" * (i % 3)} for i in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet", row_group_size=7)
    read = read_rows(str(tmp_path / "x.parquet"))
    assert (
        list(read) == rows and read[5:30] == rows[5:30] and [read[i]["n"] for i in (49, 0, 13, 14)] == [49, 0, 13, 14]
    )


def test_rows_of_a_file_are_not_held(tmp_path):
    """Of 12 MB of text some bytes a row, whatever has been read of it."""
    jsonl(tmp_path / "x.jsonl", [{"text": f"{i} " + "x" * 12_000} for i in range(1000)])
    tracemalloc.start()
    try:
        rows = read_rows(str(tmp_path / "x.jsonl"))
        rows.content()
        last, (held, _) = rows[999]["text"][:4], tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert last == "999 " and held < 400_000


def test_blank_lines_and_byte_order_mark(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}')
    assert list(read_rows(str(tmp_path / "x.jsonl"))) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("path", ["", "absent.jsonl"])
def test_a_missing_file_is_refused(tmp_path, path):
    with pytest.raises(DataError, match=r"data.eval=.*expected"):
        read_rows(path and str(tmp_path / path), key="data.eval")


@pytest.mark.parametrize("line", ['{"a": 1', "[1, 2]", "7"])
def test_malformed_jsonl_names_file_and_line(tmp_path, line):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n\n' + line + "\n")
    with pytest.raises(DataError, match=r"data\.train.*x\.jsonl:3"):
        list(read_rows(str(tmp_path / "x.jsonl")))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.json", b'[{"a": 1},\n{"a"]', r"x\.json:2: not valid JSON"),
        ("x.json", b'{"a": 1}', "expected a JSON list of objects"),
        ("x.jsonl", b'{"a": "\xff"}', "readable UTF-8"),
        ("x.parquet", b"no parquet at all", "expected a Parquet file"),
        ("x.csv", b"a,b\n1,2\n", "expected a file that ends in .jsonl, .jsonl.gz, .jsonl.zst, .json, .parquet"),
        ("x.jsonl", b"\n", "the dataset is empty"),
        ("x.json", b"[]", "the dataset is empty"),
    ],
)
def test_unreadable_content_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        list(read_rows(str(tmp_path / name)))
    assert "data.train" in str(caught.value)


def test_folder_without_data_and_ambiguous_split(tmp_path):
    (tmp_path / "none" / "main").mkdir(parents=True)
    with pytest.raises(DataError, match=r"expected a datasets.save_to_disk folder, or files .*\.parquet$"):
        read_rows(str(tmp_path / "none"))
    jsonl(tmp_path / "none" / "main" / "a.jsonl", ROWS)
    with pytest.raises(DataError, match=r"found none but in .*none/main: name one of them"):
        read_rows(str(tmp_path / "none"))
    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"a": one, "b": one}).save_to_disk(tmp_path / "two")
    with pytest.raises(DataError, match=r"expected one split, found 2.*two/a"):
        read_rows(str(tmp_path / "two"))
    assert len(read_rows(str(tmp_path / "two" / "b"))) == 3


def hub(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        row = [{"file": name}]
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(row), root / name)
        else:
            jsonl(root / name, row)
    return str(root)


def read_files(root, key):
    return [row["file"] for row in read_rows(root, key)]


LAYOUTS = [
    ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"),
    ("data/train-00000-of-00001-a09b74b3ef9c3b56.parquet", "data/validation-00000-of-00001-1fd.parquet"),
    ("train.jsonl", "test.jsonl", "valid.jsonl"),
    ("train_0.jsonl", "train_1.jsonl", "dev.jsonl"),
    ("train/a.jsonl", "train/b/c.jsonl", "test/a.jsonl"),
    ("data/training/a.parquet", "data/evaluation/a.parquet"),
    ("my.train.jsonl", "my.eval.jsonl"),
    ("gsm8k_train.jsonl", "gsm8k_test.jsonl"),
]


@pytest.mark.parametrize("names", LAYOUTS)
def test_splits_of_a_folder_are_those_of_the_hub(tmp_path, names):
    """As `datasets` tells them; data.eval has the held-out one, of two validation."""
    root = hub(tmp_path, *names)

    def theirs(patterns):
        results = set()
        for pattern in patterns:
            with contextlib.suppress(FileNotFoundError):
                results |= {str(Path(file).relative_to(root)) for file in resolve_pattern(pattern, root)}
        return sorted(results)

    splits = {split: theirs(patterns) for split, patterns in get_data_patterns(root).items()}
    assert read_files(root, "data.train") == splits.pop("train") == read_files(root, "ptx.data.train")
    assert read_files(root, "data.eval") == (splits.get("validation") or splits["test"])
    left = ", ".join(f"{split} ({len(result)})" for split, result in sorted(splits.items()))
    assert read_rows(root).note == f"reads split train of {root}, leaves out {left}"


@pytest.mark.parametrize(
    "names, train, held_out",
    [
        (("a.jsonl", "b.jsonl"), ("a.jsonl", "b.jsonl"), ("a.jsonl", "b.jsonl")),
        (("code.jsonl", "test.jsonl"), ("code.jsonl",), ("test.jsonl",)),
        (("latest.jsonl", "devices.jsonl"), ("devices.jsonl", "latest.jsonl"), ("devices.jsonl", "latest.jsonl")),
        (("test.jsonl",), ("test.jsonl",), ("test.jsonl",)),
        (("train.jsonl", "more.jsonl"), ("more.jsonl", "train.jsonl"), ("more.jsonl", "train.jsonl")),
        (
            ("train-00000-of-00001.parquet", "hard-00000-of-00001-1f.parquet", "test-00000-of-00001.parquet"),
            ("train-00000-of-00001.parquet",),
            ("test-00000-of-00001.parquet",),
        ),
        (
            ("train-00000-of-00001.parquet", "train_small-00000-of-00001.parquet", "dev-00000-of-00001.parquet"),
            ("train-00000-of-00001.parquet",),
            ("dev-00000-of-00001.parquet",),
        ),
    ],
)
def test_folders_with_some_names_of_splits(tmp_path, names, train, held_out):
    root = hub(tmp_path, *names)
    assert read_files(root, "data.train") == list(train) and read_files(root, "data.eval") == list(held_out)


@pytest.mark.parametrize("names", [("train.jsonl", "test.jsonl"), ("data/train.jsonl", "data/test.jsonl")])
@pytest.mark.parametrize("other", ["dataset_infos.json", "config.json"])
def test_a_clone_of_the_hub_may_hold_files_without_rows(tmp_path, names, other):
    """As `datasets` leaves them out."""
    root = hub(tmp_path, *names)
    (tmp_path / other).write_text('{"default": {}}')
    assert len(read_rows(root)) == len(read_rows(root, "data.eval")) == 1
    assert "leaves out test (1)" in read_rows(root).note


def test_a_split_of_another_purpose_is_reported(tmp_path):
    alone = hub(tmp_path / "alone", "test.jsonl")
    assert read_rows(alone).note == f"reads split test of {alone}, which has no other"
    assert read_rows(alone, "data.eval").note == "" == read_rows(hub(tmp_path / "x", "a.jsonl")).note


@pytest.mark.parametrize(
    "names, key, message",
    [
        (("train_sft-00000-of-00001.parquet", "train_prefs-00000-of-00001.parquet"), "data.train", "one split train"),
        (("test.jsonl", "dev.jsonl"), "data.train", "expected a split train, found test, validation"),
        (
            ("train-00000-of-00001.parquet", "hard-00000-of-00001.parquet"),
            "data.eval",
            "expected a split validation or test, found hard, train",
        ),
    ],
)
def test_folders_of_which_nobody_can_say_what_to_read(tmp_path, names, key, message):
    with pytest.raises(DataError, match=rf"^{key}=.*{message}.*data\.sources"):
        read_rows(hub(tmp_path, *names), key)


def test_saved_splits_are_chosen_likewise(tmp_path):
    splits = {name: datasets.Dataset.from_list([{"file": name}]) for name in ("train", "validation", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path)
    root = str(tmp_path)
    assert read_files(root, "data.train") == ["train"] and read_files(root, "data.eval") == ["validation"]
    assert read_rows(root).note == f"reads split train of {root}, leaves out test (1), validation (1)"


def test_a_data_set_of_the_library_that_was_shuffled_is_read_in_its_order(tmp_path):
    rows = [{"n": i, "s": {"a": i} if i % 2 else {"b": i}} for i in range(30)]
    data = datasets.Dataset.from_list(rows).shuffle(seed=3)
    data.save_to_disk(tmp_path)
    order = data["n"]
    read = read_rows(str(tmp_path))
    assert list(read) == [rows[n] for n in order] and read[7:9] == [rows[n] for n in order[7:9]]
    assert order != sorted(order)


@pytest.mark.parametrize("keep", ["nothing", "half", "all but the end"])
def test_a_saved_file_that_was_cut_is_named(tmp_path, keep):
    """Also one that ends where a batch of rows does: `datasets` reads the others as if they were all."""
    datasets.Dataset.from_list([{"n": i} for i in range(3000)]).save_to_disk(tmp_path, num_shards=3)
    file = tmp_path / "data-00001-of-00003.arrow"
    whole = file.read_bytes()
    file.write_bytes(whole[: {"nothing": 0, "half": len(whole) // 2, "all but the end": len(whole) - 8}[keep]])
    (tmp_path / "cache-0123.arrow").write_bytes(b"of another program")
    with pytest.raises(
        DataError, match=rf"data.train='{tmp_path}': expected whole Arrow files, {file.name} is cut off"
    ):
        read_rows(str(tmp_path))
    file.write_bytes(whole)
    assert [row["n"] for row in read_rows(str(tmp_path))] == list(range(3000))


def test_a_saved_row_that_is_no_text_any_more_is_refused(tmp_path):
    datasets.Dataset.from_list([{"prompt": "where the damage is"}]).save_to_disk(tmp_path)
    file = tmp_path / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes().replace(b"damage", b"d\xccmage"))
    with pytest.raises(DataError, match=r"data.train='.*': rows from 1 on cannot be read \('utf-8'"):
        list(read_rows(str(tmp_path)))


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
