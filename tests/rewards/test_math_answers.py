"""Which answers are right: a table, and what must not change a score. The comparison itself is math-verify's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aligner.rewards.math_numbers import spelled
from aligner.rewards.math_stated import SEARCHED
from aligner.rewards.math_worker import is_number, reference, score, stated
from tests.rewards.math_pairs import PAIRS

# reference, response, score
MARKED = [
    ("42", "#### 42", 1),
    ("42", "####42", 1),
    ("42", "40 + 2 = 42\n#### 42\n", 1),
    ("42", "#### 42.", 1),
    ("42", "#### 42.00", 1),
    ("42", "#### 43", 0),
    ("42", "#### 42 dollars", 1),
    ("42", "#### 42 eggs", 1),
    ("42", "#### 42 people", 1),
    ("42", "#### 42 USD", 1),
    ("42", "#### 42 gallons of milk", 1),
    ("42", "#### 42 miles per hour.", 1),
    ("42", "#### 42 km/h", 1),
    ("42", "#### 42kg", 1),
    ("42", "#### 42 cm^2", 1),
    ("42", "#### 42 sq. ft.", 1),
    ("42", "#### $42", 1),
    ("42", "#### $42$", 1),
    ("42", "#### \\$42", 1),
    ("42", "#### 42$", 1),
    ("42", "#### $42 dollars", 1),
    ("42", "#### $42$ dollars", 1),
    ("-42", "#### -$42", 1),
    ("42", "#### **42**", 1),
    ("42", "#### **42 dollars**.", 1),
    ("42", "#### **42** dollars", 1),
    ("42", "#### \\(42\\)", 1),
    ("42", "#### $\\boxed{42}$", 1),
    ("42", "#### x = 42", 1),
    ("42", "#### Answer: 42", 1),
    ("42", "#### 42%", 1),
    ("42", "#### 42 \\%", 1),
    ("42", "#### 42 percent", 1),
    ("0.42", "#### 42%", 1),
    ("1234567", "#### $1,234,567", 1),
    ("1234", "#### 1,234 dollars", 1),
    ("0.00001", "#### 1e-5", 1),
    ("-42", "#### \u221242", 1),
    ("-42", "#### -42 degrees", 1),
    ("42", "#### -42", 0),
    ("x+1", "#### 1 + x", 1),
    ("2xy", "#### 2xy", 1),
    ("2xy", "#### 2", 0),
    ("2", "#### 2xy", 0),
]
HEDGES = [
    ("42", "#### 42, 43", 0),
    ("43", "#### 42, 43", 0),
    ("42", "#### 42 1", 0),
    ("1", "#### 42 1", 0),
    ("42", "#### 42 or 43", 0),
    ("43", "#### 42 or 43", 0),
    ("42", "#### 42 dollars or 43 dollars", 0),
    ("42", "#### 42/43", 0),
    ("42", "#### $42$, $43$", 0),
    ("42", "<answer>42, 43</answer>", 0),
    ("42", "<answer>42 or 43</answer>", 0),
    ("42", "\\boxed{42, 43}", 0),
]
ANOTHER_NUMBER = [
    ("42", "#### 42 million", 0),
    ("42", "#### 42k", 0),
    ("42", "#### 42 k", 0),
    ("42", "#### 42 dozen eggs", 0),
    ("42", "#### 42 and a half", 0),
    ("42", "#### 42 dollars and 50 cents", 0),
    ("42", "#### 42i", 0),
    ("42", "#### 42 x", 0),
    ("42", "#### 42 pi", 0),
    ("42", "\\boxed{42 million}", 0),
]
HEADINGS = [
    ("42", "#### Step 1: add\n2 + 40\n\\boxed{42}", 1),
    ("42", "#### Step 1: add\n2 + 40\n\\boxed{41}", 0),
    ("42", "#### Final Answer\n\\boxed{42}", 1),
    ("42", "\\boxed{42}\n#### ", 1),
    ("42", "#### 42\n\n#### Explanation", 1),
    ("42", "#### 42\n#### 1. Explanation", 1),
    ("42", "#### 1. Add them\n#### 2. Done\nThe answer is 42", 1),
    ("42", "#### 1) **Add**\n\\boxed{42}", 1),
    ("42", "#### 1 Add them\n\\boxed{42}", 1),
    ("42", "####\n42", 1),
    ("42", "##### 42", 1),
    ("42", "#### Step 1\n43\n#### 42", 1),
]
TAGGED = [
    ("42", "<answer>42</answer>", 1),
    ("42", "<answer>\n42\n</answer>", 1),
    ("42", "<think>43 or 44</think><answer>42 dollars</answer>", 1),
    ("42", "<answer>\\boxed{42}</answer>", 1),
    ("42", "<answer>The answer is 42</answer>", 1),
    ("\\frac12", "<answer>\\frac{1}{2}</answer>", 1),
    ("42", "<answer>43</answer>", 0),
]
PLAIN = [
    ("42", "The answer is \\$42.", 1),
    ("42", "The answer is $42.", 1),
    ("-5", "The answer is \u22125", 1),
    ("42", "\\boxed{42\\%}", 1),
    ("42", "\\boxed{\\$42}", 1),
    ("42", "\\boxed{42 dollars}", 1),
    ("42", "\\boxed{42\\text{ dollars}}", 1),
    ("42", "\\boxed{\\text{42}}", 1),
    ("1234", "\\boxed{1,234}", 1),
    ("42", "\\boxed{42}" + " and so on" * 1000, 1),
    ("42", "word by word\n" * 1000 + "so the answer is $42$", 1),
    ("42", "x" * 9000, 0),
]
REFERENCES = [
    ("42 dollars", "#### 42", 1),
    ("so he pays\n#### 42 dollars", "#### 42 dollars", 1),
    ("42 people", "\\boxed{42}", 1),
    ("42 people", "\\boxed{41}", 0),
    ("\\$36", "#### 36", 1),
    ("$\\$36$", "\\boxed{36}", 1),
    ("\\$32,\\!348", "\\boxed{\\$32,\\!348}", 1),
    ("\\$32,\\!348", "32348", 1),
    ("\\text{\\$18.90}", "It costs 18.90", 1),
    ("\\text{\\$18.90}", "\\boxed{\\text{\\$18.90}}", 1),
    ("1e-05", "0.00001", 1),
    ("1e+16", "10000000000000000", 1),
    ("42\\%", "42", 1),
    ("5 \\text{ cm}", "5", 1),
    ("90^\\circ", "90", 1),
    ("\\text{Friday}", "\\boxed{\\text{Friday}}", 1),
]
UPSTREAM = [  # math-verify's own: docs/reference/rewards.md lists them. Where it learns better, change both
    ("43", "The answer is not 43 but 42.", 1),
    ("42", "It has 42 million", 1),
    ("42", "\\boxed{42 \\text{ million}}", 1),
    ("42", "So x \\ge 42", 1),
    ("42", "It is 42k", 1),
    ("42", "It is 42i", 1),
    ("42", "It is 42:1", 1),
    ("0.00001", "It is 1e-5", 0),
    ("42", "\\boxed{6 \\times 7}", 1),
]
TABLE = MARKED + HEDGES + ANOTHER_NUMBER + HEADINGS + TAGGED + PLAIN + REFERENCES + UPSTREAM


@pytest.mark.parametrize("gold, response, expected", TABLE, ids=[f"{gold}|{text[:40]}" for gold, text, _ in TABLE])
def test_the_score_of_an_answer(gold, response, expected):
    assert score(reference(gold), response) == expected


@pytest.mark.parametrize("response, gold, expected", PAIRS, ids=[f"{gold}|{text[:40]}" for text, gold, _ in PAIRS])
def test_a_person_would_say_the_same(response, gold, expected):
    assert score(reference(gold), response) == expected


def test_the_pairs_are_right_and_wrong_in_equal_measure():
    assert len(PAIRS) >= 150 and abs(sum(expected for *_, expected in PAIRS) / len(PAIRS) - 0.5) < 0.05


coordinate = st.integers(-999, 999)


@settings(max_examples=60, deadline=None)
@given(
    coordinate, coordinate, st.sampled_from(["#### {}", "<answer>{}</answer>", "\\boxed{{{}}}", "The answer is {}."])
)
@example(100, 200, "#### {}")
@example(1, 234, "The answer is {}.")
def test_a_pair_is_its_two_numbers_and_no_third(first, second, form):
    """Whatever blanks its comma has; never the number of their digits, nor the other way round."""
    known = reference(f"({first}, {second})")
    assert score(known, form.format(f"({first},{second})")) == score(known, form.format(f"( {first} , {second} )")) == 1
    assert score(known, form.format(f"({second},{first})")) == (first == second)
    digits = f"{first}{abs(second):03}"
    assert score(reference(digits), form.format(f"({first},{second})")) == 0
    assert score(known, form.format(digits)) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9999), st.integers(1, 9999), st.integers(-60, 3))
@example(6630, 1600, -34)
def test_numbers_of_any_size_are_compared_by_their_digits(first, second, power):
    """Four digits of a small number; the oracle is the integers."""
    known = reference(f"{first} \\times 10^{{{power}}}")
    assert score(known, f"\\boxed{{{second} \\cdot 10^{{{power}}}}}") == (first == second)
    assert score(known, f"#### {first}e{power}") == 1


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 999_999_999))
@example(42)
@example(305)
def test_numbers_in_words_are_read(number):
    assert spelled(in_words(number)) == number
    assert spelled(in_words(number).replace(" and ", " ")) == number


SMALL = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen"""
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"


