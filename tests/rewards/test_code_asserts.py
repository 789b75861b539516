"""Assertions that are evaluated apart from the program: what they can express, and what becomes of the rest."""

from __future__ import annotations

import functools

import pytest

from aligner.rewards.code import Code
from aligner.types import Prompt, Sample

LIST_NODE = "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val, self.next = val, next\n"
NODE = "class Node:\n    def __init__(self, v): self.v, self.left, self.right = v, None, None\n"
STACK = """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __str__(self): return f"Stack{self.items}"
"""
VALUES = (
    "def f(): return {1, 2}, {'a': (1, 2)}, b'x', 1+2j, float('nan'), frozenset([1]), -0.0, 10**5000, True, '\\ud800'"
)
TYPES = "set, dict, bytes, complex, float, frozenset, float, int, bool, str"
LIBRARY = """
import collections, datetime, decimal, fractions
def f():
    return (collections.deque("ab"), collections.OrderedDict(a=1), collections.defaultdict(int, {1: 2}),
        collections.namedtuple("N", "a b")(1, 2), collections.Counter("aab"), decimal.Decimal("1.10"),
        fractions.Fraction(1, 3), datetime.date(2020, 1, 2), datetime.timedelta(1), range(3))
"""
LIBRARY_TEST = """
from collections import Counter, deque
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
assert f() == (deque("ab"), {"a": 1}, {1: 2}, (1, 2), {"a": 2, "b": 1}, Decimal("1.1"), Fraction(1, 3),
    date(2020, 1, 2), timedelta(1), range(3))
"""
POLY = 'import math\ndef poly(xs, x):\n    """value"""\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n'
FIND_ZERO = {
    "test": "def check(candidate):\n    assert math.fabs(poly([1, 2], candidate([1, 2]))) < 1e-4\n",
    "entry_point": "find_zero",
}
LOOPS = """
METADATA = {}
def check(candidate):
    import random
    for _ in range(300):
        n = random.randint(0, 9)
        assert candidate(n) == n, "another number"
    assert candidate([1, (2,)]) == [1, (2,)]
"""


@functools.cache
def reward() -> Code:
    return Code()


def prompt(tests: str | None, text: str = "", **fields) -> Prompt:
    return Prompt(0, (1,), text, {**({} if tests is None else {"test_list": [tests]}), **fields})


def verdict(program: str, row: Prompt) -> str:
    (score,) = reward()([Sample(row, 0, f"```python\n{program}\n```", (1,), True)])
    name = next(name for name, (count, _) in reward().take_counts().items() if count)
    assert score == (name == "passed")
    return name


