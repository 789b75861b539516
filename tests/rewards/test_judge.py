"""A judge's questions and what its replies are worth; who replies is scripted, but for one run that asks its own
engine."""

import pytest

from aligner.config.sections.judge import JudgeConfig
from aligner.errors import ConfigError, RewardError
from aligner.rewards.judge import Judge
from aligner.rollout.replies import EngineReplies
from aligner.types import Prompt, Sample, SamplingParams
from tests import stages

GRADE = "{prompt} -> {response} ({topic}): 0 to 10?"
COMPARE = "{prompt}: A {first} or B {second}?"


def samples(*groups):
    """Groups of answers."""
    prompts = [Prompt(id=i, tokens=(1,), text=f"q{i}", fields={"topic": "sums"}) for i in range(len(groups))]
    return [
        Sample(prompt, i, text, (1,), finished=True)
        for prompt, group in zip(prompts, groups, strict=True)
        for i, text in enumerate(group)
    ]


def judge(reply, kind="grade", question=GRADE, **more):
    """With `reply(question)`; and the questions that it was asked."""
    heard = []

    def ask(questions, tokens):
        assert tokens == 32
        heard.extend(questions)
        return [reply(question) for question in questions]

    return Judge(JudgeConfig(kind=kind, question=question, **more), ask), heard


def test_a_grade_is_the_last_number_of_the_reply():
    replies = {"a": "7", "b": "1 of 10? No: 4.5.", "c": "fine", "d": "-99", "e": "25"}
    one, heard = judge(lambda question: replies[question.split("-> ")[1][0]])
    assert one(samples(["a", "b", "c"], ["d", "e"])) == [0.7, 0.45, None, 1.0, 1.0]
    assert heard[0] == "q0 -> a (sums): 0 to 10?" and heard[3].startswith("q1 -> d")
    assert one.take_counts() == {"unread": (1.0, 5.0)} and one.take_counts() == {"unread": (0.0, 0.0)}
    assert one([]) == []


def test_the_better_of_two_wins_in_both_orders():
    """The judge likes the longer answer."""

    def longer(question):
        first, second = (text.split(" ")[1] for text in question.removesuffix("?").split(": ")[1].split(" or "))
        return "A" if len(first) > len(second) else "B"

    one, heard = judge(longer, "pairwise", COMPARE, opponents=0)
    assert one(samples(["xx", "x", "xxx"], ["y", "yy", "yyy"])) == [0.5, 0.0, 1.0, 0.0, 0.5, 1.0]
    assert len(heard) == 2 * 2 * 3 and heard[:2] == ["q0: A xx or B x?", "q0: A x or B xx?"]
    ring, heard = judge(longer, "pairwise", COMPARE)
    assert ring(samples(["xx", "x", "xxx", "xxxx"])) == [0.5, 0.0, 0.5, 1.0] and len(heard) == 2 * 4


@pytest.mark.parametrize("reply", ["A", "B", "neither", "", None])
def test_liking_a_place_is_a_tie(reply):
    one, _ = judge(lambda question: reply, "pairwise", COMPARE)
    assert one(samples(["x", "y"])) == [0.5, 0.5]
    assert one.take_counts()["unread"] == ((2.0, 2.0) if reply not in ("A", "B") else (0.0, 2.0))


def test_what_a_group_of_one_gets_and_a_pattern_of_ones_own():
    one, heard = judge(lambda question: "B", "pairwise", COMPARE)
    assert one(samples(["x"])) == [None] and not heard
    marked, _ = judge(lambda question: "A or B? [[A]]" if "A x" in question else "[[B]]", "pairwise", COMPARE,
                      pattern=r"\[\[([AB])\]\]")  # fmt: skip
    assert marked(samples(["x", "y"])) == [1.0, 0.0]


def test_a_question_of_other_columns_is_refused_with_what_there_is():
    one, _ = judge(lambda question: "1", question="{response} {nothing}")
    with pytest.raises(RewardError, match=r"question='\{response\} \{nothing\}'.* over prompt, response, topic"):
        one(samples(["a"]))
    words, _ = judge(lambda question: "good", pattern=r"(\w+)")
    with pytest.raises(RewardError, match=r"pattern=.*matches numbers, found 'good'"):
        words(samples(["a"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": ""}, r"question='': expected a text with \{response\} for kind grade"),
        ({"question": "{first}", "kind": "pairwise"}, r"\{first\} and \{second\} for kind pairwise"),
        ({"question": "{response"}, r"question=.*a format string"),
        ({"pattern": "("}, r"pattern='\(': expected a regular expression"),
        ({"pattern": "[0-9]"}, r"pattern=.*one group in parentheses"),
        ({"kind": "vote"}, r"kind='vote'"),
        ({"scale": 0}, r"scale=0"),
        ({"opponents": -1}, r"opponents=-1"),
    ],
)
def test_bad_judges(change, message):
    with pytest.raises(ConfigError, match=message):
        JudgeConfig(**{"question": "{response}", **change})


def test_the_runs_own_engine_replies(tiny_data, tiny_runs, tmp_path, monkeypatch):
    """To each question as a user's turn, with the most likely words."""
    call, heard = EngineReplies.__call__, []

    def listening(self, questions, tokens):
        found = call(self, questions, tokens)
        text = [{"role": "user", "content": questions[0]}]
        row = self.tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False)
        again = ""
        if found[0] is not None:
            own = self.engine().generate([tuple(row)], [[5]], SamplingParams(tokens, 0.0))
            again = self.tokenizer.decode(own.tokens[0, : own.lengths[0]])
        heard.append((questions, found, again))
        return found

    monkeypatch.setattr(EngineReplies, "__call__", listening)
    more = [f"model.init={tiny_runs['sft']}", "run.steps=1", "run.export=false", "checkpoint.final=false"]
    judges = (
        "{name: pairs, kind: pairwise, question: '{first}{second}:', max_tokens: 3}",
        "{question: 'good {response} {prompt}', max_tokens: 3, weight: 0.5}",
        f"{{name: long, question: '{{response}} {'more than fits ' * 5}', max_tokens: 3}}",
    )
    run = stages.stage("grpo", tiny_data, tmp_path / "run", *more, f"reward.judges=[{', '.join(judges)}]")
    record = stages.records(run)[0]
    assert record["reward/pairs/mean"] == pytest.approx(0.5)  # of two, what one wins the other loses
    assert record["reward/long/unread"] == 1 and 0 <= record["reward/judge/unread"] <= 1
    (pairs, replies, again), (grades, others, other), (_, none, _) = heard
    assert len(pairs) == 64 and len(grades) == 32 and set(none) == {None}
    assert again.startswith(replies[0]) and other.startswith(others[0]) and len(set(replies)) > 1
