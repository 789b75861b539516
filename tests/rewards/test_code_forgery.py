"""Programs that want a score they did not earn, or none at all: each is scored 0, in every sandbox of this machine."""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from aligner.errors import ConfigError
from aligner.rewards.code import Code
from aligner.sandbox.run import TIERS
from aligner.types import Prompt, Sample

MBPP = {"test_list": ["assert f(3) == [3, 'zyqvexa']", "assert abs(f(4)[0] - 4) < 1e-6 and f(4)[1] == 'zyqvexa'"]}
HUMANEVAL = {
    "test": "def check(candidate):\n    for n in range(3):\n        assert candidate(n) == [n, 'zyqvexa']\n",
    "entry_point": "f",
}
CALLS = {"input_output": json.dumps({"inputs": [[3]], "outputs": [[3, "zyqvexa"]], "fn_name": "f"})}
STREAM = {"tests": [{"input": "3", "output": "3 zyqvexa"}]}
MAPPED = {"test_list": ["assert all(map(lambda n: f(n) == [n, 'zyqvexa'], range(3)))"]}
ROWS = {"mbpp": MBPP, "humaneval": HUMANEVAL, "calls": CALLS, "stream": STREAM, "mapped": MAPPED}

ALWAYS = """
class Always(Base):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __lt__(self, other): return True
    def __getitem__(self, key): return self
    def __sub__(self, other): return self
    def __abs__(self): return self
    def __iter__(self): return iter([self])
    __hash__ = None
def f(*args): return Always()
"""
# What they look for must not be in themselves: so a pattern of which no part is the word.
WORD = 'import re\nword = lambda text: re.search("[z][y][q][v][e][x][a]", text)\n'
FRAMES = (
    WORD
    + """
import sys, gc
def texts():
    frame = sys._getframe()
    while frame:
        yield str(frame.f_locals) + str(frame.f_code.co_consts) + str(frame.f_globals)
        frame = frame.f_back
    for each in gc.get_objects():
        yield str(each)[:10000] if isinstance(each, (dict, list, tuple)) else ""
def f(*args):
    for text in texts():
        if word(text): return [args[0], word(text)[0]]
"""
)
MEMORY = (
    WORD
    + """
import ctypes
def f(*args):
    for each in (object(), [], {}, "", (), f, args, ctypes):
        start = id(each) & ~0xFFFFF
        match = word(ctypes.string_at(start, id(each) - start).decode("latin-1"))
        if match: return [args[0], match[0]]
"""
)
FILES = (
    WORD
    + """
import os
found = b""
for fd in range(64):
    try: found += os.pread(fd, 1 << 20, 0)
    except OSError: pass
for path in ("/proc/self/environ", "/proc/1/environ", "/proc/self/fd/3", "/proc/1/fd/3", "/proc/self/cmdline"):
    try: found += open(path, "rb").read(1 << 20)
    except OSError: pass
def f(*args):
    match = word(found.decode("latin-1"))
    return match and [args[0], match[0]]
"""
)
FORGED = "import os, json\nfor fd in range(3, 64):\n    try: os.write(fd, {data})\n    except OSError: pass\n"
REPLY = """
import json, os
def say(**message):
    text = json.dumps({"do": "return", "value": None, "nodes": [], "changed": []} | message).encode()
    for fd in range(3, 64):
        try: os.write(fd, len(text).to_bytes(8, "little") + text)
        except OSError: pass
"""
PATCHED = "import builtins, json, sys\n{line}\ndef f(*args): return None\n"

# Its reply gives an object of the judge an attribute: the next call is answered by it.
FILLED = (
    REPLY
    + """
for fd in range(3, 64):
    try:
        os.read(fd, 0)
        asks = fd
    except OSError: pass
def Foo(*args):
    say(value=[0], nodes=[[["object", 0], ["startswith", [1]]], ["foreign", ["object", 1]]])
    os.read(asks, int.from_bytes(os.read(asks, 8), "little"))
    say(value=True)
    os._exit(0)
"""
)

