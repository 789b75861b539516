import json

import pytest

from aligner.config.freeze import outside_code
from aligner.config.resolve import compose
from aligner.config.sections.data import DataConfig
from aligner.data.formats import preference_rows, prompt_rows, scored_rows, sft_rows, unpaired_rows
from aligner.data.readers import read_rows
from aligner.errors import ConfigError, DataError

USER = [{"role": "user", "content": "q"}]
GOOD = [{"role": "assistant", "content": "good"}]
BAD = [{"role": "assistant", "content": "bad"}]


def test_sft_formats_are_told_apart_by_columns():
    (row,) = sft_rows([{"messages": USER + GOOD, "id": 3}], DataConfig())
    assert row.messages == USER + GOOD
    (row,) = sft_rows([{"prompt": "q", "completion": "a"}], DataConfig())
    assert (row.messages, row.prompt, row.completion) == (None, "q", "a")
    (row,) = sft_rows([{"prompt": USER, "completion": "good"}], DataConfig())
    assert (row.prompt, row.completion) == (USER, GOOD)


def test_format_can_be_forced():
    both = {"messages": USER + GOOD, "prompt": "q", "completion": "a"}
    assert sft_rows([both], DataConfig())[0].messages is not None
    assert sft_rows([both], DataConfig(format="prompt_completion"))[0].prompt == "q"
    with pytest.raises(
        DataError, match=r"data.format='preference': expected messages, prompt_completion or sharegpt or alpaca"
    ):
        sft_rows([both], DataConfig(format="preference"))


OWN = """
def pairs(row):
    return {"prompt": row["q"], "chosen": row["a"][0], "rejected": row["a"][1], "margin": row.pop("gap")}

def broken(row):
    return row["absent"]

def other(row):
    return [row]
"""


def test_a_function_of_a_users_file_makes_the_columns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_format.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)  # as an installed package's module
    raw = [{"q": "2+2", "a": ["4", "5"], "gap": 2}, {"q": "1+1", "a": ["2", "3"], "gap": 1}]
    for path in ("own_format.py:pairs", "own_format:pairs"):
        cfg = compose(["stage=dpo", f"data.format={path}"])
        rows = preference_rows(raw, cfg.data, margin=True)
        assert [(row.prompt, row.chosen, row.rejected, row.margin) for row in rows] == [
            ("2+2", "4", "5", 2.0),
            ("1+1", "2", "3", 1.0),
        ]
        assert [row.prompt for row in prompt_rows(raw, cfg.data)[:]] == ["2+2", "1+1"]
        assert raw[0]["gap"] == 2  # rows are read again in each epoch
    source = compose(["stage=dpo", "data.sources=[{path: x.jsonl, format: own_format.py:pairs}]"])
    assert outside_code(source) == {"data.format=own_format.py:pairs": OWN.encode()}
    for name, message in {
        "broken": "row 1: data.format='own_format.py:broken': .* its columns: it raised KeyError: 'absent'",
        "other": "row 1: .* a mapping of columns, not ",
        "absent": "expected a function `absent` in own_format.py, which has pairs, broken, other",
    }.items():
        with pytest.raises(DataError, match=message):
            preference_rows(raw, DataConfig(format=f"own_format.py:{name}"))
    with pytest.raises(ConfigError, match=r"data.format='pairs': expected one of auto.*, or module:function"):
        compose(["stage=dpo", "data.format=pairs"])


def test_columns_rename_and_templates_build():
    rows = [{"question": "2+2", "answer": "4"}]
    (row,) = sft_rows(rows, DataConfig(columns={"prompt": "question", "completion": "answer"}))
    assert (row.prompt, row.completion) == ("2+2", "4")
    data = DataConfig(prompt_template="Q: {question}\nA:", completion_template=" {answer}")
    (row,) = sft_rows(rows, data)
    assert (row.prompt, row.completion) == ("Q: 2+2\nA:", " 4")
    (prompt,) = prompt_rows(rows, data)
    assert prompt.prompt == "Q: 2+2\nA:" and prompt.fields["answer"] == "4" and "prompt" not in prompt.fields


