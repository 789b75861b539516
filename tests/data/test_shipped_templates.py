"""Shipped templates render what the families' own do, and mark each answer of a conversation."""

import hashlib
import re

import pytest
from hypothesis import given, settings

from aligner.config.sections.data import DataConfig
from aligner.data.dataset import PairDataset, PromptDataset, SftDataset
from aligner.data.formats import SftRow, preference_rows, prompt_rows, sft_rows, unpaired_rows
from aligner.data.rendering import try_text
from aligner.data.shipped_templates import shipped, shipped_template, training_template, use_chat_template
from aligner.data.template_checks import shown_calls
from aligner.data.templates import encode_answers, encode_sft, replacement_in_use
from aligner.data.tokenizer import load_tokenizer, stop_token_ids
from aligner.data.unpaired import UnpairedDataset
from aligner.errors import ConfigError, DataError
from tests.data.test_templates import chats

THINK = ("<think>", "</think>")
PHI = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
R1 = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
PUBLISHED = "{%- set as_published = true %}"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}


def unmarked(name):
    return shipped_template(name).replace("{%- generation %}", "").replace("{%- endgeneration %}", "")


def like_qwen3():
    """A family's own: no marks, and earlier answers lose their thoughts and the block that holds them."""
    block = "'<think>\\n' + thoughts + '\\n</think>\\n\\n'"
    assert block in unmarked("qwen3")
    return unmarked("qwen3").replace(block, f"({block} if loop.last or loop.nextitem.role == 'tool' else '')")


@pytest.fixture(scope="module")
def qwen3(make_folder):
    return load_tokenizer(make_folder(like_qwen3(), extra=THINK))


def like_qwen3_thinking():
    """As above; the mark that opens thoughts is always given."""
    template, kept = PUBLISHED + unmarked("qwen3_thinking"), "if loop.last or loop.nextitem.role == 'tool' else"
    opening, block = "'<|im_start|>assistant\\n<think>\\n' }}", "thoughts + '\\n</think>\\n\\n' + answer"
    assert template.count(opening) == 2 and block in template
    template = template.replace(opening, f"'<|im_start|>assistant\\n' + ('<think>\\n' {kept} '') }}}}", 1)
    return template.replace(block, f"(thoughts + '\\n</think>\\n\\n' {kept} '') + answer")


def like_deepseek_r1():
    """Every answer loses its thoughts, and the mark that the model was given."""
    return PUBLISHED + unmarked("deepseek_r1")


@pytest.fixture(scope="module")
def thinking(make_folder):
    return load_tokenizer(make_folder(like_qwen3_thinking(), extra=THINK))


@pytest.fixture(scope="module")
def deepseek(make_folder):
    return load_tokenizer(make_folder(like_deepseek_r1(), eos=R1[2], bos=True, extra=(*THINK, *R1)))


@pytest.fixture(scope="module")
def phi3(make_folder):
    return load_tokenizer(make_folder(unmarked("phi3"), eos="<|endoftext|>", pad="<s>", extra=PHI))


def row(messages, tools=None):
    return SftRow(messages=messages, where="data.jsonl, row 1", tools=tools)


def learned(tokenizer, found):
    tokens, mask = found
    return tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m])


def said(chat):
    return [message["content"] for message in chat if message["role"] == "assistant"]


def with_thoughts(chat):
    return [m | {"reasoning_content": "hm"} if m["role"] == "assistant" else m for m in chat]