# Each tier confines these: they end their process, use it up or write where it is read, whatever judges the row.
PROCESSES = {
    "files": FILES,
    "exit hooks": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
    "trace": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\ndef f(*a): pass",
    "exit in the call": "import os\ndef f(*a): os._exit(0)",
    "writes a verdict": FORGED.format(data="b'=passed'"),
    "writes a framed verdict": FORGED.format(data="(7).to_bytes(8, 'little') + b'=passed'"),
    "writes the end": FORGED.format(data="b'e' + (2).to_bytes(8, 'little') + b'{}'"),
    "writes garbage": FORGED.format(data="bytes(range(256)) * 100"),
    "writes a long length": FORGED.format(data="(1 << 62).to_bytes(8, 'little')"),
    "closes its pipes": "import os\nos.closerange(0, 64)\ndef f(*a): pass",
    "replies before it is asked": REPLY + "say()\nsay()\ndef f(*a): pass",
    "deep json": REPLY.replace("json.dumps(", "('[' * 100000 + json.dumps(").replace("message)", "message))"),
    "invalid utf-8": FORGED.format(data="(4).to_bytes(8, 'little') + b'\\xff\\xfe\\x00\\x80'"),
    "a deep list": "def f(*a):\n    x = []\n    for i in range(10**5): x = [x]\n    return x",
    "a deep tuple": "def f(*a):\n    x = ()\n    for i in range(10**5): x = (x,)\n    return x",
    "a long number": "def f(*a): return 1 << 10**7",
    "a long text": "def f(*a): return 'x' * 10**8",
    "colliding keys": "def f(*a): return {i * (2**61 - 1): 0 for i in range(20000)}",
    "prints a lot, then returns": "def f(*a):\n    print('x' * 10**7)\n",
    "threads that exit": "import threading, os, time\ndef f(*a):\n    threading.Timer(0.05, os._exit, (0,)).start()\n",
    "a signal to itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n",
    "an alarm": "import signal, time\nsignal.alarm(1)\ntime.sleep(3)\n",
    "aborts": "import os\nos.abort()",
    "a segmentation fault": "import ctypes\nctypes.string_at(0)",
    "forks": "import os\nwhile True: os.fork()",
    "memory that is used up": "x = []\nwhile True: x.append(bytes(1 << 20))",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef g(n): return g(n + 1) + 1\ng(0)",
    "exit code 99": "import os\nos._exit(99)",
    "exit code 98": "import os\nos._exit(98)",
    "a null byte": "def f(*a): pass\n\0",
    "many brackets": "(" * 100_000,
}
# Each kind of row judges what these find, patch, raise and return, in the same way in each tier.
REPLIES = {
    "no function": "pass",
    "always equal": ALWAYS.replace("Base", "object"),
    **{f"always equal {base}": ALWAYS.replace("Base", base) for base in ("list", "dict", "str", "float", "tuple")},
    "an equal metaclass": "class M(type):\n    def __eq__(s, o): return True\nclass f(metaclass=M): pass",
    "a class named f": "class f(list):\n    def __init__(self, *a): pass\n    def __eq__(self, o): return True\n",
    "a function that grows attributes": "def f(*a): return f\nf.__class__ = type(f)\n",
    "frames": FRAMES,
    "memory": MEMORY,
    "files": FILES,
    "patched == of ints": PATCHED.format(line="builtins.abs = lambda x: 0; builtins.set = lambda x: 0"),
    "patched json": PATCHED.format(line="json.loads = json.dumps = lambda *a, **k: {'do': 'return'}"),
    "patched exec": PATCHED.format(line="builtins.exec = builtins.compile = builtins.eval = lambda *a, **k: None"),
    "patched import": PATCHED.format(line="builtins.__import__ = lambda *a, **k: sys"),
    "patched AssertionError": PATCHED.format(line="builtins.AssertionError = SystemExit"),
    "patched len, all, any": PATCHED.format(line="builtins.len = builtins.all = builtins.any = lambda *a: True"),
    "patched modules": PATCHED.format(line="for name in list(sys.modules): sys.modules[name] = json"),
    "patched __main__": PATCHED.format(line="sys.modules['__main__'].check = lambda *a: None"),
    "its own check": "def check(*a): pass\ndef f(*a): pass",
    "SystemExit in the call": "def f(*a): raise SystemExit(0)",
    "AssertionError in the call": "def f(*a): raise AssertionError",
    "StopIteration in the call": "def f(*a): raise StopIteration",
    "a kind of StopIteration": "class E(StopIteration): pass\ndef f(*a): raise E",
    "an exception without a class": "class E(Exception): pass\nE.__name__ = 'SystemExit'\ndef f(*a): raise E",
    "a BaseException": "def f(*a): raise KeyboardInterrupt",
    "replies twice": REPLY + "def f(*a): say(); say()",
    "replies with a foreign object": REPLY
    + "def f(*a): say(value=[0], nodes=[['foreign', ['function', 0]]]); os._exit(0)",
    "replies with a cycle": REPLY + "def f(*a): say(value=[0], nodes=[['tuple', [[0]]]]); os._exit(0)",
    "replies with a module": REPLY
    + "def f(*a): say(value=[0], nodes=[['foreign', ['global', 'os', 'system']]]); os._exit(0)",
    "replies with an unknown type": REPLY + "def f(*a): say(value=[0], nodes=[['Popen', ['true']]]); os._exit(0)",
    "changes what it was not given": REPLY + "def f(*a): say(changed=[[9, ['list', []]]]); os._exit(0)",
    "changes the request": REPLY + "def f(*a): say(changed=[[0, ['list', []]]]); os._exit(0)",
    "calls the judge": REPLY
    + "def f(*a): say(do='call', value=[0], nodes=[['list', [0, [1], [2]]], ['tuple', []], ['dict', []]])",
    "an endless iterator": "import itertools\ndef f(*a): return itertools.count()",
    "a list in itself": "def f(*a):\n    x = []\n    x.append(x)\n    return x",
    "nan": "def f(*a): return [float('nan'), 'x']",
    "a lone surrogate": "def f(*a): return ['\\ud800', b'\\xff'.decode(errors='surrogateescape')]",
}
PROGRAMS = PROCESSES | REPLIES


