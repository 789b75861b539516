"""The turns of training and generation: the machine alone, with models and an engine that only keep books."""

import mmap
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.sections.memory import OFFLOADS, MemoryConfig
from aligner.engines.base import RolloutEngine
from aligner.errors import ConfigError, MemoryLimitError, OutOfMemoryError
from aligner.run.memory import PeakMeter, peak_rss_bytes
from aligner.run.phases import PhaseMemory
from aligner.run.timers import Timers

SIZES = {"weights": 100, "gradients": 200, "optimizer": 400}
NEEDS = {  # what a reader of the loop would say
    "refit": {"policy weights"},
    "verify": {"policy weights"},
    "generate": set(),
    "score": {"reward weights"},
    "logprobs": {"policy weights", "critic weights", "reference weights"},
    "update": {f"{role} {kind}" for role in ("policy", "critic") for kind in SIZES},
    "save": {f"{role} {kind}" for role in ("policy", "critic") for kind in ("weights", "optimizer")},
    "eval": {"policy weights"},
}
AWAKE = {"verify", "generate"}


class Model:
    def __init__(self, role: str, trained: bool, log: list):
        self.role, self.trained, self.log, self.away = role, trained, log, set()

    def kinds(self):
        return tuple(SIZES) if self.trained else ("weights",)

    def held_bytes(self, kind):
        return 0 if kind in self.away or kind not in self.kinds() else SIZES[kind]

    def offload(self, kind):
        size = self.held_bytes(kind)
        self.away.add(kind)
        if size:
            self.log.append(("offload", self.role, kind))
        return size

    def restore(self, kind):
        was = kind in self.away
        self.away.discard(kind)
        if was and kind in self.kinds():
            self.log.append(("restore", self.role, kind))
        return self.held_bytes(kind) if was else 0


class Engine(RolloutEngine):
    weight_bytes = 100

    def __init__(self, log: list):
        self.log, self.awake, self.weights = log, True, 0

    def sleep(self, weights=False):
        if self.awake:
            self.log.append(("sleep",))
        self.awake, self.weights = False, 0 if weights else self.weights

    def wake(self):
        assert not self.awake
        self.awake = True
        self.log.append(("wake",))

    def held_bytes(self):
        return {"weights": self.weights, "cache": 50 if self.awake else 0}


def make(
    *roles: str, engine: bool = True, judges: bool = False, empties: bool = False, **config
) -> tuple[PhaseMemory, Timers, list]:
    log: list = []
    config = {"offload": list(OFFLOADS), "sleep": "always"} | config
    models = {role: Model(role, role in ("policy", "critic"), log) for role in roles or ("policy",)}
    memory = PhaseMemory(
        MemoryConfig(**config), torch.device("cpu"), models, Engine(log) if engine else None, 50, judges, empties
    )
    timers = Timers()
    timers.around = memory.phase
    return memory, timers, log


def run(timers: Timers, *names: str) -> None:
    for name in names:
        with timers(name):
            pass


def test_one_iteration_moves_each_thing_once():
    memory, timers, log = make("policy", "reference")
    with timers("refit"):
        assert memory.now == "refit"
        with timers("verify"):
            pass
    run(timers, "generate", "score", "store", "logprobs", "advantages")
    before = len(log)
    run(timers, "update", "update", "update", "save")
    assert log[before:] == [
        ("offload", "reference", "weights"),
        ("restore", "policy", "gradients"),
        ("restore", "policy", "optimizer"),
    ]
    assert log[:before] == [
        ("sleep",),
        ("offload", "policy", "gradients"),
        ("offload", "policy", "optimizer"),
        ("offload", "reference", "weights"),
        ("wake",),
        ("offload", "policy", "weights"),
        ("sleep",),
        ("restore", "policy", "weights"),
        ("restore", "reference", "weights"),
    ]
    run(timers, "refit")
    assert len(log) == before + 5  # gradients and optimizer leave again, nothing else


def test_generation_goes_on_after_a_save():
    _, timers, log = make()
    run(timers, "refit", "generate", "score", "save", "generate")
    assert [entry for entry in log if len(entry) == 1] == [("sleep",), ("wake",), ("sleep",), ("wake",)]


@pytest.mark.parametrize("offload", [[], ["gradients"], ["optimizer", "weights"]])
def test_what_was_not_asked_for_stays(offload):
    _, timers, log = make("policy", "reference", "reward", offload=offload)
    run(timers, "refit", "generate", "score", "logprobs", "update", "save")
    assert {entry[2] for entry in log if entry[0] == "offload"} == set(offload)
    assert [entry for entry in log if len(entry) == 1] == [("sleep",), ("wake",), ("sleep",)]


