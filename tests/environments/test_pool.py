"""Tools and environments in worker processes: what is answered, retried, given up, and read from the log again."""

import asyncio
import threading
import time
from concurrent import futures

import pytest

from aligner.answers import AnswerLog
from aligner.config.sections.environment import EnvironmentConfig
from aligner.environments.pool import Pool, Session
from aligner.environments.tools import load_tools, schemas
from aligner.environments.worker import ToolWorker
from aligner.errors import EnvironmentCodeError

FILE = "tests/assets/environments.py"


def make_pool(folder, step=1, **settings):
    cfg = EnvironmentConfig(workers=1, **settings)
    log = AnswerLog(folder / "log", 0)
    log.begin(step)
    return Pool(cfg, schemas(load_tools(cfg)), log)


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


def turn(pool, session, *calls):
    return pool.ask(session, "turn", calls=list(calls)).result(300)


def test_functions_and_what_is_wrong_with_a_call(tmp_path):
    pool, session = make_pool(tmp_path, tools=[f"{FILE}:add", f"{FILE}:divide"]), Session("1", 7, {})
    assert pool.ask(session, "reset", seed=7, row={}).result(300)["value"] == []
    wrong = [call("add", a=1), call("add", a=1, b="2"), call("multiply", a=1), call("divide", a=1, b=0)]
    answer = turn(pool, session, call("add", a=1, b=2), call("divide", a=1, b=4), *wrong)["value"]
    assert answer["texts"][:2] == ["3", "0.25"] and answer["reward"] is None and not answer["done"]
    assert answer["texts"][2:] == [
        "error: add: missing a required argument: 'b'",
        "error: add: b: '2' is no integer",
        "error: there is no tool 'multiply': there are add, divide",
        "error: division by zero",
    ]
    assert answer["wrong"] == 4


TRL = '''
class Guess:
    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.number, self.done = kwargs["number"], False
        return f"Guess a number below {kwargs['below']}."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The number.

        Returns:
            Whether it is lower or higher.
        """
        if self.done:
            raise ValueError("Game over.")
        self.done = number == self.number
        self.reward = float(self.done)
        return "right" if self.done else "lower" if number > self.number else "higher"


def score(environments, **kwargs):
    return [env.reward for env in environments]


def score_texts(completions, environments, **kwargs):
    return [0.0 for _ in completions]
'''


def test_an_environment_and_its_reward_in_the_convention_of_trl(tmp_path):
    """A class without `seed` and `get_reward`, whose attribute a function of environments reads."""
    (tmp_path / "game.py").write_text(TRL)
    named = {"path": f"{tmp_path / 'game.py'}:Guess", "reward": f"{tmp_path / 'game.py'}:score"}
    pool, session = make_pool(tmp_path, **named), Session("1", 7, {})
    assert load_tools(pool.cfg).scores and not load_tools(EnvironmentConfig(path=named["path"])).scores
    opening = pool.ask(session, "reset", seed=7, row={"number": 4, "below": 9}).result(300)["value"]
    assert opening == "Guess a number below 9."
    assert turn(pool, session, call("guess", number=6))["value"]["texts"] == ["lower"]
    assert pool.ask(session, "score").result(300)["value"] == 0.0
    results = [turn(pool, session, call("guess", number=4))["value"] for _ in range(2)]
    assert [one["texts"] for one in results] == [["right"], ["error: Game over."]] and results[0]["done"]
    assert pool.ask(session, "score").result(300)["value"] == 1.0
    texts = EnvironmentConfig(path=named["path"], reward=f"{tmp_path / 'game.py'}:score_texts")
    with pytest.raises(EnvironmentCodeError, match=r"called with `environments` alone: missing .*'completions'"):
        load_tools(texts)


