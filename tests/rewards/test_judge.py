"""A judge's questions and what its replies are worth; who replies is scripted, but for one run that asks its own
engine."""

import json
import re
import shutil

import pytest
import torch

from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.judge import JudgeConfig
from aligner.config.sections.rewards import RewardConfig
from aligner.data.tokenizer import decode_responses, stop_token_ids
from aligner.engines.native.load import engine_from_folder
from aligner.errors import ConfigError, RewardError
from aligner.rewards.composite import RewardPipeline
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


def judge(reply, kind="grade", question=GRADE, **settings):
    """With `reply(question)`; and the questions that it was asked."""
    heard = []

    def ask(questions, tokens):
        assert tokens == 32
        heard.extend(question.text for question in questions)
        return [reply(question.text) for question in questions]

    return Judge(JudgeConfig(kind=kind, question=question, **settings), ask), heard


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


def with_rubrics(*rubrics):
    """A sample for each rubric, of (criterion, points)."""
    fields = [{"rubric": [{"criterion": text, "points": points} for text, points in one]} for one in rubrics]
    return [Sample(Prompt(i, (1,), f"q{i}", one), 0, f"r{i}", (1,), True) for i, one in enumerate(fields)]


def test_a_rubric_is_the_share_of_points_of_the_criteria_that_are_met():
    """Of HealthBench's formula by hand: penalties are taken off, and nothing is below 0."""
    says = {"kind": "Hm. No... YES", "short": "no", "rude": "yes", "cites": "Yes.", "lies": "no", "odd": "perhaps"}
    one, heard = judge(
        lambda text: says[text.split("|")[2]], "rubric", "{prompt}|{response}|{criterion}", max_tokens=32
    )
    rows = with_rubrics(
        [("kind", 5), ("short", 3), ("rude", -2), ("lies", -9)],  # (5 - 2) / 8
        [("kind", 1), ("rude", -4)],  # -3 / 1
        [("cites", 2.5)],
        [("short", 1)],
        [("kind", 1), ("odd", 1)],
    )
    assert one(rows) == [0.375, 0.0, 1.0, 0.0, None] and heard[2:5] == ["q0|r0|rude", "q0|r0|lies", "q1|r1|kind"]
    assert one.take_counts() == {"unread": (1.0, 10.0), "met": (6.0, 9.0)} and one.take_counts()["met"] == (0, 0)
    assert one(samples_of_null := [Sample(Prompt(0, (1,), "", {"rubric": None}), 0, "", (1,), True)]) == [None]
    assert one.unreadable([samples_of_null[0].prompt, rows[0].prompt])[0].endswith("found null")
    all_met, heard = judge(lambda text: '{"explanation": "no", "criteria_met": true}', "rubric", "", parse="json")
    assert all_met(rows[:1]) == [0.0] and len(heard) == 4 and "Criterion:\nrude\n" in heard[2]  # (8 - 11) / 8
    words, _ = judge(lambda text: "MET", "rubric", "", pattern="(MET)")
    with pytest.raises(RewardError, match=r"pattern='\(MET\)': expected a pattern that matches yes or no, found 'MET'"):
        words(rows)


@pytest.mark.parametrize(
    ("rubric", "message"),
    [
        ("[{", "a text that is not JSON"),
        ([], r"found \[\]"),
        ({"criterion": "a", "points": 1}, r"found \{'criterion'"),
        ([{"criterion": "a", "points": -1}, {"criterion": "b", "points": 0}], "found only the points -1, 0"),
        ([{"criterion": "a", "points": 1}, {"criterion": "b", "points": "2"}], r"criterion 2 points='2'"),
        ([{"criterion": "a", "points": True}], r"criterion 1 points=True"),
        ([{"criterion": "a", "points": float("nan")}], r"criterion 1 points=nan"),
        ([{"criterion": " ", "points": 1}], r"criterion 1 \{'criterion': ' '"),
        ([{"title": "a", "weight": 1}], r"criterion 1 \{'title'"),
    ],
)
def test_rows_without_a_rubric_are_refused(rubric, message):
    one, _ = judge(None, "rubric", "")
    fine = {"rubric": '[{"criterion": "a", "points": 1}]'}
    prompts = [Prompt(i, (1,), "", fields) for i, fields in enumerate([fine, {"rubric": rubric}, {"answer": 1}])]
    why = RewardPipeline([(one, 1.0)], RewardConfig()).unreadable(prompts, range(3))
    assert list(why) == [1, 2] and re.search(message, why[1])
    assert why[2].endswith("found the columns prompt, answer (data.columns={rubric: theirs})")


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
        ({"question": "{response}", "kind": "rubric"}, r"\{response\} and \{criterion\} for kind rubric"),
    ],
)
def test_contradicting_judge_keys_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        JudgeConfig(**{"question": "{response}", **change})