def test_preference_with_and_without_prompt_agree():
    apart = {"prompt": USER, "chosen": GOOD, "rejected": BAD, "margin": 2}
    whole = {"chosen": USER + GOOD, "rejected": USER + BAD}
    a, b = [preference_rows([row], DataConfig())[0] for row in (apart, whole)]
    assert (a.prompt, a.chosen, a.rejected) == (b.prompt, b.chosen, b.rejected) == (USER, GOOD, BAD)
    assert a.margin == 2.0 and b.margin is None
    (plain,) = preference_rows([{"chosen": "x", "rejected": "y"}], DataConfig())
    assert (plain.prompt, plain.chosen, plain.rejected) == ("", "x", "y")


def test_identical_conversations_keep_their_last_message():
    (row,) = preference_rows([{"chosen": USER + GOOD, "rejected": USER + GOOD}], DataConfig())
    assert row.chosen == row.rejected == GOOD


def test_margin_must_be_there_when_the_loss_uses_it():
    rows = [
        {"prompt": "p", "chosen": "a", "rejected": "b", "margin": 1},
        {"prompt": "p", "chosen": "a", "rejected": "b"},
    ]
    assert [r.margin for r in preference_rows(rows, DataConfig())] == [1.0, None]
    with pytest.raises(DataError, match=r"row 2: expected a finite number in the column `margin`"):
        list(preference_rows(rows, DataConfig(), margin=True))


def test_scored_rows_and_bad_scores():
    rows = [{"prompt": "p", "completion": "c", "help": 3, "tone": 0.5}]
    assert scored_rows(rows, DataConfig(), ["tone", "help"])[0].scores == (0.5, 3.0)
    for value in (None, "3", float("nan"), True):
        with pytest.raises(DataError, match=r"column `help` .*algorithm.reward_loss.attributes.*found"):
            scored_rows([{**rows[0], "help": value}], DataConfig(), ["help"])


def test_prompts_from_each_format():
    assert prompt_rows([{"prompt": "p", "answer": 4}], DataConfig())[0].fields == {"answer": 4}
    assert prompt_rows([{"messages": USER + GOOD}], DataConfig())[0].prompt == USER
    assert prompt_rows([{"prompt": "p", "completion": "c"}], DataConfig(format="prompt_completion"))[0].prompt == "p"
    with pytest.raises(DataError, match=r"end with a user turn"):
        prompt_rows([{"prompt": USER + GOOD}], DataConfig())


@pytest.mark.parametrize("read", [sft_rows, preference_rows, prompt_rows, lambda r, d: scored_rows(r, d, ["x"])])
def test_wrong_columns_list_what_was_found_and_expected(tmp_path, read):
    (tmp_path / "x.jsonl").write_text(json.dumps({"question": "q", "reply": "r"}) + "\n")
    with pytest.raises(
        DataError, match=r"x\.jsonl, row 1: expected the columns \{.*found question, reply.*data\.columns"
    ):
        read(read_rows(str(tmp_path / "x.jsonl")), DataConfig())


def test_a_later_row_that_lacks_a_column_is_named():
    rows = [{"prompt": "p", "completion": "c"}, {"prompt": "p", "completion": None}]
    with pytest.raises(DataError, match=r"row 2: .*found prompt, completion \(null\); missing: completion"):
        list(sft_rows(rows, DataConfig()))


@pytest.mark.parametrize(
    "data, message",
    [
        ({"columns": {"prompt": "ask"}}, "data.columns.prompt='ask': expected one of the columns question, answer"),
        ({"prompt_template": "{ask}"}, "data.prompt_template=.*over the columns question, answer .no column `ask`"),
        ({"prompt_template": "{"}, "data.prompt_template=.*Single"),
        ({"completion_template": "{}"}, r"data.completion_template=.*braces without a column.*\\boxed\{\{\}\}"),
    ],
)
def test_bad_renames_and_templates(data, message):
    with pytest.raises(DataError, match=message):
        sft_rows([{"question": "q", "answer": "a"}], DataConfig(**data))


@pytest.mark.parametrize("messages", ["text", [], [{"from": "human", "value": "q"}], [{"role": "user"}], ["q"], 7])
def test_messages_that_are_none(messages):
    with pytest.raises(DataError, match=r"row 1: expected .*messages.*data\.columns"):
        sft_rows([{"messages": messages}], DataConfig())


def test_pairs_of_a_text_and_a_conversation_are_refused():
    with pytest.raises(DataError, match=r"both strings or both messages"):
        preference_rows([{"chosen": "x", "rejected": BAD}], DataConfig())


