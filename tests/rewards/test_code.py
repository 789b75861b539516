"""Programs of answers in a sandbox: verdicts, what is contained, what is left behind."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from aligner.config.sections.rewards import RewardConfig, RewardFunctionConfig
from aligner.errors import ConfigError, RewardError, RewardPathError
from aligner.rewards import code as code_module
from aligner.rewards.code import Code, Verdict
from aligner.rewards.code_blocks import programs
from aligner.rewards.composite import RewardPipeline
from aligner.rewards.functions import load_function
from aligner.sandbox import run
from aligner.sandbox.run import TIERS, Sandbox
from aligner.types import Prompt, Sample


@pytest.fixture(scope="module")
def reward():
    return Code()


@pytest.fixture(scope="module")
def hasty():
    """For programs that use up their time."""
    return Code(cpu_s=1)


def sample(text: str, **fields) -> Sample:
    return Sample(Prompt(0, (1,), "", fields), 0, f"So:\n```python\n{text}\n```\nDone.", (1,), True)


def scored(reward: Code, text: str, **fields) -> tuple[float | None, str]:
    (score,) = reward([sample(text, **fields)])
    counts = reward.take_counts()
    return score, next(name for name, (count, _) in counts.items() if count)


STREAMS = {"tests": json.dumps([{"input": f"{n}\n", "output": f"{2 * n}\n\n"} for n in (1, 2, 3, 4)])}
ONE = {"tests": [{"input": "", "output": "42"}]}
ASSERTS = {"test_list": ["assert f(1) == 2", "assert f(-1) == 0"], "test_setup_code": "import math"}
CHECK = {"test": "def check(candidate):\n    assert candidate(1) == 2\n", "entry_point": "f"}
CALLS = {"input_output": json.dumps({"inputs": [[1], [2]], "outputs": [2, [3]], "fn_name": "f"})}
FUNCTIONAL = {
    "public_test_cases": json.dumps([{"input": '[1, 2]\n"a"', "output": "[1,2]", "testtype": "functional"}]),
    "private_test_cases": json.dumps([{"input": '[]\n"a"', "output": "[]", "testtype": "functional"}]),
    "metadata": '{"func_name": "g"}',
}


@pytest.mark.parametrize(
    ("text", "fields", "score", "verdict"),
    [
        ("print(2 * int(input()))", STREAMS, 1.0, "passed"),
        ("n = int(input())\nprint(2 * n if n < 4 else 0)", STREAMS, 0.75, "wrong"),
        ("n = int(input())\nprint(2 * n) if n < 4 else exit(1)", STREAMS, 0.75, "error"),
        ("import sys\nprint(42)\nsys.exit()", ONE, 1.0, "passed"),
        ("import atexit\natexit.register(print, 42)", ONE, 1.0, "passed"),
        (
            "import threading\nthreading.stack_size(1 << 27)\nthreading.Thread(target=print, args=(42,)).start()",
            ONE,
            1,
            "",
        ),
        ("import random, os\nprint(42 if random.random() == 0.8444218515250481 else hash('a'))", ONE, 1.0, "passed"),
        ("def f(x): return x + 1", ASSERTS, 1.0, "passed"),
        ("def f(x): return 2", ASSERTS, 0.5, "wrong"),
        ("def f(x): return math.nothing", ASSERTS, 0.0, "error"),
        ("def f(x): return x + 1", CHECK, 1.0, "passed"),
        ("def f(x): return x", CHECK, 0.0, "wrong"),
        ("def f(x): return x + 1", CALLS, 1.0, "passed"),
        ("class Solution:\n    def g(self, a: List[int], b: str): return tuple(a)", FUNCTIONAL, 1.0, "passed"),
        ("class Solution:\n    def g(self, a, b): return b", FUNCTIONAL, 0.0, "wrong"),
        ("class Solution:\n    def g(self, a, b): return object", FUNCTIONAL, 0.0, "unjudged"),
        ("while True: pass", ONE, 0.0, "cpu"),
        ("try:\n    while True: pass\nfinally:\n    print(42)", ONE, 0.0, "cpu"),
        ("x = [0] * 10**9", ONE, 0.0, "memory"),
        ("while True: print('x' * 10**5)", ONE, 0.0, "output"),
        ("import os\nwhile True: os.fork()", ONE, 0.0, "error"),
        ("open('/tmp/x', 'w').write('x')", ONE, 0.0, "error"),
        ("import os\nfd = os.memfd_create('x')\nos.ftruncate(fd, 10 << 30)", ONE, 0.0, "error"),
        ("import ctypes\nctypes.string_at(0)", ONE, 0.0, "error"),
        ("this is no Python", ONE, 0.0, "error"),
    ],
)
def test_programs_get_these_verdicts(reward, hasty, text, fields, score, verdict):
    assert scored(hasty if verdict == "cpu" else reward, text, **fields) == (score, verdict or "passed")


@pytest.mark.parametrize(
    "text",
    [
        "print('passed'); print('+'); exit(0)",
        'import os\nos.write(1, b\'{"ended": "exit", "code": 0, "said": "+"}\'); os._exit(0)',
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'+passed')\n    except OSError: pass\nos._exit(0)",
        "import sys\nframe, found = sys._getframe(), ''\nwhile frame:\n    found += str(frame.f_locals)\n"
        "    frame = frame.f_back\nf = (lambda x: x + 1) if 'ass' + 'ert f(1)' in found else None",
        "import gc\nfound = [x for x in gc.get_objects() if isinstance(x, dict) and 'word' in x]\n"
        "f = (lambda x: x + 1) if found else None",
        "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
        "import json\njson.dumps = lambda *a, **k: '2'\ndef f(x): return 3",
    ],
)
def test_a_program_cannot_say_its_own_verdict(reward, text):
    assert scored(reward, text, **ASSERTS)[0] == 0.0 and scored(reward, text, **ONE)[0] == 0.0


def test_all_or_none_and_answers_without_a_program():
    reward = Code(all_or_none=True)
    assert scored(reward, "n = int(input())\nprint(2 * n if n < 4 else 0)", **STREAMS) == (0.0, "wrong")
    assert scored(reward, "print(2 * int(input()))", **STREAMS) == (1.0, "passed")
    answer = Sample(Prompt(0, (1,), "", ONE), 0, "print(42)", (1,), True)
    assert reward([answer]) == [0.0] and reward.take_counts()["no_code"] == (1.0, 1.0)
    assert reward([sample("print(42)", tests=None)]) == [None]
    blocks = "```\na\n```\ntext\n```py\nb\n```\n```text\nc\n```\n```python\nnot closed"
    assert programs(blocks) == ["b\n"] and programs("```python\nx") == []


@pytest.mark.parametrize(
    "tests",
    [
        [{"type": "function_call", "fn_name": "f", "input": [1, [2]], "output": 3}],
        [{"fn_name": "f", "input": [1, [2]], "output": [3]}],
        [{"testtype": "functional", "metadata": {"func_name": "f"}, "input": "1\n[2]", "output": "3"}],
        [{"testtype": "functional", "metadata": '{"func_name": "f"}', "input": "1\n[2]", "output": "3"}],
        {"fn_name": "f", "inputs": [[1, [2]]], "outputs": [3]},
    ],
)
def test_functions_named_by_the_tests_themselves(reward, tests):
    """As PrimeIntellect and DeepCoder have them: none of them is what a program reads and prints."""
    for column in (tests, json.dumps(tests)):
        assert scored(reward, "def f(x, y): return x + y[0]", tests=column) == (1.0, "passed")
        assert scored(reward, "class Solution:\n    def f(self, x, y): return x", tests=column) == (0.0, "wrong")


def test_tests_of_whole_streams_beside_null_names(reward):
    padded = [
        {"type": "stdin_stdout", "fn_name": None, "testtype": None, "metadata": None, "input": "", "output": "42"}
    ]
    for tests in (padded, {"inputs": [""], "outputs": ["42"], "fn_name": None}):
        assert scored(reward, "print(42)", tests=tests) == (1.0, "passed")


@pytest.mark.parametrize("text", ["print(str(7**9000)[:2])", "print(int('4' * 9000) % 1000 * 0 + 20)", "print(20)"])
def test_whole_numbers_may_have_many_digits(reward, text):
    """Contests' programs come from Pythons without a limit."""
    shown = str(math.floor(10 ** (9000 * math.log10(7) % 1 + 1)))
    want = shown if "7**" in text else "20"
    assert scored(reward, text, tests=[{"input": "", "output": want}]) == (1.0, "passed")
    assert scored(reward, "def f(x): return 10 ** x", test_list=["assert len(str(f(9000))) == 9001"])[0] == 1.0
    calls = {"fn_name": "f", "inputs": [[9000]], "outputs": [10**4000]}
    assert scored(reward, "def f(x): return 10 ** (x - 5000)", input_output=calls) == (1.0, "passed")
    assert scored(reward, "def f(x): return 10 ** x", input_output=calls) == (0.0, "wrong")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"answer": 1}, "column of tests, one of input_output"),
        ({"tests": "[{"}, "column tests='[{'"),
        ({"tests": [{"input": "1"}]}, "KeyError: 'output'"),
        ({"tests": []}, "at least one test"),
        ({"input_output": {"inputs": ["1"], "outputs": []}}, "column input_output"),
        ({"public_test_cases": "[]", "private_test_cases": "eJxrYJmqwQABPUaFqcUlmfl5AA=="}, "public_test_cases"),
        ({"test": "def check(f): pass"}, "KeyError: 'entry_point'"),
        ({"tests": [{"fn_name": "f", "input": "[1]", "output": 2}]}, "the arguments of a function are '[1]'"),
        ({"tests": [{"type": "function_call", "input": [1], "output": 2}]}, "the name of a function is None"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "column tests"),
    ],
)
def test_rows_without_tests_are_named_before_training(reward, fields, words):
    actual = reward.unreadable([Prompt(0, (1,), "", ONE), Prompt(1, (1,), "", fields)])
    assert list(actual) == [1] and words in actual[1]
    with pytest.raises(RewardError):
        reward([sample("print(1)", **fields)])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"tier": "docker"}, "args.tier='docker': expected one of auto, bubblewrap, unshare, landlock, unsafe"),
        ({"cpu_s": 0}, "args.cpu_s=0"),
        ({"cpu_s": 0.5}, "args.cpu_s=0.5"),
        ({"memory": 5}, "unexpected keyword argument 'memory'"),
    ],
)
def test_bad_arguments_are_named(args, words):
    with pytest.raises(RewardPathError, match=r"reward.functions\[2\]") as caught:
        load_function(RewardFunctionConfig(path="code", args=args), 2)
    assert words in str(caught.value)