def test_an_iterator_that_is_at_its_end_is_no_tool_that_hangs(tmp_path):
    """`next` of nothing raises what no future takes."""
    (tmp_path / "ends.py").write_text(
        "class Ends:\n"
        "    def reset(self, seed, word):\n        return next(w for w in ['a'] if w == word)\n\n"
        "    def find(self, word: str) -> str:\n"
        '        """Find.\n\n        Args:\n            word: What.\n        """\n'
        "        return next(w for w in ['a'] if w == word)\n\n"
        "    async def wait(self) -> str:\n"
        '        """Wait."""\n        return next(iter(()))\n'
    )
    pool = make_pool(tmp_path, path=f"{tmp_path}/ends.py:Ends", retries=0)
    for number, (word, name, known) in enumerate(
        [("b", "", {}), ("a", "find", {"word": "b"}), ("a", "find", {"word": "a"}), ("a", "wait", {})]
    ):
        session = Session(str(number), 7, {})
        answer = pool.ask(session, "reset", seed=7, row={"word": word}).result(300)
        answer = turn(pool, session, call(name, **known)) if name else answer
        if known.get("word") == "a":
            assert answer["value"]["texts"] == ["a"]
        else:
            assert answer["failed"] == "raised" and "StopIteration" in answer["text"]


def wait_for(path):
    until = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def pass_over(pool, seconds):
    """On the clock of those who wait for its workers."""
    pool._loop.time = lambda: time.monotonic() + seconds
    pool._loop.call_soon_threadsafe(lambda: None)  # it looks


def test_a_start_is_not_of_the_first_answers_time(tmp_path):
    """Imports may take long on a busy machine."""
    here, go = tmp_path / "here", tmp_path / "go"
    go.touch()
    (tmp_path / "slow.py").write_text(
        f"import pathlib, time\n\npathlib.Path({str(here)!r}).touch()\n"
        f"while not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.01)\n\n\n"
        'def one() -> int:\n    """One."""\n    return 1\n'
    )
    pool = make_pool(tmp_path, tools=[f"{tmp_path}/slow.py:one"], retries=0)
    for path in (here, go):  # of the import by this process
        path.unlink()
    asked = pool.ask(Session("1", 7, {}), "reset", seed=7, row={})
    wait_for(here)
    pass_over(pool, 300)
    go.touch()
    assert asked.result(300)["value"] == []


def test_an_environment_has_a_state_of_its_own_for_each_sample(tmp_path):
    pool = make_pool(tmp_path, path=f"{FILE}:Guess", args={"top": 3})
    sessions = [Session(str(i), seed, {}) for i, seed in enumerate((4, 4, 5))]
    opened = [pool.ask(s, "reset", seed=s.seed, row={"top": 1}) for s in sessions]
    assert [f.result(300)["value"] for f in opened] == ["below 3"] * 3
    answers = [turn(pool, s, call("guess", number=1))["value"] for s in sessions]
    assert [a["texts"] for a in answers] == [["right"], ["right"], ["too low"]]
    assert [(a["reward"], a["done"]) for a in answers] == [(0.25, True), (0.25, True), (0.0, False)]
    assert [pool.ask(s, "score").result(300)["value"] for s in sessions] == [1.0, 1.0, 0.0]


def test_an_environment_made_for_trl_needs_a_seed_more(tmp_path):
    """Public methods are tools, their results become text, reset gets the row's columns and may return nothing."""
    assert [one["function"]["name"] for one in schemas(load_tools(EnvironmentConfig(path=f"{FILE}:Counter")))] == [
        "increment",
        "read",
    ]
    pool = make_pool(tmp_path, path=f"{FILE}:Counter")
    session = Session("1", 2, {"start": 10})
    assert pool.ask(session, "reset", seed=2, row=session.row).result(300)["value"] == []
    answer = turn(pool, session, call("increment", step=3), call("increment", step=4), call("read"), call("reset"))
    assert (
        answer["value"]["texts"][:3] == ["13", "17", '{"count": 7}']
        and "no tool 'reset'" in answer["value"]["texts"][3]
    )
    assert answer["value"]["reward"] is None and not answer["value"]["done"]


