import datetime
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aligner.config.sections.data import DataConfig
from aligner.data.dataset import SftDataset
from aligner.data.formats import prompt_rows, sft_rows
from aligner.data.messages import ROLES, read_messages, read_tools
from aligner.data.readers import read_rows
from aligner.errors import DataError

USER = {"role": "user", "content": "q"}
GOOD = {"role": "assistant", "content": "good"}


def read(*messages):
    return read_messages(list(messages), "messages", "f, row 3")


def calling(*calls, **more):
    return {"role": "assistant", "content": "", "tool_calls": list(calls)} | more


def call(arguments, name="add", **more):
    return {"type": "function", "id": "x", "function": {"name": name, "arguments": arguments}} | more


@pytest.mark.parametrize("role", ROLES)
def test_known_roles_are_read(role):
    assert read({"role": role, "content": "x"}) == [{"role": role, "content": "x"}]


@pytest.mark.parametrize(
    "role, near",
    [
        *(("asistant", "assistant"), ("Assistant", "assistant"), ("USER", "user"), ("assistant ", "assistant")),
        *(("sytem", "system"), ("developper", "developer"), ("human", "user"), ("gpt", "assistant"), ("tools", "tool")),
    ],
)
def test_an_unknown_role_names_the_nearest(role, near):
    with pytest.raises(DataError) as caught:
        read(USER, {"role": role, "content": "x"})
    text = str(caught.value)
    assert text.startswith(f"f, row 3, messages[1].role={role!r}: expected one of system, developer, user, assistant,")
    assert text.endswith(f"Did you mean {near!r}?")


def test_a_role_that_is_near_to_none():
    with pytest.raises(DataError, match=r"row 3, messages\[0\]\.role='xyz': expected one of .*\(data\.columns\)$"):
        read({"role": "xyz", "content": "x"})


@pytest.mark.parametrize(
    "key, near",
    [
        *(("tool_call", "tool_calls"), ("toolcalls", "tool_calls"), ("reasoning_contents", "reasoning_content")),
        *(("Tool_calls", "tool_calls"), ("tool_callid", "tool_call_id")),
    ],
)
def test_a_key_that_is_nearly_one_is_refused(key, near):
    with pytest.raises(DataError, match=rf"row 3, messages\[0\]: found the key '{key}'.*Did you mean '{near}'"):
        read(GOOD | {key: "x"})


def test_other_keys_are_the_templates_business():
    """As in WildChat; `context` is near to `content`, which is there."""
    settings = {"language": "English", "toxic": False, "turn_identifier": 7, "context": "c", "id": "1", "weight": 1}
    assert read(GOOD | settings) == [GOOD | settings]
    with pytest.raises(DataError, match=r"Did you mean 'content'"):
        read({"role": "user", "context": "c"})


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("arguments", [{"a": 2}, {}, {"a": {"b": [1, None, "é"]}, "n": None}, {"x": '{"y": 1}'}])
def test_arguments_are_a_mapping_whether_text_or_not(arguments, text):
    value = json.dumps(arguments) if text else arguments
    assert read(calling(call(value), {"name": "f", "arguments": value})) == [
        calling(call(arguments), {"name": "f", "arguments": arguments})
    ]


def test_calls_in_their_other_shapes():
    wanted = [calling({"name": "f", "arguments": {}})]
    for empty in ({}, {"arguments": ""}, {"arguments": None}, {"arguments": " "}, {"arguments": "null"}):
        assert read(calling({"name": "f"} | empty)) == wanted
    assert read(calling({"name": "f", "parameters": {}})) == wanted
    assert read({"role": "assistant", "tool_calls": json.dumps([{"name": "f", "arguments": "{}"}])}) == wanted
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert read(old) == [calling(call)]
    for none in ([], None, ""):
        assert read(GOOD | {"tool_calls": none}) == [GOOD]


