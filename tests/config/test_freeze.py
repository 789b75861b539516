"""The frozen config says the same as the composed one, whatever is in it."""

import math
from dataclasses import asdict, is_dataclass, replace
from typing import get_args, get_origin

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from aligner.config.freeze import config_hash, freeze, load_frozen, to_yaml
from aligner.config.options import hints
from aligner.config.resolve import compose, quoted
from aligner.config.schema import Config
from aligner.errors import ConfigError, UnknownKeyError

# Shrinking a whole config takes minutes, so a failure is shown as it was found.
QUICK = settings(
    max_examples=20, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    [
        "yes",
        "null",
        "1e3",
        "1_000",
        "0x10",
        "${run.name}",
        "\\${x}",
        "- a",
        "a: b",
        "# no",
        " lead",
        "trail ",
        "2001-01-01",
    ]
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
REQUIRED = {"path": "x", "question": "{response}"}  # of functions and judges
SCALARS = {int: st.integers(), float: st.floats(allow_nan=False), bool: st.booleans(), str: text}


def free(kind):
    """Strategy for one field of the schema."""
    if kind in SCALARS:
        return SCALARS[kind]
    if is_dataclass(kind):
        return unchecked(kind)
    if get_origin(kind) is list:
        return st.lists(free(get_args(kind)[0]), max_size=3)
    if get_origin(kind) is dict:
        return st.dictionaries(text, free(get_args(kind)[1]), max_size=3)
    return plain


def unchecked(kind):
    """Any instance whose own checks pass: fields that they refuse together keep their defaults."""

    def build(values):
        kept = {name: value for name, value in REQUIRED.items() if name in hints(kind)}
        for name, value in values.items():
            try:
                kind(**kept | {name: value})
            except ConfigError:
                continue
            kept[name] = value
        return kind(**kept)

    return st.fixed_dictionaries({name: free(sub) for name, sub in hints(kind).items()}).map(build)


@settings(QUICK)
@given(cfg=unchecked(Config))
def test_any_config_survives_freezing(cfg, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    path = freeze(cfg, folder)
    again = load_frozen(path)
    assert again == cfg
    assert config_hash(again) == config_hash(cfg)
    assert [p.name for p in folder.iterdir()] == ["config.yaml"]


@settings(QUICK, max_examples=8)
@given(
    name=text,
    lr=st.floats(min_value=1e-12, max_value=10),
    seed=st.integers(0, 2**40),
    tie=st.booleans(),
    column=text,
    model=st.sampled_from(["tiny", "qwen3_0.6b", "llama3_8b"]),
)
def test_any_override_survives_composing_and_freezing(name, lr, seed, tie, column, model, tmp_path_factory):
    overrides = [f"optim.lr={lr!r}", f"seed={seed}", f"model.tie_embeddings={tie}", f"model={model}"]
    overrides += [f"run.name={quoted(name)}", f"data.columns.prompt={quoted(column)}"]
    cfg = compose(overrides)
    assert (cfg.run.name, cfg.optim.lr, cfg.seed, cfg.model.tie_embeddings) == (name, lr, seed, tie)
    assert cfg.data.columns == {"prompt": column}
    assert load_frozen(freeze(cfg, tmp_path_factory.mktemp("run"))) == cfg


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[" * 100_000, "nested at most 100 deep"),
        ('{"a": ' * 50_000, "nested at most 100 deep"),
        ("- " * 50_000, "nested at most 100 deep"),
        (f"run: {'[' * 101}{']' * 101}", "nested at most 100 deep"),
        ("seed: &a 1\nrun: {steps: *a}", "expected no aliases"),
        ("a: &a [1]\nb: &b [*a, *a]\nc: [*b, *b]", "expected no aliases"),
        ("\ud800: [\n", "a config.yaml written by aligner"),  # no UTF-8
    ],
)
def test_a_file_that_would_end_the_process_is_refused(tmp_path, content, expected):
    """By its stack, which libyaml does not watch, or by its size once it is copied."""
    (tmp_path / "config.yaml").write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError, match=expected):
        load_frozen(tmp_path)


