"""Composition of the command line's overrides into a typed `Config`, through Hydra's compose API.

The structured schema is merged first, so that Hydra checks every key and type of every YAML file. Hydra's errors
become ours, which name the key, the value and the expected value.
"""

from __future__ import annotations

import pickle
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from aligner.config.checks import all_finite
from aligner.config.foreign_names import known_elsewhere
from aligner.config.identity import uses
from aligner.config.options import GROUPS, REUSED, all_keys, in_free_dict, key_type, nearest, rekeyed, type_name
from aligner.config.own_stage import store_defaults
from aligner.config.removed_keys import REMOVED, RENAMED, copied, passed_over
from aligner.config.schema import Config
from aligner.config.stages import STAGES
from aligner.errors import ConfigError, UnknownKeyError
from aligner.files import conf_dir
from aligner.user_code import is_source

# sections that are no group of files, and what decides their defaults
NOT_CHOSEN = {"algorithm": "stage=NAME sets a stage's own defaults", "cluster": "its defaults fit all machines"}


def compose(overrides: list[str], *, config_dir: str | None = None) -> Config:
    """Compose, resolve and type the config. `config_dir` is a further folder of config groups (hydra.searchpath).

    Raises ConfigError (UnknownKeyError for keys that do not exist).
    """
    with hydra(), _stage_known(lambda: _stage_of(overrides, config_dir)):
        parsed = single(overrides)
        choices, _ = searched([o for o in parsed if chooses(o)], config_dir)
        values = [_value(o) for o in parsed if not chooses(o)]
        # files of users may change while this process lives, the project's own do not
        own = any("searchpath" in choice or choice.startswith("stage=outside/") for choice in choices)
        chosen = _chosen.__wrapped__ if own else _chosen
        try:
            node = pickle.loads(chosen(choices))
            ConfigLoaderImpl._apply_overrides_to_config(values, node)
        except (HydraException, OmegaConfBaseException) as error:
            raise _translated(error, parsed) from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            location = f"{mark.name}, line {mark.line + 1}" if mark else "a config file"
            raise ConfigError("config file", location, "valid YAML", str(getattr(error, "problem", error))) from None
    return _typed(node, parsed)


def compose_over(base: Config, overrides: list[str]) -> Config:
    """Change values of a frozen config. Groups are already chosen there, so only `key=value` is allowed."""
    with hydra(), _stage_known(lambda: base.stage.name):
        parsed = single(overrides)
    # Entries are set as they are: a frozen string may contain `${`, which must not become an interpolation.
    node = OmegaConf.structured(_escaped(base))
    for override in parsed:
        key = override.key_or_group
        if key in GROUPS and not isinstance(override.value(), dict):
            raise ConfigError(key, override.value(), f"{key}.<key>=<value>: the groups of a frozen config are chosen")
        try:
            OmegaConf.update(node, key, override.value(), merge=True, force_add=in_free_dict(key))
        except OmegaConfBaseException as error:
            raise _translated(error, parsed) from None
    return _typed(node, parsed)


def sweep(overrides: list[str]) -> list[list[str]]:
    """Return every job of a multirun: `a=1,2 b=range(0,3)` -> six lists of overrides, the last override varying
    fastest."""
    with hydra():
        parsed = [_checked(o) for o in _parse(overrides)]
        try:
            batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
        except HydraException as error:  # interval(): a range that has no end
            raise ConfigError("--multirun", " ".join(overrides), "choices that can be listed", str(error)) from None
    shared = {o.get_key_element() for o in parsed if str(o.input_line).startswith("?")}
    return [[f"?{t}" if t.partition("=")[0] in shared else t for t in job] for batch in batches for job in batch]


def job_labels(jobs: list[list[str]]) -> list[str]:
    """Return names of the jobs of a sweep for their folders: number and varying overrides."""
    common = set.intersection(*map(set, jobs))
    varied = (",".join(text for text in job if text not in common) for job in jobs)
    return [f"{i}_{re.sub(r'[^\w.,=+-]+', '_', text)[:120]}".rstrip("_") for i, text in enumerate(varied)]


