"""A model served by the ranks of a job: what one rank alone answers, at an address and with a key that are in files."""

from __future__ import annotations

import os
import signal
import stat
import threading
from pathlib import Path

import httpx
import pytest
import torch.distributed as dist

from aligner.config.freeze import load_frozen
from aligner.config.resolve import compose_over
from aligner.data.tokenizer import stop_token_ids
from aligner.engines.native.fleet import FleetEngine
from aligner.errors import ConfigError
from aligner.megatron.groups import neighbours
from aligner.tools.generate import Answerer
from aligner.types import SamplingParams
from tests.ranks import on_ranks

pytest.importorskip("uvicorn")

from aligner.tools import serve
from aligner.tools.serve_ranks import serve_together

PROMPTS = ["say a:", "say bbb:", "x", "say cc:", "say dddd:"]
LIMITS = [4, 4, 2, 4, 1]


def ask(folder: Path, answers: dict) -> None:
    """What a client in the job does; then a request to stop."""
    address, key = (folder / name for name in serve.FILES)
    try:
        answers["modes"] = [stat.S_IMODE(path.stat().st_mode) for path in (address, key)]
        url, header = f"http://{address.read_text().strip()}", {"Authorization": f"Bearer {key.read_text().strip()}"}
        with httpx.Client(base_url=url, trust_env=False, timeout=300) as client:
            bodies = [
                {"model": "sft", "prompt": prompt, "max_tokens": limit, "seed": 5, "temperature": 1.0}
                for prompt, limit in zip(PROMPTS, LIMITS, strict=True)
            ]
            threads, texts = [], [""] * len(bodies)

            def one(i: int) -> None:
                texts[i] = client.post("/v1/completions", json=bodies[i], headers=header).json()["choices"][0]["text"]

            threads = [threading.Thread(target=one, args=(i,)) for i in range(len(bodies))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            answers["texts"] = texts
            scored = {"model": "sft", "prompt": PROMPTS, "max_tokens": 0, "echo": True, "logprobs": 1}
            answers["scored"] = client.post("/v1/completions", json=scored, headers=header).json()["choices"]
            answers["refused"] = [
                client.get("/v1/models", headers=wrong).status_code
                for wrong in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {key.read_text().strip()}"})
            ]
            answers["in the path"] = client.get(f"/{key.read_text().strip()}/v1/models").status_code
            answers["too long"] = client.post("/v1/completions", json=bodies[0] | {"max_tokens": 999}, headers=header)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.multirank
@pytest.mark.parametrize("width", [1, 2])
@on_ranks(2)
def test_ranks_answer_as_one_alone(tiny_runs, tmp_path, width):
    """Two replicas, or one of two ranks, by one address."""
    folder, answers = tiny_runs["sft"], {}
    settings = [f"run.dir={tmp_path}", "engine.dtype=float32", f"engine.tensor_parallel={width}"]
    cfg = compose_over(load_frozen(folder), settings)
    if dist.get_rank() == 0:
        (tmp_path / "sft").symlink_to(folder / "hf")
    cfg.model.init = str(tmp_path / "sft")
    dist.barrier()
    how = {"kind": FleetEngine, "group": neighbours(width)}
    model = Answerer.load(folder / "hf", cfg.engine, **how)
    listener = serve.opened("", 0) if dist.get_rank() == 0 else None
    if listener is not None:
        client = threading.Timer(0.5, ask, (tmp_path, answers))
        client.start()
    serve_together(cfg, model, "", listener)
    if listener is None:
        return
    client.join()

    assert answers["refused"] == [401] * 3 and answers["in the path"] == 404 and answers["modes"] == [0o600] * 2
    assert answers["too long"].status_code == 400 and not any((tmp_path / name).exists() for name in serve.FILES)
    alone = Answerer.load(folder / "hf", cfg.engine)
    tokenizer = alone.tokenizer
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    for prompt, limit, text in zip(prompts, LIMITS, answers["texts"], strict=True):
        out = alone.engine.generate(
            [prompt], [[5]], SamplingParams(limit, 1.0, stop_token_ids=stop_token_ids(tokenizer))
        )
        assert text == tokenizer.decode(out.tokens[0, : int(out.lengths[0])].tolist(), skip_special_tokens=True)
    for choice, prompt in zip(answers["scored"], prompts, strict=True):
        own = serve.scored_tokens(alone.engine, [prompt], 1, 0)[0].logprobs
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize("key", ["short", "with a\ttab in its sixteen", "k\u00e9y" * 8])
def test_a_key_that_can_be_guessed_is_refused_unseen(key, monkeypatch):
    monkeypatch.setenv(serve.KEY, key)
    with pytest.raises(ConfigError, match="at least 16 printable ASCII characters") as caught:
        serve.read_key()
    assert key not in str(caught.value)