@given(chat=chats())
@settings(max_examples=30, deadline=None)
def test_each_answer_is_learned_as_it_is_generated(qwen3, phi3, thinking, deepseek, chat):
    (encoded,) = encode_sft(qwen3, [row(chat)])
    assert learned(qwen3, encoded) == "".join(f"<think>\n\n</think>\n\n{text}<|im_end|>\n" for text in said(chat))
    (encoded,) = encode_sft(phi3, [row(chat)])
    assert learned(phi3, encoded) == "".join(f"{text}<|end|>\n" for text in said(chat)) + "<|endoftext|>"
    thought = with_thoughts(chat)
    (encoded,) = encode_sft(thinking, [row(thought)])
    assert learned(thinking, encoded) == "".join(f"hm\n</think>\n\n{text}<|im_end|>\n" for text in said(chat))
    (encoded,) = encode_sft(deepseek, [row(thought)])
    assert learned(deepseek, encoded) == "".join(f"hm\n</think>\n\n{text}{R1[2]}" for text in said(chat))
    plain = {"qwen3": qwen3, "phi3": phi3}
    for name, tokenizer in (plain | {"qwen3_thinking": thinking, "deepseek_r1": deepseek}).items():
        chat = chat if name in plain else thought  # what transformers finds by the marks
        expected = tokenizer.apply_chat_template(
            chat, chat_template=shipped_template(name), return_dict=True, return_assistant_tokens_mask=True
        )
        ((tokens, mask),) = encode_sft(tokenizer, [row(chat)])
        assert (tokens, mask) == (expected["input_ids"], expected["assistant_masks"])
        if len(said(chat)) > 1 and name != "phi3":  # a longer conversation only adds
            ((shorter, shorter_mask),) = encode_sft(tokenizer, [row(chat[:-2])])
            assert (tokens[: len(shorter)], mask[: len(shorter)]) == (shorter, shorter_mask)


@given(chat=chats().map(lambda chat: chat[-2:]))
@settings(max_examples=20, deadline=None)
def test_a_single_answer_is_learned_by_the_own_template_and_alike(qwen3, phi3, thinking, chat):
    for tokenizer, name in ((qwen3, "qwen3"), (phi3, "phi3"), (thinking, "qwen3_thinking")):
        chat = with_thoughts(chat) if name == "qwen3_thinking" else chat
        own = encode_sft(tokenizer, [row(chat)], fix=False)
        assert encode_sft(tokenizer, [row(chat)]) == own
        two = chat + chat  # its first answer is the same by the shipped template
        (tokens, mask), (alone, alone_mask) = encode_sft(tokenizer, [row(two)])[0], own[0]
        size = len(alone) - (name == "phi3")  # but for the end of text behind the last one
        assert (tokens[:size], mask[:size]) == (alone[:size], alone_mask[:size])
        assert replacement_in_use(tokenizer, [row(chat)]) is None
        assert replacement_in_use(tokenizer, [row(two)]).name == f"the shipped chat template {name}"


def test_a_template_that_loses_every_thought_is_replaced_for_single_answers_too(deepseek):
    """DeepSeek-R1-Distill's own, in its words: the model is given <think>, and then learns to answer without."""
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    opening = deepseek.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert opening == "<s>s<｜User｜>q<｜Assistant｜><think>\n"
    chat.append({"role": "assistant", "content": "<think>\nhm\n</think>\n\n7"})
    assert deepseek.apply_chat_template(chat, tokenize=False) == f"<s>s<｜User｜>q<｜Assistant｜>\n\n7{R1[2]}"
    rows = [row(chat), row([*chat[:2], {"role": "assistant", "content": "7", "reasoning_content": "hm"}])]
    for tokens, mask in encode_sft(deepseek, rows):
        assert deepseek.decode(tokens) == f"{opening}hm\n</think>\n\n7{R1[2]}"
        assert learned(deepseek, (tokens, mask)) == f"hm\n</think>\n\n7{R1[2]}"
    assert replacement_in_use(deepseek, rows).name == "the shipped chat template deepseek_r1"
    with pytest.raises(DataError, match="not prefix-preserving"):
        encode_sft(deepseek, rows, fix=False)
    with pytest.raises(DataError, match="an answer without thoughts"):
        encode_sft(deepseek, [row([*chat[:2], {"role": "assistant", "content": "7"}])])
    with pytest.raises(DataError, match="has no tool calls"):
        encode_sft(deepseek, [row([*chat, {"role": "tool", "content": "7"}, chat[2]])])