@functools.cache
def reward(tier: str) -> Code:
    try:
        return Code(tier=tier, cpu_s=1)
    except ConfigError as error:
        pytest.skip(str(error))


def sample(text: str, fields: dict) -> Sample:
    return Sample(Prompt(0, (1,), "", fields), 0, f"```python\n{text}\n```", (1,), True)


def scored(judge: Code, text: str, fields: dict) -> tuple[float | None, str]:
    (score,) = judge([sample(text, fields)])
    return score, next(name for name, (count, _) in judge.take_counts().items() if count)


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_no_program_forges_a_verdict_or_goes_without_one(tier):
    """Side by side: some of them wait for seconds. Replies in the tier that hides least."""
    judge, asked = reward(tier), [(what, row) for what in PROCESSES for row in ("mbpp", "stream")]
    if tier == TIERS[-1]:
        asked += [(what, row) for what in REPLIES for row in ROWS]
    judge.take_counts()
    with ThreadPoolExecutor(4) as pool:
        scores = pool.map(lambda one: judge([sample(PROGRAMS[one[0]], ROWS[one[1]])]), asked)
        assert {one: score for one, (score,) in zip(asked, scores, strict=True) if score != 0.0} == {}
    counts = {name: count for name, (count, _) in judge.take_counts().items() if count}
    assert sum(counts.values()) == len(asked) and not counts.keys() & {"passed", "failed"}


@pytest.mark.parametrize("tier", TIERS)
def test_the_same_rows_have_a_right_answer(tier):
    honest = "def f(n): return [n, 'zyqvexa']\nif __name__ == '__main__': print(3, 'zyqvexa')"
    assert [scored(reward(tier), honest, fields)[0] for fields in ROWS.values()] == [1.0] * len(ROWS)


@pytest.mark.parametrize("tier", TIERS)
def test_a_reply_does_not_change_an_object_of_the_judge(tier):
    row = {"test_list": ["assert Foo(1).startswith('zyqvexa')"]}
    assert scored(reward(tier), FILLED, row) == (0.0, "error")
