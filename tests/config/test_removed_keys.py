"""Keys of earlier versions: passed over where they say what is the case without them, else refused with the reason."""

import json
from dataclasses import asdict, replace

import pytest

from aligner.config.freeze import freeze, load_frozen
from aligner.config.identity import changes
from aligner.config.options import all_keys, from_plain
from aligner.config.removed_keys import MOVED, REMOVED, RENAMED
from aligner.config.resolve import compose, compose_over
from aligner.config.schema import Config
from aligner.errors import ConfigError, UnknownKeyError
from aligner.user_code import load

OTHER = {
    "logging.tensorboard": False,
    "logging.wandb.mode": "online",
    "engine.spares": 1,
    "refit.skip_unchanged": True,
    "refit.transport": "mpi_window",
}


def test_no_key_is_both():
    assert not {*REMOVED, *RENAMED} & set(all_keys()) and set(RENAMED.values()) <= set(all_keys())


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_may_say_what_is_the_case_without_it(key, tmp_path):
    off = REMOVED[key].without
    override = f"{key}={str(off).lower()}"
    plain = compose(["stage=grpo"])
    assert compose(["stage=grpo", override]) == plain == compose_over(plain, [override])
    path = freeze(plain, tmp_path)
    section, _, name = key.partition(".")
    path.write_text(path.read_text().replace(f"\n{section}:\n", f"\n{section}:\n  {name}: {str(off).lower()}\n"))
    assert name in path.read_text() and load_frozen(path) == plain
    assert changes({key: off}, {}) == []


@pytest.mark.parametrize("key", REMOVED)
def test_another_value_is_refused_with_the_reason(key, tmp_path):
    value = OTHER[key]
    override = f"{key}={str(value).lower()}"
    section, _, name = key.partition(".")
    recipes = tmp_path / "experiment"
    recipes.mkdir()
    (recipes / "mine.yaml").write_text(f"# @package _global_\n{section}:\n  {name}: {str(value).lower()}\n")
    for asked in (override, f"{section}={{{name}: {value}}}", "experiment=mine"):
        with pytest.raises(ConfigError, match="it was removed, as") as caught:
            compose(["stage=grpo", asked], config_dir=str(tmp_path))
        assert caught.value.key == key


@pytest.mark.parametrize("key", [key for key in RENAMED if key.startswith("engine.")])
def test_a_renamed_key_is_taken_by_its_former_name(key, tmp_path):
    _, engine, name = key.split(".")
    asked = ["stage=grpo", f"engine={engine}", "run.deterministic=false"]
    asked += ["engine.sleep=true"] * (name == "sleep_weights")
    wanted = compose([*asked, f"{RENAMED[key]}=true"])
    assert compose([*asked, f"{key}=true"]) == wanted == compose_over(compose(asked), [f"{key}=true"])
    recipes = tmp_path / "experiment"
    recipes.mkdir()
    (recipes / "mine.yaml").write_text(f"# @package _global_\nengine:\n  {engine}:\n    {name}: true\n")
    with pytest.raises(UnknownKeyError, match=RENAMED[key]):
        compose([*asked, "experiment=mine"], config_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("tensorboard: false", {"trackers": []}),
        ("wandb: {mode: disabled, project: x, entity: e}", {"project": "x"}),
        (
            "tensorboard: false\n  wandb: {mode: offline, project: x, entity: ''}",
            {"trackers": ["wandb"], "project": "x"},
        ),
        (
            "tensorboard: true\n  wandb: {mode: online, project: aligner, entity: e}",
            {"trackers": ["tensorboard", "wandb"], "offline": False, "args": {"wandb": {"entity": "e"}}},
        ),
    ],
)
def test_a_frozen_config_names_its_trackers(former, now, tmp_path):
    """Each had keys of its own."""
    plain = compose(["stage=sft"])
    keys = "trackers:\n  - tensorboard\n  project: aligner\n  offline: true\n  args: {}\n"
    path = freeze(plain, tmp_path)
    text = path.read_text()
    assert keys in text
    path.write_text(text.replace(keys, f"{former}\n"))
    assert load_frozen(path) == replace(plain, logging=replace(plain.logging, **now))
    assert compose(["logging.wandb.project=x"]).logging.project == "x"


@pytest.mark.parametrize("engine", ["native", "vllm", "trtllm"])
def test_a_frozen_config_says_what_its_engine_did(engine, tmp_path):
    """Each section had keys of its own; those of an engine that did not run count for nothing."""
    path = freeze(compose(["stage=grpo", f"engine={engine}"]), tmp_path)
    text = path.read_text().replace("  cuda_graphs: auto\n  sleep: auto\n", "  cuda_graphs: false\n")
    for section in ("vllm", "trtllm"):
        of_it = str(section == engine).lower()
        text = text.replace(f"\n  {section}:\n", f"\n  {section}:\n    sleep: {of_it}\n    cuda_graphs: {of_it}\n")
    path.write_text(text)
    loaded = load_frozen(path).engine
    assert loaded.captures == (engine != "native") and loaded.sleeps


def test_the_layout_of_a_critic_is_the_policys(tmp_path):
    plain = compose(["stage=ppo", "parallel.tensor=2"])
    path = freeze(plain, tmp_path)
    text, layout = path.read_text(), asdict(plain.parallel)
    path.write_text(text.replace("\ncritic:\n", f"\ncritic:\n  parallel: {json.dumps(layout)}\n"))
    assert load_frozen(path) == plain
    path.write_text(text.replace("\ncritic:\n", f"\ncritic:\n  parallel: {json.dumps(layout | {'tensor': 1})}\n"))
    with pytest.raises(ConfigError, match=r"critic\.parallel=.*the same as parallel"):
        load_frozen(path)
    with pytest.raises(ConfigError, match=r"critic\.parallel\.tensor=2.*parallel\.tensor is read instead"):
        compose(["stage=ppo", "critic.parallel.tensor=2"])


def test_functions_of_the_examples_are_found_by_their_former_paths(tmp_path):
    """In a run that an earlier version began: it goes on by the same command."""
    before, now = (
        compose(["stage=grpo", f"reward.functions=[{{path: '{a}:score'}}]", f"environment.tools=['{b}:multiply']"])
        for a, b in (MOVED, MOVED.values())
    )
    assert before == now and now.reward.functions[0].path == "examples/sums.py:score"
    path = freeze(now, tmp_path)
    path.write_text(path.read_text().replace("examples/sums.py", "aligner.tools.sums"))
    assert load_frozen(path) == now
    for function in (now.reward.functions[0].path, now.environment.tools[0]):
        assert callable(load(function, "key", "function", ConfigError))


def test_limits_by_phase_are_entries_as_they_were_keys():
    limits = ["cluster.watchdog.score_s=4", "memory.limit.update_bytes=5"]
    cfg = compose(["stage=grpo", *limits])
    assert cfg.cluster.watchdog == {"score_s": 4.0} and cfg.memory.limit == {"update_bytes": 5}
    old = {"cluster": {"watchdog": {"score_s": 4.0, "save_s": 1800.0}}, "memory": {"limit": {"update_bytes": 0}}}
    read = from_plain(Config, old)
    assert read.cluster.watchdog == {"score_s": 4.0, "save_s": 1800.0} and not read.memory.limit_of("update")
