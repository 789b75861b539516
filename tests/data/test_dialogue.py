"""Turns through the chat templates of the families, and hostile ones: no token of the engine's is changed or lost
unseen."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.data.dialogue import Dialogue
from aligner.data.tokenizer import load_tokenizer
from aligner.data.tool_calls import read_calls, written
from aligner.environments.tools import _schema
from aligner.errors import ConfigError
from aligner.ops.packing.turns import TAIL, Turn, rows_of
from tests.assets.environments import add
from tests.chat_templates import ENDS, SPECIAL, TEMPLATES, WITHOUT_TOOLS
from tests.data.test_shipped_templates import GEMMA, like_gemma4

TOOLS = [_schema(add)]
SAID = st.text(alphabet='ab é\n<>{}"7', max_size=8)
RESULTS = st.text(alphabet="abc 7", min_size=1, max_size=6)


@pytest.fixture(scope="session")
def dialogue(make_folder):
    """dialogue(name of a template) -> its Dialogue."""
    made = {}

    def make(name):
        if name not in made:
            template, end = (TEMPLATES | WITHOUT_TOOLS)[name], ENDS.get(name, "<|im_end|>")
            made[name] = Dialogue(load_tokenizer(make_folder(template, extra=SPECIAL, eos=end)), TOOLS)
        return made[name]

    return make


@st.composite
def answers(draw):
    """What a model says before its calls, a thought perhaps, and how it spaces the JSON of its call."""
    thought = f"<think>\n{draw(SAID)}\n</think>\n\n" if draw(st.booleans()) else ""
    call = json.dumps({"a": draw(st.integers(0, 99)), "b": 1}, indent=draw(st.sampled_from([None, 1])))
    return thought + draw(SAID), call, draw(RESULTS), draw(st.booleans())


def tokens_of(tokenizer, text, whole):
    """Of the whole text, or of its characters: tokens that a tokenizer would never make of it."""
    if whole:
        return tokenizer.encode(text, add_special_tokens=False)
    return [t for c in text for t in tokenizer.encode(c, add_special_tokens=False)]


def play(dialogue, name, turns):
    """Turns of given answers, and the prompt that each one's rendering makes."""
    tokenizer = dialogue.tokenizer
    messages = [{"role": "user", "content": "what is it"}]
    prompt, results = dialogue.begin(messages), []
    for answer, arguments, result, whole in turns:
        call = written(dialogue.calls, "add", {}).replace("{}", arguments)
        answer = "" if dialogue.calls == "llama3" else answer  # a call is all of an answer there
        if prompt.text.endswith("<think>\n"):  # this template refuses an answer without thoughts
            answer = "so\n</think>\n\n" + answer.rpartition("</think>")[2]
        end = tokenizer.convert_tokens_to_ids(ENDS.get(name, "<|im_end|>"))
        mark = "[TOOL_CALLS]"
        text = answer.replace(mark, "") + call
        head, _, tail = text.partition(mark)
        output = tokens_of(tokenizer, head, whole)
        if mark in text:
            output += [tokenizer.convert_tokens_to_ids(mark), *tokens_of(tokenizer, tail, whole)]
        output.append(end)
        results.append(Turn(prompt.tokens, output, [-1.0] * len(output)))
        beside, calls = read_calls(tokenizer.decode(output[:-1], skip_special_tokens=False), dialogue.calls)
        assert [(c.name, c.arguments) for c in calls] == [("add", json.loads(arguments))]
        messages += [dialogue.answer_message(text, beside, calls), dialogue.result(calls[0], 0, result)]
        prompt = dialogue.follow(prompt, output, messages)
    return [*results, Turn(prompt.tokens, [], [])], messages


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(st.lists(answers(), min_size=1, max_size=3))
def test_every_prompt_is_the_templates_text_and_every_row_what_the_engine_saw(dialogue, name, turns):
    one = dialogue(name)
    actual, messages = play(one, name, turns)
    tokenizer = one.tokenizer
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, tools=TOOLS)
    assert tokenizer.decode(actual[-1].prompt) == text  # whatever tokens stand for it
    rows = rows_of(actual)
    assert rows[-1].tokens == list(actual[-1].prompt)
    if name in ("qwen2", "llama3"):  # what these render stays: no token is lost, none is rendered anew
        assert len(rows) == 1 and sum(rows[0].made) == sum(len(turn.output) for turn in actual)
    for turn in actual[:-1]:  # each answer is in a row, whole but for less than a tail
        kept = max(_held(row, turn) for row in rows)
        assert len(turn.output) - kept < min(TAIL, len(turn.output))


def _held(row, turn):
    """How much of an answer a row holds as generated, where it stands behind its prompt."""
    start = len(turn.prompt)
    if row.tokens[:start] != list(turn.prompt):
        return -1
    answer = row.tokens[start : start + len(turn.output)]
    return next(
        (i for i, t in enumerate(turn.output) if answer[i : i + 1] != [t] or not row.made[start + i]), len(answer)
    )