def test_a_tier_that_is_not_there_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"package `bubblewrap`.*no `bwrap` in PATH"):
        Sandbox("bubblewrap")
    monkeypatch.setattr(run, "landlock_version", lambda: 0)  # a kernel without it
    with pytest.raises(ConfigError, match=r"no `bwrap`.*no `unshare`.*Linux 5.13.*doctor sandbox"):
        Sandbox()
    assert next(iter(Sandbox("unsafe").run("print(1)", [""]))).out == "1\n"


def test_a_sandbox_that_fails_says_nothing_of_the_program(monkeypatch):
    named = load_function(RewardFunctionConfig(path="code"))
    code = named.function
    monkeypatch.setattr(code_module, "PAUSES_S", (0.0,))
    monkeypatch.setattr(code.sandbox, "_command", lambda: ["/bin/sh", "-c", "echo no namespace >&2; exit 7"])
    pipeline = RewardPipeline(
        [(named, 1.0), (load_function(RewardFunctionConfig(path="length", args={"limit": 9})), 1)], RewardConfig()
    )
    components = pipeline.functions([sample("print(42)", **ONE), sample("def f(x): pass", **ASSERTS)])
    assert all(map(math.isnan, components["code"]))
    scores = pipeline.combine(components, 2, update=False)
    assert scores.valid == [False, False]  # although the other function has a score for them
    failed, why = pipeline.failed(components)
    assert failed == 2 and "`code`: the sandbox ended before its program: no namespace" in why


