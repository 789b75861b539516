"""Keys of earlier versions: passed over where they say what is the case without them, else refused with the reason."""

import pytest

from aligner.config.former import REMOVED
from aligner.config.freeze import freeze, load_frozen
from aligner.config.identity import changes
from aligner.config.options import all_keys
from aligner.config.resolve import compose, compose_over
from aligner.errors import ConfigError

OTHER = {"engine.spares": 1, "refit.skip_unchanged": True, "refit.transport": "mpi_window"}


def test_no_key_is_both():
    assert not set(REMOVED) & set(all_keys())


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
