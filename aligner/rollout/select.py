"""Rows for other stages from a prompt's samples with their rewards: the best answers (best-of-n, RAFT, rejection
sampling), pairs (iterative DPO, SPIN), labels (KTO). A sample is a record of `rollout/samples_file.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aligner.config.stages.sample import SampleConfig

Record = dict[str, Any]
Text = str | list[dict[str, Any]]


def usable(group: Sequence[Record], cfg: SampleConfig) -> list[Record]:
    """Return finished answers that are not empty: a model would learn to stop where a cut one does."""
    return [one for one in group if one[cfg.column].strip() and (one["finished"] or cfg.unfinished)]


def ranked(group: Sequence[Record], cfg: SampleConfig) -> list[Record]:
    """Return different usable answers that have a reward, the best first; of equal rewards, and of equal answers,
    the sample drawn first comes first."""
    known = [one for one in usable(group, cfg) if one["reward"] is not None]
    answers: dict[str, Record] = {}
    for one in sorted(known, key=lambda one: -one["reward"]):
        answers.setdefault(one[cfg.column], one)
    return list(answers.values())


def best(group: Sequence[Record], cfg: SampleConfig) -> list[Record]:
    good = [one for one in ranked(group, cfg) if one["reward"] > cfg.reward_above]
    return good[: cfg.best or None]


def pairs(group: Sequence[Record], cfg: SampleConfig) -> list[Record]:
    """Return the best answer against the worst, if their rewards differ by more than the margin; or the row's own
    answer against each different one."""
    if cfg.pairs == "answers":
        own = group[0]["reference"]
        others = {one[cfg.column]: one for one in usable(group, cfg) if one[cfg.column].strip() != _text(own).strip()}
        return [_about(one) | {"chosen": own, "rejected": text} for text, one in others.items()]
    known = ranked(group, cfg)
    if not known or not known[0]["reward"] - known[-1]["reward"] > cfg.margin_above:
        return []
    first, last = known[0], known[-1]
    return [
        _about(first)
        | {
            "chosen": first[cfg.column],
            "rejected": last[cfg.column],
            "margin": first["reward"] - last["reward"],
            "chosen_reward": first["reward"],
            "rejected_reward": last["reward"],
        }
    ]


def labels(group: Sequence[Record], cfg: SampleConfig) -> list[Record]:
    return [
        _about(one) | {"completion": one[cfg.column], "label": one["reward"] > cfg.reward_above}
        for one in ranked(group, cfg)
    ]


def files(cfg: SampleConfig, rewards: bool) -> dict[str, Callable[[Sequence[Record], SampleConfig], list[Record]]]:
    """Return the files to write, and the function that makes the rows of each."""
    makers = {"best.jsonl": best} if rewards else {}
    if rewards or cfg.pairs == "answers":
        makers["pairs.jsonl"] = pairs
    return makers | ({"labels.jsonl": labels} if cfg.labels else {})


def _about(record: Record) -> Record:
    """Return the fields of a record about its prompt."""
    return {name: record[name] for name in ("prompt", "tools", "row") if name in record}


def _text(answer: Text) -> str:
    return answer if isinstance(answer, str) else answer[-1]["content"]