@pytest.mark.parametrize("kind", ["raised", "hung", "died"])
def test_what_fails_once_is_asked_again_in_a_new_environment(tmp_path, kind):
    settings = {"path": f"{FILE}:Troubled"}
    pool = make_pool(tmp_path, args={"folder": str(tmp_path)}, **settings)
    session = Session("1", 2, {"kind": kind})
    pool.ask(session, "reset", seed=2, row=session.row).result(300)
    answer = turn(pool, session, call("guess", number=1))
    assert answer["value"]["texts"] == ["too low"] and answer["retried"] == 1
    assert turn(pool, session, call("guess", number=2))["value"]["texts"] == ["right"]
    assert pool.ask(session, "score").result(300)["value"] == 2.0  # calls that it has seen: those of the first are not
    always = make_pool(tmp_path, step=2, args={"folder": str(tmp_path), "fails": 9}, retries=1, **settings)
    session = Session("1", 3, {"kind": kind})
    always.ask(session, "reset", seed=3, row=session.row).result(300)
    answer = turn(always, session, call("guess", number=1))
    assert answer["failed"] == kind and answer["retried"] == 1 and "value" not in answer


def test_an_environment_that_failed_is_kept_no_longer(tmp_path):
    """Another one is tried: it would be there as long as the run is."""
    cfg = EnvironmentConfig(path=f"{FILE}:Troubled", args={"folder": str(tmp_path)})
    tools = load_tools(cfg)
    worker = ToolWorker(cfg, tools, {tool["function"]["name"]: tool["function"] for tool in schemas(tools)})

    def ask(op, **more):
        return asyncio.run(worker.answer({"id": 0, "op": op, "key": "1/0", **more}))

    assert ask("reset", seed=2, row={"kind": "raised"})["value"] and worker.objects
    assert ask("turn", calls=[call("guess", number=1)])["cause"] == "raised" and not worker.objects


def test_one_that_holds_its_interpreter_is_killed_and_another_one_asked(tmp_path):
    """Which is there for the one try that is left."""
    pool = make_pool(tmp_path, path=f"{FILE}:Troubled", args={"folder": str(tmp_path)}, retries=1)
    session = Session("1", 2, {"kind": "holds"})
    pool.ask(session, "reset", seed=2, row=session.row).result(300)
    asked = pool.ask(session, "turn", calls=[call("guess", number=1)])
    wait_for(tmp_path / "holds-2-0")
    pass_over(pool, 300)
    answer = asked.result(300)
    assert answer["value"]["texts"] == ["too low"] and answer["retried"] == 1


def test_a_process_that_ended_between_two_questions_is_replaced(tmp_path):
    pool, session = make_pool(tmp_path, path=f"{FILE}:Guess"), Session("1", 2, {})
    pool.ask(session, "reset", seed=2, row={}).result(300)
    before = session.process
    before.transport.kill()
    asyncio.run_coroutine_threadsafe(asyncio.wait([before.ended]), pool._loop).result(300)
    answer = turn(pool, session, call("guess", number=1))
    assert answer["value"]["texts"] == ["too low"] and answer["retried"] == 0 and session.process is not before


def test_its_processes_end_with_it_also_where_their_own_thread_lets_it_go(tmp_path):
    """As the collector may."""
    pool, let_go = make_pool(tmp_path, path=f"{FILE}:Guess"), asyncio.Event()
    session = Session("1", 2, {})
    pool.ask(session, "reset", seed=2, row={}).result(300)

    async def hold(pool):
        await let_go.wait()
        return threading.current_thread()

    loop, process, held = pool._loop, session.process, asyncio.run_coroutine_threadsafe(hold(pool), pool._loop)
    del pool
    loop.call_soon_threadsafe(let_go.set)
    held.result(300).join(300)
    assert loop.is_closed() and process.transport.get_returncode() is not None