@pytest.mark.parametrize(
    "calls, message",
    [
        ([call("{'a': 1}")], r"tool_calls\[0\], arguments of add:1: not valid JSON"),
        ([call('{"a": 1, "a": 2}')], "the key 'a' comes twice"),
        ([call("[1]")], r"tool_calls\[0\], arguments of add=.*expected a JSON object, or its JSON text"),
        ([call('"{}"')], r"tool_calls\[0\], arguments of add=.*expected a JSON object"),
        ([call({"d": datetime.date(2026, 1, 2)})], r"tool_calls\[0\], .* of add: expected values of JSON types .*date"),
        ([{"function": "add", "arguments": {}}], r"tool_calls\[0\]=.*expected a call"),
        (["add"], r"tool_calls\[0\]='add': expected a call"),
        ({"name": "add"}, r"tool_calls=.*expected a list of calls"),
        ("[", r"tool_calls:1: not valid JSON"),
    ],
)
def test_calls_that_are_none_are_refused_by_their_row(calls, message):
    with pytest.raises(DataError, match=rf"^f, row 3, messages\[0\]\.{message}" if "twice" not in message else message):
        read({"role": "assistant", "content": "", "tool_calls": calls})


def test_thoughts_are_texts():
    assert read(GOOD | {"reasoning_content": None, "thinking": "t"}) == [GOOD | {"thinking": "t"}]
    with pytest.raises(DataError, match=r"messages\[0\]\.reasoning_content=.*expected a string"):
        read(GOOD | {"reasoning_content": ["t"]})


def test_tools_in_json_text_whole_or_one_by_one():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
    for value in (tools, json.dumps(tools), [json.dumps(tool) for tool in tools]):
        assert read_tools({"tools": value}, [USER], "r") == tools
    with pytest.raises(DataError, match=r"r, tools: expected values of JSON types"):
        read_tools({"tools": [{"a": b"x"}]}, [USER], "r")


def test_rows_that_train_nothing_are_named_by_file_row_and_roles(tmp_path, chatml):
    rows = [{"messages": [USER, GOOD]}, {"messages": [USER, USER]}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError) as caught:
        SftDataset(sft_rows(read_rows(str(tmp_path / "x.jsonl")), DataConfig()), chatml, DataConfig())
    expected = "x.jsonl, row 2: expected a message of role assistant in `messages`, to be learned, found user, user"
    assert str(caught.value).endswith(expected)
    assert len(SftDataset(sft_rows(rows, data := DataConfig(loss_on="all")), chatml, data)) == 2
    with pytest.raises(DataError, match=r"row 1: expected a message of role assistant in `completion`"):
        sft_rows([{"prompt": [USER], "completion": [USER]}], DataConfig())


CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_tokens_are_the_same_of_every_reader_and_form_of_arguments(tmp_path, make_folder):
    """JSONL with mappings is the truth; columns that only another row has come from Arrow."""
    from aligner.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(make_folder(CALLS))

    def row(name, text, **arguments):
        turn = {"role": "assistant", "tool_calls": [call(json.dumps(arguments) if text else arguments, name)]}
        schema = {"type": "object", "properties": {key: {"type": "string"} for key in arguments}}
        tools = [{"type": "function", "function": {"name": name, "parameters": schema}}]
        return {"messages": [USER, turn, {"role": "tool", "content": "5"}, GOOD], "tools": tools}

    results = []
    for text in (False, True):
        rows = [row("add", text, a="2", b="3"), row("look", text, city="Rome")]
        (tmp_path / "x.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        (tmp_path / "x.json").write_text(json.dumps(rows))
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / f"saved{text}")
        for name in ("x.jsonl", "x.json", "x.parquet", f"saved{text}"):
            typed = sft_rows(read_rows(str(tmp_path / name)), DataConfig())
            results.append(
                [(i.tokens.tolist(), i.loss_mask.tolist()) for i in SftDataset(typed, tokenizer, DataConfig())]
            )
            prompts = prompt_rows(read_rows(str(tmp_path / name)), DataConfig())
            assert [p.prompt[1]["tool_calls"][0]["function"]["arguments"] for p in prompts] == [
                {"a": "2", "b": "3"},
                {"city": "Rome"},
            ]
    assert results == results[:1] * 8
    assert "null" not in tokenizer.decode(results[0][0][0]) and '{"a": "2", "b": "3"}' in tokenizer.decode(
        results[0][0][0]
    )


def test_turns_of_from_and_value_are_told_the_format_that_reads_them(tmp_path):
    """By a hint that holds."""
    rows = [{"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}]
    with pytest.raises(DataError, match=r"data.format=sharegpt 'data.columns=\{conversations: messages\}'"):
        sft_rows(rows, DataConfig())
    (row,) = sft_rows(rows, DataConfig(format="sharegpt", columns={"conversations": "messages"}))
    assert row.messages == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