def test_a_reward_model_reads_the_thoughts_that_a_rollout_has(deepseek, qwen3):
    """Also behind earlier answers without any, as the prompt of a rollout has them."""
    ask = [{"role": role, "content": text} for role, text in (("user", "p"), ("assistant", "a"), ("user", "q"))]
    prompt = deepseek.apply_chat_template(ask, tokenize=False, add_generation_prompt=True)
    assert prompt.endswith(f"a{R1[2]}<｜User｜>q<｜Assistant｜><think>\n")
    answers = [
        [{"role": "assistant", "content": "<think>\nhm\n</think>\n\n7"}],
        [{"role": "assistant", "content": "7", "reasoning_content": "hm"}],
        [{"role": "assistant", "content": "7"}],
    ]
    actual = encode_answers(deepseek, [ask] * 3, answers, ["r"] * 3, stop_token_ids(deepseek))
    thought = prompt + f"hm\n</think>\n\n7{R1[2]}"
    assert [deepseek.decode(ids) for ids in actual[:2]] == [thought] * 2
    as_they_are = encode_answers(deepseek, [ask] * 3, answers, ["r"] * 3, stop_token_ids(deepseek), fix=False)
    own = [deepseek.apply_chat_template([*ask, *answer], tokenize=False) for answer in answers]
    assert [deepseek.decode(ids) for ids in as_they_are] == own and actual[2] == as_they_are[2]
    assert "hm" not in own[0]
    (kept,) = encode_answers(qwen3, [ask[2:]], answers[:1], ["r"], stop_token_ids(qwen3))
    assert "<think>\nhm\n</think>\n\n7" in qwen3.decode(kept)


@pytest.mark.parametrize("variant", ["large", "older", "large older"])
def test_a_reward_model_reads_gemma_4_as_a_rollout_has_it(make_folder, variant):
    """The own template of large models omits the empty channel that their prompts end with."""
    tokenizer = load_tokenizer(make_folder(like_gemma4(variant), **FAMILIES["gemma4"][1]))
    ask, stops = [{"role": "user", "content": "q"}], stop_token_ids(tokenizer)
    for thoughts, options in (("", {}), ("hm", {"enable_thinking": True})):
        prompt = tokenizer.apply_chat_template(ask, tokenize=False, add_generation_prompt=True, **options)
        answer = [{"role": "assistant", "content": "7", "reasoning_content": thoughts}]
        (ids,) = encode_answers(tokenizer, [ask], [answer], ["r"], stops, arguments=options)
        channel = f"<|channel>thought\n{thoughts}\n<channel|>" if thoughts else ""
        assert tokenizer.decode(ids) == f"{prompt}{channel}7<turn|>"
    if "large" in variant:  # the prompt has closed the channel
        with pytest.raises(DataError, match=r"tokens of the prompt .*=\{enable_thinking: false\}, or true"):
            encode_answers(tokenizer, [ask], [answer], ["row 1"], stops)


def test_only_what_renders_alike_is_replaced(qwen3, thinking, deepseek, phi3, forgetful, chatml, make_folder):
    for tokenizer, name in ((qwen3, "qwen3"), (thinking, "qwen3_thinking"), (deepseek, "deepseek_r1"), (phi3, "phi3")):
        assert training_template(tokenizer).name == f"the shipped chat template {name}"
    assert training_template(forgetful) is training_template(chatml) is None
    other = load_tokenizer(make_folder(like_qwen3().replace("a json object", "JSON"), extra=THINK))
    assert training_template(other) is None  # differs with tools alone
    two = [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]
    with pytest.raises(
        DataError,
        match=r"not prefix-preserving.*data.chat_template=FILE.*chatml, deepseek_r1, gemma4, glm4_5, gpt_oss, phi3, "
        r"qwen3, qwen3_5, qwen3_thinking",
    ):
        encode_sft(other, [row(two)])
    with pytest.raises(DataError, match="not prefix-preserving"):  # a template that was named is taken as it is
        SftDataset(sft_rows([{"messages": two}], DataConfig()), qwen3, DataConfig(chat_template="x.jinja"))


def test_thoughts_calls_and_tools(qwen3):
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "<think>\nseven\n</think>\n\nit is 7"},
    ]
    (encoded,) = encode_sft(qwen3, [row(chat, TOOLS)])
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
    text = "<think>\nhm\n</think>\n\n" + call + "<|im_end|>\n<think>\nseven\n</think>\n\nit is 7<|im_end|>\n"
    assert learned(qwen3, encoded) == text
    whole = qwen3.decode(encoded[0])
    assert '<tools>\n{"type": "function"' in whole and "<tool_response>\n7\n</tool_response>" in whole
    bare, tooled = encode_sft(qwen3, [row(chat), row(chat, TOOLS)])  # each row has its own
    assert tooled == encoded and len(bare[0]) < len(tooled[0])