def test_templates_that_change_an_answer_make_another_row(dialogue):
    kinds = {}
    for name in ("qwen2", "trims", "shouts", "forgets", "qwen3"):
        turns = [("<think>\nso\n</think>\n\nab ", '{"a": 1, "b": 1}', "c", True)] * 2
        kinds[name] = len(rows_of(play(dialogue(name), name, turns)[0][:2]))
    assert kinds == {"qwen2": 1, "trims": 1, "shouts": 2, "forgets": 1, "qwen3": 1}
    assert len(rows_of(play(dialogue("forgets"), "forgets", turns)[0])) == 2  # the question itself has gone


def test_a_template_that_refuses_an_answer_ends_the_conversation(dialogue):
    one = dialogue("qwen3_thinking for training")
    messages = [{"role": "user", "content": "what is it"}]
    prompt = one.begin(messages)
    answer = [*messages, {"role": "assistant", "content": "no thoughts"}, {"role": "tool", "content": "7"}]
    assert one.follow(prompt, tokens_of(one.tokenizer, "no thoughts<|im_end|>", True), answer) is None


@pytest.mark.parametrize("thinks", [True, False])
def test_gemma_4_keeps_its_thoughts_and_tokens_through_calls(make_folder, thinks):
    """By its own template: the channel of thoughts that it opens behind a result is continued."""
    tokenizer = load_tokenizer(make_folder(like_gemma4(), extra=GEMMA, eos="<turn|>"))
    one = Dialogue(tokenizer, TOOLS, {"enable_thinking": thinks})
    assert (one.calls, one.verbatim) == ("gemma4", False)
    messages = [{"role": "user", "content": "what is it"}]
    prompt = one.begin(messages)
    for number in range(3):
        opened = prompt.text.endswith("<|channel>thought\n")
        assert opened == (thinks and number > 0)
        thought = ("" if opened else "<|channel>thought\n") + f"so {number}\n<channel|>" if thinks else ""
        text = f"{thought}<|tool_call>call:add{{a:{number},b:2}}<tool_call|>"
        output = tokenizer.encode(text + "<|tool_response>", add_special_tokens=False)
        beside, calls = one.read(text)
        assert [(call.name, call.arguments) for call in calls] == [("add", {"a": number, "b": 2})]
        messages += [one.answer_message(text, beside, calls, number), one.result(calls[0], number, "7")]
        before, prompt = prompt, one.follow(prompt, output, messages)
        assert prompt.tokens[: len(before.tokens) + len(output)] == (*before.tokens, *output)
        assert one.decode(prompt.tokens) == prompt.text


@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen2"])
def test_the_format_of_calls_is_told_from_the_template(dialogue, name):
    assert dialogue(name).calls == {"qwen2": "hermes"}.get(name, name)
    assert dialogue(name).verbatim == (name != "mistral")


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_a_template_without_tools_is_refused(dialogue, name):
    with pytest.raises(ConfigError, match=r"model\.tokenizer=.*shows the tools: this one leaves out add"):
        dialogue(name)


@pytest.mark.parametrize(
    "kind, text, beside, names",
    [
        ("hermes", 'so <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "so", ["f"]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": "{}"}', "", ["f", "g"]),
        ("hermes", "no call", "no call", []),
        ("llama3", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", ["f", "g"]),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}', "", ["f"]),
        ("llama3", "{not a call}", "{not a call}", []),
        (
            "mistral",
            'so [TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
            "so",
            ["f", "g"],
        ),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"a": 2}', "", ["f", "g"]),
    ],
)
def test_calls_of_a_format(kind, text, beside, names):
    found, calls = read_calls(text, kind)
    assert (found, [call.name for call in calls]) == (beside, names) and not any(call.fault for call in calls)


@pytest.mark.parametrize(
    "kind, text",
    [
        ("hermes", "<tool_call>{oops</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": 7}</tool_call>'),
        ("hermes", r'<tool_call>{"name": "f", "arguments": {"a": "\ud800"}}</tool_call>'),
        ("llama3", '{"name": "f", "parameters": '),
        ("mistral", "[TOOL_CALLS]f[ARGS]{oops"),
        ("mistral", "[TOOL_CALLS][7]"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(kind, text):
    ((call,),) = (read_calls(text, kind)[1],)
    assert call.fault and not call.name


@given(st.text(alphabet='ab{}[]":,;\\ <|>/toolcall_TOOLCALLS', max_size=60))
def test_no_text_breaks_a_reader(text):
    for kind in ("hermes", "llama3", "mistral"):
        for head in ("", "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>"):
            read_calls(head + text, kind)