def test_a_program_that_breaks_its_sandbox_has_a_score(monkeypatch):
    """Where another program runs, it is the program: no answer is without a score."""
    reward = Code()
    monkeypatch.setattr(code_module, "PAUSES_S", (0.0,))
    monkeypatch.setattr(reward.sandbox, "works", lambda: None)
    monkeypatch.setattr(reward.sandbox, "_command", lambda: ["/bin/false"])
    assert scored(reward, "print(42)", **ONE) == (0.0, "error")


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nprint(42)\n```\nOutput:\n```\n42\n```", "print(42)"),
        ("```\nno Python at all\n```\n```py\nprint(42)\n```\n```text\n42\n```", "print(42)"),
        ("```python\nprint(1)\n```\nBetter:\n```python\nprint(42)\n```", "print(42)"),
        ("```\nprint(42)\n```\nOutput:\n```\n42\n```", "print(42)"),
        ("```\nprint(42)\n```\n```\nInput: none\n```", "print(42)"),
        ('````python\nx = """\n```\n"""\nprint(42)\n````', "print(42)"),
        ("~~~python\nprint(42)\n~~~", "print(42)"),
        ("1. So:\r\n   ```Python\r\nprint(42)\r\n   ```\r\nDone.", "print(42)"),
        ("1. So:\n   ```python\n   def f():\n       print(42)\n\n   f()\n   ```\n2. Done.", "f()"),
        ("- \t```\n- So:\n\t```python\n\tprint(42)\n\t```", "print(42)"),
        ("<think>\n```python\nprint(1)\n</think>\n```python\nprint(42)\n```", "print(42)"),
        ("<think>\n```python\nprint(1)\n```\n</think>\n```\nprint(42)\n```", "print(42)"),
        ("<think>\n```python\nprint(42)\n```\n</think>\nThat is all.", "print(42)"),
        *(
            (f"{opens}\n```python\nprint(1)\n```\n{ends}\n```\nprint(42)\n```", "print(42)")
            for opens, ends in (("<|channel>thought", "<channel|>"), ("[THINK]", "[/THINK]"))
        ),
        ("a\n```python\nprint(1)\n```<|channel|>final<|message|>\n```\nprint(42)\n```", "print(42)"),
        ("```python title=a.py\nprint(42)\n```", "print(42)"),
        ("1. So:\n   ```python\n   for _ in '1':\n       print(42)\n   ```\nDone.", "for _"),
        ("- So:\n\t```py\n\tx = 42\n\n\tprint(x)\n\t```", "x = 42"),
        ('  ```python\nx = """\n4\n 2"""\nprint(42) if x else 0\n  ```', "print(42)"),
        ("<answer>```python\nprint(42)\n```</answer>", "print(42)"),
        ("<think>```python\nprint(1)\n```</think>\n```python\nprint(42)\n``` </answer><|im_end|>", "print(42)"),
        ("```python3.12\nprint(42)\n```", "print(42)"),
        ("```PY3\nprint(42)\n```\n```pypy\nprint(1)\n```", "print(42)"),
    ],
)
def test_the_program_of_an_answer(reward, response, program):
    assert any(program in text for text in programs(response))
    assert reward([Sample(Prompt(0, (1,), "", ONE), 0, response, (1,), True)]) == [1.0]


def test_blocks_take_linear_time():
    """Openings that nothing closes: a search from each of them would take hours."""
    assert programs("``` a\n" * 200_000) == []
    for line in ("<a> " * 200_000, " " * 800_000 + "<", "<" * 800_000, "```" + " </a>" * 200_000 + "x"):
        assert programs(line) == [] and programs(f"```\n{line}") == []


@pytest.mark.parametrize("end", ["exit()", "quit()", "exit(0)", "raise SystemExit", "import sys; sys.exit(None)"])
def test_a_right_program_may_end_itself(reward, end):
    assert scored(reward, f"print(42)\n{end}", **ONE) == (1.0, "passed")
    assert scored(reward, f"def f(x): return x + 1\n{end}", **ASSERTS) == (1.0, "passed")


SLEEPERS = [
    "import time\nwhile True: time.sleep(1)",
    "import threading\nthreading.Event().wait()",
    "import time\nbegun = time.time()\nwhile time.time() < begun + 0.5: pass\ntime.sleep(600)",
    "import time\nwhile True:\n    sum(range(100_000))\n    time.sleep(0.05)",
    "import time, sys\nwhile True:\n    sys.stdout.write('4')\n    sys.stdout.flush()\n    time.sleep(0.2)",
    "import os\nos.read(os.pipe()[0], 1)",
    "import signal\nsignal.pause()",
]


@pytest.mark.slow
def test_a_program_that_waits_has_failed(reward):
    """Side by side: each waits for seconds."""
    waiting = [sample(text, **ONE) for text in SLEEPERS]
    for text in SLEEPERS:
        indented = text.replace("\n", "\n    ")
        waiting.append(sample(f"def f(x):\n    {indented}", **ASSERTS))
    with ThreadPoolExecutor(len(waiting)) as pool:
        assert list(pool.map(lambda one: reward([one]), waiting)) == [[0.0]] * len(waiting)
    assert {name: count for name, (count, _) in reward.take_counts().items() if count} == {Verdict.HUNG: len(waiting)}


@pytest.mark.slow
def test_answers_that_wait_are_zeros_of_the_pipeline_whatever_its_limit():
    pipeline = RewardPipeline([(load_function(RewardFunctionConfig(path="code")), 1.0)], RewardConfig(timeout_s=1.0))
    texts = [SLEEPERS[2], SLEEPERS[3], "print(42)"]
    components = pipeline.functions([sample(text, **ONE) for text in texts])
    assert components == {"code": [0.0, 0.0, 1.0]} and pipeline.failed(components)[0] == 0


@pytest.mark.slow
def test_all_tests_of_an_answer_have_a_limit_too():
    """Each of its 60 tests is within its own: an answer cannot hold a run for as long as it has tests."""
    rows = {"tests": [{"input": "", "output": "42"}] * 60}
    score, verdict = scored(Code(cpu_s=1), "import time\nwhile time.process_time() < 0.7: pass\nprint(42)", **rows)
    assert verdict == "cpu" and 0.2 < score < 0.5


@pytest.mark.slow
def test_load_decides_nothing():
    """A program that needs most of its CPU time, on one core with as many busy processes as make it wait far longer."""
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(ours)])  # which those that are started here inherit
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(3)]
    try:
        text = "import time\nwhile time.process_time() < 1.2: pass\nprint(42)"
        begun = time.monotonic()
        assert scored(Code(cpu_s=2), text, **ONE) == (1.0, "passed")
        assert scored(Code(cpu_s=1), text, **ONE) == (0.0, "cpu")
        assert time.monotonic() - begun > 2.2
    finally:
        os.sched_setaffinity(0, ours)
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_hundreds_of_programs_leave_nothing_behind(tier, tmp_path, monkeypatch):
    runner = shutil.copytree(run.RUNNER.parent, tmp_path / "of this test") / run.RUNNER.name
    monkeypatch.setattr(run, "RUNNER", runner)  # others may run programs at the same time
    try:
        reward = Code(tier=tier)
    except ConfigError as error:
        pytest.skip(str(error))
    texts = ["print(42)", "print(41)", "import os\nos.fork()", "x = [0] * 10**9", "exit(3)", "open('x', 'w')", "1 / 0"]
    texts += ["import threading\nthreading.Thread(target=print, args=(42,)).start()", "print('x' * 10**7)", "import os"]
    me, count = psutil.Process(), 200 if tier == TIERS[0] else 50
    samples = [sample(texts[i % len(texts)], **ONE) for i in range(count)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: reward([one]), samples[:20]))
        reward.take_counts()
        files, others = me.num_fds(), {*threading.enumerate(), *me.children(recursive=True)}
        scores = [score for (score,) in pool.map(lambda one: reward([one]), samples)]
        left = {*threading.enumerate(), *me.children(recursive=True)} - others  # what was there may have ended
    assert me.num_fds() <= files and not left
    named = [p for p in psutil.process_iter(["cmdline"]) if str(runner) in (p.info["cmdline"] or [])]
    assert not named
    assert Counter(scores) == {1.0: count // 5, 0.0: count - count // 5}
    counts = {name: round(n) for name, (n, _) in reward.take_counts().items() if n}
    each = count // 10
    assert counts == {"passed": 2 * each, "wrong": 2 * each, "error": 4 * each, "memory": each, "output": each}


@pytest.mark.parametrize("tier", ["bubblewrap", "unshare"])
def test_other_files_are_not_even_there(tier, tmp_path):
    """Where a tier has namespaces. Landlock lets names and sizes be seen."""
    try:
        sandbox = Sandbox(tier)
    except ConfigError as error:
        pytest.skip(str(error))
    paths = [str(tmp_path), __file__, "/etc/passwd", "/home", "/proc/self", "/dev/shm", "/var"]
    (ended,) = sandbox.run(f"import os, decimal, sqlite3\nprint([p for p in {paths} if os.path.lexists(p)])", [""])
    assert ended.out == "[]\n"