def test_nulls_that_parquet_adds_to_messages_are_ignored():
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}, {**GOOD[0], "tool_calls": None}]
    (row,) = sft_rows([{"messages": USER + messages}], DataConfig())
    assert row.messages[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]},
        GOOD[0],
    ]


def test_data_without_rows_is_refused():
    with pytest.raises(DataError, match=r"empty"):
        prompt_rows([], DataConfig())


def test_content_in_parts_is_joined_and_pictures_are_refused():
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]
    (row,) = sft_rows([{"messages": [{"role": "user", "content": parts}, *GOOD]}], DataConfig())
    assert row.messages == [{"role": "user", "content": "What is this?"}, *GOOD]
    parts.append({"type": "image_url", "image_url": {"url": "x"}})
    with pytest.raises(DataError, match=r"row 1: expected a message of `messages` .*found the part.*image"):
        sft_rows([{"messages": [{"role": "user", "content": parts}, *GOOD]}], DataConfig())


@pytest.mark.parametrize("kind", ["image", "image_url", "video", "audio", "input_audio"])
@pytest.mark.parametrize(
    "read, column, others",
    [
        (sft_rows, "messages", {}),
        (sft_rows, "prompt", {"completion": GOOD}),
        (preference_rows, "chosen", {"rejected": USER + GOOD}),
        (unpaired_rows, "prompt", {"completion": GOOD, "label": True}),
        (prompt_rows, "prompt", {}),
    ],
)
def test_media_are_refused_by_file_and_row(tmp_path, read, column, others, kind):
    chat = lambda parts: [{"role": "user", "content": [{"type": "text", "text": "q"}, *parts]}, *GOOD]  # noqa: E731
    rows = [
        {column: chat(parts)[: 1 if column == "prompt" else 2], **others} for parts in ([], [{"type": kind, kind: "x"}])
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = (
        rf"x.jsonl, row 2: expected a message of `{column}` to have a text .*found the part .*{kind}.*: images, video"
    )
    with pytest.raises(DataError, match=expected):
        list(read(read_rows(str(tmp_path / "x.jsonl")), DataConfig()))


@pytest.mark.parametrize("column", ["image", "images", "videos", "audio"])
def test_a_column_of_media_is_refused_by_file_and_row(tmp_path, column):
    """A text shows them, or the column has them as datasets of Hugging Face do."""
    shown, plain = f"<{column.removesuffix('s')}>Which?", {"messages": USER + GOOD}
    rows = [{"messages": [{"role": "user", "content": shown}, *GOOD], column: ["x.png"]}]
    rows += [{**plain, column: value} for value in ({"bytes": None, "path": "x.png"}, [{"bytes": "x"}])]
    for row in rows:
        (tmp_path / "x.jsonl").write_text(json.dumps(plain) + "\n" + json.dumps(row))
        with pytest.raises(
            DataError, match=rf"x.jsonl, row 2: the column `{column}` has .* data: expected rows of text"
        ):
            list(sft_rows(read_rows(str(tmp_path / "x.jsonl")), DataConfig()))
    for other in ({**rows[0], column: []}, {**plain, column: "python:3.12"}):
        assert sft_rows([other], DataConfig())[0].messages[1:] == GOOD


def test_tools_are_schemas_or_their_json():
    tools = [{"type": "function", "function": {"name": "f"}}]
    for value in (tools, json.dumps(tools)):
        (row,) = sft_rows([{"messages": USER + GOOD, "tools": value}], DataConfig())
        assert row.tools == tools
        (prompt,) = prompt_rows([{"prompt": USER, "tools": value}], DataConfig())
        assert prompt.tools == tools and prompt.fields["tools"] == value
    assert sft_rows([{"messages": USER + GOOD, "tools": None}], DataConfig())[0].tools is None
    assert prompt_rows([{"prompt": "plain", "tools": "a hammer"}], DataConfig())[0].tools is None
    with pytest.raises(DataError, match=r"row 1: expected the column `tools` to be a list of JSON schemas"):
        sft_rows([{"messages": USER + GOOD, "tools": "a hammer"}], DataConfig())


def test_a_row_is_typed_when_it_is_asked_for():
    rows = sft_rows(
        [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}, {"prompt": "e"}], DataConfig()
    )
    assert [row.prompt for row in rows[:2]] == ["a", "c"] and rows[-2].completion == "d" and len(rows) == 3
    with pytest.raises(DataError, match=r"row 3: .*missing: completion"):
        rows[2]
