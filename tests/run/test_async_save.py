"""checkpoint.async_save: written while training goes on, whole or not there, and never of a later step."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from aligner.config.resolve import compose
from aligner.errors import CheckpointError
from aligner.megatron.checkpoint import ModelSave
from aligner.megatron.checkpoint_files import complete_checkpoints
from aligner.run.checkpoints import SaveError
from aligner.run.loop import Run
from tests import stages
from tests.run.jobs import run_stage
from tests.stages import PowerCut

MORE = ["run.steps=5", "checkpoint.every=2", "checkpoint.keep_last=9", "logging.progress=false"]


MAIN = threading.main_thread()


def slow_rank(arguments: list[str], rank: int) -> dict[int, tuple[list[int], list[int]]]:
    """`run_stage` with a rank whose background writes end only after the step behind theirs; by step what is a
    checkpoint, and what is still on its way."""
    finish, write, done, seen = Run.finish, ModelSave.write, [0], {}
    folder = Path(compose(arguments).run.dir) / "checkpoints"

    def wait(self):
        number = int(self.folder.parent.stem.removeprefix("step-"))
        while dist.get_rank() == rank and done[0] <= number and threading.current_thread() is not MAIN:
            time.sleep(0.01)
        write(self)

    def finished(self, step, *args, **kwargs):
        finish(self, step, *args, **kwargs)
        seen[step] = [n for n, _ in complete_checkpoints(folder)], [int(p.stem[5:]) for p in folder.glob("*.tmp")]
        done[0] = step
        while dist.get_rank() == rank and step % 2 and self.checkpoints.writing:
            time.sleep(0.01)
        dist.barrier()

    Run.finish, ModelSave.write = finished, wait
    try:
        run_stage(arguments)
    finally:
        Run.finish, ModelSave.write = finish, write
    return seen


def hashes(run: Path, step: int) -> dict:
    """Checksums of a checkpoint's weights and optimizer, by model and file."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    files = {p.parent.name: json.loads(p.read_text())["files"] for p in folder.glob("*/integrity.json")}
    return {(m, n): digest for m, f in files.items() for n, digest in f.items() if n.endswith(".distcp")}


def small_states(run: Path, step: int) -> dict:
    return json.loads((run / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())["state"]


@pytest.fixture
def slow_writer(monkeypatch):
    """Background writes wait for `go`; `began` tells that one is waiting."""
    write, go, began = ModelSave.write, threading.Event(), threading.Event()

    def wait(self):
        if threading.current_thread() is not threading.main_thread():
            began.set()
            assert go.wait(600)
        write(self)

    monkeypatch.setattr(ModelSave, "write", wait)
    yield go, began
    go.set()


@pytest.fixture
def after_step(monkeypatch):
    """Call something at the end of a step."""
    finish, actions = Run.finish, {}

    def finished(self, step, *args, **kwargs):
        finish(self, step, *args, **kwargs)
        if step in actions:
            actions[step](self)

    monkeypatch.setattr(Run, "finish", finished)
    return actions


@pytest.mark.slow
def test_it_holds_the_step_at_which_it_began(tiny_data, tiny_runs, tmp_path, slow_writer, after_step):
    """The write of step 2 begins and ends only after step 3: training has gone on, the checkpoint has not."""
    go, began = slow_writer
    overrides = [*MORE, f"model.init={tiny_runs['sft']}", f"reward.model={tiny_runs['rm']}"]
    plain = stages.stage("ppo", tiny_data, tmp_path / "plain", *overrides)
    run, seen = tmp_path / "run", {}

    def look(loop):
        assert began.wait(600)
        seen[loop.step] = (stages.checkpoints(run), loop.checkpoints.writing)
        if loop.step == 3:
            go.set()
            while loop.checkpoints.writing:
                time.sleep(0.01)

    after_step[2] = after_step[3] = look
    stages.stage("ppo", tiny_data, run, *overrides, "checkpoint.async_save=true")
    assert seen == {2: ([], True), 3: ([], True)}
    assert stages.checkpoints(run) == stages.checkpoints(plain) == [2, 4, 5]
    for step in (2, 4, 5):
        assert hashes(run, step) == hashes(plain, step) and small_states(run, step) == small_states(plain, step)
    assert stages.same_weights(run, plain) and stages.differences(run, plain) == []


@pytest.mark.slow
def test_a_kill_while_it_is_written_leaves_the_one_before(tiny_data, tmp_path, slow_writer, after_step, capsys):
    go, began = slow_writer
    plain = stages.stage("sft", tiny_data, tmp_path / "plain", *MORE)
    run = tmp_path / "run"
    stages.stage("sft", tiny_data, run, *MORE, "run.steps=2")

    writers = []

    def cut(loop):
        assert began.wait(600)
        writers.append(loop.checkpoints._writing.thread)
        raise PowerCut

    after_step[4] = cut
    with pytest.raises(PowerCut):
        stages.stage("sft", tiny_data, run, *MORE, "checkpoint.async_save=true")
    assert stages.checkpoints(run) == [2] and list((run / "checkpoints").glob("*.tmp"))
    after_step.clear()
    go.set()
    writers[0].join()  # of a process that was killed it would be gone
    stages.stage("sft", tiny_data, run, *MORE, "checkpoint.async_save=true")
    assert stages.same_weights(run, plain) and stages.differences(run, plain) == []
    assert not list((run / "checkpoints").glob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "no space left"),
        (MemoryError("m"), "MemoryError"),
        (SystemExit(0), "Sys"),
    ],
)
def test_a_write_that_fails_stops_the_run_and_touches_nothing(tiny_data, tmp_path, monkeypatch, error, message):
    """Whatever ends the thread that writes."""
    run, write = tmp_path / "run", ModelSave.write

    def fails(self):
        if "step-00000004" in str(self.folder):
            raise error
        write(self)

    monkeypatch.setattr(ModelSave, "write", fails)
    with pytest.raises(SaveError, match=rf"step-00000004.*{message}.*Earlier checkpoints are untouched") as caught:
        stages.stage("sft", tiny_data, run, *MORE, "checkpoint.async_save=true")
    assert isinstance(caught.value, CheckpointError) and caught.value.transient
    assert stages.checkpoints(run) == [2] and not list((run / "checkpoints").glob("*.tmp"))
    monkeypatch.undo()  # space was made
    stages.stage("sft", tiny_data, run, *MORE, "checkpoint.async_save=true")
    plain = stages.stage("sft", tiny_data, tmp_path / "plain", *MORE)
    assert stages.same_weights(run, plain) and stages.differences(run, plain) == []


@pytest.mark.slow
@pytest.mark.multirank
def test_it_waits_for_the_slowest_rank(ranks, tiny_data, tmp_path):
    """Rank 1 still writes step 2 while step 3 runs: no rank takes it for a checkpoint before rank 1 is done."""
    lines = {
        name: stages.overrides("sft", tiny_data, tmp_path / name, *MORE, "batch.micro_batch_samples=4")
        for name in ("run", "plain")
    }
    lines["run"].append("checkpoint.async_save=true")
    seen = ranks.run(slow_rank, world=2, arguments=lines["run"], rank=1)
    assert seen[0] == {1: ([], []), 2: ([], [2]), 3: ([], [2]), 4: ([2], [4]), 5: ([2], [4])}
    ranks.run(run_stage, world=2, arguments=lines["plain"])
    assert stages.same_weights(tmp_path / "run", tmp_path / "plain")
    for step in (2, 4, 5):
        assert hashes(tmp_path / "run", step) == hashes(tmp_path / "plain", step)
