"""A reward model over HTTP, asked by reward `http`: the loop is closed."""

from __future__ import annotations

import threading

import httpx
import pytest

from aligner.builders.models import make_reward_model
from aligner.config.freeze import load_frozen
from aligner.config.resolve import compose_over
from aligner.megatron.groups import leave_distributed
from aligner.rewards.http import Http
from aligner.tools.serve_rm import scorer, server
from aligner.types import Prompt, Sample
from tests import stages


@pytest.mark.slow
def test_scores_over_http_are_those_of_the_model(tiny_runs, monkeypatch):
    monkeypatch.chdir(stages.ROOT)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    job, answer = scorer(compose_over(load_frozen(tiny_runs["rm"]), [f"run.dir={tiny_runs['rm']}"]))
    try:
        encode = lambda text: tuple(job.tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
        end = (job.tokenizer.eos_token_id,)
        samples = [
            Sample(Prompt(i, encode("say a:"), "say a:"), 0, text, encode(text) + end, True)
            for i, text in enumerate(("a", "b", "aa", ""))
        ]
        with server(answer, "127.0.0.1", 0) as serving:
            threading.Thread(target=serving.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{serving.server_address[1]}/get_reward"
            found = Http(url, timeout_s=300, deadline_s=300)(samples)
            bad = [
                httpx.post(url, content=text, timeout=300)
                for text in (b"{", b"[]", b'{"query": []}', b'{"query": ["a"]')
            ]
            long = httpx.post(url, json={"query": ["a " * 100_000]}, timeout=300)
            uneven = httpx.post(url, json={"query": ["a"], "prompts": ["a", "b"]}, timeout=300)
            serving.shutdown()
        assert found == pytest.approx(make_reward_model(job)(samples), abs=1e-6)
        assert len(set(found)) > 1
        assert all(reply.status_code == 400 and reply.json()["error"] for reply in [*bad, long, uneven])
        assert "model.max_position" in long.json()["error"] and "one for each query" in uneven.json()["error"]
    finally:
        leave_distributed()