def test_without_thinking_the_empty_block_is_given(qwen3):
    chat = [{"role": role, "content": role} for role in ("user", "assistant") * 2]
    (encoded,) = encode_sft(qwen3, [row(chat)], arguments={"enable_thinking": False})
    assert learned(qwen3, encoded) == "assistant<|im_end|>\n" * 2
    assert qwen3.decode(encoded[0]).count("<think>\n\n</think>\n\n") == 2
    data = DataConfig(template_arguments={"enable_thinking": False})
    prompts = PromptDataset(prompt_rows([{"prompt": chat[:1], "tools": TOOLS}], data), qwen3, data)
    assert prompts[0].text.endswith("assistant\n<think>\n\n</think>\n\n") and "<tools>" in prompts[0].text
    assert prompts[0].messages == (chat[0],) and prompts[0].fields["tools"] == TOOLS
    with pytest.raises(ConfigError, match=r"data.template_arguments.enable_thinkin=False: expected a variable"):
        data = DataConfig(template_arguments={"enable_thinkin": False})
        PromptDataset(prompt_rows([{"prompt": chat[:1]}], data), qwen3, data)
    with pytest.raises(ConfigError, match=r"data.template_arguments.tools"):
        DataConfig(template_arguments={"tools": []})


def test_what_a_template_leaves_out_is_reported(chatml):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    with pytest.raises(DataError, match=r"row 1: the chat template .* leaves out `tool_calls`.*data.chat_template"):
        encode_sft(chatml, [row(chat)])
    rows = sft_rows([{"messages": [chat[0], {"role": "assistant", "content": "a"}], "tools": TOOLS}], DataConfig())
    assert "`tools` has no effect" in str(SftDataset(rows, chatml, DataConfig()).report)


def test_the_report_names_the_shipped_template(qwen3):
    two = [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]
    assert "shipped chat template qwen3" in str(
        SftDataset(sft_rows([{"messages": two}], DataConfig()), qwen3, DataConfig()).report
    )
    one = SftDataset(sft_rows([{"messages": two[:2]}], DataConfig()), qwen3, DataConfig())
    assert "shipped" not in str(one.report)


def test_a_template_by_name_or_file(make_folder, tmp_path):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    tokenizer = load_tokenizer(make_folder(None))
    use_chat_template(tokenizer, DataConfig(chat_template="chatml"))
    (encoded,) = encode_sft(tokenizer, [row(chat)])
    assert tokenizer.decode(encoded[0]) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    tokenizer.save_pretrained(str(tmp_path / "out"))
    assert load_tokenizer(str(tmp_path / "out")).chat_template == shipped_template("chatml")
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}")
    use_chat_template(tokenizer, DataConfig(chat_template=str(tmp_path / "mine.jinja")))
    assert tokenizer.decode(encode_sft(tokenizer, [row(chat)], fix=False)[0][0]) == "q<|im_end|>a<|im_end|>"
    with pytest.raises(ConfigError, match=rf"data.chat_template='qwen4': expected auto, one of {', '.join(shipped())}"):
        use_chat_template(tokenizer, DataConfig(chat_template="qwen4"))


def like_qwen3_5(keeps=""):
    """Its own: answers before the last question lose their block."""
    template, block = shipped_template("qwen3_5"), "'<think>\\n' + thoughts + '\\n</think>\\n\\n'"
    assert "assistant\\n<think>\\n' + thoughts" in template
    template = template.replace("assistant\\n<think>\\n' + thoughts + '\\n</think>\\n\\n' + content", "BLOCK")
    kept = f"({block} if loop.last or loop.nextitem.role == 'tool'{keeps} else '')"
    return template.replace("BLOCK", f"assistant\\n' + {kept} + content")


def like_glm4_5():
    return shipped_template("glm4_5").replace(
        "thoughts.strip()", "(thoughts.strip() if loop.last or loop.nextitem.role == 'tool' else '')"
    )


def like_gpt_oss():
    """Its own: a final answer has its thoughts and its own end only where the conversation ends."""
    template = shipped_template("gpt_oss").replace("+ '<|return|>'", "+ ('<|return|>' if loop.last else '<|end|>')")
    return template.replace("if thoughts or (", "if (loop.last or not final) and (thoughts or ").replace(
        "{%- set last = namespace(call='') %}",
        "{%- set last = namespace(call='') %}{%- set final = messages[-1].role == 'assistant' and not "
        "messages[-1].tool_calls %}",
    )


