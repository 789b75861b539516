"""Reference logprobs of whole datasets, computed once before training and kept in the run folder: no second model
runs while the policy trains."""

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
ITEMS = 1024  # of all ranks, computed per pass over the data


def store_reference(job: Job, train: Answers | Mixture, held_out: Answers | None, collate: Collate) -> None:
    """Give each dataset the logprobs of its tokens by the model of `model.init`. They come from <run.dir>/reference,
    if they were computed for the same weights, tokens and dtype. Otherwise they are computed by a model that is freed
    afterwards, and written there. `collate` makes a batch of items. Collective."""
    parts = list(train.parts.values()) if isinstance(train, Mixture) else [train]
    datasets: dict[str, Answers] = {f"train-{i}": dataset_part for i, dataset_part in enumerate(parts)}
    datasets |= {"eval": held_out} if held_out is not None else {}
    reference = None
    for name, dataset in datasets.items():
        file, key = Path(job.cfg.run.dir) / "reference" / f"{name}.safetensors", _key(job, dataset)
        stored = _read(file, key) if job.env.rank == 0 else None
        known = torch.tensor(int(stored is not None), device=job.device)
        dist.broadcast(known, 0)
        if known:
            values = torch.zeros(dataset.tokens, device=job.device) if stored is None else stored.to(job.device)
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
    """Return a key that changes with all that the numbers depend on: weights, and the tokens after template and
    limits."""
    initial = job.initial
    digest = hashlib.sha256(repr((initial.content, initial.seed, shape_of(initial.config), str(job.dtype))).encode())
    digest.update(dataset.digest())
    return digest.hexdigest()


def _read(file: Path, key: str) -> Tensor | None:
    """Return the logprobs, None if there is no complete file of this key."""
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
    """Return float32 [dataset.tokens], 0 outside the answers, the same on all ranks."""
    layout, logprobs = reference.model.layout, torch.zeros(dataset.tokens)
    for first in range(0, len(dataset), ITEMS):
        items = range(first, min(first + ITEMS, len(dataset)))
        own_items = items[share(len(items), layout.data, layout.dp_rank)]
        if not own_items:  # ranks that share experts call together
            reference.logprobs(no_rows())
            continue
        batch = collate([dataset[i] for i in own_items], 0)
        each = reference.logprobs(batch, batch.loss_mask, dataset.rows) * batch.loss_mask
        inside = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
        logprobs[dataset.span(own_items[0], own_items[-1] + 1)] = each[inside]  # neighbouring items, row after row
    logprobs = logprobs.to(reference.model.device)
    dist.all_reduce(logprobs, group=layout.pgs.dp)
    return logprobs
