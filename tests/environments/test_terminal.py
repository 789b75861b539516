"""A terminal for each trajectory: what it keeps, what it refuses, what is left, and who decides its reward."""

from __future__ import annotations

import gc
import os
import re
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from aligner.answers import AnswerLog
from aligner.config.sections.environment import EnvironmentConfig
from aligner.environments.pool import Pool, Session
from aligner.environments.terminal import Terminal
from aligner.environments.tools import load_tools, schemas
from aligner.errors import EnvironmentCodeError
from aligner.sandbox.terminal import TerminalLimits, TerminalSandbox, lacks

PATH = "aligner.environments.terminal:Terminal"
pytestmark = pytest.mark.skipif(bool(why := lacks()), reason=str(why))


def opened(row: dict | None = None, **args) -> Terminal:
    made = Terminal(**args)
    made.reset(7, **{"tests": "grep -q three /app/a.txt", "files": {"a.txt": "one\ntwo\n", "b": None}} | (row or {}))
    return made


@pytest.fixture(scope="module")
def terminal():
    return opened(cpu_s=0.5, waits_s=1, memory_mb=128, disk_mb=16, processes=24, output_chars=200)


CALLS = [
    ("bash", {"command": "x=5; mkdir d; cd d; pwd"}, "/app/d"),
    ("bash", {"command": "echo $x; pwd; false"}, "5\n/app/d\n(exit status 1)"),
    ("bash", {"command": "if"}, "bash: syntax error: unexpected end of file\n(exit status 2)"),
    ("bash", {"command": "read y; echo \"[$y] it's\" '$x' !!"}, "[] it's $x !!"),
    ("bash", {"command": "hostname; id -u; echo $HOME $TZ $RANDOM; ls /proc | grep -cx 1"}, None),
    ("write", {"path": "e/f.txt", "text": "one\ntwo\n"}, "wrote e/f.txt"),
    ("edit", {"path": "e/f.txt", "old": "two", "new": "three"}, "edited e/f.txt"),
    (
        "edit",
        {"path": "e/f.txt", "old": "e", "new": ""},
        "error: expected the old text once in e/f.txt, found it 3 times",
    ),
    ("bash", {"command": "cat e/f.txt"}, "one\nthree"),
    ("python", {"code": "import os\nn = 3\nos.path.exists('e/f.txt')"}, "True"),
    ("python", {"code": "n * 2"}, "6"),
    ("python", {"code": "raise SystemExit(2)"}, "Traceback"),
    ("bash", {"command": "seq 1000"}, "bytes cut"),
    ("bash", {"command": "bash -c 'sleep 9 & sleep 0.1; kill $!; wait $!; echo $?'"}, "143"),
    (
        "bash",
        {"command": "bash -c 'trap \"echo $x\" HUP; kill -HUP $$; trap - HUP; kill -HUP $$'"},
        "(exit status 129)",
    ),
    ("bash", {"command": "sleep 100 & sleep 99; echo never"}, "(it waited for 1 s)"),
    ("bash", {"command": "echo $x; while :; do :; done"}, "5\n\n(it computed for 0.5 s)"),
    (
        "bash",
        {"command": "pgrep -c sleep; echo $x; exit 4"},
        "1\n5\nexit\n(the shell has ended: the next call has a new one)",
    ),
    ("bash", {"command": "echo [$x]; pwd"}, "[]\n/app"),
]


def test_a_session_keeps_its_state_and_a_second_one_answers_the_same(terminal):
    answers = []
    for made in (terminal, opened(cpu_s=0.5, waits_s=1, output_chars=200)):
        answers.append([getattr(made, name)(**arguments) for name, arguments, _ in CALLS])
    for (_, arguments, expected), text in zip(CALLS, answers[0], strict=True):
        assert expected is None or text == expected or (expected in text and len(expected) < 20), (arguments, text)
    assert answers[0] == answers[1]
    assert answers[0][4].startswith("sandbox\n0\n/root UTC ") and answers[0][4].endswith("\n0\n(exit status 1)")