@pytest.mark.parametrize(
    ("program", "row"),
    [
        ("def f(x): x.sort()", prompt("x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]")),
        (
            "def f(x): x[0].append(1); return x[0]",
            prompt("a = [1]\nb = [a]\nr = f(b)\nassert a == [1, 1] and r is a and b[0] is a"),
        ),
        ("def f(x): x.reverse()", prompt("a, b = [1], [2]\nx = [a, b]\nf(x)\nassert x[0] is b and a == [1]")),
        ("def f(d): d['k'] = [1]; del d['z']", prompt("d = {'z': 0}\nassert f(d) is None and d == {'k': [1]}")),
        ("def f(s): s.add(3)", prompt("s = {1}\nf(s)\nassert s == {1, 3}")),
        ("def f(x): x.append(x); return x", prompt("x = [1]\nr = f(x)\nassert r is x and x[1] is x")),
        ("def f(n):\n    for i in range(n): yield i", prompt("assert list(f(1000)) == list(range(1000))")),
        (
            "import itertools\ndef f(): return itertools.count()",
            prompt("g = f()\nassert next(g) == 0 and next(g) == 1"),
        ),
        (
            VALUES,
            prompt(
                f"r = f()\nassert [type(v) for v in r] == [{TYPES}]\nassert str(r[6]) == '-0.0'\nassert r[4] != r[4]"
            ),
        ),
        (VALUES, prompt("r = f()\nassert r[:4] == ({1, 2}, {'a': (1, 2)}, b'x', 1+2j) and r[7] == 10**5000")),
        (LIBRARY, prompt(LIBRARY_TEST)),
        ("def f(d): return d.keys(), d.values()", prompt("k, v = f({'a': 1})\nassert 'a' in k and list(v) == [1]")),
        ("def f(g, x): return [g(i) for i in x]", prompt("assert f(lambda v: v * 2, [1, 2]) == [2, 4]")),
        ("def f(g, x): return [g(i) for i in x]", prompt("assert f(len, ['ab']) == [2] and f(str, [1]) == ['1']")),
        (
            "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x",
            prompt("try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'negative'"),
        ),
        (
            "class E(KeyError): pass\ndef f(x): raise E('k')",
            prompt("import unittest\nwith unittest.TestCase().assertRaises(KeyError): f(1)"),
        ),
        (
            "def f(x): return x / 3",
            prompt("import unittest\nunittest.TestCase().assertAlmostEqual(f(1), 1 / 3)\nassert math.isclose(f(3), 1)"),
        ),
        ("def f(x): return x / 3", prompt("assert abs(f(1) - 1 / 3) < 1e-9 and not f(0) and set([f(3)]) == {1}")),
        (
            f"{NODE}def height(n): return 0 if n is None else 1 + max(height(n.left), height(n.right))",
            prompt(
                "assert height(root) == 3",
                test_setup_code="root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(3)",
            ),
        ),
        (f"{NODE}def total(ns): return sum(n.v for n in ns)", prompt("assert total([Node(5), Node(15)]) == 20")),
        (
            STACK,
            prompt(
                "s = Stack()\ns.push(1)\ns.push([2])\nassert len(s) == 2 and s.pop() == [2] and str(s) == 'Stack[1]'"
            ),
        ),
        ("class Solution:\n    def f(self, x): return x + 1", prompt("assert Solution().f(1) == 2")),
        ("def sum(a, b): return a * b", prompt("assert sum(2, 3) == 6")),
        (
            "def turn(h):\n    p = None\n    while h: h.next, p, h = p, h, h.next\n    return p",
            prompt(
                "h = ListNode(1, ListNode(2))\nr = turn(h)\nassert r.val == 2 and r.next is h and h.next is None",
                test_setup_code=LIST_NODE,
            ),
        ),
        ("def f(x): return ListNode(x)", prompt("assert f(7).val == 7", test_setup_code=LIST_NODE)),
        ("def f(x): return math.sqrt(x)", prompt("assert f(4) == 2", test_imports=["import math"])),
        ("def f(x): return x", prompt(None, test=LOOPS, entry_point="f")),
        (
            "def sum(x): return 6",
            prompt(None, test="def check(c):\n    assert c(0) == sum([1, 2, 3])", entry_point="sum"),
        ),
        ("def find_zero(xs): return -xs[0] / xs[1]", prompt(None, text=POLY, **FIND_ZERO)),
        (
            "def enc(x): return x[::-1]\ndef dec(x): return x[::-1]",
            prompt("assert dec(enc('ab')) == 'ab'", entry_point=["enc", "dec"]),
        ),
        ("def f(x): return 1\nprint(f(2))\nexit()", prompt("assert f(1) == 1")),
    ],
)
def test_what_assertions_can_say(program, row):
    assert reward().unreadable([row]) == {}
    assert verdict(program, row) == "passed"
    assert verdict("pass", row) != "passed"


LIAR = """
class Liar:
    def __init__(self, *a): pass
    def startswith(self, x): return True
    def __eq__(self, other): return True
"""