def in_words(number: int) -> str:
    """As it is said in English."""
    for size, name in ((10**6, "million"), (10**3, "thousand"), (100, "hundred")):
        if number >= size:
            rest = f" and {in_words(number % size)}" if size == 100 else f" {in_words(number % size)}"
            return f"{in_words(number // size)} {name}" + (rest if number % size else "")
    if number < 20:
        return SMALL.split()[number]
    return TENS.split()[number // 10 - 2] + (f"-{in_words(number % 10)}" if number % 10 else "")


@pytest.mark.parametrize("letter", "ABCDEFGHIJ")
@pytest.mark.parametrize(
    "form", ["Answer: {}", "The answer is ({}).", "**{}**", "\\boxed{{\\text{{{}}}}}", "{}) 42", "option {}"]
)
def test_a_letter_is_read_as_itself_alone(letter, form):
    for other in "ABCDEFGHIJ":
        assert score(reference(other), form.format(letter)) == (letter == other)


@pytest.mark.parametrize(
    "text",
    [
        *("answer is" + "\n" * 20000 + "x", "answer is" + " " * 30000 + "x", "answer: ( " * 3000, "A) x\n" * 5000),
        *("\\text{" * 5000, "\\boxed{1}" * 5000, "(1," * 8000, "answer" + "*" * 20000 + "x", "<answer>" * 5000),
    ],
)
def test_long_responses_leave_no_pattern_running(text):
    """What takes square or cubic time in these lengths would not end; the process's alarm is not in this one."""
    for gold in ("42", "B", "Friday", "(1, 2)"):
        assert score(reference(gold), text) == 0


@pytest.mark.parametrize(
    "gold",
    [
        "",
        " ",
        "proof",
        "Proof.",
        "nan",
        "None",
        "null",
        "N/A",
        "not found",
        "???",
        "\\text{}",
        "$$",
        "\\text{proof}",
        "$\\textbf{None.}$",
        "\\boxed{\\text{N/A}}",
    ],
)
def test_a_reference_that_is_none_is_refused(gold):
    with pytest.raises(ValueError, match="reference answer"):
        reference(gold)


@pytest.mark.parametrize("gold", ["42", "so\n#### 1,234.50 dollars", "-7 %", "$18$", "1e-05", "\\$36", "3 km", ".5"])
def test_a_reference_that_is_taken_for_a_number_can_be_read(gold):
    assert is_number(gold) and reference(gold)


@pytest.mark.parametrize("gold", ["???", "1 2", "x", "", "42, 43", "42k", "\\frac12", "#### ", "so 3"])
def test_other_references_are_not(gold):
    assert not is_number(gold)


UNITS = ["dollars", "apples", "km", "square feet", "hours per week", "kg", "Stück"]
numbers = st.decimals(-(10**6), 10**6, allow_nan=False, places=2).map(str) | st.integers(-(10**9), 10**9).map(str)


@settings(max_examples=60, deadline=None)
@given(numbers, numbers, st.sampled_from(UNITS), st.sampled_from(["#### {}", "<answer>{}</answer>", "\\boxed{{{}}}"]))
@example("42", "42", "dollars", "#### {}")
@example("42", "43", "dollars", "#### {}")
def test_a_unit_changes_no_score(gold, answer, unit, form):
    expected = score(reference(gold), form.format(answer))
    assert expected == (float(gold) == float(answer))
    assert score(reference(gold), form.format(f"{answer} {unit}")) == expected
    assert score(reference(f"{gold} {unit}"), form.format(answer)) == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from([", ", " or ", " and ", "; ", " dollars or "]))