def like_gemma4(variant=""):
    """Its own: thoughts of answers before the last question are dropped."""
    thoughts = "message.reasoning_content or '' %}"
    assert thoughts in shipped_template("gemma4")
    later = "(messages[1:] if opened else messages)[loop.index:] | selectattr('role', 'equalto', 'user') | list"
    kept = "(preserve_thinking and message.tool_calls)"
    template = shipped_template("gemma4").replace(
        thoughts, f"{thoughts}{{%- set thoughts = '' if {later} and not {kept} else thoughts %}}"
    )
    return "".join(f"{{%- set {name} = true %}}" for name in ("as_published", *variant.split())) + template


HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>")
GEMMA = ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>')
GLM = ("<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", *THINK)
FAMILIES = {
    "qwen3_5": (like_qwen3_5, {"extra": THINK, "regex": False}),
    "glm4_5": (like_glm4_5, {"extra": GLM, "eos": "<|endoftext|>", "pad": "<s>"}),
    "gpt_oss": (like_gpt_oss, {"extra": HARMONY, "eos": "<|return|>"}),
    "gemma4": (like_gemma4, {"extra": GEMMA, "eos": "<turn|>"}),
}


@pytest.fixture(scope="module")
def family(make_folder):
    return lambda name: load_tokenizer(make_folder(FAMILIES[name][0](), **FAMILIES[name][1]))


LEARNED = {
    "qwen3_5": [
        "hm\n</think>\n\n<tool_call>\n<function=look>\n<parameter=at>\nit\n</parameter>\n</function>\n</tool_call>"
        "<|im_end|>\n",
        "so\n</think>\n\nit is 7<|im_end|>\n",
        "yes\n</think>\n\nbye<|im_end|>\n",
    ],
    "glm4_5": [
        "\n<think>hm</think>\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>it</arg_value>\n</tool_call>"
        "<|observation|>",
        "\n<think>so</think>\nit is 7<|user|>",
        "\n<think>yes</think>\nbye<|user|>",
    ],
    "gpt_oss": [
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.look<|channel|>commentary json"
        '<|message|>{"at": "it"}<|call|>',
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>it is 7<|return|>",
        "<|channel|>analysis<|message|>yes<|end|><|start|>assistant<|channel|>final<|message|>bye<|return|>",
    ],
    "gemma4": [
        '<|channel>thought\nhm\n<channel|><|tool_call>call:look{at:<|"|>it<|"|>}<tool_call|><|tool_response>',
        "so\n<channel|>it is 7<turn|>\n",
        "<|channel>thought\nyes\n<channel|>bye<turn|>\n",
    ],
}
TURNS = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "it is 7", "reasoning_content": "so"},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "bye", "reasoning_content": "yes"},
]


@pytest.mark.parametrize("name", FAMILIES)
def test_thoughts_of_all_turns_are_learned_where_the_own_template_drops_them(family, name):
    tokenizer, rows = family(name), [row(TURNS), row(TURNS[:4])]
    assert replacement_in_use(tokenizer, rows).name == f"the shipped chat template {name}"
    whole, shorter = encode_sft(tokenizer, rows)
    assert learned(tokenizer, whole) == "".join(LEARNED[name])
    size = len(shorter[0]) - (name == "glm4_5")  # the next question's mark closes its answer
    assert [ids[:size] for ids in whole] == [ids[:size] for ids in shorter]
    with pytest.raises(DataError, match="not prefix-preserving"):
        encode_sft(tokenizer, rows, fix=False)