@cache
def _chosen(choices: tuple[str, ...]) -> bytes:
    """Compose the files of these choices of groups' options into a pickle, whose copy is three times as fast as
    `deepcopy`. Hydra sets values on top of them, after the last file."""
    return pickle.dumps(hydra_compose("config", overrides=list(choices)))


@cache
def _store_schema() -> None:
    ConfigStore.instance().store(name="schema", node=Config, provider="aligner")


@contextmanager
def _stage_known(stage: Callable[[], str]) -> Iterator[None]:
    """Add to an UnknownKeyError raised within the block the nearest key that this stage reads."""
    try:
        yield
    except UnknownKeyError as error:
        location = str(error).partition(error.hint)[2]
        near = _nearest(error.key, name := stage())
        again = UnknownKeyError(error.key, near)
        key = (near or "").partition("=")[0]
        unread = bool(name and key) and key not in GROUPS and not uses(name, key)
        again.args = (f"{again}{f' Stage {name} does not read it.' if unread else ''}{location}",)
        raise again from None


def _nearest(key: str, stage: str) -> str | None:
    """Return the nearest key, or if the stage does not read it, what it reads instead: the key of the same meaning, or
    one with the same last part."""
    anywhere = nearest(key, stage=stage)
    if not stage or anywhere is None or anywhere in GROUPS or uses(stage, anywhere):
        return anywhere
    if (instead := known_elsewhere(anywhere, stage)) and uses(stage, instead.partition("=")[0]):
        return instead
    here = nearest(key, stage=stage, reads=lambda name: uses(stage, name))
    return here if here and here.rpartition(".")[2] == key.rpartition(".")[2] else anywhere


def _stage_of(overrides: list[str], config_dir: str | None) -> str:
    """Return the stage that the overrides choose, despite other errors in them; "" if it cannot be determined."""
    groups = "|".join((*GROUPS, "hydra.searchpath"))
    try:
        parsed = _parse([text for text in overrides if re.match(rf"\??\+?({groups})=", text)])
        choices, _ = searched([o for o in parsed if chooses(o)], config_dir)
        name = str(OmegaConf.select(pickle.loads(_chosen.__wrapped__(choices)), "stage.name"))
    except Exception:  # the caller reports another error
        return ""
    return name if name in STAGES or is_source(name) else ""


@contextmanager
def hydra() -> Iterator[None]:
    _store_schema()
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3", job_name="aligner"):
        yield


def _parse(overrides: list[str]) -> list[Override]:
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    overrides_parsed = []
    for text in overrides:
        try:
            marked = text.startswith("?")
            parsed = parser.parse_overrides([text[marked:]])
            overrides_parsed += [replace(o, input_line=f"?{o.input_line}") for o in parsed] if marked else parsed
        except OverrideParseException:
            raise ConfigError("override", text, "key=value, as Hydra reads it", _how_to_quote(text)) from None
    return overrides_parsed