def test_two_numbers_are_no_answer(right, other, between):
    if right != other:
        for text in (f"{right}{between}{other}", f"{other}{between}{right}"):
            assert score(reference(str(right)), f"#### {text}") == 0
            assert score(reference(str(right)), f"<answer>{text}</answer>") == 0


@pytest.mark.parametrize("word", ["\\[ ", "$ ", "42 ", "<answer>", "#### ", "\\boxed{", "#### 1. ", "\n", "1 a. "])
def test_a_long_response_is_searched_at_its_end(word):
    answer, searched = stated(word * 8000)
    assert len(answer or searched) <= SEARCHED + 2
    assert score(reference("42"), word * 8000 + "\n#### 42") == 1


@pytest.mark.slow
def test_the_helper_answers_whatever_it_is_asked():
    """One process gets them all: what cannot be compared scores 0, and the next is scored."""
    odd = ["9" * 5000, "\\boxed{" * 3000, "(" * 5000, "\ud800", "\0", "1/0", "\\frac{1}{0}", "$" + "{" * 4000 + "$"]
    lines = [json.dumps({"gold": "42", "response": text, "timeout_s": 60}) for text in (*odd, "42")]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "aligner.rewards.math_worker"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"score": 0.0}] * len(odd) + [{"score": 1.0}]
