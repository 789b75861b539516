"""A finished rollout is not generated again: not after a kill in its step, not after one before its checkpoint."""

import shutil
from pathlib import Path

import pytest

from aligner.config.freeze import rollout_key
from aligner.config.resolve import compose
from aligner.errors import DataError
from aligner.rollout.store import Store, read_description
from tests import stages

STEPS = [
    "run.steps=4",
    "checkpoint.every=2",
    "logging.progress=false",
    "reward.normalize=true",
    "optim.schedule=cosine",
]
MORE = {
    "grpo": ["batch.epochs=2"],
    "filter": ["batch.epochs=2", "algorithm.filter_groups=true", "algorithm.filter_rounds=50"],
    "remax": ["algorithm.advantage=remax", "sampling.top_k=20"],
    "ppo": [],
}


@pytest.fixture
def arguments(tiny_runs):
    def get(case: str) -> list[str]:
        more = [*STEPS, *MORE[case], f"model.init={tiny_runs['sft']}"]
        return [*more, f"reward.model={tiny_runs['rm']}"] if case == "ppo" else more

    return get


@pytest.fixture
def interrupt(tiny_data):
    """Run a stage until the power goes off in the middle of `step`: in its first update."""

    def go(case: str, run: Path, step: int, more: list[str]) -> None:
        with stages.power_cut_in_update(step), pytest.raises(stages.PowerCut):
            stages.stage("ppo" if case == "ppo" else "grpo", tiny_data, run, *more)

    return go


@pytest.fixture
def generated(monkeypatch):
    """The numbers of the orders that engines were given since."""
    from aligner.rollout.player import Player
    from aligner.rollout.schedule import Schedule

    orders, last, start, go_on = [], [0], Schedule._start, Player.go_on

    def started(self, *arguments, **named):
        last[0] = self._order + 1
        return start(self, *arguments, **named)

    def went_on(self, *arguments, **named):
        orders.append(last[0])
        return go_on(self, *arguments, **named)

    monkeypatch.setattr(Schedule, "_start", started)
    monkeypatch.setattr(Player, "go_on", went_on)
    return orders


def stored(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "pending_rollouts").glob("*"))


def test_only_what_a_rollout_is_named_is_one(tmp_path):
    store = Store(tmp_path, "key", None)
    strange = [
        "step-1.bak",
        "step-\u00b2",
        "step-\u0663\u0663\u0663\u0663\u0663\u0663\u0663\u0663",
        "step-",
        "step--0000001",
        "x",
    ]
    for name in [*strange, "step-00000002", "step-100000000"]:
        (tmp_path / name).mkdir()
    assert store.numbers() == [2, 100_000_000] and store.others() == sorted(strange)


@pytest.mark.slow
def test_strange_names_in_a_run_folder_refuse_no_start(tiny_data, tmp_path, arguments, capfd):
    """Each folder is told in a line, and goes on to the same result."""
    more, run = [*arguments("grpo"), "debug.record=2"], tmp_path / "run"
    whole = stages.stage("grpo", tiny_data, tmp_path / "whole", *more)
    with stages.power_cut_in_update(4), pytest.raises(stages.PowerCut):
        stages.stage("grpo", tiny_data, run, *more)
    for folder in ("pending_rollouts", "answers", "rollouts", "checkpoints"):
        for name in ("step-1.bak", "step-\u00b2", "step-1.bak.safetensors"):
            (run / folder).mkdir(exist_ok=True)
            (run / folder / name).write_bytes(bytes(range(256)))
    (run / "metrics.joined.jsonl").write_bytes(b"garbage\n" * 3)
    capfd.readouterr()
    stages.stage("grpo", tiny_data, run, *more)
    said = "".join(capfd.readouterr())
    assert said.count("that are no rollout") == 1 and "metrics.joined.jsonl" in said and "Traceback" not in said
    assert stages.same_weights(run, whole) and stages.differences(run, whole) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_a_rollout_outlives_a_kill_in_its_step(tiny_data, tmp_path, arguments, interrupt, generated, case):
    """Killed in step 4; the checkpoint is of step 2. Steps 3 and 4 are not generated again, and nothing differs."""
    stage, more = "ppo" if case == "ppo" else "grpo", arguments(case)
    whole = stages.stage(stage, tiny_data, tmp_path / "whole", *more)
    run = tmp_path / "run"
    interrupt(case, run, 4, more)
    assert stages.checkpoints(run) == [2] and len(stored(run)) >= 2 and "step-00000001" not in stored(run)
    generated.clear()
    stages.stage(stage, tiny_data, run, *more)
    assert generated == []
    assert stages.same_weights(run, whole) and stages.differences(run, whole) == []
    assert stored(run) == []