def test_an_engine_may_be_kept_awake():
    for sleep, offload in (("never", list(OFFLOADS)), ("auto", [])):  # auto: on this CPU nobody wants the room
        memory, timers, log = make(sleep=sleep, offload=offload)
        run(timers, "refit", "generate", "score", "logprobs", "update")
        assert all(len(entry) == 3 for entry in log) and memory.engine.awake
    memory, timers, log = make(sleep="always", offload=[])
    run(timers, "refit", "generate", "score", "logprobs", "update")
    assert log == [("sleep",), ("wake",), ("sleep",)]


@pytest.mark.parametrize("names, text", [
    (["generate"], "generate after the start"),
    (["refit", "generate", "update", "generate"], "generate after update"),
    (["refit", "generate", "update", "save", "generate"], "generate after update"),
    (["refit", "logprobs", "score"], "score after logprobs"),
    (["refit", "verify"], "verify within none"),
])  # fmt: skip
def test_illegal_transitions_are_refused(names, text):
    _, timers, log = make()
    with pytest.raises(AssertionError, match=text):
        run(timers, *names)
    assert not (log and log[-1] == ("wake",)), "refused before anything has moved"


@pytest.mark.parametrize(
    "outer, inner",
    [("generate", "update"), ("update", "refit"), ("refit", "update"), ("eval", "update"), ("save", "save")],
)
def test_illegal_nesting_is_refused(outer, inner):
    _, timers, _ = make()
    if outer == "generate":
        run(timers, "refit")
    with pytest.raises(AssertionError, match=f"phase {inner} within {outer}"), timers(outer), timers(inner):
        pass
    run(timers, "refit", "generate", "score", "save")  # a phase that failed is over


def test_evaluation_during_training():
    memory, timers, _ = make("policy", "reward")
    run(timers, "refit", "generate", "score", "logprobs", "update")
    with timers("eval"):
        run(timers, "refit", "generate", "score")
        assert not memory.engine.awake, "a reward model has the device for itself"
    run(timers, "save", "refit", "generate")
    assert memory.engine.awake


def test_judges_get_the_device_or_an_awake_engine():
    """One of its own weights has the device for itself; the run's engine has to be awake to be asked."""
    memory, timers, log = make("policy", "judge.0")
    run(timers, "refit", "generate", "score")
    assert log[-2:] == [("sleep",), ("restore", "judge.0", "weights")]
    run(timers, "logprobs")
    assert ("offload", "judge.0", "weights") in log[-2:]
    memory, timers, _ = make("policy", "reward", "judge.0", judges=True)
    run(timers, "refit", "generate", "score")
    assert memory.engine.awake


def test_an_engine_is_empty_until_a_refit_where_one_comes_before_its_next_use():
    memory, timers, _ = make("policy", "reward", empties=True, limit={"update_bytes": 700, "logprobs_bytes": 200})
    engine = memory.engine
    for _ in range(2):
        assert not engine.weights
        with timers("refit"):
            engine.weights = 100
        run(timers, "generate", "score", "save", "generate", "eval")
        assert engine.weights, "there may be no other refit before a generation"
        run(timers, "logprobs")
        assert not engine.weights
        with timers("refit"):
            engine.weights = 100
        run(timers, "update")
    with pytest.raises(ConfigError, match=r"at least 200.*engine weights"):
        make(empties=True, limit={"refit_bytes": 150})
    for sleep, empties in (("never", True), ("always", False)):
        memory, timers, _ = make(sleep=sleep, empties=empties)
        memory.engine.weights = 100
        run(timers, "logprobs", "update")
        assert memory.engine.weights


@settings(max_examples=150)
@given(st.data())
def test_any_legal_order_has_what_it_needs_and_nothing_else(data):
    roles = data.draw(st.sets(st.sampled_from(["critic", "reference", "reward"])))
    offload = data.draw(st.sets(st.sampled_from(OFFLOADS)))
    memory, timers, _ = make("policy", *sorted(roles), offload=sorted(offload))
    names = ["refit", "generate", "score", "logprobs", "update", "save", "eval", "advantages"]
    for name in data.draw(st.lists(st.sampled_from(names), max_size=25)):
        try:
            with timers(name):
                leaf = name
                if name == "refit" and data.draw(st.booleans()):
                    with timers("verify"):
                        check(memory, "verify", roles, offload)
                    continue
                if leaf in NEEDS:
                    check(memory, leaf, roles, offload)
        except AssertionError as error:
            if not re.match(r"phase (generate|score) after", str(error)):
                raise