def test_the_runs_own_engine_replies(tiny_data, tiny_runs, tmp_path, monkeypatch):
    """To each question as a user's turn, with the most likely words."""
    call, heard = EngineReplies.__call__, []

    def listening(self, questions, tokens):
        actual = call(self, questions, tokens)
        text = [{"role": "user", "content": questions[0].text}]
        row = self.tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False)
        again = ""
        if actual[0] is not None:
            own = self.engine().generate([tuple(row)], [[5]], SamplingParams(tokens, 0.0))
            again = self.tokenizer.decode(own.tokens[0, : own.lengths[0]])
        heard.append((questions, actual, again))
        return actual

    monkeypatch.setattr(EngineReplies, "__call__", listening)
    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=1", "run.export=false", "checkpoint.final=false"]
    judges = (
        "{name: pairs, kind: pairwise, question: '{first}{second}:', max_tokens: 3}",
        "{question: 'good {response} {prompt}', max_tokens: 3, weight: 0.5}",
        f"{{name: long, question: '{{response}} {'more than fits ' * 5}', max_tokens: 3}}",
        "{name: listed, kind: rubric, question: '{criterion}{response}', max_tokens: 3}",
    )
    rows = [json.loads(line) for line in (tiny_data / "train.jsonl").read_text().splitlines()]
    rubric = [{"criterion": "a", "points": 1}, {"criterion": "b", "points": -1}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"rubric": rubric}) + "\n" for row in rows))
    overrides += [f"data.train={tmp_path / 'rows.jsonl'}"]
    run = stages.stage("grpo", tiny_data, tmp_path / "run", *overrides, f"reward.judges=[{', '.join(judges)}]")
    record = stages.records(run)[0]
    assert record["reward/pairs/mean"] == pytest.approx(0.5)  # of two, what one wins the other loses
    assert record["reward/long/unread"] == 1 and 0 <= record["reward/judge/unread"] <= 1
    assert record["reward/listed/unread"] == 1
    (pairs, replies, again), (grades, others, other), (_, none, _), (criteria, *_) = heard
    assert [one.text[0] for one in criteria] == ["a", "b"] * 32
    assert len(pairs) == 64 and len(grades) == 32 and set(none) == {None}
    assert again.startswith(replies[0]) and other.startswith(others[0]) and len(set(replies)) > 1