def damage(run: Path, step: int) -> None:
    path = next((run / "pending_rollouts" / f"step-{step:08d}").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
def test_a_damaged_one_is_told_and_generated_again(tiny_data, tmp_path, arguments, interrupt, generated, capsys):
    more, run = arguments("grpo"), tmp_path / "run"
    whole = stages.stage("grpo", tiny_data, tmp_path / "whole", *more)
    interrupt("grpo", run, 4, more)
    damage(run, 3)
    (run / "pending_rollouts" / "step-00000004" / "part-00000-of-00001.json").unlink()  # killed while it was written
    generated.clear(), capsys.readouterr()
    stages.stage("grpo", tiny_data, run, *more)
    assert generated == [3, 4] and "WARNING: rollout 3 is generated again" in capsys.readouterr().out
    assert stages.same_weights(run, whole) and stages.differences(run, whole) == []


@pytest.mark.slow
def test_damage_of_a_description_is_told_and_it_is_generated_again(
    tiny_data, tmp_path, arguments, interrupt, generated, capsys
):
    """A number of a group in step 3; then a bit of each byte that is noted of step 4, another one in each."""
    more, run = arguments("grpo"), tmp_path / "run"
    whole = stages.stage("grpo", tiny_data, tmp_path / "whole", *more)
    interrupt("grpo", run, 4, more)
    group, every_bit = (run / "pending_rollouts" / step / "part-00000-of-00001.json" for step in stored(run))
    text = group.read_text()
    group.write_text(text.replace('"groups": [', '"groups": [1'))
    assert group.read_text() != text
    content, told = every_bit.read_bytes(), read_description(every_bit)
    flipped = tmp_path / "flipped.json"
    for bit in range(0, len(content) * 8, 7):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        flipped.write_bytes(damaged)
        with pytest.raises(DataError):
            read_description(flipped)
    assert told["groups"] == list(range(24, 32))
    generated.clear(), capsys.readouterr()
    stages.stage("grpo", tiny_data, run, *more)
    out = capsys.readouterr().out
    assert generated == [3] and f"WARNING: {group}: damaged" in out and "rollout 3 is generated again" in out
    assert stages.same_weights(run, whole) and stages.differences(run, whole) == []


@pytest.mark.slow
def test_those_of_another_config_are_not_used(tiny_data, tmp_path, arguments, interrupt, generated):
    more, cut = arguments("grpo"), tmp_path / "cut"
    interrupt("grpo", cut, 4, more)
    for name, change in enumerate(("sampling.temperature=0.9", "run.resume=never", "checkpoint.rollouts=false")):
        run, accepted = shutil.copytree(cut, tmp_path / str(name)), "run.accept_changes=true"
        generated.clear()
        stages.stage("grpo", tiny_data, run, *more, change, accepted, "run.export=false")
        assert generated == ([1, 2, 3, 4] if "never" in change else [3, 4])


def test_the_key_knows_what_rollouts_depend_on(tiny_data, tmp_path):
    def key(*more: str) -> str:
        return rollout_key(compose(stages.overrides("grpo", tiny_data, tmp_path, *more)))

    same = [
        "parallel.tensor=2",
        "batch.micro_batch_samples=2",
        "checkpoint.every=7",
        "run.name=x",
        "logging.wandb.project=y",
        "reward.workers=2",
        "reward.timeout_s=7",
        "reward.overlap=false",
        "engine.silent_s=300",
    ]
    assert {key(text) for text in same} == {key()}
    other = [
        "seed=1",
        "sampling.top_k=3",
        "optim.lr=1",
        "engine.lag=1",
        "batch.group=8",
        "algorithm.clip_low=0.3",
        "reward.normalize=true",
    ]
    assert len({key(), *(key(text) for text in other)}) == 1 + len(other)
    replayed = ["model.family=qwen3_moe", "model.moe.num_experts=4", "mismatch.replay_routing=true"]
    assert key(*replayed) != key(*replayed[:2])
    code = tmp_path / "mine.py"
    code.write_text("def reward(samples): return [0.0] * len(samples)")
    mine = f"reward.functions=[{{path: {code}:reward}}]"
    before = key(mine)
    code.write_text("def reward(samples): return [1.0] * len(samples)")
    assert key(mine) != before


@pytest.mark.slow
@pytest.mark.multirank
def test_another_layout_goes_on_with_the_stored_rollout(ranks, tiny_data, tiny_runs, tmp_path, interrupt):
    """One rank is killed in step 3 of 4; two data-parallel or two tensor ranks go on, and two hand over to one. Step 3
    trains on the stored samples, within the bounds of equal numbers (docs/layouts.md); step 4 has the same prompts and
    request seeds."""
    more = [*STEPS, "run.steps=4", f"model.init={tiny_runs['sft']}", "batch.micro_batch_samples=4"]
    whole = tmp_path / "whole"
    (wanted,) = ranks.run("tests.run.jobs:seeds_of", arguments=stages.overrides("grpo", tiny_data, whole, *more))
    assert {step for step, *_ in wanted} == {1, 2, 3, 4}
    start, final = stages.weights(tiny_runs["sft"]), stages.weights(whole)
    interrupt("grpo", tmp_path / "one", 3, more)
    two = stages.overrides("grpo", tiny_data, tmp_path / "two", *more)
    assert ranks.run("tests.run.jobs:cut_in_update", world=2, arguments=two, step=3) == [True, True]
    folder = tmp_path / "two" / "pending_rollouts" / "step-00000003"
    assert sorted(p.name for p in folder.glob("*.json")) == [f"part-0000{i}-of-00002.json" for i in range(2)]
    for name, source, world, where in (
        ("data", "one", 2, []),
        ("tensor", "one", 2, ["parallel.tensor=2"]),
        ("single", "two", 1, []),
    ):
        run = tmp_path / name
        shutil.copytree(tmp_path / source, run)
        line = stages.overrides("grpo", tiny_data, run, *more, *where)
        found = ranks.run("tests.run.jobs:seeds_of", world=world, arguments=line)
        assert set().union(*found) == {seed for seed in wanted if seed[0] >= 3}, name
        here, there = stages.timeless(run)[2], stages.timeless(whole)[2]
        tight = ("reward/mean", "response/tokens_mean", "advantage/std", "loss", "policy/entropy", "policy/grad_norm")
        for metric in [metric for metric in tight if metric in there]:
            assert abs(here[metric] - there[metric]) <= 1e-5 * max(1, abs(there[metric])), (name, metric)
        assert {"reward/mean", "advantage/std", "policy/entropy"} < there.keys()
        # two more Adam steps, with their noise-sized gradients
        for tensor, t in stages.weights(run).items():
            assert (t - final[tensor]).norm() <= 1e-2 * (final[tensor] - start[tensor]).norm(), (name, tensor)