def check(memory, phase, roles, offload):
    here = {name for name, size in memory.held_bytes().items() if size and not name.startswith("engine")}
    needed = {name for name in NEEDS[phase] if name.split()[0] in {"policy", *roles}}
    assert needed <= here
    if phase not in ("score", "save"):
        assert not {name for name in here - needed if name.split()[1] in offload}
    if phase in AWAKE or phase != "score":
        assert memory.engine.awake == (phase in AWAKE)


# --- budgets


def test_out_of_memory_says_which_phase_budget_and_key(world):
    _, timers, _ = make(offload=["gradients"], limit={"update_bytes": 12345})
    with pytest.raises(OutOfMemoryError) as caught, timers("update"):
        torch.empty(1 << 60, dtype=torch.uint8)
    text = str(caught.value)
    for piece in (
        "phase update on rank 0",
        "memory.limit.update_bytes=12345",
        "batch.micro_batch_tokens",
        "model.recompute=full",
        "add optimizer, weights to memory.offload",
        "policy gradients 0.0 MiB",
    ):
        assert piece in text, (piece, text)
    message = r"phase generate of eval .*engine.kv_cache_bytes=50.*engine.max_batch"
    with pytest.raises(OutOfMemoryError, match=message), timers("eval"):
        run(timers, "refit")
        with timers("generate"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with pytest.raises(RuntimeError, match=r"^shapes$"), timers("update"):
        raise RuntimeError("shapes")


def test_what_helps_a_save_depends_on_where_its_copy_lies(world):
    """In host memory, which is the device's own on a CPU alone."""
    memory, timers, _ = make()
    for device, helps in (("cpu", True), ("cuda", False)):
        memory.device = torch.device(device)
        with (
            pytest.raises(OutOfMemoryError, match=r"lower a rank's share: parallel\.tensor") as caught,
            timers("save"),
        ):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        assert ("or set checkpoint.async_save=false" in str(caught.value)) == helps


def test_limits_below_what_a_phase_holds_are_refused():
    with pytest.raises(ConfigError, match=r"memory.limit.update_bytes=799: expected at least 800"):
        make(limit={"update_bytes": 799})  # weights, gradients, optimizer, the engine's weights
    make(limit={"update_bytes": 800})
    with pytest.raises(ConfigError, match=r"generate_bytes=149: expected at least 150.*kv_cache_bytes"):
        make(limit={"generate_bytes": 149})  # the engine's weights and its whole cache
    make(limit={"generate_bytes": 150})
    with pytest.raises(ConfigError, match=r"generate_bytes=150: expected at least 850"):
        make(offload=[], limit={"generate_bytes": 150})
    with pytest.raises(ConfigError, match=r"memory.limit.save_bytes=-1: expected a number >= 0"):
        MemoryConfig(limit={"save_bytes": -1})
    with pytest.raises(ConfigError, match=r"memory.limit.saves=1: expected one of the entries refit_bytes"):
        MemoryConfig(limit={"saves": 1})
    with pytest.raises(ConfigError, match=r"memory.offload='momentum'.*gradients, optimizer, weights"):
        MemoryConfig(offload=["momentum"])


def use(size: int) -> None:
    """Fill so many bytes from the system, and give them back: those of malloc may be ones that it has kept."""
    with mmap.mmap(-1, size) as pages:
        for start in range(0, size, mmap.PAGESIZE):
            pages[start] = 1


def test_peaks_are_measured_and_limits_enforced(world, capsys):
    memory, timers, _ = make(limit={"update_bytes": 1 << 50, "logprobs_bytes": 1000})
    resident = peak_rss_bytes()
    with timers("update"):
        use(64 << 20)
    with timers("logprobs"):
        pass
    actual = memory.take()
    assert set(actual) == {
        "memory/update_peak_bytes", "memory/logprobs_peak_bytes", "memory/moved_bytes", "memory/moving_s"
    }  # fmt: skip
    assert actual["memory/update_peak_bytes"] > actual["memory/logprobs_peak_bytes"] + (48 << 20)
    assert peak_rss_bytes() >= max(resident, actual["memory/update_peak_bytes"])
    assert actual["memory/moved_bytes"] == 600  # gradients and optimizer left for the logprobs
    with pytest.raises(MemoryLimitError, match=r"phase logprobs used \d+ bytes.*memory.limit.logprobs_bytes=1000"):
        memory.check(actual)
    memory.config.on_excess = "warn"
    memory.check(actual)
    assert "memory.limit.logprobs_bytes" in capsys.readouterr().err
    assert memory.take() == {"memory/moved_bytes": 0.0, "memory/moving_s": 0.0}


def test_the_meter_forgets_what_was_before():
    meter = PeakMeter(torch.device("cpu"))
    meter.start()
    use(96 << 20)
    high = meter.stop()
    meter.start()
    assert meter.stop() < high - (64 << 20)
    assert peak_rss_bytes() >= high
