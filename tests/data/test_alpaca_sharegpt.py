import json

import pytest

from aligner.config.sections.data import DataConfig
from aligner.data.dataset import PreferenceDataset, SftDataset
from aligner.data.formats import preference_rows, prompt_rows, scored_rows, sft_rows
from aligner.errors import DataError

ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}
TURNS = [("human", "q"), ("gpt", "a"), ("human", "r"), ("gpt", "b")]


def user(text):
    return {"role": "user", "content": text}


def model(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def talk(*turns, **columns):
    return {"conversations": [{"from": who, "value": text} for who, text in turns], **columns}


def test_alpaca_is_a_conversation_and_history_is_learned_too():
    assert sft_rows([ALPACA], DataConfig())[0].messages == [user("Add.\n1 2"), model("3")]
    row = {**ALPACA, "input": "", "system": "Short.", "history": [["hi", "ho"]]}
    rows = sft_rows([row], DataConfig())
    assert rows[0].messages == [system("Short."), user("hi"), model("ho"), user("Add."), model("3")]
    line = "format alpaca, detected from the columns (data.format)"
    assert rows.notes == [line] and not sft_rows([row], DataConfig(format="alpaca")).notes


def test_alpaca_for_the_other_stages():
    row = {"instruction": "Add.", "chosen": "3", "rejected": "4", "kto_tag": True}
    rows = preference_rows([row], DataConfig())[0]
    assert (rows.prompt, rows.chosen, rows.rejected) == ([user("Add.")], [model("3")], [model("4")])
    prompt = prompt_rows([ALPACA], DataConfig())[0]
    assert prompt.prompt == [user("Add.\n1 2")] and prompt.fields["output"] == "3"
    scored = scored_rows([{**ALPACA, "help": 2}], DataConfig(), ["help"])[0]
    assert (scored.prompt, scored.completion, scored.scores) == ([user("Add.\n1 2")], [model("3")], (2.0,))


def test_columns_of_ours_come_first():
    """What was read as a prompt and a completion before is read so still."""
    data = DataConfig(columns={"completion": "output"}, prompt_template="{instruction}\n{input}\n")
    assert sft_rows([ALPACA], data)[0].prompt == "Add.\n1 2\n"
    whole = {"instruction": "x", "chosen": [user("q"), model("a")], "rejected": [user("q"), model("b")]}
    assert preference_rows([whole], DataConfig())[0].prompt == [user("q")]
    assert sft_rows([talk(*TURNS, messages=[user("q"), model("a")])], DataConfig())[0].messages == [
        user("q"),
        model("a"),
    ]


def test_sharegpt_for_each_stage():
    messages = [user("q"), model("a"), user("r"), model("b")]
    rows = sft_rows([talk(*TURNS, system="S")], DataConfig())
    assert rows[0].messages == [system("S"), *messages] and "sharegpt" in rows.notes[0]
    assert sft_rows([talk(("system", "S"), *TURNS)], DataConfig())[0].messages == [system("S"), *messages]
    assert prompt_rows([talk(*TURNS)], DataConfig())[0].prompt == messages[:3]
    pair = talk(*TURNS[:3], chosen={"from": "gpt", "value": "b"}, rejected={"from": "gpt", "value": "c"})
    row = preference_rows([pair], DataConfig())[0]
    assert (row.prompt, row.chosen, row.rejected) == (messages[:3], [model("b")], [model("c")])
    assert prompt_rows([pair], DataConfig())[0].prompt == messages[:3]
    scored = scored_rows([talk(*TURNS, help=1)], DataConfig(), ["help"])[0]
    assert (scored.prompt, scored.completion) == (messages[:3], messages[3:])


def test_sharegpt_with_tools():
    bare = [{"name": "add", "parameters": {"type": "object"}}]
    call = {"name": "add", "arguments": {"a": 1}}
    row = talk(("human", "q"), ("function_call", json.dumps(call)), ("observation", "3"), ("gpt", "3!"))
    wanted = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    for tools in (bare, json.dumps(bare), [{"type": "function", "function": bare[0]}]):
        rows = sft_rows([row | {"tools": tools}], DataConfig())[0]
        assert rows.messages == [user("q"), wanted, {"role": "tool", "content": "3"}, model("3!")]
        assert rows.tools == [{"type": "function", "function": bare[0]}]
    assert sft_rows([row | {"tools": ""}], DataConfig())[0].tools is None
    with pytest.raises(DataError, match=r"row 1: expected the column `tools` to be a list"):
        sft_rows([row | {"tools": "a hammer"}], DataConfig())


@pytest.mark.parametrize(
    "row, message",
    [
        (talk(), r"row 1: conversations='\[\]': expected a list of at least one"),
        ({"conversations": "text"}, r"conversations='text': expected a list"),
        (talk(("system", "S")), r"nothing but the system message"),
        (talk(("gpt", "a"), ("human", "q")), r"conversations\[0\]: from='gpt': expected human or observation here"),
        (talk(("human", "q"), ("human", "r")), r"conversations\[1\]: from='human': expected gpt or function_call here"),
        (talk(("system", "S"), ("gpt", "a")), r"conversations\[1\]: from='gpt'"),
        (talk(("human", "q"), ("bard", "a")), r"conversations\[1\]: from='bard'.*known roles: system, human"),
        (talk(*TURNS, ("system", "S")), r"conversations\[4\]: from='system'"),
        (talk(("human", "q"), ("gpt", None)), r"conversations\[1\]: value='None': expected a string"),
        (talk(("human", "q"), ("function_call", "{")), r"expected the JSON of a function call"),
        (talk(("human", "q"), ("function_call", "[7]")), r"of a function call, \{name, arguments\}"),
        (talk(*TURNS[:3]), r"expected `conversations` to end with an answer of the model"),
        ({"conversations": ["text"]}, r"conversations\[0\]: expected \{from, value\}, found 'text'"),
        (talk(("system", "S"), *TURNS, system="T"), r"system='T': expected none with"),
        ({**ALPACA, "input": 7}, r"input='7': expected a string"),
        ({**ALPACA, "history": [["q"]]}, r"history\[0\]=.*expected a \[question, answer\] pair"),
        ({**ALPACA, "history": "q"}, r"history='q': expected a list"),
    ],
)
def test_rows_that_do_not_fit(row, message):
    good = talk(*TURNS) if "conversations" in row else ALPACA
    with pytest.raises(DataError, match=message.replace("row 1", "row 2")) as caught:
        list(sft_rows([good, row], DataConfig()))
    assert str(caught.value).startswith("row 2") and "\n" not in str(caught.value)


def test_a_pair_that_is_answered_already():
    pair = talk(*TURNS, chosen={"from": "gpt", "value": "b"}, rejected={"from": "human", "value": "c"})
    with pytest.raises(DataError, match=r"expected `conversations` to end with a turn of the user"):
        preference_rows([pair], DataConfig())
    pair["conversations"] = pair["conversations"][:3]
    with pytest.raises(DataError, match=r"rejected: from='human': expected gpt or function_call"):
        preference_rows([pair], DataConfig())


def test_the_log_names_what_was_recognised(chatml):
    line = "format sharegpt, detected from the columns (data.format)"
    assert line in str(SftDataset(sft_rows([talk(*TURNS)], DataConfig()), chatml, DataConfig()).report)
    pair = {"instruction": "Add.", "chosen": "3", "rejected": "4"}
    report = PreferenceDataset(preference_rows([pair], DataConfig()), chatml, DataConfig()).report
    assert line.replace("sharegpt", "alpaca") in str(report)


def test_both_train_what_messages_train(chatml):
    plain = SftDataset(sft_rows([{"messages": [user("q"), model("a")]}], DataConfig()), chatml, DataConfig())[0]
    for row in (talk(*TURNS[:2]), {"instruction": "q", "output": "a"}):
        item = SftDataset(sft_rows([row], DataConfig()), chatml, DataConfig())[0]
        assert item.tokens.tolist() == plain.tokens.tolist() and item.loss_mask.tolist() == plain.loss_mask.tolist()


def test_conversations_of_roles_are_messages():
    messages = [user("q"), model("a"), {"role": "tool", "content": "7"}, model("b")]
    row = {"conversations": messages}
    assert sft_rows([row], DataConfig())[0].messages == messages
    assert sft_rows([row | {"system": "S"}], DataConfig())[0].messages == [system("S"), *messages]
    assert prompt_rows([row], DataConfig())[0].prompt == messages[:3]
    pair = {"conversations": messages[:3], "chosen": model("b"), "rejected": [model("c")]}
    (rows,) = preference_rows([pair], DataConfig())
    assert (rows.prompt, rows.chosen, rows.rejected) == (messages[:3], [model("b")], [model("c")])
    with pytest.raises(DataError, match=r"row 1, conversations\[1\]\.role='asistant': .*Did you mean 'assistant'"):
        sft_rows([{"conversations": [user("q"), {"role": "asistant", "content": "a"}]}], DataConfig())
    for first in ([], [system("s")]):
        (rows,) = sft_rows([{"conversations": [*first, *messages], "system": "s"}], DataConfig())
        assert rows.messages == [system("s"), *messages]
    with pytest.raises(DataError, match=r"row 1: system='s': expected none with .* another system message"):
        sft_rows([{"conversations": [system("t"), *messages], "system": "s"}], DataConfig())
    with pytest.raises(DataError, match=r"row 1: expected messages of `conversations` with the strings `role`"):
        sft_rows([{"conversations": [user("q"), {"from": "gpt", "value": "a"}]}], DataConfig())