# what it does -> bash that prints "done" if it succeeds
HOSTILE = {
    "mounts a file system": "mkdir -p m; mount -t tmpfs x m && echo done",
    "makes a namespace with rights": "unshare -Ur true && echo done; unshare -m true && echo done",
    "enters another namespace": "nsenter -t 1 -m true && echo done; nsenter --mount=/proc/self/ns/mnt : && echo done",
    "leaves by chroot": "chroot / true && echo done",
    "leaves by the first process": "ls /proc/1/root/image && echo done; ls -d /proc/1 && echo done",
    "kills all others": "kill -9 -1 1; kill -INT 1 -1; echo",
    "limits the first process": "prlimit --pid 1 --cpu=1:1 && echo done; renice -n 19 1 && echo done",
    "connects outside": "exec 3<>/dev/tcp/127.0.0.1/PORT && echo done; exec 3<>/dev/tcp/1.1.1.1/53 && echo done",
    "makes ever new processes": ":(){ :|:& };:; sleep 0.5",
    "fills the memory": "python3 -c 'x = bytearray(1 << 30)' && echo done",
    "fills the memory by many": "for i in 1 2 3; do (x=$(head -c 90M /dev/zero | tr '\\0' a); sleep 9) & done; wait",
    "fills shared memory": "python3 -c 'import mmap; x = mmap.mmap(-1, 1 << 30); x.write(bytes(1 << 30))' && echo done",
    "fills the memory with files": "for f in big /dev/shm/big; do head -c 99M /dev/zero > $f && echo done; done",
    "writes without end": "yes",
    "asks for memory without a name": "python3 -c 'import os; os.memfd_create(\"x\")' && echo done",
    "leaves a daemon": "setsid nohup sleep 987654 >/dev/null 2>&1 & disown; echo",
    "writes to the kernel": "for f in sys/kernel/core_pattern sysrq-trigger; do (echo x > /proc/$f) && echo done; done",
    "writes to the machine": "touch /usr/bin/x && echo done; touch /etc/ld.so.cache && echo done",
    "traces a process": "sleep 9 & python3 -c 'import ctypes as c; print(c.CDLL(None).ptrace(16, '$!') or \"done\")'",
    "reads the job": "ls HOME && echo done; env | grep -i SECRET && echo done; cat /proc/1/environ && echo done",
    "makes a device": "mknod d b 8 0 && echo done; ls /dev/sd* /dev/vd* /dev/nvidia* 2>/dev/null && echo done",
    "closes the line of its status": "exec 9>&-; echo",
    "writes what a screen obeys": "printf '\\033c\\033]52;c;eA==\\007\\0'; head -c 999 /dev/urandom",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_hostile_agent_does_stays_within(terminal, monkeypatch, what):
    monkeypatch.setenv("ALIGNER_SECRET", "0" * 64)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        text = HOSTILE[what].replace("HOME", str(Path(__file__).parent)).replace("PORT", str(server.getsockname()[1]))
        answer = terminal.bash(text)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert "done" not in answer.splitlines()
    assert "here" in (terminal.bash("rm -rf /app/* /dev/shm/*; echo here") for _ in range(9))  # it goes on
    assert terminal.write("b.txt", "x") == "wrote b.txt"


def test_nothing_is_left(tmp_path):
    mounts, before = Path("/proc/mounts").read_text(), len(os.listdir("/proc/self/fd"))
    made = opened()
    made.bash("setsid sleep 123321 & sleep 123322 & sleep 0.2; pgrep -x sleep")
    made.bash("until [ $(pgrep -cx sleep) = 2 ]; do :; done")
    assert [p for p in psutil.process_iter(["cmdline"]) if "123321" in (p.info["cmdline"] or [])]
    del made
    gc.collect()
    until = time.monotonic() + 30
    while left := [p for p in psutil.process_iter(["cmdline"]) if {"123321", "123322"} & {*(p.info["cmdline"] or [])}]:
        assert time.monotonic() < until, left
    assert Path("/proc/mounts").read_text() == mounts and len(os.listdir("/proc/self/fd")) == before


# what an agent leaves behind to be rewarded for nothing
FORGERIES = {
    "reward.txt": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod 0 /logs",
    "a daemon that writes it": "(while :; do echo 1 > /logs/verifier/reward.txt; done) 2>/dev/null & echo",
    "links": "rm -rf /logs /tests /tmp; ln -s /app /logs; ln -s /app /tests; echo 'exit 0' > test.sh; mkdir verifier",
    "start files": "echo 'exit 0' | tee ~/.bashrc ~/.profile /etc/profile /etc/bash.bashrc; export BASH_ENV=~/.bashrc",
    "a library for all": "mkdir -p /etc; echo /app/x.so > /etc/ld.so.preload",
    "modules": "s=$(python3 -m site --user-site); mkdir -p $s; for m in re.py sitecustomize.py $s/usercustomize.py; do "
    "echo 'import os; os._exit(0)' > $m; done",
    "a race of links": "(while :; do ln -sfn /app /logs; ln -sfn /app /tests; done) >/dev/null 2>&1 & echo",
    "a status": "(echo 0 > /proc/$$/fd/9) 2>/dev/null; echo",
    "no folders": "rm -rf /bin /etc /lib /sbin; mkdir /bin; echo x > /bin/bash; mv /app /x; ln -s /x /app",
}
HARMFUL = ("no folders", "links", "a race of links")  # to an honest agent
TESTS = "import re, sys\nsys.exit(not re.search('three', open('/app/a.txt').read()))\n"


def test_no_agent_forges_its_reward():
    tests = {"test.sh": "set -e\npython3 /tests/check.py\ngrep -q three a.txt\n", "check.py": TESTS}
    for what, text in FORGERIES.items():
        made = opened({"tests": tests})
        made.bash(text)
        assert made.get_reward() == 0.0, what
    made = opened({"tests": tests})
    made.bash("\n".join(text for what, text in FORGERIES.items() if what not in HARMFUL))
    made.edit("a.txt", "two", "three")
    assert made.get_reward() == 1.0  # none of it harms an honest one either


TASK = {
    "task.toml": '[verifier]\ntimeout_sec = 5.0\nenv = { WANTED = "7" }\n',
    "instruction.md": "Write seven.\n",
    "environment/Dockerfile": "FROM debian\nWORKDIR /srv/it\nCOPY start.txt sub/ ./\n# no more\nENV A=1\n",
    "environment/start.txt": "6",
    "environment/sub/more.txt": "m",
    "tests/test.sh": 'test "$(cat n)" = $WANTED -a -e more.txt && echo 0.75 > /logs/verifier/reward.txt\n',
}


def write_files(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_a_task_of_harbor_is_played(tmp_path):
    write_files(tmp_path / "task", TASK)
    made = Terminal()
    assert made.reset(1, task=str(tmp_path / "task")) == "Write seven."
    assert made.bash("pwd; ls; ls /tests; echo $(($(cat start.txt) + 1)) > n") == "/srv/it\nmore.txt\nstart.txt"
    assert made.get_reward() == 0.75
    write_files(tmp_path / "task", {"environment/Dockerfile": "FROM debian\nRUN apt-get install vim\n"})
    with pytest.raises(ValueError, match=r"'RUN apt-get install vim': expected .*image\.tar"):
        Terminal().reset(1, task=str(tmp_path / "task"))


@pytest.mark.parametrize(
    ("tests", "reward"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt", 0.25),
        ("echo 0.5 > /logs/verifier/reward.txt; exit 1", 0.5),
        ("echo nan > /logs/verifier/reward.txt", 0.0),
        ("ln -s /app/a.txt /logs/verifier/reward.txt", 0.0),
        ('cd /logs/verifier; echo 0.5 > reward.txt; echo \'{"quality": 0.1, "reward": 0.75}\' > reward.json', 0.75),
        ("echo '{\"reward\": NaN}' > /logs/verifier/reward.json", 0.0),
        ("echo '{\"reward\": true}' > /logs/verifier/reward.json; exit 1", 1.0),
        ("while :; do :; done", 0.0),
        ("touch /usr/x || test -e /app/b.txt -a ! -e /logs/agent", 1.0),
    ],
)
def test_a_reward_is_the_tests_number_or_their_exit_status(tests, reward):
    made = opened({"tests": tests}, test_s=0.5)
    made.bash("touch b.txt; touch /logs/agent")
    assert made.get_reward() == reward


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("reward: 1", "reward.json:1: not valid JSON"),
        ("{}", "expected an object with a number `reward`, found {}"),
        ("[1.0]", "expected an object with a number `reward`, found [1.0]"),
        ('{"reward": "1", "quality": 1}', 'a number `reward`, found {"reward": "1", "quality": 1}'),
    ],
)
def test_a_file_of_rewards_without_a_reward_is_refused(text, words):
    made = opened({"tests": {"test.sh": "cp /tests/r /logs/verifier/reward.json", "r": text}})
    with pytest.raises(EnvironmentCodeError, match=re.escape(words)):
        made.get_reward()


