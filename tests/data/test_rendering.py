"""What is handed to chat templates, what they leave out, and how their answers end."""

import re
from pathlib import Path

import pytest
import torch

from aligner.config.sections.data import DataConfig
from aligner.data.chats import check_arguments
from aligner.data.dataset import PairDataset, SftDataset
from aligner.data.formats import SftRow, preference_rows, sft_rows, unpaired_rows
from aligner.data.shipped_templates import use_chat_template
from aligner.data.template_checks import describe
from aligner.data.templates import encode_answers, encode_prompts, encode_sft
from aligner.data.tokenizer import decode_responses, load_tokenizer, stop_token_ids
from aligner.data.unpaired import UnpairedDataset
from aligner.errors import DataError
from tests.data.conftest import CHATML, CHATML_MARKED
from tests.data.test_shipped_templates import like_qwen3

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
TAIL = "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
WANTS = {
    "mapping": HEAD + "{% for k, v in c.function.arguments.items() %}{{ k + '=' ~ v }}{% endfor %}" + TAIL,
    "items": HEAD + "{% for k, v in c.function.arguments|items %}{{ k }}={{ v }}{% endfor %}" + TAIL,
    "json": HEAD + "{{ c.function.arguments | tojson }}" + TAIL,
    "text": HEAD + "{{ '!' + c.function.arguments }}" + TAIL,
    "printed": HEAD + "{{ c.function.arguments }}" + TAIL,
}
GLM = (
    "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)


def chat(*messages):
    return SftRow(messages=[dict(zip(("role", "content"), m, strict=True)) for m in messages], where="f, row 3")


def learned(tokenizer, row, **more):
    ((ids, mask),) = encode_sft(tokenizer, [row], **more)
    return tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])


@pytest.mark.parametrize("form", WANTS)
def test_arguments_have_the_form_that_the_template_reads(make_folder, form):
    template = WANTS[form].replace("in m.tool_calls or [] %}", "in m.tool_calls or [] %}{{ c.function.name }} ", 1)
    tokenizer = load_tokenizer(make_folder(template))
    texts = []
    for arguments in ({"a": 2}, '{"a": 2}'):
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        texts.append(learned(tokenizer, SftRow(messages=messages, where="r")))
    assert len(set(texts)) == 1 and ("a=2" in texts[0] or '{"a": 2}' in texts[0])


@pytest.mark.parametrize(
    "fault, message",
    [("{{ 'a' + 7 }}", "TypeError"), ("{{ m.x.y }}", "UndefinedError"), ("{{ 1 // 0 }}", "ZeroDivision")],
)
def test_whatever_fails_inside_a_template_names_row_message_and_line(make_folder, fault, message):
    template = "{% for m in messages %}\n{% if m.role == 'tool' %}\n" + fault + "{% endif %}{{ m.content }}{% endfor %}"
    tokenizer = load_tokenizer(make_folder(template))
    bad = chat(("user", "q"), ("tool", "x"), ("assistant", "a"))
    with pytest.raises(DataError, match=rf"f, row 3: .*line 3 of the template, messages\[1\] \(tool\): {message}"):
        encode_sft(tokenizer, [chat(("user", "q"), ("assistant", "a")), bad])
    with pytest.raises(DataError, match=rf"row 9.*{message}"):
        encode_prompts(tokenizer, [bad.messages[:2]], ["row 9"])


def test_what_a_template_leaves_out_is_refused_or_told(make_folder):
    only = CHATML.replace(
        "{% for m in messages %}", "{% for m in messages if m.role in ('user', 'assistant', 'system') %}"
    )
    tokenizer = load_tokenizer(make_folder(only))
    assert "French" in tokenizer.decode(
        encode_sft(tokenizer, [chat(("developer", "French"), ("assistant", "a"))])[0][0]
    )
    with pytest.raises(DataError, match=r"f, row 3: .*leaves out the content of messages\[1\] \(role tool\)"):
        encode_sft(tokenizer, [chat(("user", "q"), ("tool", "q"), ("assistant", "a"))])
    neither = load_tokenizer(make_folder(only.replace(", 'system')", ")")))
    with pytest.raises(DataError, match=r"f, row 3: .*leaves out the content of messages\[0\] \(role developer\)"):
        encode_sft(neither, [chat(("developer", "French"), ("user", "q"), ("assistant", "a"))])
    rows = [{"messages": [{"role": "user", "content": "q", "name": "Eve"}, {"role": "assistant", "content": "a"}]}]
    report = str(SftDataset(sft_rows(rows, DataConfig()), tokenizer, DataConfig()).report)
    assert "leaves out `name` of role user" in report
    lines = "\n".join(describe(tokenizer, {}))
    assert "leaves out tool" in lines and "ends an answer with <|im_end|>" in lines and "developer as system" in lines
    assert lines.count("chat template: ") == 2


