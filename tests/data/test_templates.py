import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.sections.data import DataConfig
from aligner.data.dataset import SftDataset
from aligner.data.formats import SftRow, sft_rows
from aligner.data.templates import encode_answers, encode_prompts, encode_sft
from aligner.data.tokenizer import load_tokenizer, stop_token_ids
from aligner.errors import DataError
from tests.data.conftest import CHATML

# letters only: no text spells a special token, and none merges with the template's line breaks
WORDS = st.text(alphabet="abc é7", min_size=1, max_size=8).map(lambda s: "x" + s + "x")
ASSISTANT_FIRST = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "bye"}]


@st.composite
def chats(draw):
    turns = draw(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3))
    start = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    pairs = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in turns]
    return start + [m for pair in pairs for m in pair]


def row(messages):
    return SftRow(messages=messages, where="data.jsonl, row 1")


@given(batch=st.lists(chats(), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_marked_template_agrees_with_transformers_and_with_the_prefix_path(byte, marked, chatml, batch):
    rows = [row(chat) for chat in batch]
    for tokenizer in (byte, marked):
        for (tokens, mask), chat in zip(encode_sft(tokenizer, rows), batch, strict=True):
            expected = tokenizer.apply_chat_template(
                chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            assert (tokens, mask) == (expected["input_ids"], expected["assistant_masks"])
    # the unmarked twin of the marked template must find the same spans from prefixes alone
    assert encode_sft(chatml, rows) == encode_sft(marked, rows)


@given(chat=chats())
@settings(max_examples=20, deadline=None)
def test_loss_is_on_the_assistant_texts_and_their_end(chatml, chat):
    ((tokens, mask),) = encode_sft(chatml, [row(chat)])
    learned = chatml.decode([t for t, m in zip(tokens, mask, strict=True) if m])
    assert learned == "".join(m["content"] + "<|im_end|>\n" for m in chat if m["role"] == "assistant")


SYSTEM_FIRST = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"


@pytest.mark.parametrize("default", ["", SYSTEM_FIRST])
def test_assistant_that_opens_the_conversation_learns_its_words_alone(make_folder, default):
    """Neither the mark of its turn nor a system message of the template."""
    tokenizer = load_tokenizer(make_folder(default + CHATML))
    ((tokens, mask),) = encode_sft(tokenizer, [row(ASSISTANT_FIRST)])
    assert tokenizer.decode(tokens) == tokenizer.apply_chat_template(ASSISTANT_FIRST, tokenize=False)
    learned = "".join(m["content"] + "<|im_end|>\n" for m in ASSISTANT_FIRST if m["role"] == "assistant")
    assert tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m]) == learned


@pytest.mark.parametrize("name", ["byte", "chatml", "marked"])
def test_conversational_completion_gets_the_only_loss(request, name):
    tokenizer = request.getfixturevalue(name)
    first = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "old"},
        {"role": "user", "content": "r"},
    ]
    (typed,) = sft_rows([{"prompt": first, "completion": "new"}], DataConfig())
    ((tokens, mask),) = encode_sft(tokenizer, [typed])
    assert tokens == tokenizer.apply_chat_template([*first, *typed.completion], tokenize=True)["input_ids"]
    learned = tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m], skip_special_tokens=True)
    assert learned.strip() == "new"


def test_plain_text_is_prompt_completion_eos(byte, with_bos):
    rows = [SftRow(prompt="ab", completion="cde"), SftRow(prompt="", completion="x<eos>")]
    (tokens, mask), (second, second_mask) = encode_sft(byte, rows)
    assert byte.decode(tokens) == "abcde<eos>" and mask == [0, 0, 1, 1, 1, 1]
    assert byte.decode(second) == "x<eos>" and second_mask == [0, 1]  # EOS once; no logprob for the first token
    assert encode_sft(byte, rows[:1], "all")[0][1] == [0, 1, 1, 1, 1, 1]
    ((tokens, mask),) = encode_sft(with_bos, [SftRow(prompt="ab", completion="c")])
    assert with_bos.decode(tokens) == "<s>abc<|im_end|>" and mask == [0, 0, 0, 1, 1]


def test_loss_on_all_for_chats_needs_no_prefixes(forgetful):
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "hm</think>a"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "b"},
    ]
    ((tokens, mask),) = encode_sft(forgetful, [row(chat)], "all")
    assert mask == [0] + [1] * (len(tokens) - 1)
    with pytest.raises(DataError, match=r"not prefix-preserving") as caught:
        encode_sft(forgetful, [row(chat)])
    text = str(caught.value)
    assert (
        "data.jsonl, row 1" in text
        and "hm</think>a" in text
        and "{% generation %}" in text
        and "model.tokenizer" in text
    )


def test_tokens_that_merge_across_a_turn_are_noticed(make_folder):
    chatml = load_tokenizer(make_folder(regex=False))
    # "\n" of the opening and "\n" of the answer become the one token "\n\n"
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\na"}]
    with pytest.raises(DataError, match=r"not prefix-preserving"):
        encode_sft(chatml, [row(chat)])