def call(name: str, **arguments) -> dict:
    return {"name": name, "arguments": arguments}


def test_after_a_kill_its_calls_are_repeated_and_a_resumed_run_reads_them(tmp_path):
    cfg = EnvironmentConfig(path=PATH, args={"cpu_s": 5}, workers=1)
    row = {"tests": "test $(cat n) = 3", "setup": "echo 1 > n", "prompt": "count"}
    known, log = schemas(load_tools(cfg)), AnswerLog(tmp_path / "log", 0)
    assert [one["function"]["name"] for one in known] == ["bash", "edit", "python", "write"]
    log.begin(1)
    pool, session = Pool(cfg, known, log), Session("1", 3, row)
    step = call("bash", command="x=$((x + 1)); echo $(($(cat n) + 1)) > n; echo $x $(cat n)")
    ask = lambda owner, key: owner.ask(key, "turn", calls=[step]).result(300)  # noqa: E731
    assert pool.ask(session, "reset", seed=3, row=row).result(300)["value"] == []
    first = ask(pool, session)
    session.process.kill()  # and with it the sandbox
    assert first["value"]["texts"] == ["1 2"] and ask(pool, session)["value"]["texts"] == ["2 3"]
    again = AnswerLog(tmp_path / "log", 0)
    again.begin(1)
    resumed, same = Pool(cfg, known, again), Session("1", 3, row)
    resumed.ask(same, "reset", seed=3, row=row).result(300)
    assert [ask(resumed, same)["value"]["texts"] for _ in range(2)] == [["1 2"], ["2 3"]]
    assert same.process is None  # nothing was executed
    assert resumed.ask(same, "score").result(300)["value"] == 1.0


