"""The built-in checkers."""

from __future__ import annotations

import signal
import threading
from functools import partial

import pytest

from aligner.config.sections.rewards import RewardConfig, RewardFunctionConfig
from aligner.errors import RewardError
from aligner.processes import REQUESTS
from aligner.rewards import verifiable
from aligner.rewards.composite import RewardPipeline
from aligner.rewards.functions import load_function
from aligner.rewards.verifiable import exact_match, format, length
from aligner.types import Prompt, Sample

PATIENT_S = 120.0  # a helper's first answer takes longest, and the machine may be busy
math = partial(verifiable.math, timeout_s=PATIENT_S)


def sample(response: str, **fields) -> Sample:
    return Sample(Prompt(0, (1,), "", fields), 0, response, tuple(range(len(response))), True)


@pytest.mark.parametrize(
    "gold, response, score",
    [
        ("42", "The answer is 42.", 1),
        ("42", "The answer is 43.", 0),
        ("1/2", "so it is 0.5", 1),
        ("\\frac{1}{2}", "\\boxed{0.5}", 1),
        ("\\frac{1}{2}", "\\boxed{\\frac{2}{3}}", 0),
        ("$\\sqrt{8}$", "We get $2\\sqrt{2}$", 1),
        ("x^2+2x+1", "$(x+1)^2$", 1),
        ("(1,2)", "$(1,2)$", 1),
        ("(1,2)", "$(2,1)$", 0),
        ("-7", "-7", 1),
        ("-7", "7", 0),
        ("3.0", "3", 1),
        ("He has 3+4=<<3+4=7>>7 left.\n#### 7", "3 + 4 = 7\n#### 7", 1),
        ("He has 3+4=<<3+4=7>>7 left.\n#### 7", "3 + 5 = 8\n#### 8", 0),
        ("total\n#### 1,234", "The answer is 1234", 1),
        ("total\n#### 1,234", "#### 1,234", 1),
        ("#### -5", "therefore\n#### -5", 1),
        ("#### 18", "#### $18", 1),
        ("#### 42", "", 0),
        ("#### 42", "I do not know", 0),
    ],
)
def test_math_gives_these_scores(gold, response, score):
    assert math([sample(response, answer=gold)]) == [score]


@pytest.mark.slow
def test_math_kills_what_never_ends_and_goes_on():
    """9^9^9^9 is one C call that holds the interpreter lock: only a kill from outside stops it."""
    helper = verifiable._helper()
    assert math([sample("$9^{9^{9^{9}}}$", answer="3")], timeout_s=1.0) == [0.0] and helper.poll() == -signal.SIGALRM
    assert math([sample("3", answer="3")]) == [1.0] and verifiable._helper() is not helper


def test_maths_helper_leaves_requests_to_stop_to_its_rank():
    assert math([sample("3", answer="3")]) == [1.0]
    helper = verifiable._helper()
    for number in REQUESTS:
        helper.send_signal(number)
    assert math([sample("4", answer="4")]) == [1.0] and verifiable._helper() is helper


def test_math_works_off_the_main_thread():
    results: list = []
    thread = threading.Thread(
        target=lambda: results.extend(math([sample("\\boxed{5}", solution="5")], field="solution"))
    )
    thread.start()
    thread.join()
    assert results == [1.0]


def test_math_null_reference_is_not_applicable_and_a_missing_column_an_error():
    assert math([sample("5", answer=None)]) == [None]
    with pytest.raises(RewardError, match=r"args.field='answer'.*solution"):
        math([sample("5", solution="5")])


def test_math_refuses_a_reference_without_mathematics():
    loaded = load_function(RewardFunctionConfig(path="math", args={"timeout_s": PATIENT_S}))
    with pytest.raises(RewardError, match=r"no mathematical expression.*'\?\?\?'"):
        loaded([sample("5", answer="???")])


@pytest.mark.parametrize("gold", ["proof", "Not found", "nan", "N/A"])
def test_what_stands_for_no_reference_scores_nothing_and_is_refused_before(gold):
    rows = [sample(f"\\boxed{{{text}}}", answer=gold) for text in (gold, "5")]
    assert math(rows) == [None, None]
    assert list(verifiable.unreadable([row.prompt for row in rows], timeout_s=PATIENT_S)) == [0, 1]


def test_math_tells_which_references_cannot_be_read():
    fine = ["42", "42 dollars", 1e-05, "the cat", "\\$36", 7, True, "B", "(1,2)", ["42"]]
    none = ["???", "", " ", "proof", "nan", "None", ["1", "2"], {"value": 1}, [float("nan")]]
    loaded = load_function(RewardFunctionConfig(path="math", args={"timeout_s": PATIENT_S}))
    actual = loaded.unreadable([sample("", answer=gold).prompt for gold in fine + none])
    assert list(actual) == list(range(len(fine), len(fine + none))) and "'???'" in actual[len(fine)]
    with pytest.raises(RewardError, match=r"args.field='answer'.*solution"):
        loaded.unreadable([sample("", solution="5").prompt])


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_row_without_a_reference_is_refused_where_nothing_else_scores_it(missing):
    """Mixtures have rows for other functions: there it only does not apply."""
    prompts = [sample("", answer=gold).prompt for gold in ("42", missing, "7")]
    checker = load_function(RewardFunctionConfig(path="math", args={"timeout_s": PATIENT_S}))
    other = load_function(RewardFunctionConfig(path="length", args={"limit": 5}))
    actual = RewardPipeline([(checker, 1.0)], RewardConfig()).unreadable(prompts, range(3))
    assert list(actual) == [1] and "`answer`" in actual[1]
    assert RewardPipeline([(checker, 1.0), (other, 1.0)], RewardConfig()).unreadable(prompts, range(3)) == {}
    assert checker([sample("\\boxed{nan}", answer=missing)]) == exact_match([sample("nan", answer=missing)]) == [None]


@pytest.mark.parametrize("gold, answer", [(1e-05, "0.00001"), (1e16, "10000000000000000"), (0.1, "1/10"), (7, "7")])
def test_math_takes_numbers_as_references(gold, answer):
    assert math([sample(f"${answer}$", answer=gold), sample("$3$", answer=gold)]) == [1.0, 0.0]


def test_exact_match_strips_and_may_ignore_case():
    rows = [
        sample(" Yes\n", answer="Yes"),
        sample("yes", answer="Yes"),
        sample("12", answer=12),
        sample("x", answer=None),
    ]
    assert exact_match(rows) == [1.0, 0.0, 1.0, None]
    assert exact_match(rows, ignore_case=True) == [1.0, 1.0, 1.0, None]
    assert exact_match(rows, strip=False)[0] == 0.0


def test_format_and_a_pattern_that_is_none():
    rows = [sample("<think>a\nb</think>7"), sample("7")]
    assert format(rows, r"\A<think>.*</think>") == [1.0, 0.0]
    with pytest.raises(RewardError, match="raised on"):
        load_function(RewardFunctionConfig(path="format", args={"pattern": "("}))(rows)


def test_length_is_the_dapo_ramp():
    """Points of the published piecewise line: 0 up to L_max - L_cache, -1 from L_max on, linear between."""
    rows = [sample("x" * n) for n in (0, 60, 70, 80, 100, 120)]
    assert length(rows, limit=100, buffer=40) == pytest.approx([0, 0, -0.25, -0.5, -1, -1])
    assert length(rows, limit=80) == [0, 0, 0, 0, -1, -1]
    with pytest.raises(RewardError, match=r"args.buffer=9.*args.limit=5"):
        length(rows, limit=5, buffer=9)
