"""What the ranks run for the tests of this folder."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import aligner.build
import aligner.builders.job
import aligner.megatron.checkpoint
import aligner.roles.model_init
import aligner.run.checkpoints
from aligner.cluster.env import RankEnv
from aligner.cluster.signals import StopSignals
from aligner.config.freeze import freeze
from aligner.config.resolve import compose
from aligner.config.schema import Config
from aligner.config.sections.checkpoint import CheckpointConfig
from aligner.config.sections.mismatch import MismatchConfig
from aligner.config.validate import validate
from aligner.errors import AlignerError, MismatchError
from aligner.megatron.checkpoint import ModelSave
from aligner.megatron.checkpoint_files import complete_checkpoints
from aligner.megatron.model import Head
from aligner.ops import agree
from aligner.roles.model_init import resolve
from aligner.rollout import requests
from aligner.run.checkpoints import Checkpoints
from aligner.run.loop import Run
from aligner.run.mismatch import check_mismatch
from aligner.types import RolloutBatch
from tests.stages import PowerCut, power_cut_in_update

MAIN = threading.main_thread()


def run_stage(arguments: list[str], signals: StopSignals | None = None) -> int:
    """A stage on all ranks of the job, whose process group stays."""
    return run_config(compose(arguments), signals)


def run_config(cfg: Config, signals: StopSignals | None = None) -> int:
    world = dist.get_world_size()
    validate(cfg, world)
    if dist.get_rank() == 0:
        freeze(cfg, cfg.run.dir)
    dist.barrier()
    homes = (aligner.build, aligner.builders.job)
    leave = aligner.build.leave_distributed
    for home in homes:
        home.leave_distributed = lambda: None
    try:
        return aligner.build.run_stage(cfg, RankEnv(dist.get_rank(), dist.get_rank(), world, world), signals)
    finally:
        for home in homes:
            home.leave_distributed = leave
        torch.use_deterministic_algorithms(False)


def stop_after(arguments: list[str], step: int, rank: int, number: int) -> None:
    """`run_stage`, in which one rank gets a signal during `step`."""
    signals, finish = StopSignals(), Run.finish

    def told(self, now, *args, **kwargs):
        finish(self, now, *args, **kwargs)
        if now == step and dist.get_rank() == rank:
            signals._note(number, None)

    Run.finish = told
    try:
        assert run_stage(arguments, signals) == 0
    finally:
        Run.finish = finish


def resume_elsewhere(arguments: list[str], shared: Path, mine: Path, appears_s: float = 0.0) -> str:
    """`run_stage`, in which rank 1 finds the folder `mine` where the others find `shared`: it is on a node without the
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
            return look(mine / folder.relative_to(shared) if late and folder.is_relative_to(shared) else folder)

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


def cut_in_update(arguments: list[str], step: int) -> bool:
    """`run_stage` until the power goes off on all ranks in the first update of `step`."""
    try:
        with power_cut_in_update(step):
            run_stage(arguments)
    except PowerCut:
        dist.barrier()
        return True
    return False


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


def seeds_of(arguments: list[str]) -> set[tuple[int, int, int, int]]:
    """`run_stage`; (step, prompt, sample, seed) of all requests of training that this rank made."""
    made: set[tuple[int, int, int, int]] = set()
    original = requests.request_seed

    def noted(seed: int, step: int, prompt: int, sample: int) -> int:
        made.add((step, prompt, sample, original(seed, step, prompt, sample)))
        return original(seed, step, prompt, sample)

    requests.request_seed = noted
    try:
        run_stage(arguments)
    finally:
        requests.request_seed = original
    return made


def refusals_of_rank_0(folder: Path) -> list[str]:
    """What each of these ends with on this rank where rank 0 can neither rename a checkpoint nor make a model's folder:
    to start anew, to go back, to set a damaged one aside, to save."""
    kept, told = Checkpoints(folder, CheckpointConfig(), {}, {}, {"stage": "sft"}), []
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
        told.append(f"{type(caught.value).__name__}: {caught.value}")

    tell(lambda: kept.restore("never"))
    tell(lambda: kept.restore(str(folder / "checkpoints/step-00000001")))
    if dist.get_rank() == 0:
        (folder / "checkpoints/step-00000002/state.json").write_text("[")
    tell(lambda: kept.restore("auto"))
    kept.models = {"policy": None}  # no rank comes to look at it
    tell(lambda: kept.save(3, {}))
    return told


def worst_of_two() -> dict[str, str]:
    """What the gate says of two ranks' rollouts: two prompts x two samples each, one wrong token on rank 1; then a NaN
    on rank 0."""
    rank = dist.get_rank()
    tokens = torch.arange(10, 15).repeat(4, 1)
    mask = (torch.arange(5) >= 2).float().repeat(4, 1)
    rollout = RolloutBatch(
        tokens=tokens,
        lengths=torch.full((4,), 5),
        response_mask=mask,
        rollout_logprobs=torch.full((4, 5), -0.5),
        rewards=torch.zeros(4),
        valid=torch.ones(4, dtype=torch.bool),
        group=torch.tensor([0, 0, 1, 1]) + 2 * rank,
        finished=torch.ones(4, dtype=torch.bool),
        weight_version=0,
        old_logprobs=torch.full((4, 5), -0.6),
    )
    rollout.old_logprobs[:, :2] = 100.0  # what is no response counts nowhere
    if rank == 1:
        rollout.old_logprobs[3, 4] = -3.0
    told = {"gate": _refused(rollout)}
    if rank == 0:
        rollout.response_mask[0, 1], rollout.old_logprobs[0, 1] = 1.0, float("nan")
    return told | {"nan": _refused(rollout)}


def _refused(rollout: RolloutBatch) -> str:
    with pytest.raises(MismatchError) as caught:
        check_mismatch({"mismatch/token_mult_prob_error": 1.5}, rollout, MismatchConfig(stop_above=1.2))
    return str(caught.value)