def test_answers_without_thoughts_among_others_follow_the_opening_of_their_own(family):
    tokenizer = family("qwen3_5")
    first = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "no"}]
    (encoded,) = encode_sft(tokenizer, [row(first + TURNS)])
    assert learned(tokenizer, encoded) == "no<|im_end|>\n" + "".join(LEARNED["qwen3_5"])
    assert tokenizer.decode(encoded[0]).startswith(
        "<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n<think>\n\n</"
    )
    (off,) = encode_sft(tokenizer, [row(first + TURNS)], arguments={"enable_thinking": False})
    assert off == encoded
    for alone in (first, first + first):
        assert learned(tokenizer, encode_sft(tokenizer, [row(alone)])[0]) == "no<|im_end|>\n" * (len(alone) // 2)
        assert encode_sft(tokenizer, [row(alone)]) == encode_sft(
            tokenizer, [row(alone)], arguments={"enable_thinking": False}
        )


def test_a_file_of_both_modes_is_counted_and_one_of_the_other_mode_is_refused(family):
    """Its weights would be trained for an opening that no later prompt has."""
    tokenizer = family("qwen3_5")
    first = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "no"}]
    both = sft_rows([{"messages": first}, {"messages": TURNS[:4]}, {"messages": first + TURNS}], DataConfig())
    note = "1 conversations have responses that open with enable_thinking: false, unlike prompts of this run"
    assert note in str(SftDataset(both, tokenizer, DataConfig()).report)
    off = DataConfig(template_arguments={"enable_thinking": False})
    assert "2 conversations have responses that open with enable_thinking: true" in str(
        SftDataset(both, tokenizer, off).report
    )
    alone = sft_rows([{"messages": first}, {"messages": first + first}], DataConfig())
    with pytest.raises(DataError, match=r"data.train: .*none among 2: .*=\{enable_thinking: false\}, also in"):
        SftDataset(alone, tokenizer, DataConfig())
    for key in ("data.sources.plain", "data.eval"):  # other files may have the mode of prompts
        assert "2 conversations have responses" in str(SftDataset(alone, tokenizer, DataConfig(), key).report)
    assert "enable_thinking" not in str(SftDataset(alone, tokenizer, off).report)
    pair = {"prompt": first[:1], "chosen": first[1:], "rejected": [{"role": "assistant", "content": "yes"}]}
    for dataset, typed in (
        (PairDataset, preference_rows([pair], DataConfig())),
        (UnpairedDataset, unpaired_rows([pair], DataConfig())),
    ):
        with pytest.raises(DataError, match=r"none among 2: .*=\{enable_thinking: false\}, also in"):
            dataset(typed, tokenizer, DataConfig())
        assert dataset(typed, tokenizer, off).report.kept


def test_a_mode_in_the_system_turn_is_that_of_the_conversation(make_folder):
    """As Qwen3.8's. Its prompt with thinking opens thoughts, which a response without any does not follow."""
    modes = "'<|im_start|>system\n' + ('' if enable_thinking is defined and enable_thinking is false else 'Think.')"
    own = f"{{{{- {modes} + '<|im_end|>\n' }}}}" + like_qwen3_5(" or preserve_thinking")
    tokenizer = load_tokenizer(make_folder(own, extra=THINK, regex=False))
    plain = [TURNS[0], {"role": "assistant", "content": "no"}]
    for messages, thinks in ((plain, False), (plain + plain, False), (TURNS, True)):
        (encoded,) = encode_sft(tokenizer, [row(messages)])
        assert tokenizer.decode(encoded[0]).startswith("<|im_start|>system\nThink.") == thinks
        expected = "".join(LEARNED["qwen3_5"]) if thinks else "no<|im_end|>\n" * (len(messages) // 2)
        assert learned(tokenizer, encoded) == expected
    both = sft_rows([{"messages": plain}, {"messages": TURNS}], DataConfig())
    note = "1 conversations have responses that open with enable_thinking: false"
    assert note in str(SftDataset(both, tokenizer, DataConfig()).report)
    with pytest.raises(DataError, match="row 1: the chat template is not prefix-preserving"):
        encode_sft(tokenizer, [row(plain + TURNS)])


def test_thoughts_within_the_content_are_those_of_a_template_that_has_a_key_for_them(family, make_folder):
    """gpt-oss's own, and one that puts a block before any content, as Qwen3.8's."""
    inside = [TURNS[0], {"role": "assistant", "content": "<think>\nso\n</think>\n\nit is 7"}]
    keyed = [TURNS[0], {**TURNS[3]}]
    splits = shipped_template("qwen3_5").replace("'</think>' in content", "false")
    assert splits != shipped_template("qwen3_5")
    for tokenizer, name in (
        (family("gpt_oss"), "gpt_oss"),
        (load_tokenizer(make_folder(splits, extra=THINK, regex=False)), "qwen3_5"),
    ):
        (encoded,) = encode_sft(tokenizer, [row(inside)])
        assert [encoded] == encode_sft(tokenizer, [row(keyed)])
        assert learned(tokenizer, encoded) == LEARNED[name][1]
    (encoded,) = encode_sft(family("gpt_oss"), [row([*inside, *TURNS[4:]])])
    assert learned(family("gpt_oss"), encoded) == "".join(LEARNED["gpt_oss"][1:])


@pytest.mark.parametrize(
    "switch", ["preserve_thinking: true", "truncate_history_thinking: false", "clear_thinking: false"]
)
def test_a_template_that_can_keep_thoughts_is_taken_itself(make_folder, switch):
    """Qwen3.6's, Nemotron 3's, and GLM-4.7's."""
    name, value = switch.split(": ")
    keeps = f" or ({name} is defined and {name} is {value})"
    tokenizer = load_tokenizer(make_folder(like_qwen3_5(keeps), extra=THINK, regex=False))
    assert replacement_in_use(tokenizer, [row(TURNS)]).name == f"the argument {switch}"
    (encoded,) = encode_sft(tokenizer, [row(TURNS)])
    assert learned(tokenizer, encoded) == "".join(LEARNED["qwen3_5"])
    with pytest.raises(DataError, match="not prefix-preserving"):  # what was named is taken as it is
        encode_sft(tokenizer, [row(TURNS)], arguments={name: value != "true"})


def test_the_small_models_of_qwen3_5_are_known_by_their_opening(make_folder):
    """Models up to 2B do not think unless they are made to."""
    opening = "enable_thinking is defined and enable_thinking is false"
    assert opening in like_qwen3_5()
    small = like_qwen3_5().replace(opening, "not (enable_thinking is defined and enable_thinking is true)")
    tokenizer = load_tokenizer(make_folder(small, extra=THINK, regex=False))
    first = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "no"}]
    (encoded,) = encode_sft(tokenizer, [row(first + first)])
    assert learned(tokenizer, encoded) == "no<|im_end|>\n" * 2
    for arguments in ({"enable_thinking": True}, {}):
        (encoded,) = encode_sft(tokenizer, [row(TURNS)], arguments=arguments)
        assert learned(tokenizer, encoded) == "".join(LEARNED["qwen3_5"])


