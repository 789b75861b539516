"""All ranks load the same checkpoint, initial weights and stored rollouts, or none of them goes on."""

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import aligner.builders.job
import aligner.builders.stage
import aligner.megatron.checkpoint
import aligner.roles.model_init
import aligner.run.checkpoints
from aligner.config.resolve import compose
from aligner.config.sections.checkpoint import CheckpointConfig
from aligner.errors import AlignerError, CheckpointError
from aligner.megatron.model import Head
from aligner.ops import agree
from aligner.roles.model_init import resolve
from aligner.run.checkpoints import Checkpoints
from tests import stages
from tests.run.jobs import run_stage

pytestmark = pytest.mark.multirank
LAYOUTS = {"data": [], "tensor": ["parallel=tp2"]}


def resume_elsewhere(arguments: list[str], shared: Path, own: Path, appears_s: float = 0.0) -> str:
    """`run_stage`, in which rank 1 finds the folder `own` where the others find `shared`: it is on a node without the
    shared file system, or, with `appears_s`, on one that learns so long after its first look what there is. What it
    raises, or ""."""
    homes = [
        (aligner.run.checkpoints, "view"),
        (aligner.roles.model_init, "view"),
        (aligner.roles.model_init, "folder_view"),
    ]
    looks, first_s = [getattr(*home) for home in homes], []

    def elsewhere(look):
        def other(folder: Path) -> dict[str, str]:
            first_s.append(time.monotonic())
            late = not appears_s or first_s[-1] - first_s[0] < appears_s
            return look(own / folder.relative_to(shared) if late and folder.is_relative_to(shared) else folder)

        return other

    for (home, name), look in zip(homes, looks, strict=True):
        if dist.get_rank() == 1:
            setattr(home, name, elsewhere(look))
    node, agree.node = agree.node, lambda: f"node {dist.get_rank()}"
    agree.WAIT_S = 300 * appears_s
    try:
        run_stage(arguments)
    except AlignerError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        agree.WAIT_S, agree.node = 90.0, node
        for (home, name), look in zip(homes, looks, strict=True):
            setattr(home, name, look)
    return ""


def looks_at_start(run: Path, per_node: int, other: Path | None = None) -> tuple[dict[str, int], str]:
    """What a start from the export of `run`, from its newest checkpoint, and its resumption look at on this rank, of so
    many `per_node`; all but the first node see `other` in place of the checkpoint. And what was raised."""
    first, looks = dist.get_rank() < per_node, Counter[str]()

    def counted(name: str, look: Callable) -> Callable:
        def count(folder, *args):
            looks[name] += 1
            return look(folder if first or name != "view" or other is None else other, *args)

        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agree, "node", lambda: f"node {dist.get_rank() // per_node}")
        patch.setattr(agree, "WAIT_S", 0.0)
        for home, name in (
            (aligner.roles.model_init, "folder_view"),
            (aligner.roles.model_init, "check_folder"),
            (aligner.roles.model_init, "view"),
            (aligner.run.checkpoints, "view"),
            (aligner.megatron.checkpoint, "check_before_loading"),
        ):
            patch.setattr(home, name, counted(name, getattr(home, name)))
        try:
            model = compose([]).model
            resolve(model, str(run), 0).source(Head())
            checkpoint = resolve(model, str(run / "checkpoints"), 0).checkpoint
            aligner.megatron.checkpoint._verified(checkpoint)
            Checkpoints(run, CheckpointConfig(), {}, {}, {}).restore("auto")
        except AlignerError as error:
            return dict(looks), f"{type(error).__name__}: {error}"
    return dict(looks), ""


def run_with_own(arguments: list[str], own: list[str]) -> str:
    """`run_stage`, in which rank 1 has overrides of its own; what it raises, or ""."""
    agree.WAIT_S = 0.0
    try:
        run_stage(arguments + (own if dist.get_rank() == 1 else []))
    except AlignerError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        agree.WAIT_S = 90.0
    return ""