def test_its_thread_ends_with_it_also_where_there_is_no_process_to_end(tmp_path, monkeypatch):
    """What is asked of the thread may be done before anyone looks."""

    def at_once(work, loop, real=asyncio.run_coroutine_threadsafe):
        asked = real(work, loop)
        futures.wait([asked], 300)
        return asked

    others, pool = set(threading.enumerate()), make_pool(tmp_path, path=f"{FILE}:Guess")
    (thread,) = set(threading.enumerate()) - others
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", at_once)
    del pool
    assert not thread.is_alive()


def test_what_is_no_unicode_is_replaced(tmp_path):
    """As names of files are that are no UTF-8: no tokenizer takes them."""
    source = 'class Folder:\n    def reset(self): pass\n\n    def names(self) -> str:\n        """Lists."""\n'
    (tmp_path / "folder.py").write_text(source + '        return "é\\udcff"\n')
    pool = make_pool(tmp_path, path=f"{tmp_path}/folder.py:Folder")
    session = Session("1", 2, {})
    pool.ask(session, "reset", seed=2, row={}).result(300)
    assert turn(pool, session, call("names"))["value"]["texts"] == ["é?"]


@pytest.mark.slow
def test_answers_are_read_before_anyone_is_asked(tmp_path):
    def play(pool, *numbers):
        session = Session("9", 2, {})
        pool.ask(session, "reset", seed=2, row={}).result(300)
        return session, [turn(pool, session, call("guess", number=n)) for n in numbers]

    _, first = play(make_pool(tmp_path, path=f"{FILE}:Guess"), 0, 1)
    path = tmp_path / "log" / "step-00000001-rank-00000.jsonl"
    path.write_bytes(path.read_bytes()[:-9])  # a kill: the answer to the second guess was being written
    again = make_pool(tmp_path, path=f"{FILE}:Guess")
    session, second = play(again, 0)
    assert second[0] == first[0] and session.process is None  # to the second on the clock: nobody was asked
    assert turn(again, session, call("guess", number=1))["value"] == first[1]["value"]
    assert session.process is not None and again.ask(session, "score").result(300)["value"] == 0.0
    assert turn(again, session, call("guess", number=2))["value"]["texts"] == ["right"]
    other, _ = play(make_pool(tmp_path, path=f"{FILE}:Guess"), 3)  # another question than the one answered
    assert other.process is not None
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0].replace("below", "above"), *lines[1:]]) + "\n")
    changed, _ = play(make_pool(tmp_path, path=f"{FILE}:Guess"))
    assert changed.process is not None  # a line that does not have its checksum is none


@pytest.mark.parametrize(
    "more, words",
    [
        ({"tools": [f"{FILE}:bare"]}, r"the tool `bare`: expected a type hint"),
        ({"tools": [f"{FILE}:mute"]}, r"the tool `mute`: expected .* a docstring"),
        ({"tools": [f"{FILE}:add", "./tests/assets/environments.py:add"]}, r"environment\.tools\[1\].*another name"),
        ({"tools": [f"{FILE}:subtract"]}, r"environment\.tools\[0\].*expected a function `subtract`.*add, divide"),
        ({"tools": [f"{FILE}:guess"], "path": f"{FILE}:Guess"}, r"environment\.path=.*`guess` is both"),
        ({"path": f"{FILE}:NoReset"}, r"environment\.path=.*method reset\(self, seed, \*\*row\)"),
        ({"path": f"{FILE}:Guess", "tools": ["tests/assets/guess.py:guess"]}, r"environment\.tools\[0\].*no file"),
        ({"path": "Guess"}, r"environment\.path='Guess': expected module:Class, path\.py:Class"),
    ],
)
def test_bad_tools_are_reported_before_anything_starts(more, words):
    with pytest.raises(EnvironmentCodeError, match=words):
        schemas(load_tools(EnvironmentConfig(**more)))