def test_gemma_4_has_one_mode_in_a_conversation_which_its_system_turn_tells(family):
    tokenizer = family("gemma4")
    plain = [TURNS[0], {"role": "assistant", "content": "no"}]
    for messages, thinks in (
        (TURNS, True),
        (TURNS[:4], True),
        (plain, False),
        (plain + plain, False),
        (plain + TURNS, True),
    ):
        for arguments in ({}, {"enable_thinking": False}):
            (encoded,) = encode_sft(tokenizer, [row(messages)], arguments=arguments)
            assert tokenizer.decode(encoded[0]).startswith("<|turn>system\n<|think|>\n<turn|>\n") == thinks
    rows = sft_rows([{"messages": plain}, {"messages": TURNS}], DataConfig())
    note = "1 conversations have responses that open with enable_thinking: true"
    assert note in str(SftDataset(rows, tokenizer, DataConfig()).report)
    with pytest.raises(DataError, match=r"template_arguments=\{enable_thinking: true\}, also in later stages"):
        SftDataset(sft_rows([{"messages": TURNS}], DataConfig()), tokenizer, DataConfig())


def test_gemma_4_without_thoughts_and_with_words_beside_a_call(family):
    """Within thinking, the channel that is open behind a result is closed at once."""
    tokenizer = family("gemma4")
    looks = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
    call = '<|tool_call>call:look{at:<|"|>it<|"|>}<tool_call|><|tool_response>'
    chat = [TURNS[0], looks, TURNS[2], {"role": "assistant", "content": "it is 7"}]
    assert learned(tokenizer, encode_sft(tokenizer, [row(chat)])[0]) == f"I look.{call}it is 7<turn|>\n"
    chat[1] = looks | {"reasoning_content": "hm"}
    (encoded,) = encode_sft(tokenizer, [row(chat)])
    expected = f"<|channel>thought\nhm\n<channel|>I look.{call}<channel|>it is 7<turn|>\n"
    assert learned(tokenizer, encoded) == expected
    chat[1] = looks | {"content": "<think>\nhm\n</think>\n\nI look."}
    assert encode_sft(tokenizer, [row(chat)]) == [encoded]


