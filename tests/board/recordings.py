"""Recorded rollouts and samples of runs that nobody has trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>&amp;</pre>"


def run_folder(folder: Path, rows: int = 0) -> Path:
    """With rows of samples.jsonl: step i has reward i % 5 and prompt `question i % 3`."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("stage: {name: grpo}\nmodel: {tokenizer: '', init: random}\n")
    if rows:
        write_rows(folder, range(rows))
    return folder


def write_rows(folder: Path, steps) -> None:
    with (folder / "samples.jsonl").open("a") as file:
        for i in steps:
            row = {"step": i, "prompt": f"question {i % 3}", "response": f"{HOSTILE} {i}", "reward": i % 5}
            file.write(
                json.dumps(row | {"advantage": 0.5, "finished": True, "scores": {"a": 1.0}, "columns": {}}) + "\n"
            )


TEXT = "abc<x> "  # a prompt of three letters, and what stands behind it
PROMPTS, GROUP = 3, 2


def record(folder: Path, step: int, ids: Sequence[int] = tuple(TEXT.encode())) -> dict[str, np.ndarray]:
    """A rollout of rows that are all `TEXT`, a token a letter, of whose answers the third was given to the policy.
    Returns the columns."""
    n = PROMPTS * GROUP
    draw = np.random.default_rng(step)
    tokens = np.tile(np.array(ids, np.int32), (n, 1))
    mask = np.tile(np.array([0, 0, 0, 1, 1, 0, 1], np.float32), (n, 1))
    columns = {
        "tokens": tokens,
        "response_mask": mask,
        "lengths": np.full(n, 7),
        "group": np.repeat(np.arange(PROMPTS), GROUP),
        "sample_index": np.tile(np.arange(GROUP), PROMPTS),
        "finished": np.ones(n, bool),
        "scores/total": np.arange(n, dtype=np.float64),
        "scores/components/math": np.where(np.arange(n) == 1, np.nan, 1.0),
        "valid": np.ones(n, bool),
        "rollout_logprobs": draw.normal(size=(n, 7)).astype(np.float32),
    }
    for name in ("old_logprobs", "ref_logprobs", "advantages"):
        columns[f"trained/{name}"] = draw.normal(size=(n, 7)).astype(np.float32)
    header = {"format": "aligner-rollout", "version": 1, "step": step, "weight_version": step, "origin": {}}
    header |= {"slots": list(range(PROMPTS)), "responses": [f"{HOSTILE} {i}" for i in range(n)]}
    header["prompts"] = [{"id": 10 + i, "text": f"question {i} {HOSTILE}"} for i in range(PROMPTS)]
    (folder / "rollouts").mkdir(exist_ok=True)
    path = folder / "rollouts" / f"step-{step:08d}.safetensors"
    save_file(columns, str(path), {"header": json.dumps(header)})
    return columns