def test_a_row_that_a_template_refuses_says_nothing_of_the_next_of_its_shape(make_folder):
    nine = "{% if m.name is defined and m.name | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
    tokenizer = load_tokenizer(
        make_folder(
            CHATML.replace("%}{{", "%}" + nine + "{% if m.role != 'system' %}{{", 1).replace(
                "}}{% endfor", "}}{% endif %}{% endfor", 1
            )
        )
    )
    for name, result in (("Eve", "nine letters"), ("Evangelos", r"leaves out the content of messages\[0\]")):
        row = chat(("system", "words"), ("user", "q"), ("assistant", "a"))
        row.messages[1]["name"] = name
        with pytest.raises(DataError, match=result):
            encode_sft(tokenizer, [row])


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
# as the published templates of Llama 3.1 and of Mistral: a turn of calls has nothing else
CALLS_ALONE = (HEAD + TAIL).replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")
CALLS_ALONE = CALLS_ALONE.replace("or [] %}", "or [] %}{{ c.function | tojson }}")


def called(text, **row):
    return row | {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": text, "tool_calls": [CALL]},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "four"},
        ]
    }


def test_what_a_template_leaves_out_beside_calls_is_counted(make_folder):
    tokenizer, data = load_tokenizer(make_folder(CALLS_ALONE)), DataConfig()
    rows = [
        called("Let me look."),
        called("  "),
        called(None),
        called("", tools=[CALL]),
        called("I add.", tools=[CALL]),
    ]
    dataset = SftDataset(sft_rows(rows, data), tokenizer, data)
    assert "leaves out the text beside tool calls, in 2 rows" in str(dataset.report)
    assert len(dataset) == 5 and tokenizer.decode(dataset[0].tokens) == tokenizer.decode(dataset[1].tokens)
    shows = load_tokenizer(make_folder(CALLS_ALONE.replace(" if not m.tool_calls", "")))
    assert "beside" not in str(SftDataset(sft_rows(rows, data), shows, data).report)


def test_words_beside_calls_are_counted_in_answers_too(make_folder):
    tokenizer, data = load_tokenizer(make_folder(CALLS_ALONE)), DataConfig()
    question, *answer = called("Let me look.")["messages"]
    pair = {"prompt": [question], "chosen": answer, "rejected": [{"role": "assistant", "content": "no"}]}
    report = PairDataset(preference_rows([pair, pair], data), tokenizer, data).report
    assert "beside tool calls, in 2 rows" in str(report)
    split = UnpairedDataset(unpaired_rows([pair], data), tokenizer, data)
    assert "beside tool calls, in 1 rows" in str(split.report)
    lost = CALLS_ALONE.replace("{{ c.function | tojson }}", "")
    with pytest.raises(DataError, match=r"leaves out `tool_calls` of messages\[1\]"):
        PairDataset(preference_rows([pair], data), load_tokenizer(make_folder(lost)), data)


def test_thoughts_that_a_template_leaves_out_are_counted(make_folder):
    """DeepSeek-V3.1's of all answers, LFM2.5's of earlier ones; Qwen3's are kept by the shipped template."""
    thought, question = "<think>\nhm\n</think>\n\n", {"role": "user", "content": "q"}
    inside, beside = {"content": thought + "a"}, {"content": "a", "reasoning_content": "hm"}
    rows = [[question, {"role": "assistant", **answer}] * n for answer in (inside, beside) for n in (1, 2)]
    rows = [{"messages": messages} for messages in [*rows, [question, {"role": "assistant", "content": "a"}]]]
    shown = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    kept = CHATML_MARKED.replace("{% generation %}", "{% generation %}" + shown)
    last = kept.replace("m.reasoning_content %}", "m.reasoning_content and loop.last %}")
    never = CHATML_MARKED.replace("m['content'] +", "m['content'].split('</think>')[-1] +")
    split = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
    some, whole = DataConfig(), DataConfig(loss_on="all")
    for template, data, form, count in (
        *((kept, some, rows, 0), (last, some, rows, 1), (never, some, rows, 4), (last, some, split, 1)),
        *((like_qwen3(), some, rows, 0), (like_qwen3(), whole, rows, 2), (like_qwen3(), whole, split, 2)),
    ):
        tokenizer = load_tokenizer(make_folder(template, extra=("<think>", "</think>")))
        report = str(SftDataset(sft_rows(form, data), tokenizer, data).report)
        assert ("leaves out thoughts" in report) == bool(count)
        assert not count or f"leaves out thoughts of responses, in {count} rows" in report