@pytest.mark.parametrize("variant", ["large", "older", "large older"])
def test_each_published_form_of_gemma_4_is_recognised(make_folder, variant):
    """Large models get an empty channel without thinking; before 2026-07, thoughts of a last answer were dropped."""
    tokenizer = load_tokenizer(make_folder(like_gemma4(variant), **FAMILIES["gemma4"][1]))
    options = training_template(tokenizer).options
    assert shown_calls(tokenizer, {}) == "gemma4"
    assert {name for name in ("large", "older") if options.get(name)} == set(variant.split())
    (encoded,) = encode_sft(tokenizer, [row(TURNS)])
    opens = "<|channel>thought\n" if "older" in variant else ""
    first, second, third = LEARNED["gemma4"]
    assert learned(tokenizer, encoded) == first + opens + second + third
    for chat, texts in ((TURNS[:1], ["no"]), (TURNS[:1] + TURNS[5:] + TURNS[4:5], ["bye", "no"])):
        chat = [*chat, {"role": "assistant", "content": "no"}]
        plain = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in chat]
        (encoded,) = encode_sft(tokenizer, [row(plain)])
        assert learned(tokenizer, encoded) == "".join(f"{text}<turn|>\n" for text in texts)
        closed = tokenizer.decode(encoded[0]).count("<|turn>model\n<|channel>thought\n<channel|>")
        assert closed == (len(texts) if "large" in variant else 0)
    single = [TURNS[0], TURNS[5]]  # whose thoughts the older ones drop
    assert learned(tokenizer, encode_sft(tokenizer, [row(single)])[0]) == LEARNED["gemma4"][2]


SCHEMA = {
    "at": {"type": "string", "description": "Where, “there”."},
    "how": {"type": "string", "enum": ["a", "b"], "default": "a"},
    "numbers": {"type": "array", "items": {"type": "integer"}},
    "more": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"oneOf": [{"type": "string"}, {}]}}},
}
LOOK = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": SCHEMA, "required": ["at"]},
}
RICH = {"at": 'it, "é"\n', "numbers": [1, 2], "more": {"x": 1.5, "y": None}, "on": True}
ASK = [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "q <b> ü "}]
RICH_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": RICH}}],
}
ENDING = [  # conversations that do not continue after an answer, with tools or without
    (ASK, False),
    (ASK[1:], True),
    ([*ASK, {"role": "assistant", "content": " a\n\nb", "reasoning_content": "hm\n"}], True),
    ([*ASK[1:], {"role": "assistant", "content": "", "reasoning_content": "hm"}], False),
    ([*ASK, RICH_CALL], True),
    (
        [
            *ASK,
            RICH_CALL | {"reasoning_content": "hm"},
            {"role": "tool", "content": "é\n"},
            RICH_CALL,
            *[{"role": "tool", "content": ""}] * 2,
        ],
        True,
    ),
]
# of the texts of ENDING, and of its first without thinking, by the published templates (copies of TRL 1.16.0)
PUBLISHED_DIGESTS = {
    "qwen3_5": "a264ef431d0f aa5271bcfa8f dd0546d32af4 45853b541314 376b979c98b1 741870684de7 bedb69053b61",
    "glm4_5": "e9690a8db00a f80eee1047fa e316eb4cad27 40a16a97e3e9 fd0dd1dd78e9 716e5368f6e4 df6b9b913a67",
    "gpt_oss": "0c45d25258b2 677e2e5a7328 65627cbf1f11 18e2045e111a df8f6c1f4563 36782418010e 0c45d25258b2",
    "gemma4": "0bb0b153024a 98e98c8cbc74 8a1c69d61607 f7decd9fea1f 78f36c1e2216 86efaad492a8 0bb0b153024a",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_ends_at_an_answer_is_rendered_as_the_published_template_does(family, name):
    tokenizer = family(name)
    tokenizer.chat_template = shipped_template(name)
    assert rendered_digests(tokenizer) == PUBLISHED_DIGESTS[name].split()


def rendered_digests(tokenizer):
    asked = [(*one, {}) for one in ENDING] + [(*ENDING[0], {"enable_thinking": False})]
    texts = [
        try_text(tokenizer, chat, tools=[{"type": "function", "function": LOOK}] if tools else None,
                 add_generation_prompt=chat[-1]["role"] != "assistant", **options)
        for chat, tools, options in asked
    ]  # fmt: skip
    texts = [re.sub(r"Current date: [\d-]+", "", text) for text in texts]
    return [hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts]
