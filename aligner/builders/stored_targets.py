"""A teacher's most likely tokens of whole datasets, computed once and kept in a folder that runs share: no teacher
runs while a student trains. Every rank computes a share, in any layout; existing files are not computed again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aligner.builders.job import Job, tokenizer_hash
from aligner.builders.teachers import find_teachers, make_teachers
from aligner.config.sections.distill import KEY
from aligner.data.collate import collate_sft
from aligner.data.mixture import Mixture
from aligner.data.stored_targets import MANIFEST, StoredTargets, digest, key_of, manifests
from aligner.errors import ConfigError
from aligner.models.safetensors_io import save_whole
from aligner.ops.agree import by_rank_0, same_view
from aligner.roles.batching import no_rows
from aligner.roles.teacher import Teacher
from aligner.types import TeacherTargets


def store_targets(job: Job, train: Any) -> tuple[StoredTargets | Mixture, int]:
    """Return the training set with the teacher's targets for its rows, from `algorithm.distill.store`, and the number
    of tokens that they cover. Missing files are computed, by a model that is freed afterwards. Collective. Raises
    ConfigError if no teacher is set to compute them."""
    parts = train.parts if isinstance(train, Mixture) else {"": train}
    stores, teacher, cfg, most = {}, None, job.cfg.algorithm.distill, 0
    for name, dataset in parts.items():
        store, vocab_size = _store_of(job, dataset)
        missing = by_rank_0(store.missing)
        if missing and not cfg.teacher:
            many = f"{len(missing)} of {len(store.blocks)} files"
            raise ConfigError(f"{KEY}.teacher", "", f"the teacher, to compute {many} that {store.folder} lacks")
        if missing:
            job.say(f"{dataset.report.key}: {len(missing)} of {len(store.blocks)} files of the teacher's are computed")
            teacher = teacher or replace(make_teachers(job)[0], student=None)  # rows are dealt to its own layout
            _compute(teacher, store, missing)
        if vocab_size > job.initial.config.vocab_size:
            expected = f"files of at most the student's {job.initial.config.vocab_size} tokens"
            raise ConfigError(f"{KEY}.store", str(store.folder), expected, f"{vocab_size} there.")
        same_view(store.folder, lambda store=store: {"files that are missing": str(store.missing())})
        job.say(f"{dataset.report.key}: the teacher's {cfg.top_k} most likely tokens from {store.folder}")
        job.built.contents[f"{KEY}.store{name and f'.{name}'}"] = store.folder.name
        stores[name], most = store, max(most, vocab_size)
    job.built.models.pop("teacher", None)
    job.built.contents.pop(f"{KEY}.teacher", None)  # the stores' contents include it
    return Mixture(stores, train.weights) if isinstance(train, Mixture) else stores[""], most


def _store_of(job: Job, dataset: Any) -> tuple[StoredTargets, int]:
    """Return the stored targets of a dataset, complete or not, and the number of tokens that they cover."""
    cfg = job.cfg.algorithm.distill
    store = Path(cfg.store).expanduser().absolute()
    known = {
        "data": by_rank_0(lambda: digest(dataset)),
        "rows": len(dataset),
        "tokenizer": tokenizer_hash(job),
        "top_k": cfg.top_k,
        "temperature": cfg.temperature,
    }
    if not cfg.teacher:
        folder, manifest = by_rank_0(lambda: _fitting(store, known))
        return StoredTargets(dataset, folder, cfg.top_k), manifest["vocab_size"]
    (initial,), vocab_size = find_teachers(job)
    manifest = known | {"teacher": initial.content, "dtype": str(job.dtype), "vocab_size": vocab_size}
    folder = store / key_of(manifest)

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")

    by_rank_0(begin)
    return StoredTargets(dataset, folder, cfg.top_k), vocab_size


def _fitting(store: Path, known: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the one folder that fits. Raises ConfigError, which names the differences of the others."""
    there = manifests(store)
    fit = [(folder, m) for folder, m in there.items() if all(m.get(k) == v for k, v in known.items())]
    if len(fit) == 1:
        return fit[0]
    if fit:
        expected = f"the teacher to take, of the {len(fit)} whose files for these rows are in {store}"
        raise ConfigError(f"{KEY}.teacher", "", expected)
    others = [
        f"{folder.name} has another {', '.join(k for k, v in known.items() if m.get(k) != v)}"
        for folder, m in there.items()
    ]
    expected = "a folder with files for these rows, top_k, temperature and tokenizer, or the teacher to compute them"
    raise ConfigError(f"{KEY}.store", str(store), expected, "; ".join(others[:5]) or "Nothing is there.")


def _compute(teacher: Teacher, store: StoredTargets, missing: list[int]) -> None:
    """Compute files of targets. Each data-parallel rank takes every `layout.data`-th file."""
    layout = teacher.model.layout
    leads = (layout.tp_rank, layout.pgs.cp.rank(), layout.pp_rank) == (0, 0, 0)
    for turn in range(0, len(missing), layout.data):
        own_block = missing[turn + layout.dp_rank : turn + layout.dp_rank + 1]
        if not own_block:  # ranks that share experts call together
            teacher.add_targets(no_rows())
            continue
        batch = teacher.add_targets(collate_sft([store.dataset[row] for row in store.rows(own_block[0])], 0))
        on, targets = batch.loss_mask.bool(), batch.of(TeacherTargets)
        if leads:
            content = {"logprobs": targets.teacher[on], "ids": targets.teacher_ids[on].int()}
            save_whole(store.path(own_block[0]), content, {"key": store.folder.name})