@pytest.mark.slow
def test_a_judge_with_weights_of_its_own(tiny_data, tiny_runs, tmp_path, monkeypatch):
    """Replies as that model's own engine does, whatever the policy learns. A run that is killed and goes on gives the
    bits of one that was not, also where the judge's weights are on the host while nobody asks it."""
    call, heard = EngineReplies.__call__, []

    def listening(self, questions, tokens):
        texts = [question.text for question in questions]
        heard.append((self, dict(zip(texts, call(self, questions, tokens), strict=True))))
        return list(map(heard[-1][1].get, texts))

    monkeypatch.setattr(EngineReplies, "__call__", listening)
    questions = "kind: pairwise, question: 'say {first}{second}:', max_tokens: 3"
    judges = f"{{model: {tiny_runs['sft']}, {questions}}}, {{name: same, model: {tiny_runs['sft']}, {questions}}}"
    overrides = ["model.init=random", "run.steps=2", "checkpoint.every=1", f"reward.judges=[{judges}]"]
    whole = stages.stage("grpo", tiny_data, tmp_path / "whole", *overrides)
    asked, engine = heard[0][0], heard[0][0].engine()
    assert {id(one) for one, _ in heard} == {id(asked)}  # loaded once
    assert engine.weight_version == 0 and engine.held_bytes()["cache"] == 0  # never refit; asleep
    alone = engine_from_folder(tiny_runs["sft"] / "hf", EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0)
    answer = {question: reply for _, result in heard for question, reply in result.items()}
    for question in list(answer)[::9]:
        text = [{"role": "user", "content": question}]
        row = asked.tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False)
        own = alone.generate([row], [[0]], SamplingParams(3, 0.0, stop_token_ids=stop_token_ids(asked.tokenizer)))
        assert decode_responses(asked.tokenizer, own.tokens, own.lengths) == [answer[question]]
    assert len(set(answer.values())) > 1
    overrides += ["memory.offload=[weights]"]
    with stages.power_cut_in_update(2), pytest.raises(stages.PowerCut):
        stages.stage("grpo", tiny_data, tmp_path / "cut", *overrides)
    cut = stages.stage("grpo", tiny_data, tmp_path / "cut", *overrides, "run.resume=auto")
    assert stages.same_weights(whole, cut)
    assert [r["reward/judge/mean"] for r in stages.records(cut)] == [r["reward/same/mean"] for r in stages.records(cut)]
    moved = shutil.copytree(tiny_runs["rm"], tmp_path / "other")
    with pytest.raises(ConfigError, match=r"reward.judges.judge.model=.*a head of scores"):
        stages.stage("grpo", tiny_data, cut, *overrides, f"reward.judges=[{{model: {moved}, {questions}}}]")


def no_template(folder):
    config = json.loads((folder / "hf/tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "hf/tokenizer_config.json").write_text(json.dumps(config))
    (folder / "hf/chat_template.jinja").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (no_template, "expected a model whose tokenizer has a chat template"),
        (lambda folder: (folder / "hf/tokenizer.json").unlink(), "expected a folder with the model's tokenizer"),
        (lambda folder: shutil.rmtree(folder / "hf"), "a Hugging Face folder, or a run that has exported one"),
        (shutil.rmtree, "expected a path that exists"),
    ],
)
def test_a_folder_that_cannot_judge(tiny_data, tiny_runs, tmp_path, spoil, message):
    folder = shutil.copytree(tiny_runs["sft"], tmp_path / "judge")
    spoil(folder)
    judge = f"reward.judges=[{{name: strict, model: {folder}, question: '{{response}}'}}]"
    with pytest.raises(ConfigError, match=rf"reward.judges.strict.model=.*{message}"):
        stages.stage("grpo", tiny_data, tmp_path / "run", f"model.init={tiny_runs['sft']}", "run.steps=1", judge)


@pytest.mark.slow
@pytest.mark.multirank
def test_ranks_share_a_judge(tiny_data, tiny_runs, tmp_path, ranks):
    """Two engines of one rank, or one of two."""
    judge = f"{{model: {tiny_runs['sft']}, kind: pairwise, question: 'say {{first}}{{second}}:', max_tokens: 3}}"
    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=1", "run.export=false", "checkpoint.final=false"]
    run_dir = [stages.stage("grpo", tiny_data, tmp_path / "one", *overrides, f"reward.judges=[{judge}]")]
    for width in (1, 2):
        where = f"engine.tensor_parallel={width}", f"reward.judges=[{judge}]"
        arguments = stages.overrides("grpo", tiny_data, tmp_path / f"two{width}", *overrides, *where)
        ranks.run("tests.run.jobs:run_stage", world=2, arguments=arguments)
        run_dir.append(tmp_path / f"two{width}")
    one, *others = ({k: v for k, v in stages.records(run)[0].items() if k.startswith("reward/")} for run in run_dir)
    assert "reward/judge/mean" in one and others == [pytest.approx(one)] * 2