def test_no_special_token_twice(with_bos):
    chat = [{"role": "user", "content": "q"}]
    chat_ids, plain, spelled = encode_prompts(with_bos, [chat, "q", "<s>q"], ["r1", "r2", "r3"])
    assert with_bos.decode(chat_ids) == "<s><|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert with_bos.decode(plain) == with_bos.decode(spelled) == "<s>q"


def test_answers_end_with_their_stop_token_like_rollouts(chatml, byte):
    ask, say = [{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a \n"}]
    for tokenizer in (chatml, byte):
        stop = stop_token_ids(tokenizer)
        chat, plain = encode_answers(tokenizer, [ask, "q"], [say, "a \n"], ["r1", "r2"], stop)
        assert chat[-1] in stop and plain[-1] == tokenizer.eos_token_id
        opening = encode_prompts(tokenizer, [ask], ["r1"])[0]
        assert chat[: len(opening)] == opening  # what the policy is given, then what it would say
        assert tokenizer.decode(chat[len(opening) : -1]) == "a \n"
        assert tokenizer.decode(plain[:-1]) == "qa \n"


def test_template_without_a_stop_token_gets_eos(make_folder):
    tokenizer = load_tokenizer(make_folder("{% for m in messages %}{{ m['content'] }}\n{% endfor %}"))
    chat = [{"role": "assistant", "content": "a"}]
    (ids,) = encode_answers(tokenizer, [[]], [chat], ["r"], stop_token_ids(tokenizer))
    assert tokenizer.decode(ids) == "a\n<|im_end|>"


def test_conversations_need_a_chat_template(make_folder):
    tokenizer = load_tokenizer(make_folder(None))
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(DataError, match=r"model.tokenizer=.*expected a chat template"):
        encode_sft(tokenizer, [row(chat)])
    with pytest.raises(DataError, match=r"model.tokenizer=.*expected a chat template"):
        encode_prompts(tokenizer, [chat[:1]], ["row 1"])
    assert encode_prompts(tokenizer, ["q"], ["row 1"])  # plain text needs none
    slow = type("Slow", (type(tokenizer),), {"is_fast": False})
    tokenizer.__class__ = slow
    assert encode_sft(tokenizer, [SftRow(prompt="q", completion="a")])


def test_template_that_refuses_a_role_names_the_row(byte):
    good = SftRow(messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], where="row 1")
    bad = SftRow(messages=[{"role": "oracle", "content": "q"}], where="row 2")
    with pytest.raises(DataError, match=r"row 2: the chat template .* refuses the roles .*unknown role oracle"):
        encode_sft(byte, [good, bad])


@pytest.mark.parametrize("name", ["byte", "chatml"])
def test_nothing_to_learn_names_the_row(request, name):
    with pytest.raises(DataError, match=r"data.jsonl, row 1: expected at least one token to learn"):
        encode_sft(request.getfixturevalue(name), [row([{"role": "user", "content": "q"}])])


@pytest.mark.parametrize("text", ["4", " 4", "5+4", "44"])
@pytest.mark.parametrize("prompt", ["Q:2+2=", "Q:4", ""])
def test_a_completion_gets_no_blank_from_a_tokenizer_that_puts_one_before_texts(tmp_path, prompt, text):
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "</s>", "<pad>", *"▁Q:0123456789+=\n", "▁4", "▁5"]
    vocab = {name: i for i, name in enumerate(names)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "4"), ("▁", "5")], unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in ("</s>", "<pad>")])
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>", pad_token="<pad>")
    made.save_pretrained(str(tmp_path))
    tokenizer = load_tokenizer(str(tmp_path))
    ((ids, _),) = encode_sft(tokenizer, [SftRow(prompt=prompt, completion=text, where="r")])
    assert tokenizer.decode(ids[:-1]) == prompt + text and ids[-1] == tokenizer.eos_token_id
    stop = [tokenizer.eos_token_id]
    assert encode_answers(tokenizer, [prompt], [text], ["r"], stop) == [ids]


def test_an_opening_that_begins_thoughts_names_the_argument_that_changes_it(make_folder):
    """As Nemotron 3's; the remedy holds."""
    opening = "{% if add_generation_prompt and enable_thinking | default(true) %}<think>\n{% endif %}"
    tokenizer = load_tokenizer(make_folder(CHATML + opening))
    (typed,) = sft_rows(
        [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}], DataConfig()
    )
    with pytest.raises(DataError, match=r"Fix: data.template_arguments=\{enable_thinking: false\}"):
        SftDataset([typed], tokenizer, DataConfig())
    ((tokens, mask),) = encode_sft(tokenizer, [typed], arguments={"enable_thinking": False})
    assert tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m]) == "a<|im_end|>\n"