def refusals_of_rank_0(folder: Path) -> list[str]:
    """What each of these ends with on this rank where rank 0 can neither rename a checkpoint nor make a model's folder:
    to start anew, to go back, to set a damaged one aside, to save."""
    kept, messages = Checkpoints(folder, CheckpointConfig(), {}, {}, {"stage": "sft"}), []
    kept.save(1, {}), kept.save(2, {})
    make = Path.mkdir

    def refuse(path: Path, *args, **options) -> None:
        raise OSError(1, "Operation not permitted", str(path))

    def no_model(path: Path, *args, **options) -> None:
        (refuse if path.name == "policy" else make)(path, *args, **options)

    def tell(work: Callable[[], object]) -> None:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(AlignerError) as caught:
            if dist.get_rank() == 0:
                patch.setattr(Path, "rename", refuse)
                patch.setattr(Path, "mkdir", no_model)
            work()
        messages.append(f"{type(caught.value).__name__}: {caught.value}")

    tell(lambda: kept.restore("never"))
    tell(lambda: kept.restore(str(folder / "checkpoints/step-00000001")))
    if dist.get_rank() == 0:
        (folder / "checkpoints/step-00000002/state.json").write_text("[")
    tell(lambda: kept.restore("auto"))
    kept.models = {"policy": None}  # no rank comes to look at it
    tell(lambda: kept.save(3, {}))
    return messages


@pytest.fixture(scope="module")
def half(ranks, tiny_data, tmp_path_factory):
    """A run of two data-parallel ranks, stopped after two of four steps."""
    run = tmp_path_factory.mktemp("agreement") / "half"
    line = stages.overrides("sft", tiny_data, run, "run.steps=2", "checkpoint.every=1", "batch.micro_batch_samples=4")
    assert ranks.run(run_stage, world=2, arguments=line) == [0, 0]
    assert stages.checkpoints(run) == [1, 2]
    return run


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", ["lacks the newest", "another run's"])
def test_a_rank_that_sees_another_folder_ends_the_run(ranks, tiny_data, tmp_path, half, layout, what):
    run, other = shutil.copytree(half, tmp_path / "run"), shutil.copytree(half, tmp_path / "other")
    newest = other / "checkpoints" / "step-00000002"
    if what == "lacks the newest":
        shutil.rmtree(newest)
    else:
        shutil.rmtree(newest), shutil.copytree(other / "checkpoints" / "step-00000001", newest)
    line = stages.overrides("sft", tiny_data, run, "run.steps=4", "batch.micro_batch_samples=4", *LAYOUTS[layout])
    results = ranks.run(resume_elsewhere, world=2, arguments=line, shared=run, own=other)
    wrong = "manifest.json is absent, on rank 0 " if what == "lacks the newest" else "manifest.json is "
    for text in results:
        assert text.startswith(f"ViewError: rank 1 sees another {run}/checkpoints/step-00000002 than rank 0: {wrong}")
    assert stages.checkpoints(run) == [1, 2] and [r["step"] for r in stages.records(run)] == [1, 2]


@pytest.mark.slow
def test_a_rank_that_learns_of_a_checkpoint_late_is_waited_for(ranks, tiny_data, tmp_path, half):
    line = ["run.steps=4", "batch.micro_batch_samples=4"]
    whole, run = shutil.copytree(half, tmp_path / "whole"), shutil.copytree(half, tmp_path / "run")
    ranks.run(run_stage, world=2, arguments=stages.overrides("sft", tiny_data, whole, *line))
    other = shutil.copytree(half, tmp_path / "other")
    shutil.rmtree(other / "checkpoints" / "step-00000002")
    job = {"arguments": stages.overrides("sft", tiny_data, run, *line), "shared": run, "own": other, "appears_s": 1.0}
    assert ranks.run(resume_elsewhere, world=2, **job) == ["", ""]
    assert stages.differences(run, whole) == [] and stages.same_weights(run, whole)


