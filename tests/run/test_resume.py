"""Nothing is lost: a run that was stopped, killed, damaged or refused goes on to the result it would have had."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from aligner.config.sections.checkpoint import CheckpointConfig
from aligner.errors import CheckpointError, RewardError
from aligner.run.chain import FILE
from tests import stages
from tests.stages import PowerCut

TOTAL, HALF = 4, 2


def arguments(stage: str, runs: dict) -> list[str]:
    """Everything a checkpoint has to keep is in use: schedules, shuffling, running statistics, an adaptive KL."""
    kl = "algorithm.kl={coef: 0.1, placement: %s, controller: {kind: adaptive, target: 0.01, horizon: 100}}"
    overrides = [f"run.steps={TOTAL}", f"checkpoint.every={HALF}", "optim.schedule=cosine", "optim.warmup_steps=2"]
    return (
        overrides
        + {
            "sft": ["ema.decay=0.5"],
            "rm": [f"model.init={runs['sft']}"],
            "dpo": [f"model.init={runs['sft']}", "algorithm.preference={wpo: true, sync_every: 1, sync_alpha: 0.5}"],
            "kto": [f"model.init={runs['sft']}", "algorithm.kto.undesirable_weight=1.2"],
            "distill": [f"algorithm.distill={{teacher: {runs['sft']}, kind: jsd, sft_coef: 0.1, on_policy: 0.5}}"],
            "online_dpo": [f"model.init={runs['sft']}", "algorithm.preference={nll_coef: 0.1, sync_every: 3}"],
            "grpo": [
                f"model.init={runs['sft']}",
                "reward.normalize=true",
                "batch.epochs=2",
                "ema.decay=0.9",
                kl % "loss",
            ],
            "ppo": [
                f"model.init={runs['sft']}",
                f"reward.model={runs['rm']}",
                "reward.normalize=true",
                "critic.pretrain_steps=3",
                "ptx={coef: 0.1, sequences: 5, data: {train: '${data.train}', max_tokens: 32}}",
                kl % "reward",
            ],
        }[stage]
    )


def disturbed(function: str, counter: Path, at: int) -> str:
    """The reward `vowels`, but for its call number `at`."""
    arguments = f"name: vowels, args: {{counter: {counter}, at: {at}}}"
    return f"reward.functions=[{{path: tests/assets/tiny_rewards.py:{function}, {arguments}}}]"


@pytest.fixture(scope="module")
def straight(tiny_data, tiny_runs, tmp_path_factory):
    """Uninterrupted runs, each made once."""
    root, made = tmp_path_factory.mktemp("straight"), {}

    def get(stage: str) -> Path:
        if stage not in made:
            made[stage] = stages.stage(stage, tiny_data, root / stage, *arguments(stage, tiny_runs))
        return made[stage]

    return get


@pytest.fixture
def interrupt(monkeypatch, tiny_data, tiny_runs, tmp_path):
    """Run a stage until the power goes off after `step`; returns its folder."""
    from aligner.run.loop import Run

    finish = Run.finish

    def go(stage: str, step: int, *overrides: str) -> Path:
        def cut(self, now, *args, **kwargs):
            finish(self, now, *args, **kwargs)
            if now == step:
                raise PowerCut

        with monkeypatch.context() as patch, pytest.raises(PowerCut):
            patch.setattr(Run, "finish", cut)
            stages.stage(stage, tiny_data, tmp_path / "run", *arguments(stage, tiny_runs), *overrides)
        assert not (tmp_path / "run" / "DONE").exists()
        return tmp_path / "run"

    return go


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", stages.STAGES)
def test_a_resumed_run_is_the_uninterrupted_one(tiny_data, tiny_runs, straight, interrupt, stage):
    """Cut one step behind the checkpoint: that step is done twice and recorded once."""
    run = interrupt(stage, HALF + 1)
    assert [r["step"] for r in stages.records(run)] == [1, 2, 3] and stages.checkpoints(run) == [HALF]
    stages.stage(stage, tiny_data, run, *arguments(stage, tiny_runs))
    assert [r["step"] for r in stages.records(run)] == list(range(1, TOTAL + 1))
    assert stages.differences(run, straight(stage)) == []
    assert stages.same_weights(run, straight(stage))
    assert (run / FILE).read_bytes() == (straight(stage) / FILE).read_bytes()
    assert (run / "hf_ema").exists() == (stage in ("sft", "grpo"))
    assert (run / "DONE").exists()


def test_resuming_a_finished_run_changes_nothing(tiny_data, tiny_runs, straight, tmp_path):
    run = shutil.copytree(straight("sft"), tmp_path / "run")
    stages.stage("sft", tiny_data, run, *arguments("sft", tiny_runs))
    assert stages.differences(run, straight("sft")) == [] and stages.same_weights(run, straight("sft"))


def test_never_starts_anew(tiny_data, tiny_runs, straight, tmp_path):
    run = shutil.copytree(straight("sft"), tmp_path / "run")
    stages.stage("sft", tiny_data, run, *arguments("sft", tiny_runs), "run.resume=never", "seed=1")
    assert len(stages.records(run)) == TOTAL and not stages.same_weights(run, straight("sft"))


def test_a_named_checkpoint_is_resumed(tiny_data, tiny_runs, straight, tmp_path):
    checkpoint = straight("sft") / "checkpoints" / f"step-{HALF:08d}"
    run = stages.stage("sft", tiny_data, tmp_path / "run", *arguments("sft", tiny_runs), f"run.resume={checkpoint}")
    assert [r["step"] for r in stages.records(run)] == [3, 4] and stages.same_weights(run, straight("sft"))


@pytest.mark.slow
def test_kill_in_the_middle_of_a_step(tiny_data, tiny_runs, straight, tmp_path):
    """The command line as a process, killed while step 4 waits for its rewards."""
    run, counter = tmp_path / "run", tmp_path / "calls"
    hangs = disturbed("hangs_at", counter, 4)
    line = stages.overrides("grpo", tiny_data, run, *arguments("grpo", tiny_runs), hangs)
    environment = {**os.environ, "PYTHONPATH": str(stages.ROOT), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "aligner", "run", *line],
            cwd=stages.ROOT,
            env=environment,
            stdout=log,
            stderr=log,
        )
        while not (counter.exists() and counter.read_text() == "4"):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert stages.checkpoints(run) == [2] and [r["step"] for r in stages.records(run)] == [1, 2, 3]
    mended = "run.accept_changes=true"  # another reward function, that scores alike
    stages.stage("grpo", tiny_data, run, *arguments("grpo", tiny_runs), mended)
    assert stages.same_weights(run, straight("grpo")) and stages.differences(run, straight("grpo")) == []


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*.distcp")), key=lambda path: path.stat().st_size)


DAMAGE = {
    "truncated weights": lambda folder: os.truncate(largest(folder), largest(folder).stat().st_size // 2),
    "a flipped byte": lambda folder: flip(largest(folder)),
    "truncated state": lambda folder: os.truncate(folder / "state.json", 100),
    "missing metadata": lambda folder: (folder / "policy" / ".metadata").unlink(),
    "a digit in the state": lambda folder: flip_digit(folder / "state.json"),
    "random state": lambda folder: flip(folder / "rng" / "rank-0000.pt"),
    "missing manifest": lambda folder: (folder / "manifest.json").unlink(),
}


UNREADABLE = ("truncated state", "missing manifest")


def flip_digit(path: Path) -> None:
    text = path.read_text()
    assert '"cursor": 32' in text or '"cursor": 48' in text or '"cursor": 64' in text, text
    path.write_text(re.sub(r'"cursor": (\d+)', r'"cursor": \g<1>1', text))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(
    tiny_data, tiny_runs, straight, tmp_path, capsys, damage
):
    run = shutil.copytree(straight("grpo"), tmp_path / "run")
    DAMAGE[damage](run / "checkpoints" / f"step-{TOTAL:08d}")
    capsys.readouterr()
    stages.stage("grpo", tiny_data, run, *arguments("grpo", tiny_runs))
    out = capsys.readouterr().out
    assert (
        f"WARNING: cannot {'read' if damage in UNREADABLE else 'load checkpoint'} {run}/checkpoints/step-0000000{TOTAL}"
        in out
    )
    assert re.search(rf"WARNING: using the checkpoint before it: .*step-0000000{HALF}\n", out)
    assert f"resumed at step {HALF} of {TOTAL}" in out
    assert stages.differences(run, straight("grpo")) == [] and stages.same_weights(run, straight("grpo"))


def test_without_an_earlier_checkpoint_damage_is_an_error(tiny_data, tiny_runs, straight, tmp_path):
    run = shutil.copytree(straight("sft"), tmp_path / "run")
    for step in (HALF, TOTAL):
        DAMAGE["truncated weights"](run / "checkpoints" / f"step-{step:08d}")
    with pytest.raises(CheckpointError, match=f"cannot load checkpoint .*step-0000000{HALF}"):
        stages.stage("sft", tiny_data, run, *arguments("sft", tiny_runs))


REFUSED = {
    "model": ("sft", ["model.hidden_size=64"], "model.hidden_size is 32 there, 64 here"),
    "model family": (
        "sft",
        ["model.family=qwen3", "model.qk_norm=true"],
        "model.family is 'llama' there, 'qwen3' here",
    ),
    "tokenizer": ("sft", ["model.tokenizer=OTHER"], "tokenizer is '"),
    "advantage": ("grpo", ["algorithm.advantage=rloo"], "algorithm.advantage is 'grpo' there, 'rloo' here"),
    "loss": (
        "rm",
        ["algorithm.reward_loss={kind: regression, attributes: [good]}", "data.train=SCORED"],
        "algorithm.reward_loss is 'bradley_terry' there, 'regression' here",
    ),
    "stage": ("sft", ["stage=rm", "data.train=PAIRS", "ema.decay=0"], "stage is 'sft' there, 'rm' here"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_checkpoint_of_something_else_is_refused(tiny_data, tiny_runs, straight, tmp_path, what):
    stage, change, message = REFUSED[what]
    run = shutil.copytree(straight(stage), tmp_path / "run")
    swap_two_tokens(tiny_data / "tokenizer", tmp_path / "tokenizer")
    places = {"OTHER": tmp_path / "tokenizer", "SCORED": tiny_data / "scored.jsonl", "PAIRS": tiny_data / "pairs.jsonl"}
    for name, location in places.items():
        change = [text.replace(name, str(location)) for text in change]
    before = {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError) as caught:
        stages.stage(stage, tiny_data, run, *arguments(stage, tiny_runs), *change)
    assert message in str(caught.value) and "run.resume=never" in str(caught.value)
    assert before == {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}
    assert stages.differences(run, straight(stage)) == []


def swap_two_tokens(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    content = json.loads((target / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (target / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_two_tensor_ranks_hand_over_to_one(ranks, tiny_data, tiny_runs, straight, tmp_path, stage):
    """Steps 1 and 2 with TP=2, steps 3 and 4 on one rank: the same prompts, and the same numbers but for rounding."""
    shown = ["run.samples_every=1", "logging.samples_shown=32", "logging.progress=false"]
    overrides = [*arguments(stage, tiny_runs), "optim.schedule=constant", *shown]
    reference = stages.stage(stage, tiny_data, tmp_path / "one", *overrides)
    run = tmp_path / "two"
    line = stages.overrides(stage, tiny_data, run, *overrides, "run.steps=2", "parallel=tp2")
    assert ranks.run("tests.run.jobs:run_stage", world=2, arguments=line) == [0, 0]
    stages.stage(stage, tiny_data, run, *overrides)
    records, wanted = stages.records(run), stages.records(reference)
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    name = "sft/loss" if stage == "sft" else "policy/entropy"
    assert [r[name] for r in records] == pytest.approx([r[name] for r in wanted], rel=2e-3)
    if stage == "grpo":
        assert prompts(run) == prompts(reference) and len(prompts(run)) == TOTAL * 8 * 2  # two samples of a group
    one, two = stages.weights(reference), stages.weights(run)
    start = stages.weights(tiny_runs["sft"]) if stage == "grpo" else {n: torch.zeros_like(t) for n, t in one.items()}
    for tensor, t in one.items():
        assert (two[tensor] - t).norm() <= 0.05 * (t - start[tensor]).norm().clamp_min(1e-3), tensor


def prompts(run: Path) -> list[tuple[int, str]]:
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return [(row["step"], row["prompt"]) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "evaluation"), [(5, []), (7, ["run.eval_every=2", "eval.prompts=4"])], ids=["step", "evaluation"]
)
def test_a_reward_that_fails_in_a_run_costs_nothing(tiny_data, tiny_runs, tmp_path, capsys, call, evaluation):
    """It raises in step 5, or in the evaluation after step 4; the last checkpoint was of step 3. Step 4 is saved, with
    the state in which step 5 began, or the evaluation did."""
    counter = tmp_path / "calls"
    fails = disturbed("fails_at", counter, call)
    overrides = [
        *arguments("grpo", tiny_runs),
        "run.steps=6",
        "checkpoint.every=3",
        f"data.eval={tiny_data / 'eval.jsonl'}",
    ]
    overrides += evaluation
    undisturbed = stages.stage("grpo", tiny_data, tmp_path / "undisturbed", *overrides)
    with pytest.raises(RewardError) as caught:
        stages.stage("grpo", tiny_data, tmp_path / "run", *overrides, fails)
    assert "reward `vowels`" in str(caught.value) and "the judge is out of order" in str(caught.value)
    assert caught.value.exit_code == 1
    run = tmp_path / "run"
    assert stages.checkpoints(run) == [3, 4] and [r["step"] for r in stages.records(run)][-4:] == [1, 2, 3, 4]
    assert "saved step 4 before stopping: RewardError" in capsys.readouterr().err
    stages.stage("grpo", tiny_data, run, *overrides, "run.accept_changes=true")  # another function, that scores alike
    assert stages.differences(run, undisturbed) == [] and stages.same_weights(run, undisturbed)
    kept = [json.loads((path / "checkpoints/step-00000006/state.json").read_text()) for path in (run, undisturbed)]
    assert kept[0]["state"]["alarms"] == kept[1]["state"]["alarms"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["rm", "ppo"])
def test_only_the_last_few_and_the_best_are_kept(tiny_data, tiny_runs, tmp_path, stage):
    """In a whole run: the newest two."""
    overrides = [*arguments(stage, tiny_runs), "checkpoint.every=1", "checkpoint.keep_last=2"]
    assert stages.checkpoints(stages.stage(stage, tiny_data, tmp_path / "run", *overrides)) == [3, 4]


@pytest.fixture
def process_group():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_damaged_one_does_not_count_as_one_of_the_last(tmp_path, process_group, capsys):
    """With keep_last=1 it would otherwise be the one that is kept."""
    from aligner.run.checkpoints import Checkpoints

    config = CheckpointConfig(keep_last=2)
    before = Checkpoints(tmp_path, config, {}, {}, {"stage": "sft"})
    for step in (1, 9):
        before.save(step, {})
    os.truncate(tmp_path / "checkpoints" / "step-00000009" / "state.json", 10)
    config.keep_last = 1
    after = Checkpoints(tmp_path, config, {}, {}, {"stage": "sft"})
    assert after.restore("auto") == 1
    assert "step-00000009" in capsys.readouterr().out and after.committed == 1
    after.save(2, {})
    assert stages.checkpoints(tmp_path) == [2] and after.restore("auto") == 2
    assert (tmp_path / "checkpoints" / "damaged-step-00000009").exists()


@pytest.mark.parametrize(
    ("metric", "best"),
    [("eval/accuracy", [3, 5]), ("eval/loss", [1, 2])],  # larger is better; of a loss smaller
)
def test_the_last_and_the_best_checkpoints_are_kept(tmp_path, process_group, metric, best):
    from aligner.run.checkpoints import Checkpoints

    config = CheckpointConfig(keep_last=2, keep_best=2, metric=metric)
    kept = Checkpoints(tmp_path, config, {}, {}, {"stage": "sft"})
    for step, value in enumerate([0.1, 0.2, 0.9, 0.3, 0.8, 0.4, 0.5, None], 1):
        kept.save(step, {} if value is None else {metric: value})
    assert stages.checkpoints(tmp_path) == sorted({*best, 7, 8})
    assert kept.restore("auto") == 8
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


def test_of_equally_good_checkpoints_the_newest_stays(tmp_path, process_group):
    from aligner.run.checkpoints import Checkpoints

    kept = Checkpoints(tmp_path, CheckpointConfig(keep_last=1, keep_best=2), {}, {}, {"stage": "grpo"})
    for step, value in enumerate([0.0, 0.0, 0.0, 0.0, None], 1):
        kept.save(step, {} if value is None else {"eval/accuracy": value})
    assert stages.checkpoints(tmp_path) == [3, 4, 5]


def test_how_long_a_save_took_is_of_the_last_one_by_the_clock_it_is_given(tmp_path, process_group):
    """One that stands still while the process is stopped, in a run."""
    from aligner.run.checkpoints import Checkpoints

    kept, passed = Checkpoints(tmp_path, CheckpointConfig(), {}, {}, {"stage": "sft"}), iter(range(0, 1000, 7))
    kept.now = lambda: next(passed)
    kept.save(1, {})
    assert kept.seconds == 14  # from the start to the write's end, and from the finish's start to its end
    kept.now = lambda: 0.0
    kept.save(2, {})
    assert kept.seconds == 0.0


def test_a_metric_that_is_not_measured_is_reported_once(tmp_path, process_group, capsys):
    from aligner.run.checkpoints import Checkpoints

    kept = Checkpoints(tmp_path, CheckpointConfig(keep_best=1, metric="reward/meen"), {}, {}, {"stage": "grpo"})
    kept.save(1, {})  # a save beside the steps has no metrics
    assert "WARNING" not in capsys.readouterr().out
    for step in (2, 3):
        kept.save(step, {"reward/mean": 0.5, "sft/loss": 1.0})
    out = capsys.readouterr().out
    assert out.count("WARNING") == 1
    assert "checkpoint.metric=reward/meen: not measured at step 2, for keep_best. Similar: reward/mean" in out


@pytest.mark.parametrize("trouble", ["undeletable", "immovable", "a link", "a link to nowhere", "damaged", "no state"])
def test_trouble_with_an_old_checkpoint_ends_no_run(tmp_path, process_group, monkeypatch, capsys, trouble):
    """The new one is whole by then; with several ranks only one would notice."""
    import aligner.megatron.checkpoint_files as files
    from aligner.run.checkpoints import Checkpoints

    kept = Checkpoints(tmp_path, CheckpointConfig(keep_last=1, keep_best=1), {}, {}, {"stage": "sft"})
    kept.save(1, {kept.config.metric: 0.9})
    old, elsewhere = tmp_path / "checkpoints/step-00000001", tmp_path / "elsewhere"
    kept.config.keep_best = int(trouble in ("damaged", "no state"))
    if trouble.startswith("a link"):
        old.rename(elsewhere)
        (old if trouble == "a link" else old.with_name("step-00000002")).symlink_to(elsewhere)
    if trouble == "a link to nowhere":
        shutil.rmtree(elsewhere)
    if trouble == "damaged":
        os.truncate(old / "state.json", 10)
    if trouble == "no state":
        (old / "state.json").write_text("[1]")
    remove, move = shutil.rmtree, Path.rename

    def busy(path, **options):
        if trouble == "undeletable" and not options:
            raise OSError(16, "Device or resource busy", ".nfs0001")
        remove(path, **options)

    def stays(path, target):
        if trouble == "immovable" and path == old:
            raise OSError(1, "Operation not permitted")
        return move(path, target)

    monkeypatch.setattr(files.shutil, "rmtree", busy)
    monkeypatch.setattr(Path, "rename", stays)
    kept.save(2, {kept.config.metric: 0.5}), kept.save(3, {})
    left = {"immovable": [1, 3], "damaged": [2, 3], "no state": [2, 3]}
    assert stages.checkpoints(tmp_path) == left.get(trouble, [3]) and kept.committed == 3
    output = capsys.readouterr().out
    assert output.count("WARNING") == {"undeletable": 2, "a link": 0, "a link to nowhere": 0}.get(trouble, 1), output
    assert elsewhere.exists() == (trouble == "a link")


@pytest.mark.parametrize("moment", ["before the rename", "after the rename", "half deleted"])
def test_a_kill_within_a_commit_leaves_whole_checkpoints(tmp_path, process_group, monkeypatch, moment):
    """Steps 1 and 2 are there, 3 is on its way in and 1 on its way out."""
    import aligner.megatron.checkpoint_files as files
    import aligner.run.checkpoints as module

    kept = module.Checkpoints(tmp_path, CheckpointConfig(keep_last=2), {}, {}, {"stage": "sft"})
    kept.save(1, {}), kept.save(2, {})
    position, remove = files.put_in_place, shutil.rmtree

    def cut_in_place(aside, final):
        if moment == "after the rename":
            position(aside, final)
        raise PowerCut

    def cut_deleting(path, **options):
        if not options:  # the deletion itself, not a look for leftovers
            (path / "rng" / "rank-0000.pt").unlink()
            raise PowerCut
        remove(path, **options)

    with monkeypatch.context() as patch, pytest.raises(PowerCut):
        if moment == "half deleted":
            patch.setattr(files.shutil, "rmtree", cut_deleting)
        else:
            patch.setattr(module, "put_in_place", cut_in_place)
        kept.save(3, {})
    assert stages.checkpoints(tmp_path) == {"before the rename": [1, 2], "after the rename": [1, 2, 3]}.get(
        moment, [2, 3]
    )
    again = module.Checkpoints(tmp_path, CheckpointConfig(keep_last=2), {}, {}, {"stage": "sft"})
    assert again.restore("auto") == (2 if moment == "before the rename" else 3)
    assert all(path.name in ("step-00000001", "step-00000002", "step-00000003") for path in again.folder.iterdir())