def test_a_start_is_quick_and_many_neither_thrash_nor_time_out():
    def start(_: int) -> float:
        begun = time.thread_time(), time.monotonic()
        TerminalSandbox(TerminalLimits()).close()
        return time.monotonic() - begun[1]

    assert statistics.median(map(start, range(5))) < 2.0  # 0.05 on a free machine
    with ThreadPoolExecutor(16) as threads:
        many = list(threads.map(lambda _: opened(waits_s=5), range(16)))
        texts = list(threads.map(lambda made: made.bash("for i in 1 2 3; do ls | wc -l; done"), many))
    assert texts == ["1\n1\n1"] * 16


def test_a_terminal_whose_programs_wait_is_looked_at_rarely_and_keeps_its_limit():
    """As while an agent's program waits for the model. Each look is a wait of the process that watches."""
    with ThreadPoolExecutor(1) as threads:
        sandbox = TerminalSandbox(TerminalLimits())
        text = "sleep 4; touch done; while :; do :; done"
        asked = threads.submit(sandbox.run, ["bash", "-c", text], 0.5, {}, 1e6)
        (first,) = psutil.Process(sandbox._session._process.pid).children()
        time.sleep(1)
        begun, before = time.monotonic(), first.num_ctx_switches().voluntary
        time.sleep(2)
        looks = first.num_ctx_switches().voluntary - before
        assert looks < (time.monotonic() - begun) / 0.1
        assert asked.result(120)["why"].startswith("it computed for 0.5 s")
        assert sandbox.read("done") == ""
        sandbox.close()


def test_arguments_that_are_refused_before_a_run(tmp_path):
    for args, words in (
        ({"memory": 1}, "memory"),
        ({"cpu_s": 0}, "cpu_s=0"),
        ({"image": "nowhere"}, "image='nowhere'"),
    ):
        with pytest.raises(EnvironmentCodeError, match=rf"environment\.args=.*{words}"):
            load_tools(EnvironmentConfig(path=PATH, args=args))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"tests": ""}, "neither `task` nor `tests`"),
        ({"setup": "exit 3"}, r"setup: .*exit status 3"),
    ],
)
def test_a_row_that_cannot_be_played_is_named(row, words):
    with pytest.raises((ValueError, RuntimeError), match=words):
        opened(row)


def test_the_table_of_calls_is_of_both_architectures():
    from aligner.sandbox.confine import CALLS as ALLOWED
    from aligner.sandbox.confine import REFUSED

    names = {entry.split()[0] for entry in REFUSED.split(";")}
    assert all(re.fullmatch(r"\s*\w+ \d+ \d+\s*", entry) for entry in REFUSED.split(";"))
    assert not names & {entry.split()[0] for entry in ALLOWED.split(";")}