@pytest.mark.parametrize("kind", ["an export", "a checkpoint"])
def test_initial_weights_are_the_same_on_every_rank(ranks, tiny_data, tiny_runs, tmp_path, kind):
    """Of the policy; rank 1 has those of another run of the same shape."""
    init = shutil.copytree(tiny_runs["sft"], tmp_path / "init")
    other = shutil.copytree(tiny_runs["sft"], tmp_path / "other")
    if kind == "an export":
        path = other / "hf" / "model.safetensors"
        wrong = f"{init}/hf than rank 0: model.safetensors is "
    else:
        shutil.rmtree(init / "hf")
        path = next((other / "checkpoints" / "step-00000040").glob("*/integrity.json"))
        wrong = f"{init}/checkpoints/step-00000040 than rank 0: policy/integrity.json is "
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    line = stages.overrides("sft", tiny_data, tmp_path / "run", "run.steps=1", f"model.init={init}")
    results = ranks.run(resume_elsewhere, world=2, arguments=line, shared=init, own=other)
    assert all(text.startswith(f"ViewError: rank 1 sees another {wrong}") for text in results), results


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [2, 4])
def test_one_rank_of_a_node_looks_and_one_of_all_reads(ranks, tiny_runs, tmp_path, per_node):
    """Or 1,000 ranks would stat and read every file of a checkpoint 1,000 times before the first step."""
    job = {"world": 4, "run": tiny_runs["sft"], "per_node": per_node}
    looks = {"folder_view": 1, "view": 2}
    results = ranks.run(looks_at_start, **job)
    assert results[0] == (looks | {"check_folder": 1, "check_before_loading": 1}, "")
    assert results[1:] == [(looks if rank % per_node == 0 else {}, "") for rank in range(1, 4)]
    if per_node == 2:
        results = ranks.run(looks_at_start, **job, other=tmp_path)
        assert all(
            "rank 2 sees another" in text and "manifest.json is absent, on rank 0 " in text for _, text in results
        )


@pytest.mark.parametrize(
    ("own", "wrong"),
    [
        ("data.train=EVAL", "TRAIN than rank 0: data.train is "),
        ("seed=1", "RUN than rank 0: seed is 1, on rank 0 0."),
        ("model.init_std=0.03", "RUN than rank 0: model.init_std is 0.03, on rank 0 0.02."),
    ],
)
def test_data_and_settings_are_the_same_on_every_rank(ranks, tiny_data, tmp_path, own, wrong):
    """A rank that was started by hand, or that reads a copy of the data."""
    run, train = tmp_path / "run", tiny_data / "train.jsonl"
    own = own.replace("EVAL", str(tiny_data / "eval.jsonl"))
    wrong = wrong.replace("TRAIN", str(train)).replace("RUN", str(run))
    line = stages.overrides("sft", tiny_data, run, "run.steps=1")
    results = ranks.run(run_with_own, world=2, arguments=line, own=[own])
    assert all(text.startswith(f"ViewError: rank 1 sees another {wrong}") for text in results), results


def test_what_rank_0_alone_cannot_rename_or_make_is_reported_on_all(ranks, tmp_path):
    results = ranks.run(refusals_of_rank_0, world=2, folder=tmp_path)
    assert results[0] == results[1]
    *renamed, saved = results[0]
    for text in renamed:
        assert text.startswith(f"WriteError: run.dir='{tmp_path}': expected a folder that can be written"), results
    assert re.match(r"SaveError: cannot write checkpoint .*step-00000003.*not permitted: .*policy", saved), saved


@pytest.mark.parametrize("entry", ["rope_base", "norm_eps"])
def test_a_changed_description_is_no_starting_point(tiny_data, tiny_runs, tmp_path, entry):
    """One digit of the shape that `model.init` reads from a checkpoint."""
    checkpoint = shutil.copytree(tiny_runs["sft"] / "checkpoints", tmp_path / "init" / "checkpoints") / "step-00000040"
    path = checkpoint / "state.json"
    path.write_text(re.sub(rf'("{entry}": \d)', r"\g<1>1", path.read_text()))
    with pytest.raises(CheckpointError, match=r"step-00000040: state\.json does not have the checksum"):
        stages.stage("sft", tiny_data, tmp_path / "run", "run.steps=1", f"model.init={tmp_path / 'init'}")


def test_a_folder_without_its_state_is_reported(tiny_data, half, tmp_path, capsys):
    run = shutil.copytree(half, tmp_path / "run")
    newest = run / "checkpoints" / "step-00000002"
    (newest / "state.json").unlink()
    stages.stage("sft", tiny_data, run, "run.steps=2", "run.export=false", "logging.progress=false")
    out = capsys.readouterr().out
    assert f"WARNING: {newest} has no state.json" in out and "resumed at step 1 of 2" in out
    assert "WARNING: progress.json names a checkpoint of step 2: the newest usable one here is of step 1" in out
    shutil.rmtree(run / "checkpoints")
    stages.stage("sft", tiny_data, run, "run.steps=2", "run.export=false", "logging.progress=false")
    assert "names a checkpoint of step 2: there is none here" in capsys.readouterr().out
    stages.stage("sft", tiny_data, run, "run.steps=2", "run.export=false", "logging.progress=false")
    assert "WARNING" not in capsys.readouterr().out