@pytest.mark.parametrize(
    ("program", "row", "how"),
    [
        (f"{LIAR}def f(x): return Liar()", prompt("assert f(1).startswith('a')"), "unjudged"),
        (LIAR, prompt("assert Liar(1).startswith('a')"), "unjudged"),
        (LIAR, prompt("assert Liar(1) == Liar(2)"), "unjudged"),
        (
            f"{LIAR}def f(x): return Liar()",
            prompt("try:\n    ok = f(1) == 3\nexcept:\n    ok = True\nassert ok"),
            "unjudged",
        ),
        (f"{LIAR}def f(x): return [Liar()]", prompt("assert f(1) == [3]"), "unjudged"),
        ("def f(x): return f", prompt("assert f(1)"), "unjudged"),
        ("def f(x): return open", prompt("assert f(1) == open"), "unjudged"),
        ("def f(x): return 1", prompt("f(1)\nwhile True: pass\nassert f(1)"), "unjudged"),
        ("def f(x): return 10**9", prompt("assert [0] * f(1) * 100"), "unjudged"),
        ("def f(x): x.clear(); return []", prompt("x = (1, 2)\nassert f(x) == []"), "error"),
        ("def poly(*a): return 0\ndef find_zero(xs): return 7", prompt(None, text=POLY, **FIND_ZERO), "wrong"),
    ],
)
def test_what_decides_is_data(program, row, how):
    assert reward().unreadable([row]) == {}
    assert verdict(program, row) == how


SUITE = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 9)\n"
IDLE = [
    "print(f(1) == 9)",
    "f(1) == 9",
    "assert (f(1) == 9, 'message')",
    "assert True\nf(1)",
    "def test():\n    assert f(1) == 9",
    "try:\n    assert f(1) == 9\nexcept AssertionError:\n    print('wrong')",
    "try:\n    f(1)\n    assert False\nexcept:\n    pass",
    f"{SUITE}unittest.main(argv=[''], exit=False)",
    f"{SUITE}unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))",
]


@pytest.mark.parametrize(
    "test",
    [
        f"{SUITE}unittest.main()",
        "def test():\n    assert f(1) == 9\ntest()",
        "try:\n    assert f(1) == 9\nexcept AssertionError:\n    raise SystemExit(1)",
        "try:\n    ok = f(1) == 9\nexcept Exception:\n    pass\nelse:\n    assert ok",
        "same(f(1), 9)",
        "assert f(x=1) == 9 and dict(exit=f(1))",
        "try:\n    f(9)\n    assert False\nexcept ValueError:\n    pass",
    ],
)
def test_checks_that_are_reached(test):
    row = prompt(test, test_setup_code="def same(a, b):\n    assert a == b")
    assert reward().unreadable([row]) == {}
    assert verdict("def f(x):\n    if x == 1: return 9\n    raise ValueError", row) == "passed"
    assert verdict("def f(x): return 8", row) == "wrong"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (prompt("assert isclose(f(1), 2)"), "`f`, `isclose`: name in a column entry_point"),
        (prompt("assert [1][0]"), "call no function of the answer"),
        *((prompt(test), "no assert that can fail") for test in IDLE),
        (prompt(None, test="def check(c):\n    print(c(1) == 2)", entry_point="f"), "no assert that can fail"),
        (prompt(None, test="def check(c):\n    return c(1) == 2", entry_point="f"), "no assert that can fail"),
        (prompt("import numpy as np\nassert f(1) == np.e"), "only Python's standard library"),
        (prompt("from math import *\nassert f(1) == pi"), "import by name"),
        (prompt("assert f(1) =="), "SyntaxError"),
        (prompt("assert IsClose(f(1), 2)"), "pass a result to IsClose"),
        (prompt(None, test="assert f(1)", entry_point="f"), "no function `check`"),
        (prompt(None, **FIND_ZERO), "`poly`, which neither they nor test_setup_code define"),
    ],
)
def test_rows_that_cannot_be_judged_are_named_before_training_and_score_nothing(row, words):
    assert words in reward().unreadable([row])[0]
    everything = "def f(*a): return 2\ndef check(*a): return 1\npoly = isclose = IsClose = find_zero = f"
    assert verdict(everything, row) == "unjudged"


def test_inputs_that_a_test_draws_are_the_same_each_time():
    row = prompt("import random\nx = random.random()\nassert f(x) == 0.8444218515250481")
    assert [verdict("def f(x): return x", row) for _ in range(2)] == ["passed"] * 2


def test_a_test_runs_in_a_sandbox_too(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    test = f"f(1)\ntry:\n    open({str(secret)!r})\nexcept OSError:\n    pass\nelse:\n    assert False"
    assert verdict("def f(x): return x", prompt(test)) == "passed"
