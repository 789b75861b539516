"""Shipped templates render what the families' own do, and mark each answer of a conversation."""

import pytest
from hypothesis import given, settings

from aligner.config.sections.data import DataConfig
from aligner.data.dataset import PromptDataset, SftDataset
from aligner.data.formats import SftRow, prompt_rows, sft_rows
from aligner.data.shipped_templates import shipped, shipped_template, training_template, use_chat_template
from aligner.data.templates import encode_answers, encode_sft, shipped_in_use
from aligner.data.tokenizer import load_tokenizer, stop_token_ids
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
        assert shipped_in_use(tokenizer, [row(chat)]) is None and shipped_in_use(tokenizer, [row(two)]) == name


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
    assert shipped_in_use(deepseek, rows) == "deepseek_r1"
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


def test_only_what_renders_alike_is_replaced(qwen3, thinking, deepseek, phi3, forgetful, chatml, make_folder):
    assert training_template(qwen3) == "qwen3" and training_template(thinking) == "qwen3_thinking"
    assert training_template(deepseek) == "deepseek_r1" and training_template(phi3) == "phi3"
    assert training_template(forgetful) is training_template(chatml) is None
    other = load_tokenizer(make_folder(like_qwen3().replace("a json object", "JSON"), extra=THINK))
    assert training_template(other) is None  # differs with tools alone
    two = [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]
    with pytest.raises(
        DataError,
        match=r"not prefix-preserving.*data.chat_template=FILE.*chatml, deepseek_r1, phi3, qwen3, qwen3_thinking",
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