def test_the_hash_speaks_of_what_is_computed():
    base = compose(["stage=grpo"])
    assert len(config_hash(base)) == 12 and int(config_hash(base), 16) >= 0
    same = ["run.dir=x", "run.name=y", "run.resume=never", "logging=quiet", "logging.project=z"]
    assert config_hash(compose(["stage=grpo", *same])) == config_hash(base)
    others = ["seed=1", "optim.lr=2e-4", "run.steps=3", "data.columns.a=b", "critic.clip=0.1", "run.deterministic=true"]
    hashes = {config_hash(compose(["stage=grpo", other])) for other in others}
    assert len(hashes | {config_hash(base)}) == len(others) + 1


def test_the_hash_does_not_depend_on_order_and_stays():
    one, two = compose(["data.columns={a:b,c:d}"]), compose(["data.columns={c:d,a:b}"])
    assert config_hash(one) == config_hash(two)
    mixed = compose(["reward.functions=[{path:x,args:{deep:{1:2,a:3}}}]"])
    assert config_hash(mixed) != config_hash(one)


def test_the_file_follows_the_schema_and_is_replaced(tmp_path):
    cfg = compose([])
    path = freeze(cfg, tmp_path / "deep" / "run")
    assert list(map(str, asdict(cfg))) == [
        line.split(":")[0] for line in to_yaml(cfg).splitlines() if line[:1].isalpha()
    ]
    assert "${" not in path.read_text() and config_hash(cfg) in path.read_text()
    changed = replace(cfg, seed=7)
    assert freeze(changed, path.parent) == path and load_frozen(path.parent).seed == 7


@pytest.mark.parametrize(
    ("text", "error", "named"),
    [
        ("optim: {lrr: 1}", UnknownKeyError, "optim.lrr"),
        ("foo: 1", UnknownKeyError, "foo"),
        ("reward: {functions: [{path: a, wight: 1}]}", UnknownKeyError, "wight"),
        ("optim: {lr: abc}", ConfigError, "optim.lr='abc': expected a number"),
        ("run: {steps: true}", ConfigError, "run.steps=True: expected an integer"),
        ("seed: 1.5", ConfigError, "seed=1.5"),
        ("optim: 3", ConfigError, "optim=3"),
        ("optim: {betas: 1}", ConfigError, "optim.betas=1"),
        ("data: {columns: {1: a}}", ConfigError, "data.columns"),
        ("critic: {optim: {lr: -1}}", ConfigError, "critic.optim.lr=-1"),
        ("optim: [", ConfigError, "written by aligner"),
        ("optim: {lr: *x}", ConfigError, "expected no aliases, as *x"),
        ("3", ConfigError, "written by aligner"),
    ],
)
def test_a_changed_file_is_checked(tmp_path, text, error, named):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(error) as caught:
        load_frozen(path)
    assert named in str(caught.value)


@pytest.mark.parametrize("name", ["caf\udce9", "\U0001f600", "a\x85b\u2028\ufeff\udcff: #"])
def test_names_of_files_that_are_no_utf8_survive(tmp_path, name):
    cfg = compose([f"run.dir={quoted(name)}"])
    assert cfg.run.dir == name and load_frozen(freeze(cfg, tmp_path)) == cfg


def test_missing_and_unwritable_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="--frozen"):
        load_frozen(tmp_path / "none.yaml")
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "run", "/proc/aligner", "/proc", "/sys"):
        with pytest.raises(ConfigError, match=r"run\.dir="):
            freeze(compose([]), folder)


def test_a_full_disk_leaves_the_old_config(tmp_path, monkeypatch):
    cfg = compose([])
    path = freeze(cfg, tmp_path)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        freeze(replace(cfg, seed=9), tmp_path)
    assert load_frozen(path) == cfg and [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_infinity_is_kept(tmp_path):
    cfg = compose([])
    cfg.run.stop.above = math.inf
    assert load_frozen(freeze(cfg, tmp_path)) == cfg