NINE = "{% if ID | length != 9 %}{{ raise_exception('ids of length 9') }}{% endif %}{{ '<' + ID + '>' }}"
MISTRAL = (HEAD + NINE.replace("ID", "c.id") + "{{ c.function | tojson }}" + TAIL).replace(
    "{{ m.content }}", "{% if m.role == 'tool' %}" + NINE.replace("ID", "m.tool_call_id") + "{% endif %}{{ m.content }}"
)


@pytest.mark.parametrize(
    "own, shown",
    [
        (("abcdefghi", "ABCDEFGH9"), ("abcdefghi", "ABCDEFGH9")),
        (("call_0123456789abcdef", "call_fedcba9876543210"), ("call00000", "call00001")),
        ((None, None), ("call00000", "call00001")),
    ],
)
def test_ids_of_calls_are_such_as_the_template_takes(make_folder, own, shown):
    tokenizer = load_tokenizer(
        make_folder(
            MISTRAL.replace("c.id |", "(c.id or '') |").replace(".tool_call_id |", ".tool_call_id | default('') |")
        )
    )
    calls = [CALL | ({"id": one} if one else {}) for one in own]
    results = [{"role": "tool", "content": "4"} | ({"tool_call_id": one} if one else {}) for one in own]
    first = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    messages = [*first, *results, {"role": "assistant", "content": "four"}]
    ((ids, _),) = encode_sft(tokenizer, [SftRow(messages=messages, where="r")])
    assert re.findall(r"<(\w{9})>", tokenizer.decode(ids)) == [*shown, *shown]
    with pytest.raises(DataError, match="ids of length 9"):  # of no call
        encode_sft(tokenizer, [SftRow(messages=[*messages[:2], results[0] | {"tool_call_id": "x"}, messages[-1]])])


def test_a_turn_that_the_next_one_closes_is_learned_with_what_opens_that(make_folder):
    tokenizer = load_tokenizer(make_folder(GLM, eos="<|endoftext|>", pad="<s>", extra=["<|user|>"]))
    row = chat(("user", "hi"), ("assistant", "yo"), ("user", "more"), ("assistant", "ok"))
    assert learned(tokenizer, row) == "yo<|user|>ok<|user|>"
    assert tokenizer.convert_tokens_to_ids("<|user|>") in stop_token_ids(tokenizer)
    ids = encode_answers(tokenizer, [row.messages[:3]], [row.messages[3:]], ["r"], stop_token_ids(tokenizer))
    assert tokenizer.decode(ids[0]).endswith("ok<|user|>")