def _how_to_quote(text: str) -> str:
    """Return advice on writing a value with characters that Hydra's grammar and the shell use otherwise; "" if that
    is not the error."""
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[+~]{0,2}[\w./@-]+", key) or value[:1] in ("[", "{", '"', "'"):
        return ""
    return f"Quote a value with = ( [ quotes or letters beyond ASCII: {shlex.quote(f'{key}={quoted(value)}')}"


def single(overrides: list[str]) -> list[Override]:
    """Return the overrides of one job: parsed, checked, none of them a sweep."""
    parsed = [_checked(o) for o in _parse(overrides)]
    for override in parsed:
        if override.is_sweep_override():
            raise _one_value(override)
    leaves = [leaf for override in parsed for leaf in _leaves(override)]
    return [leaf for leaf in leaves if leaf.key_or_group not in REMOVED]


def _leaves(override: Override) -> Iterator[Override]:
    """Yield the keys of a section one by one: in a mapping of the whole section Hydra takes no new entries of free
    dictionaries."""
    key, value = override.key_or_group, override._value
    if isinstance(value, dict) and is_dataclass(key_type(key)):
        for name, entry in value.items():
            yield from _leaves(_checked(replace(override, key_or_group=f"{key}.{name}", _value=entry)))
    else:
        yield override


def _checked(override: Override) -> Override:
    """Refuse what cannot be in the schema before Hydra adds it (`+new.key=1`) or deletes it (`~optim.lr`)."""
    key = override.key_or_group
    names = str | list | dict | (None if key == "experiment" else str)
    if key in GROUPS and not override.is_sweep_override() and not isinstance(override.value(), names):
        raise ConfigError(key, override.value(), f"the name of one of its options, or {key}.<key>=<value>")
    if key in GROUPS or key == "hydra.searchpath":
        return override
    if not key:
        raise ConfigError("override", override.input_line, "key=value")
    if key in REMOVED and passed_over(key, override.value()):
        return override
    if copied(key):
        raise ConfigError(key, override.value(), f"no such key: {copied(key)} is read instead", "Leave the key out.")
    if key in RENAMED:
        return _checked(replace(override, key_or_group=RENAMED[key]))
    if key_type(key) is None:
        raise UnknownKeyError(key, nearest(key))
    if key in NOT_CHOSEN and isinstance(override._value, str | QuotedString):
        raise ConfigError(key, override.value(), f"{key}.<key>=<value>: {NOT_CHOSEN[key]}")
    if override.is_delete():
        raise ConfigError(key, "~", "a value: keys of the schema cannot be deleted")
    return override


def chooses(override: Override) -> bool:
    """Return whether it chooses files: an option of a group, or the folders of further groups. Others set values."""
    key = override.key_or_group
    return key == "hydra.searchpath" or (key in GROUPS and not isinstance(override.value(), dict))


def _value(override: Override) -> Override:
    """Return the override as a change, or an addition for free dictionaries, which take new entries. `+key=` of an
    existing key means `key=`."""
    key = override.key_or_group
    free = in_free_dict(key) or get_origin(key_type(key)) is dict
    return replace(override, type=OverrideType.FORCE_ADD if free else OverrideType.CHANGE)


def searched(choices: Sequence[Override], config_dir: str | None) -> tuple[tuple[str, ...], list[Path]]:
    """Return these choices as Hydra reads them, and the user's folders in which it looks for their files."""
    texts = tuple(_option(o) for o in choices)
    places = [text for o in choices if o.key_or_group == "hydra.searchpath" for text in o.value()]
    if config_dir is not None:
        folder = Path(config_dir).expanduser().resolve()
        if not folder.is_dir():
            raise ConfigError("--config-dir", config_dir, "an existing folder")
        texts += (f"hydra.searchpath=[{quoted(f'file://{folder}')}]",)
        places = [str(folder)]
    return texts, [Path(text.removeprefix("file://")) for text in places if not text.startswith("pkg://")]


def _option(choice: Override) -> str:
    """Return a choice as Hydra reads it: of a stage in a user's file, the option that its defaults are stored as."""
    if choice.key_or_group == "stage" and is_source(path := str(choice.value())):
        return f"stage={store_defaults(path, STAGES[path])}"
    return str(choice.input_line).removeprefix("?")


def quoted(text: str) -> str:
    """Return any text as a quoted string of Hydra's override grammar."""
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', re.sub(r"\\+$", lambda m: m[0] * 2, text))
    return '"' + re.sub(r"(\\*)\$\{", r"\1\1\\${", escaped) + '"'


def _typed(node: DictConfig, overrides: list[Override]) -> Config:
    """Resolve interpolations, then build the dataclasses, which check their values."""
    try:
        try:
            config = OmegaConf.to_object(node)
        except ConfigError:
            _check_reused(node)
            raise
    except OmegaConfBaseException as error:
        raise _translated(error, overrides) from None
    assert isinstance(config, Config), type(config)
    all_finite(config)
    return config


def _check_reused(node: DictConfig) -> None:
    """Raise the ConfigError of a section that is used in a second place, with that place in its key."""
    for owner, section in ((owner, name) for owner, names in REUSED.items() for name in names):
        try:
            OmegaConf.to_object(node[owner][section])
        except ConfigError as error:
            raise rekeyed(error, owner) from None


def _escaped(value: Any) -> Any:
    """Return the same dataclass with `${` escaped for OmegaConf."""
    if is_dataclass(value):
        return replace(value, **{f.name: _escaped(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, list):
        return [_escaped(v) for v in value]
    if isinstance(value, dict):
        return {k: _escaped(v) for k, v in value.items()}
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _one_value(override: Override) -> ConfigError:
    value = str(override.input_line).partition("=")[2]
    return ConfigError(override.key_or_group, value, "one value", "Add --multirun to sweep, or brackets for a list.")


def _translated(error: Exception, overrides: list[Override]) -> ConfigError:
    """Translate Hydra's or OmegaConf's error into ours."""
    if isinstance(error, MissingConfigException):
        return _missing(error)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    where = re.match(r"In '([^']*)'", str(error))
    location = f" (in {where.group(1)}.yaml)" if where else ""
    if cause is None:
        text = " ".join(str(o.input_line) for o in overrides)
        return ConfigError("overrides", text, "a valid config", " ".join(str(error).split()))
    key = _full_key(cause)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and key_type(key) is None:
        if key in REMOVED:
            expected = f"no such key: {REMOVED[key].reason}"
            return ConfigError(key, _offending(cause, key, overrides), expected, location.strip())
        unknown = UnknownKeyError(key, RENAMED.get(key) or copied(key) or nearest(key))
        unknown.args = (f"{unknown}{location}",)
        return unknown
    if isinstance(cause, ValidationError):
        return ConfigError(key, _offending(cause, key, overrides), type_name(key_type(key)), location.strip())
    reason = str(cause.msg or cause).splitlines()[0] + location
    for override in overrides:  # an interpolation may surface in another key that uses this one
        if "${" in str(override.input_line):
            return ConfigError(override.key_or_group, override.value(), "a value that resolves", reason)
    return ConfigError(key, None, "a value that resolves", reason)


def _full_key(error: OmegaConfBaseException) -> str:
    key = str(error.full_key or error.key or "config")
    if key_type(key) is None:  # inside a list OmegaConf forgets where the element is, but knows its type
        for name in all_keys():
            kind = key_type(name)
            if get_origin(kind) is list and get_args(kind)[0] is error.object_type and error.object_type is not None:
                return f"{name}[].{error.key}"
    return key


def _offending(error: OmegaConfBaseException, key: str, overrides: list[Override]) -> Any:
    """Return the value that a user wrote: from the override if there is one, else from OmegaConf's message."""
    for override in reversed(overrides):
        if override.key_or_group == key:
            return override.value()
    if error.value is not None:
        return error.value
    quoted = re.search(r"[Vv]alue '(.*?)'", str(error))
    return quoted.group(1) if quoted else None


def _missing(error: MissingConfigException) -> ConfigError:
    """Return the error for a group without such an option, or a file that names a missing one."""
    path = str(error.missing_cfg_file or "")
    group = next((group for group in GROUPS if path.startswith(f"{group}/")), "")
    name = path.removeprefix(f"{group}/")
    hint = " ".join(f"Did you mean `{near}`?" for near in get_close_matches(name, error.options or (), 1))
    if group == "model" and ("/" in name or Path(name).is_dir()):
        hint = f"To start from a Hugging Face folder or a run: model.init={name}."
    if not error.options:
        return ConfigError(group or "config", name, "an existing option; this group has none yet (see --config-dir)")
    return ConfigError(group or "config", name, "one of " + ", ".join(sorted(error.options)), hint)
