"""Fixtures of all tests."""

import gc
import importlib.util
import shutil
import signal
from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.needs import lacking
from tests.ranks import POOLS, Ranks
from tests.servers import Server

FOLDER = Path(__file__).parent
FILES_SHOWN = 40
# what takes minutes is begun first: at the end of a run a worker that has one of these left would go on alone
LONGEST = [
    *("examples/test_quickstart.py", "test_tutorials.py", "slurm/test_slurm.py", "rehearse/test_grid.py"),
    *("algorithms/test_environments.py", "algorithms/test_recipes.py", "test_invariance.py"),
    *("environments/test_terminals_left.py", "shakedown/test_shakedown.py", "engines/vllm/test_vllm_drafts.py"),
    *("engines/vllm/test_vllm_stage.py", "rehearse/test_shortened.py", "rewards/test_code_forgery.py"),
    *("rehearse/test_plan.py", "megatron/test_layouts.py", "rewards/test_code.py", "engines/vllm/test_vllm_engine.py"),
    *("slurm/test_shakedown.py", "examples/test_notebook.py", "benchmarks/test_versus.py", "test_reruns.py"),
    *("algorithms/test_preferences_learn.py", "algorithms/test_experts_learn.py", "run/test_soak.py"),
]

# the machine's pace is no property of what is tested, and every run tries the same examples; others with
# --hypothesis-profile=default
unimportant = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("paceless", deadline=None, derandomize=True, suppress_health_check=unimportant)
settings.load_profile("paceless")

# in the background of a shell it is ignored, also by what tests start and interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all tests are imported, which stay (see aligner/loading.py): a quarter of the collection's time


def pytest_configure(config):
    """Refuse a path that does not exist: with workers pytest would say no more than that no tests ran."""
    here = config.invocation_params.dir
    missing = [argument for argument in config.args if not (here / argument.partition("::")[0]).exists()]
    if missing and not hasattr(config, "workerinput"):
        rooms = ", ".join(sorted({path.relative_to(FOLDER).parts[0] for path in FOLDER.glob("*/**/test_*.py")}))
        raise pytest.UsageError(f"no tests at {missing[0]}: expected a path, or with launchers/test.sh one of {rooms}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():  # of a worker, and of the process that hands out files, which collects nothing
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks `slow` what `few` leaves out. Workers of xdist take whole files in this order: the LONGEST first, then
    those of many tests, so that what is left for the end is short."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few"):
            cases[item.path, item.originalname].append(item)
    for result in cases.values():
        (count,) = result[0].get_closest_marker("few").args
        kept = {round(i * (len(result) - 1) / max(1, count - 1)) for i in range(count)}  # spread, from first to last
        for i, item in enumerate(result):
            if i not in kept:
                item.add_marker("slow")
    if hasattr(config, "workerinput"):
        places, tests = {FOLDER / name: index for index, name in enumerate(LONGEST)}, Counter(i.path for i in items)
        items.sort(key=lambda item: (places.get(item.path, len(places)), -tests[item.path], item.path))


def pytest_terminal_summary(terminalreporter, config):
    """Where the time of a run with workers went: the files with most seconds, by the side of pytest's slowest tests."""
    if not config.getoption("numprocesses", None):
        return
    seconds = defaultdict(float)
    for report in chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section(f"slowest files of {len(seconds)}, {sum(seconds.values()):.0f} s in all")
    for file in sorted(seconds, key=seconds.__getitem__, reverse=True)[:FILES_SHOWN]:
        terminalreporter.write_line(f"{seconds[file]:.2f}s {file}")


@pytest.fixture(scope="module", autouse=True)
def _of_files_before():
    """What files before this one have left alive stays: the full collection at the end of each stage would look
    through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def server(monkeypatch):
    """An HTTP server of the test's own (tests.servers.Server)."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = Server().start()
    yield made
    made.close()


@pytest.fixture(scope="module")  # of the session it would be in the way of others' asyncio.run
def browser():
    """Chromium."""
    program = shutil.which("chromium")
    if program is None or importlib.util.find_spec("playwright") is None:
        lacking("no browser: apt-get install chromium, pip install playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=300_000)
        yield started
        started.close()


@pytest.fixture
def world():
    """The process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks():
    """The session's pool of rank processes (see tests/ranks.py); nothing starts before its first job."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="module", autouse=True)
def memory_of_ranks():
    """Give back what the models of a file's tests took: the ranks of all workers would else hold several GiB."""
    yield
    for pool in POOLS:
        pool.end()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """Tokenizer and data files of the toy runs (see tests/stages.py)."""
    from tests import stages

    return stages.make_data(tmp_path_factory.mktemp("tiny_data"))


@pytest.fixture(scope="session")
def tiny_runs(tiny_data, tmp_path_factory):
    """Finished toy runs that other stages start from: {"sft": folder, "rm": folder}."""
    from tests import stages

    root = tmp_path_factory.mktemp("tiny_runs")
    sft = stages.stage("sft", tiny_data, root / "sft", "run.steps=40", "checkpoint.every=20")
    rm = stages.stage("rm", tiny_data, root / "rm", "run.steps=20", f"model.init={sft}")
    return {"sft": sft, "rm": rm}
