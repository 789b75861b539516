"""What makes a run this run: compared with its checkpoint at every start.

A run's definition is flat: config keys, and hashes of what its paths lead to ("content of data.train"). The table below
says of each key what a new value means for a run that goes on. A key of a new section has to be added there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from aligner.config.former import REMOVED, RENAMED
from aligner.config.options import hints
from aligner.config.schema import Config
from aligner.config.sections.data import SourceConfig
from aligner.config.sections.judge import JudgeConfig
from aligner.config.stage import EVALUATION, ROLLOUTS, SEQUENCES, TRAINING
from aligner.config.stages import STAGES


class Kind(Enum):
    DEFINES = "refused, unless run.accept_changes"
    TOLD = "taken over, in one line"
    HARMLESS = "taken over, unmentioned"


D, T, H = Kind.DEFINES, Kind.TOLD, Kind.HARMLESS
CONTENT = "content of "  # before the key of a path

# by the longest prefix of a key. Of paths only the content counts: data may move
KINDS: dict[str, Kind] = {
    "seed": D,
    "run": T,
    "run.dir": H,
    "run.name": H,
    "run.resume": H,
    "run.accept_changes": H,
    "stage": D,
    "stage.name": H,  # this and the model's shape: the identity of the checkpoint, which no flag changes
    "model": H,
    "model.init_std": D,
    "model.lora.dropout": D,  # the rest of the section: the identity of the checkpoint
    "model.dtype": T,
    "model.recompute": T,
    "model.kernels": T,
    "model.varlen_attention": T,
    "model.rope_scaling.factors": D,
    "model.moe.aux_coef": D,
    "model.moe.aux_over": D,
    "parallel": T,
    "optim": T,
    "ema": T,
    "ptx": D,
    "ptx.data.train": H,
    "critic": D,
    "critic.init": H,
    "critic.parallel": T,
    "critic.optim": T,
    "batch": D,
    "batch.micro_batch_samples": T,
    "batch.micro_batch_tokens": T,
    "batch.logprob_tokens": T,
    "batch.logits_bytes": T,
    "batch.packing": T,
    "batch.share_prompts": T,
    "batch.balance": T,
    "sampling": D,
    "algorithm": D,
    "algorithm.old_logprobs": T,
    "algorithm.distill.teacher": H,
    "algorithm.distill.teachers": H,
    "algorithm.distill.store": H,
    "algorithm.distill.tensor": T,
    "algorithm.distill.pipeline": T,
    "engine": T,
    "engine.lag": D,
    "engine.window": D,
    "refit": H,
    "memory": H,
    "mismatch": D,
    "mismatch.warn_above": T,
    "mismatch.stop_above": T,
    "reward": D,
    "reward.model": H,
    "reward.workers": H,
    "reward.timeout_s": H,
    "reward.max_invalid_fraction": H,
    "reward.overlap": H,
    "environment": D,
    "environment.timeout_s": H,
    "environment.retries": H,
    "environment.workers": H,
    "data": D,
    "data.train": H,
    "data.eval": H,
    "data.chat_template": H,
    "eval": T,
    "checkpoint": T,
    "logging": T,
    "cluster": H,
    "debug": H,
    "debug.shuffle_rewards": D,
    "debug.skip_refit": T,
    CONTENT: D,
    f"{CONTENT}data.eval": T,
    f"{CONTENT}environment": T,
    f"{CONTENT}reward.functions": T,  # one that raised has to be mended before the run goes on
}
# sections and keys that not every stage reads: those that do name them (`Stage.reads`)
OWN = ("environment", "critic", "algorithm.reward_loss", "algorithm.preference", "algorithm.kto", "algorithm.distill")
PATHS = {SourceConfig: "path"}  # of elements of lists: data may move
OPTIONAL = (*ROLLOUTS, *SEQUENCES, *OWN)


@dataclass(frozen=True)
class Change:
    key: str
    was: Any
    now: Any
    kind: Kind

    def __str__(self) -> str:
        return f"{self.key} {_short(self.was)} -> {_short(self.now)}"


@cache
def kind_of(key: str) -> Kind:
    return KINDS[_longest(KINDS, key)]


def definition(cfg: Config, contents: Mapping[str, str]) -> dict[str, Any]:
    """Flat and as JSON gives it back. `contents`: key of a path -> hash of what is there."""
    found = {key: value for key, value in _flat(cfg, "") if kind_of(key) is not H and reads(cfg.stage.name, key)}
    found |= {f"{CONTENT}{key}": digest for key, digest in contents.items()}
    return json.loads(json.dumps(found))


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """What differs, in the schema's order. A key that was not there had its default: an earlier version knew none."""
    defaults = dict(_flat(Config(), ""))
    found = []
    for key in [*now, *(key for key in was if key not in {*now, *REMOVED, *RENAMED})]:
        there, here = (side[key] if key in side else defaults.get(key) for side in (was, now))
        if there != here:
            found.append(Change(key, there, here, kind_of(key)))
    return found


def _flat(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name in hints(type(section)):
        value = getattr(section, name)
        if is_dataclass(value):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", [_plain(v) for v in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """An element of a list, without its path where only the content counts."""
    if not is_dataclass(value):
        return value
    if isinstance(value, JudgeConfig):
        return value.definition()
    return {key: v for key, v in asdict(value).items() if key != PATHS.get(type(value))}


@cache
def reads(stage: str, key: str) -> bool:
    """Whether a key defines what this stage trains: all do that no entry above is about, and of `stage` its own
    section."""
    own = STAGES[stage].reads
    optional = (*OPTIONAL, *own, *(f"stage.{name}" for name in STAGES))
    prefix = _longest(dict.fromkeys(optional), key, "")
    return not prefix or prefix in (*own, f"stage.{stage}")


@cache
def uses(stage: str, key: str) -> bool:
    """Whether this stage reads a key at all: its training, or its evaluation."""
    own = STAGES[stage]
    where = dict.fromkeys(TRAINING, own.trains) | dict.fromkeys(("refit",), own.answers or own.rollouts)
    where |= {name: own.answers for name in EVALUATION if name.startswith("eval.")}
    where |= {"data.max_tokens": not own.rollouts, "data.max_prompt_tokens": own.rollouts or own.answers}
    prefix = _longest(where, key, "")
    if (prefix and not where[prefix]) or _longest(dict.fromkeys(own.unread), key, ""):
        return False
    return reads(stage, key) or (own.answers and bool(_longest(dict.fromkeys(EVALUATION), key, "")))


def _longest(table: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """The longest entry that is `key` or a section of it."""
    fits = [p for p in table if key == p or key.startswith(p if p == CONTENT else f"{p}.")]
    assert fits or default is not None, f"{key} has no place in the table of {__name__}"
    return max(fits, key=len, default=default or "")


def _short(value: Any) -> str:
    text = "nothing" if value is None else value if isinstance(value, str) and value else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
