"""Prompts that only a teacher reads: how they are made of a row, and what stands behind them."""

import pytest
import torch

from aligner.config.sections.data import DataConfig
from aligner.data.dataset import PromptDataset
from aligner.data.formats import prompt_rows
from aligner.data.mixture import PromptMixture
from aligner.data.shipped_templates import use_chat_template
from aligner.data.teacher_prompts import TeacherPrompts
from aligner.data.templates import encode_prompts
from aligner.data.tokenizer import byte_tokenizer
from aligner.errors import DataError
from aligner.types import TeacherRows, TrainBatch

TEMPLATE = "{prompt} It is {solution[text]}."


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    tokenizer = byte_tokenizer(str(tmp_path_factory.mktemp("byte")))
    use_chat_template(tokenizer, DataConfig(chat_template="chatml"))
    return tokenizer


def prompts_of(rows, tokenizer, template=TEMPLATE):
    data = DataConfig(max_prompt_tokens=200)
    return PromptDataset(prompt_rows(rows, data, teacher_prompt=template), tokenizer, data)


def row(prompt, text="x", **more):
    return {"prompt": prompt, "solution": {"text": text}, **more}


def test_the_last_message_is_built_anew_and_the_answer_follows(chat):
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    rows = [row("too long" * 99), row("1 + 1?", "2"), row(talk, "4"), row(talk, "5", tools=tools)]
    whole = prompts_of(rows, chat)
    assert [prompt.id for prompt in whole] == [1, 2, 3]
    theirs = TeacherPrompts(whole, chat, {}, 300)
    answers = [[7, 8, 9], [5], [6, 4]]
    lengths = [len(prompt.tokens) + len(answer) for prompt, answer in zip(whole, answers, strict=True)]
    tokens, mask = torch.zeros(3, max(lengths), dtype=torch.int64), torch.zeros(3, max(lengths))
    for i, (prompt, answer) in enumerate(zip(whole, answers, strict=True)):
        tokens[i, : lengths[i]] = torch.tensor([*prompt.tokens, *answer])
        mask[i, len(prompt.tokens) : lengths[i]] = 1
    back = torch.tensor([2, 0, 1])
    answered = TrainBatch(tokens, torch.tensor(lengths), mask).select(back)
    result = theirs.rows([whole[i] for i in back], answered, answered.loss_mask)
    longer = [talk[0], {"role": "user", "content": "2 + 2? It is 4."}]
    other = [talk[0], {"role": "user", "content": "2 + 2? It is 5."}]
    expected = encode_prompts(chat, ["1 + 1? It is 2.", longer, other], ["", "", ""], [None, None, tools], {})
    for at, i in enumerate(back.tolist()):
        wanted = expected[i] + answers[i]
        n = int(result.teacher_lengths[at])
        assert result.teacher_tokens[at, :n].tolist() == wanted
        assert result.teacher_mask[at].nonzero().flatten().tolist() == list(range(len(expected[i]), n))
    assert whole[0].tokens == tuple(encode_prompts(chat, ["1 + 1?"], [""])[0])  # the student's own is as it was


def test_prompts_of_several_sources_are_known_by_their_numbers(chat):
    parts = {name: prompts_of([row("q" * n, name) for n in (1, 2)], chat) for name in "ab"}
    both = PromptMixture(parts, [1, 1])
    none = TrainBatch(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1).long(), torch.zeros(1, 1))
    theirs = TeacherPrompts(both, chat, {}, 300).rows([both[2]], none, none.loss_mask)
    assert chat.decode(theirs.teacher_tokens[0], skip_special_tokens=True) == "q It is b."


@pytest.mark.parametrize(
    "template, message",
    [
        (
            "{prompt} {hint}",
            r"row 1: algorithm.distill.teacher_prompt='{prompt} {hint}': expected a format string over",
        ),
        (r"\boxed{solution}", r"algorithm.distill.teacher_prompt=.*: expected \\boxed{{solution}} for"),
        ("{empty}", r"algorithm.distill.teacher_prompt='{empty}'.*`empty` is null in this row"),
    ],
)
def test_a_row_that_lacks_what_the_teacher_reads_is_refused(chat, template, message):
    with pytest.raises(DataError, match=message):
        prompts_of([row("q", empty=None)], chat, template)


def test_a_prompt_that_does_not_fit_the_teacher_is_refused(chat):
    prompts = prompts_of([row("q"), row("q", "x" * 40)], chat)
    with pytest.raises(DataError, match=r"row 2: expected 1 to 30 tokens in the teacher's prompt, found 49"):
        TeacherPrompts(prompts, chat, {}, 30)


def test_a_right_answer_is_read_where_there_is_one_that_fits(chat):
    """Behind the same prompt as without; the other rows leave the loss, and the teacher reads one token of them."""
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    rows = [row("1 + 1?"), row(talk), row("x"), row("y"), row("{right_answer}")]
    whole = prompts_of(rows, chat, "{prompt} Right: {right_answer}. {solution[text]}")
    theirs = TeacherPrompts(whole, chat, {}, 110, room=20)
    lengths = torch.tensor([len(prompt.tokens) + 2 for prompt in whole])
    tokens = torch.zeros(5, int(lengths.max()), dtype=torch.int64)
    mask = torch.zeros(tokens.shape)
    for i, n in enumerate(lengths.tolist()):
        tokens[i, n - 2 : n], mask[i, n - 2 : n] = torch.tensor([5 + i, 6]), 1
    right = ["two {prompt}", "4", None, "z" * 110, "a"]
    result = theirs.with_right_answers(list(whole), TrainBatch(tokens, lengths, mask), right, mask)
    taught = [True, True, False, False, True]
    assert torch.equal(result.loss_mask, mask * torch.tensor(taught)[:, None])
    longer = [talk[0], {"role": "user", "content": "2 + 2? Right: 4. x"}]
    texts = ["1 + 1? Right: two {prompt}. x", longer, "a Right: a. x"]
    expected = iter(encode_prompts(chat, texts, [""] * 3))
    own = result.of(TeacherRows)
    for i in range(5):
        wanted = [*next(expected), 5 + i, 6] if taught[i] else [chat.pad_token_id]
        n = int(own.teacher_lengths[i])
        assert own.teacher_tokens[i, :n].tolist() == wanted
        assert own.teacher_mask[i].nonzero().flatten().tolist() == (list(range(n - 2, n)) if taught[i] else [])


def test_a_prompt_without_room_for_a_right_answer_is_refused(chat):
    prompts = prompts_of([row("q", "x" * 30)], chat, "{prompt} {right_answer} {solution[text]}")
    TeacherPrompts(prompts, chat, {}, 60)
    message = r"expected 1 to 30 tokens in the teacher's prompt, found \d+: .*max_response_tokens, twice: one is the"
    with pytest.raises(DataError, match=message):
        TeacherPrompts(prompts, chat, {}, 60, room=30)
