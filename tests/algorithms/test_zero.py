"""`mismatch.expect=zero`: engine and trainer compute the same bits, whatever rows are beside a token; and a difference
is named by sample, token and layer."""

import re
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from aligner.config.sections.model.moe import MoeConfig
from aligner.engines.native.heads import PlainHeads
from aligner.errors import ConfigError, MismatchError
from tests import stages
from tests.run import jobs
from tests.tiny import LLAMA

ZERO = ["mismatch.expect=zero", "run.steps=2", "run.export=false"]
QWEN3 = ["model.family=qwen3", "model.qk_norm=true", "sampling.max_response_tokens=10", "engine.max_batch=5"]
QWEN3 += ["engine.draft_tokens=2", "batch.micro_batch_tokens=64"]
EXPERTS = replace(LLAMA, family="mixtral", moe=MoeConfig(4, 2, 48))
# bits that these leave equal: other shapes of the products of both sides
RUNS = {
    "llama, few pages": ["engine.page_tokens=4", "engine.kv_cache_bytes=11264", "sampling.max_response_tokens=8"],
    "mistral, padded": [
        *("model.family=mistral", "model.attention.window=5", "batch.packing=false", "batch.micro_batch_samples=4"),
        *("batch.minibatch_samples=16", "batch.epochs=2", "sampling.temperature=0.7", "sampling.top_p=0.9"),
    ],
    "qwen2, odd widths": [
        *("model.family=qwen2", "model.qkv_bias=true", "model.hidden_size=36", "model.ffn_hidden_size=50"),
        *("model.head_dim=12", "batch.share_prompts=false", "batch.micro_batch_samples=1", "batch.prompts=2"),
    ],
    "qwen3_moe, packed": [
        *("model.family=qwen3_moe", "model.qk_norm=true", "model.moe.num_experts=4", "model.moe.top_k=2"),
        *("model.moe.ffn_hidden_size=40", "batch.micro_batch_tokens=64", "engine.max_batch=5"),
    ],
    "mixtral, bfloat16": [
        *("model.family=mixtral", "model.moe.num_experts=5", "model.moe.top_k=3", "model.moe.ffn_hidden_size=24"),
        *("model.dtype=bfloat16", "batch.minibatch_samples=16", "batch.packing=false", "batch.micro_batch_samples=4"),
    ],
    "llama, bfloat16": ["model.dtype=bfloat16", "batch.prompts=4", "batch.group=2"],
}


@pytest.mark.parametrize("name", RUNS)
def test_engine_and_trainer_compute_the_same_bits(name, tiny_data, tmp_path):
    folder = stages.stage("grpo", tiny_data, tmp_path / "run", *ZERO, "checkpoint.final=false", *RUNS[name])
    for record in stages.records(folder):
        assert record["mismatch/logprob_abs_max"] == 0.0, record
        assert record["response/tokens_mean"] > 1


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize(
    "own", [["parallel.pipeline=2", "model.dtype=bfloat16", "batch.micro_batch_samples=4"], ["batch.prompts=6"]],
    ids=["pipeline", "data"],
)  # fmt: skip
def test_so_do_two_ranks(own, ranks, tiny_data, tmp_path):
    arguments = stages.overrides("grpo", tiny_data, tmp_path / "run", *ZERO, "checkpoint.final=false", *own)
    assert ranks.run(jobs.run_stage, world=2, arguments=arguments) == [0, 0]
    assert [record["mismatch/logprob_abs_max"] for record in stages.records(tmp_path / "run")] == [0.0, 0.0]


def test_so_do_trajectories_with_tools(tmp_path):
    data = stages.make_dice(tmp_path / "data")
    own = [f"model.init={data / 'sft'}", "environment.path=tests/assets/environments.py:Clock", "reward.functions=[]"]
    own += ["environment.max_turns=3", "environment.max_tokens=40", "sampling.max_response_tokens=6", "batch.prompts=2"]
    own += ["batch.group=4", "environment.workers=1"]
    folder = stages.stage("grpo", data, tmp_path / "run", *ZERO, "checkpoint.final=false", *own)
    for record in stages.records(folder):
        assert record["mismatch/logprob_abs_max"] == 0.0 and record["environment/turns_mean"] > 1


def test_so_does_ppo(tiny_data, tiny_runs, tmp_path):
    own = [*ZERO, "checkpoint.final=false", f"model.init={tiny_runs['sft']}", f"reward.model={tiny_runs['rm']}"]
    folder = stages.stage("ppo", tiny_data, tmp_path / "run", *own)
    assert [record["mismatch/logprob_abs_max"] for record in stages.records(folder)] == [0.0, 0.0]


def test_a_run_with_equal_bits_resumes_as_if_it_had_not_stopped(tiny_data, tmp_path):
    whole, parts = (tmp_path / name for name in ("whole", "parts"))
    stages.stage("grpo", tiny_data, whole, *ZERO, *QWEN3)
    for steps in (1, 2):
        stages.stage("grpo", tiny_data, parts, *ZERO, *QWEN3, f"run.steps={steps}")
    assert stages.same_weights(whole, parts)
    assert all(record["mismatch/logprob_abs_max"] == 0.0 for record in stages.records(parts))


@pytest.mark.parametrize("layer", [0, 1])
def test_the_first_difference_is_named(layer, tiny_data, tmp_path):
    """A decode step adds a millionth to one head in one layer, where it reads the token at position 7."""
    plain = PlainHeads.decode

    def decode(self, at, y, step):
        out = plain(self, at, y, step)
        return out + 1e-6 * (step.positions == 7)[:, None] * (at == layer) * torch.eye(out.shape[1])[0]

    with patch.object(PlainHeads, "decode", decode), pytest.raises(MismatchError) as caught:
        stages.stage("grpo", tiny_data, tmp_path / "run", *ZERO, "checkpoint.final=false")
    text = str(caught.value)
    token = int(re.search(r"first prompt slot \d+, sample \d+ \(rank 0\), token (\d+) ", text)[1])
    assert "mismatch.expect=zero" in text
    assert token >= 8, text  # it is predicted from position 7 on
    assert f"output of layer {layer} (of 0 to 1), at token 7" in text, text


@pytest.mark.parametrize(
    "model, expected",
    [(LLAMA, "own on a GPU without TransformerEngine"), (EXPERTS, "own on a GPU for a model with experts")],
    ids=["dense", "experts"],
)
def test_on_a_gpu_it_is_refused_where_it_cannot_work(model, expected):
    from aligner.megatron.invariant import use_invariant_products

    with pytest.raises(ConfigError, match=rf"model\.kernels='invariant': expected {expected}"):
        use_invariant_products(model, torch.device("cuda"))
