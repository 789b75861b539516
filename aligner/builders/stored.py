"""Reference logprobs of whole datasets, computed once before training and kept in the run folder: while the policy
trains there is no second model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aligner.builders.job import Job
from aligner.builders.models import make_reference
from aligner.data.answers import Answers
from aligner.data.mixture import Mixture
from aligner.models.safetensors_io import save_whole
from aligner.roles.batching import no_rows
from aligner.roles.model_init import shape_of
from aligner.roles.policy import Reference
from aligner.rollout.sharing import share
from aligner.types import TrainBatch

Collate = Callable[[Sequence, int], TrainBatch]
ITEMS = 1024  # of all ranks, computed between two looks at the data


def store_reference(job: Job, train: Answers | Mixture, held_out: Answers | None, collate: Collate) -> None:
    """Give each of their datasets the logprobs of its tokens by the model of `model.init`: from <run.dir>/reference, if
    they were computed for the same weights, tokens and dtype; else computed, with a model that is gone afterwards, and
    written there. `collate` makes a batch of items. Collective."""
    parts = list(train.parts.values()) if isinstance(train, Mixture) else [train]
    datasets: dict[str, Answers] = {f"train-{i}": part for i, part in enumerate(parts)}
    datasets |= {"eval": held_out} if held_out is not None else {}
    reference = None
    for name, dataset in datasets.items():
        file, key = Path(job.cfg.run.dir) / "reference" / f"{name}.safetensors", _key(job, dataset)
        found = _read(file, key) if job.env.rank == 0 else None
        known = torch.tensor(int(found is not None), device=job.device)
        dist.broadcast(known, 0)
        if known:
            values = torch.zeros(dataset.tokens, device=job.device) if found is None else found.to(job.device)
            dist.broadcast(values, 0)
        else:
            reference = reference or make_reference(job)
            values = _compute(reference, dataset, collate)
            if job.env.rank == 0:
                _write(file, key, values)
        job.say(f"{dataset.report.key}: reference logprobs {'read from' if known else 'written to'} {file}")
        dataset.reference = values.cpu().numpy()
    job.built.models.pop("reference", None)


def _key(job: Job, dataset: Answers) -> str:
    """Changes with whatever the numbers depend on: weights, and the tokens that template and limits left."""
    initial = job.initial
    digest = hashlib.sha256(repr((initial.content, initial.seed, shape_of(initial.config), str(job.dtype))).encode())
    digest.update(dataset.digest())
    return digest.hexdigest()


def _read(file: Path, key: str) -> Tensor | None:
    """None where there is no whole file of this key."""
    if not file.is_file():
        return None
    try:
        with safe_open(file, "pt") as content:
            return content.get_tensor("logprobs") if content.metadata() == {"key": key} else None
    except SafetensorError:
        return None


def _write(file: Path, key: str, values: Tensor) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_whole(file, {"logprobs": values.cpu()}, {"key": key})


def _compute(reference: Reference, dataset: Answers, collate: Collate) -> Tensor:
    """float32 [dataset.tokens], 0 outside the answers, the same on all ranks."""
    layout, found = reference.model.layout, torch.zeros(dataset.tokens)
    for first in range(0, len(dataset), ITEMS):
        items = range(first, min(first + ITEMS, len(dataset)))
        mine = items[share(len(items), layout.data, layout.dp_rank)]
        if not mine:  # ranks that share experts call together
            reference.logprobs(no_rows())
            continue
        batch = collate([dataset[i] for i in mine], 0)
        each = reference.logprobs(batch, batch.loss_mask, dataset.rows) * batch.loss_mask
        inside = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
        found[dataset.span(mine[0], mine[-1] + 1)] = each[inside]  # items next to each other, row after row
    found = found.to(reference.model.device)
    dist.all_reduce(found, group=layout.pgs.dp)
    return found