@pytest.mark.parametrize("known", [True, False])
def test_a_call_ends_with_a_token_of_its_own(make_folder, known):
    """GLM-4.5's result opens with <|observation|>, which ends the call; gpt-oss ends calls with <|call|>."""
    calls = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    glm = "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>{{ m.content }}" + calls
    glm += "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    extra = ["<|user|>", "<|assistant|>", "<|observation|>", "<tool_call>", "</tool_call>", "<|call|>"]
    oss = CHATML.replace("'<|im_end|>\n'", "('<|call|>' if m.tool_calls else '<|im_end|>')").replace(
        "m['content'] +", "m['content'] ~ (m.tool_calls[0].function | tojson if m.tool_calls else '') ~"
    )
    for template, end, answer in ((glm, "<|observation|>", "<|user|>"), (oss, "<|call|>", "<|im_end|>")):
        tokenizer = load_tokenizer(make_folder(template, eos="<|endoftext|>", pad="<s>", extra=extra))
        if known:
            ends = [tokenizer.convert_tokens_to_ids(name) for name in (end, answer)]
            (Path(tokenizer.name_or_path) / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
        stops = stop_token_ids(tokenizer)
        names = [tokenizer.convert_ids_to_tokens(i) for i in stops]
        assert sorted(names) == sorted(["<|endoftext|>", end, answer])
        call = '{"name": "add", "arguments": {"a": 2}}'
        call = f"<tool_call>{call}</tool_call>" if template == glm else call
        question, *answers = called("")["messages"]
        assert learned(tokenizer, SftRow(messages=[question, *answers], where="r")) == call + end + "four" + answer
        assert learned(tokenizer, SftRow(messages=[question, answers[0]], where="r")) == call + end
        (ids,) = encode_answers(tokenizer, [[question]], [answers[:1]], ["r"], stops)
        assert tokenizer.decode(ids).endswith(call + end)


def test_a_call_of_an_unknown_format_adds_no_stop_token(make_folder):
    """Gemma 4 quotes arguments by a special token: generation must not stop there."""
    calls = "<|call>call:{{ c.function.name }}{at:<|q|>{{ c.function.arguments.at }}<|q|>}<call|>"
    tokenizer = load_tokenizer(make_folder(HEAD + calls + TAIL, extra=["<|q|>", "<|call>", "<call|>"]))
    assert [tokenizer.convert_ids_to_tokens(i) for i in stop_token_ids(tokenizer)] == ["<|im_end|>"]


def test_chatml_ends_with_the_eos_of_a_tokenizer_without_its_tokens(byte):
    byte = load_tokenizer(byte.name_or_path)
    use_chat_template(byte, DataConfig(chat_template="chatml"))
    row = chat(("user", "hi"), ("assistant", "yo"), ("user", "more"), ("assistant", "ok"))
    assert learned(byte, row) == "yo<eos>\nok<eos>\n"


def test_answers_without_a_stop_token_are_counted(byte):
    byte = load_tokenizer(byte.name_or_path)
    byte.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}" + (
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    messages = chat(("user", "hi"), ("assistant", "yo"), ("user", "more"), ("assistant", "ok")).messages
    report = str(SftDataset(sft_rows([{"messages": messages}], DataConfig()), byte, DataConfig()).report)
    assert "1 of 2 answers are learned without an end token" in report


def test_texts_of_answers_keep_special_tokens_but_for_the_end(make_folder):
    tokenizer = load_tokenizer(make_folder(extra=["<think>", "</think>"]))
    ids = tokenizer("<think>a</think>42<|im_end|>", add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([ids])
    assert decode_responses(tokenizer, tokens, [len(ids)]) == ["<think>a</think>42"]
    assert decode_responses(tokenizer, tokens, [len(ids) - 1]) == ["<think>a</think>42"]
    assert decode_responses(tokenizer, tokens, [len(ids)], special="strip") == ["a42"]


def test_several_templates_without_a_default_are_refused_by_name(make_folder):
    tokenizer = load_tokenizer(make_folder({"tool_use": CHATML, "rag": CHATML}))
    with pytest.raises(DataError, match=r"row 7: .*`default`.*tool_use, rag|row 7: .*`default`.*rag, tool_use"):
        encode_sft(tokenizer, [SftRow(messages=[{"role": "assistant", "content": "a"}], where="row 7")])
    assert stop_token_ids(tokenizer) == (tokenizer.eos_token_id,)  # plain texts need none
    with pytest.raises(DataError, match="template_arguments"):
        check_arguments(tokenizer, {"enable_thinking": False})


def test_stop_tokens_that_the_tokenizer_lacks_are_reported_by_their_numbers(make_folder):
    folder = make_folder()
    (Path(folder) / "generation_config.json").write_text('{"eos_token_id": [2, 99999]}')
    assert "generation stops at <|im_end|>, 99999" in describe(load_tokenizer(folder), {})[1]


@pytest.mark.parametrize("answer", ["yes", ""])
def test_a_scored_answer_ends_where_its_generation_does(make_folder, answer):
    """Where the template closes the turn and then the text, as Phi-3's."""
    tokenizer = load_tokenizer(make_folder(CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"))
    tokenizer.eos_token = "<|endoftext|>"
    stops, prompt = stop_token_ids(tokenizer), [{"role": "user", "content": "q"}]
    assert {tokenizer.convert_ids_to_tokens(i) for i in stops} == {"<|im_end|>", "<|endoftext|>"}
    (encoded,) = encode_answers(tokenizer, [prompt], [[{"role": "assistant", "content": answer}]], ["r"], stops)
    (opening,) = encode_prompts(tokenizer, [prompt], ["r"])
    assert encoded == [*opening, *tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]]
