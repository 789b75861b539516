"""Calls as the families' templates write them, in short faithful copies: what is rendered is read back, and told."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.data.dialogue import Dialogue
from aligner.data.tokenizer import load_tokenizer
from aligner.data.tool_calls import READERS, read_calls, written
from aligner.errors import ConfigError

_EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
_XML = (
    _EACH + "{{ '\n<tool_call>\n<function=' + f.name + '>\n' }}{% for k, v in f.arguments|items %}"
    "{{ '<parameter=' + k + '>\n' }}{{ v | tojson if v is mapping or (v is sequence and v is not string) else "
    "v | string }}{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}"
)
_GLM = (
    _EACH + "{{ '\n<tool_call>' + f.name + '\n' }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v | tojson if v is not string else v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
)
_V3 = (
    "{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}"
    + _EACH
    + "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>'"
    " + f.name + '\n```json\n' + f.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}"
    "{% endif %}"
)
_V31 = _V3.replace("c.type + '<｜tool▁sep｜>' + f.name + '\n```json\n'", "f.name + '<｜tool▁sep｜>'").replace(
    "\n```<", "<"
)
_KIMI = (
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments if c.function.arguments is string else "
    "c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
)
_HARMONY = (
    "{% for c in m.tool_calls[:1] %}{{ ' to=functions.' + c.function.name + '<|channel|>commentary json<|message|>' }}"
    "{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
)
_GEMMA = (
    "{% macro shown(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    "{% elif v is mapping %}{{ '{' }}{% for k, e in v | dictsort %}{{ k }}:{{ shown(e) }}{{ ',' if not loop.last }}"
    "{% endfor %}{{ '}' }}{% elif v is sequence %}[{% for e in v %}{{ shown(e) }}{{ ',' if not loop.last }}"
    "{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
    + _EACH
    + "{{ '<|tool_call>call:' + f.name }}{{ shown(f.arguments) }}<tool_call|>{% endfor %}"
)
_LFM = (
    "{% macro shown(v) %}{% if v is string %}'{{ v | replace('\\\\', '\\\\\\\\') | replace(\"'\", \"\\\\'\") | "
    "replace('\\n', '\\\\n') | replace('\\r', '\\\\r') }}'{% elif v is mapping or v is iterable %}{{ v | tojson }}"
    "{% else %}{{ v | string }}{% endif %}{% endmacro %}<|tool_call_start|>["
    + _EACH
    + "{{ ', ' if not loop.first }}{{ f.name }}({% for k, v in f.arguments|items %}{{ k }}={{ shown(v) }}"
    "{{ ', ' if not loop.last }}{% endfor %}){% endfor %}]<|tool_call_end|>"
)


def _whole(calls):
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'tool' %}{{ m.tool_call_id }}: {% endif %}{{ m.content }}{% if m.tool_calls %}"
        + calls
        + "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


TEMPLATES = {
    "xml": ("qwen3_coder", _whole(_XML)),
    "glm": ("glm45", _whole(_GLM)),
    "v3": ("deepseek", _whole(_V3)),
    "v31": ("deepseek", _whole(_V31)),
    "kimi": ("kimi_k2", _whole(_KIMI)),
    "harmony": ("harmony", _whole(_HARMONY)),
    "gemma": ("gemma4", _whole(_GEMMA)),
    "lfm": ("lfm2", _whole(_LFM)),
}
KINDS = {"text": "string", "count": "integer", "ratio": "number", "on": "boolean", "items": "array", "more": "object"}
PROPERTIES = {name: {"type": kind} for name, kind in KINDS.items()}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "d", "parameters": {
    "type": "object", "properties": PROPERTIES}}}]  # fmt: skip
WORDS = st.lists(
    st.sampled_from(
        [
            *("a", " ", "\n", '"', "'", "</parameter>", "</arg_value>", "é", "7", "{", "true", "\\"),
            *("<｜tool▁call▁end｜>", "<|tool_call_end|>", "<tool_call|>", "\r"),
        ]
    )
)
JSON = st.recursive(st.integers(-9, 9) | st.booleans() | st.text(max_size=4), lambda x: st.lists(x, max_size=2))
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": WORDS.map("".join),
        "count": st.integers(-(10**6), 10**6),
        "ratio": st.floats(-1e6, 1e6).map(lambda x: round(x, 3)),
        "on": st.booleans(),
        "items": st.lists(JSON, max_size=3),
        "more": st.dictionaries(st.text(max_size=3), JSON, max_size=2),
    },
)
PLAIN = ARGUMENTS.filter(lambda them: all(key.isalnum() for key in them.get("more", {})))  # Gemma's writes keys bare


@pytest.fixture(scope="module")
def dialogue(make_folder):
    made = {}

    def make(name):
        if name not in made:
            made[name] = Dialogue(load_tokenizer(make_folder(TEMPLATES[name][1])), TOOLS)
        return made[name]

    return make


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_told_from_the_template(dialogue, name):
    assert dialogue(name).calls == TEMPLATES[name][0]


@pytest.mark.parametrize(
    "before, each, behind",
    [
        ('<|START_ACTION|>[{"tool_name": "', '", "parameters": ', "}]<|END_ACTION|>"),  # Command R7B
        ('<tool_call>[{"name": "', '", "arguments": ', "}]</tool_call>"),
        ("<function=", ">", "</function>"),  # Functionary
        ('<|tool_call|>[{"name": "', '", "arguments": ', "}]<|/tool_call|>"),  # Phi-4
        ("", "\n", ""),  # GLM-4
    ],
)
def test_a_format_that_only_looks_like_a_known_one_is_refused(make_folder, before, each, behind):
    """Its calls would be read as other ones, or as words."""
    call = f"{{{{ {before!r} + c.function.name + {each!r} }}}}{{{{ c.function.arguments | tojson }}}}{behind}"
    template = _whole("{% for c in m.tool_calls %}" + call + "{% endfor %}")
    with pytest.raises(ConfigError, match="in another format"):
        Dialogue(load_tokenizer(make_folder(template)), TOOLS)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_calls_that_a_template_renders_are_read_back(dialogue, name, data):
    several = data.draw(st.lists(PLAIN if name == "gemma" else ARGUMENTS, min_size=1, max_size=3))
    one, several = dialogue(name), several[:1] if name == "harmony" else several
    functions = [{"name": "add", "arguments": arguments} for arguments in several]
    calls = [{"id": f"x{i}", "type": "function", "function": function} for i, function in enumerate(functions)]
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    text = one._render(chat)
    answer = text.partition("assistant\n")[2].rpartition("<|im_end|>")[0]
    actual = one.read(answer)[1]
    assert [(c.name, c.arguments) for c in actual] == [("add", arguments) for arguments in several]


@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=40, deadline=None)
@given(arguments=ARGUMENTS)
def test_a_call_that_is_written_is_read(kind, arguments):
    (call,) = read_calls(written(kind, "add", arguments), kind, TOOLS)[1]
    assert (call.name, call.arguments) == ("add", arguments)


@pytest.mark.parametrize("kind", READERS)
@given(st.text(alphabet='ab{}[]":,;\\ <|>/=\n', max_size=40))
def test_no_text_breaks_a_reader(kind, text):
    for mark in ("", "<tool_call>", "<tool_call><function=f>", "<tool_call>f<arg_key>", "<｜tool▁call▁begin｜>",
                 "<|tool_call_begin|>", "<|channel|>commentary to=functions.f <|message|>",
                 "<|tool_call>call:f{a:", "<|tool_call_start|>[f(a="):  # fmt: skip
        read_calls(mark + text, kind)


@pytest.mark.parametrize(
    "kind, text",
    [
        ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=f>\nso</function>\n</tool_call>"),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1\n</tool_call>"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{oops<｜tool▁call▁end｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"),
        ("hermes", '<tool_call>\n{"name": "f", "argumnts": {"a": 1}}\n</tool_call>'),
        ("llama3", '{"name": "f", "params": {}}'),
        ("qwen3_coder", "<function=f><parameter=a>\n1\n</parameter><parameter=a>\n2\n</parameter></function>"),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<argval>1</arg_value>\n</tool_call>"),
        (
            "glm45",
            "<tool_call>f\n<arg_key>a</key>\n<arg_value>1</arg_value><arg_key>b</arg_key><arg_value>1</arg_value>",
        ),
        (
            "glm45",
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<ag_key>b</arg_key>\n<arg_value>1</arg_value>",
        ),
        ("glm45", "<tool_call>ad"),
        ("qwen3_coder", "<tool_call>\n<function=ad"),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>[1]<|tool_call_end|>"),
        ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{oops"),
        ("gemma4", "<|tool_call>call:f{a:it}<tool_call|>"),
        ("gemma4", "<|tool_call>call:f{a:1,a:2}<tool_call|>"),
        ("gemma4", "<|tool_call>call:f{a:1}, I think<tool_call|>"),
        ("gemma4", '<|tool_call>call:f{a:<|"|>it}<tool_call|>'),
        ("gemma4", "<|tool_call>call:f" + "{a:" * 2000),
        ("lfm2", "<|tool_call_start|>f(a=1)<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(a=g(1))]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(a='it, b='so')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(a='it)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>"),
        ("lfm2", r"<|tool_call_start|>[f(a='\ud800')]<|tool_call_end|>"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(kind, text):
    (call,) = read_calls(text, kind)[1]
    assert call.fault and not call.name


@pytest.mark.parametrize("kind", ["hermes", "qwen3_coder", "glm45", "deepseek", "kimi_k2", "gemma4", "lfm2"])
def test_a_call_that_lacks_a_mark_does_not_take_the_next_one(kind):
    broken, call = (written(kind, name, {"a": "1"}) for name in "gf")
    for mark in re.findall(r"<[^>]+>|[{}()']", broken):
        *others, last = read_calls(broken.replace(mark, "", 1) + "\n" + call, kind)[1]
        assert (last.name, last.arguments) == ("f", {"a": "1"}), mark
        assert not others or others[0].fault or (others[0].name, others[0].arguments) == ("g", {"a": "1"}), mark


@pytest.mark.parametrize("kind", ["hermes", "deepseek", "kimi_k2", "gemma4", "lfm2"])
def test_a_mark_within_json_is_text(kind):
    arguments = {"a": "</tool_call> <｜tool▁call▁end｜> <|tool_call_end|> <tool_call|> {"}
    beside, calls = read_calls("so " + written(kind, "f", arguments) * 2, kind)
    assert beside == "so" and [(call.name, call.arguments) for call in calls] == [("f", arguments)] * 2


@pytest.mark.parametrize(
    "text, arguments",
    [
        ('a=\'it\'s\', b="say \\"no\\""', {"a": "it's", "b": 'say "no"'}),
        (r"a='C:\\d\n\u00e9\q', b=None", {"a": "C:\\d\né\\q", "b": None}),
        ("a=True, b=[1, 'x', false], c={\"d\": null,}", {"a": True, "b": [1, "x", False], "c": {"d": None}}),
        ("a=-1.5e3 , b = 7,", {"a": -1500.0, "b": 7}),
        ("", {}),
    ],
)
def test_a_call_in_python(text, arguments):
    """Also with quotes that the published template of LFM2.5 does not escape."""
    beside, (call,) = read_calls(f"so <|tool_call_start|>[f.g({text})]<|tool_call_end|> yes", "lfm2")
    assert (beside, call.name, call.arguments) == ("so  yes", "f.g", arguments)


# as the folders of these models describe their answers to transformers
ANSWERS = {
    "gemma4": {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
        "close_pattern": r"<tool_call\|>\s*",
        "content": "json",
        "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
    },
    "lfm2": {
        "open_pattern": r"(?:<\|tool_call_start\|>\[|,\s*)(?P<name>\w+)\(",
        "close_pattern": r"\)(?:\]<\|tool_call_end\|>)?\s*",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"(?P<key>\w+)=(?P<value>'[^']*'|\[[^\]]*\]|\{[^}]*\}|[^,)]*)",
            "value_parser": {"name": "json", "args": {"string_delims": [["'", "'"]], "allow_non_json": True}},
        },
    },
}


@pytest.mark.parametrize("kind", ANSWERS)
@settings(max_examples=30, deadline=None)
@given(
    several=st.lists(
        st.fixed_dictionaries(
            {"text": st.text(alphabet="ab é7 ", max_size=9)},
            optional={"count": st.integers(-99, 99), "items": st.lists(st.integers(0, 9), max_size=3)},
        ),
        min_size=1,
        max_size=3,
    )
)
def test_calls_are_read_as_transformers_reads_them(kind, several):
    from transformers.utils.chat_parsing import parse_response

    text = "".join(written(kind, "add", arguments) for arguments in several)
    field = ANSWERS[kind] | {
        "repeats": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    template = {
        "start_anchor": "<start>",
        "fields": {"tool_calls": field, "content": {"close_pattern": "<end>|$", "content": "text"}},
    }
    theirs = [call["function"] for call in parse_response(text, template, prefix="<start>")["tool_calls"]]
    ours = [{"name": call.name, "arguments": call.arguments} for call in read_calls(text, kind)[1]]
    assert ours == theirs == [{"name": "add", "arguments": arguments} for arguments in several]
