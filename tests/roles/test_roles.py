"""Policy, critic and reward model against transformers, on several layouts."""

from dataclasses import replace

import pytest
import torch

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron.model import Head
from aligner.roles.model_init import shape_of
from tests.tiny import LLAMA, MODELS, MOE, MORE, WINDOWS, batch, relative, transformers_model, write_folder

pytestmark = pytest.mark.multirank

LAYOUTS = [
    (1, ParallelConfig()),
    (2, ParallelConfig(tensor=2)),
    (2, ParallelConfig(tensor=2, sequence=True)),
    (2, ParallelConfig(pipeline=2)),
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    model, raw = transformers_model(MODELS["qwen3"])
    return model, write_folder(model, raw, tmp_path_factory.mktemp("policy") / "hf")


@pytest.fixture(scope="module")
def scorers(tmp_path_factory):
    """outputs -> (transformers model, folder)"""
    made = {}
    for outputs in (1, 5):
        model, raw = transformers_model(LLAMA, "score", outputs)
        made[outputs] = model, write_folder(model, raw, tmp_path_factory.mktemp("score") / "hf")
    return made


@pytest.mark.parametrize("world, parallel", LAYOUTS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_log_softmax(ranks, policy, world, parallel, temperature):
    model, folder = policy
    rows = batch(MODELS["qwen3"])
    with torch.no_grad():
        logp = (model(rows.tokens).logits / temperature).log_softmax(-1)
    wanted = logp[:, :-1].gather(-1, rows.tokens[:, 1:, None])[..., 0]
    real = torch.arange(13)[None] < rows.lengths[:, None]
    job = {"folder": folder, "rows": rows, "parallel": parallel, "temperature": temperature, "budget": 30}
    for got in ranks.run("tests.roles.jobs:policy_logprobs", world=world, **job):
        assert got.shape == rows.tokens.shape and got.dtype == torch.float32
        assert (got[:, 0] == 0).all()
        assert (got[:, 1:] - wanted)[real[:, 1:]].abs().max() <= 1e-4


@pytest.mark.parametrize("world, parallel", LAYOUTS)
def test_values_are_of_the_state_before_the_token(ranks, scorers, world, parallel):
    model, folder = scorers[1]
    rows = batch(LLAMA)
    with torch.no_grad():
        hidden = model.model(rows.tokens).last_hidden_state
        heads = model.score(hidden)[..., 0]
    wanted = torch.zeros(rows.tokens.shape)
    wanted[:, 1:] = (heads[:, :-1] - 0.25) / 3.0
    real = torch.arange(13)[None] < rows.lengths[:, None]
    job = {"folder": folder, "rows": rows, "parallel": parallel, "bias": 0.25, "scale": 3.0}
    for got in ranks.run("tests.roles.jobs:critic_values", world=world, **job):
        assert (got[:, 0] == 0).all()
        assert (got - wanted)[real].abs().max() <= 1e-4


@pytest.mark.parametrize("world, parallel", LAYOUTS)
@pytest.mark.parametrize("outputs", [1, 5])
def test_scores_equal_sequence_classification(ranks, scorers, outputs, world, parallel):
    model, folder = scorers[outputs]
    rows = batch(LLAMA, width=4)  # more outputs than columns
    with torch.no_grad():
        wanted = model(rows.tokens).logits  # reads the last token that is not padding
    job = {"folder": folder, "rows": rows, "parallel": parallel, "outputs": outputs, "bias": -0.5, "scale": 4.0}
    for got in ranks.run("tests.roles.jobs:reward_scores", world=world, **job):
        assert got["raw"].shape == (8, outputs)
        assert (got["raw"] - wanted).abs().max() <= 1e-4
        assert torch.allclose(got["scores"], (wanted[:, 0] + 0.5) / 4, atol=1e-4)
        assert torch.allclose(got["mixed"], (wanted[:, -1] - 0.5) / 2 - wanted[:, 0] / 2, atol=1e-4)
        assert got["called"] == pytest.approx(got["scores"].tolist(), abs=1e-5) and got["none"] == []


ALL = [*LAYOUTS, (2, ParallelConfig()), (4, ParallelConfig(tensor=2))]


@pytest.mark.parametrize("world, parallel", ALL)
def test_the_first_update_sees_the_old_logprobs(ranks, world, parallel):
    for got in ranks.run("tests.roles.jobs:policy_update", world=world, cfg=MODELS["qwen2"], parallel=parallel):
        stats = got["stats"]
        assert got["moved"] and stats["gap"] <= 1e-5
        assert {"policy/loss", "policy/grad_norm", "policy/lr", "hits"} <= stats.keys()
        assert 0 <= stats["hits"] <= 1 and stats["policy/grad_norm"] > 0


@pytest.mark.parametrize(
    "world, parallel", [(1, ParallelConfig()), (2, ParallelConfig(tensor=2)), (2, ParallelConfig(context=2))]
)
def test_parts_of_a_trajectory_do_not_see_each_other_and_the_loss_sees_all_of_it(ranks, world, parallel):
    for got in ranks.run("tests.roles.jobs:forked_logprobs", world=world, cfg=MODELS["qwen2"], parallel=parallel):
        found = torch.cat([row[:n] for row, n in zip(got["rows"], got["lengths"], strict=True)])
        torch.testing.assert_close(found, got["pieces"], atol=2e-6, rtol=0)
        assert not got["rows"][0::2, 4].any()  # nothing is before it
    for got in ranks.run("tests.roles.jobs:policy_update", world, cfg=MODELS["qwen2"], parallel=parallel, forked=True):
        assert got["moved"] and got["stats"]["gap"] <= 1e-5
    for got in ranks.run("tests.roles.jobs:critic_update", world, cfg=LLAMA, parallel=parallel, forked=True):
        assert got["stats"][0]["gap"] <= 1e-5 and got["stats"][-1]["critic/loss"] < got["stats"][0]["critic/loss"]


@pytest.mark.parametrize("world, parallel", ALL)
def test_the_critic_learns(ranks, world, parallel):
    for got in ranks.run("tests.roles.jobs:critic_update", world=world, cfg=LLAMA, parallel=parallel):
        losses = [s["critic/loss"] for s in got["stats"]]
        assert got["stats"][0]["gap"] <= 1e-5
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("world, parallel", [(1, ParallelConfig()), (2, ParallelConfig())])
@pytest.mark.parametrize("bc", [BatchConfig(micro_batch_samples=1), BatchConfig(micro_batch_tokens=40)])
def test_pairs_stay_together_and_separate(ranks, world, parallel, bc):
    cfg = replace(LLAMA, tie_embeddings=False)  # a score head is never tied
    for got in ranks.run("tests.roles.jobs:reward_update", world=world, cfg=cfg, parallel=parallel, bc=bc):
        losses = [s["rm/loss"] for s in got["stats"]]
        assert losses[-1] < losses[0]


HEADS = {"policy": Head(), "critic": Head("score"), "reward model": Head("score", 2)}
WHOLE = replace(LLAMA, tie_embeddings=False)


@pytest.mark.few(5)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    "cfg, world, parallel, bc, skips_layer",
    [
        (WHOLE, 1, ParallelConfig(), BatchConfig(), True),
        (WHOLE, 1, ParallelConfig(), BatchConfig(share_prompts=False), True),
        (WHOLE, 1, ParallelConfig(), BatchConfig(packing=False), True),
        (replace(WHOLE, recompute="full"), 1, ParallelConfig(), BatchConfig(), True),
        (replace(WINDOWS["gemma3"], num_layers=3, tie_embeddings=False), 1, ParallelConfig(), BatchConfig(), True),
        (WHOLE, 2, ParallelConfig(tensor=2), BatchConfig(), True),
        (WHOLE, 2, ParallelConfig(pipeline=2), BatchConfig(micro_batch_samples=2), True),
        (WHOLE, 2, ParallelConfig(tensor=2, sequence=True), BatchConfig(), False),
        (WHOLE, 2, ParallelConfig(context=2), BatchConfig(), False),
        (replace(MOE, tie_embeddings=False), 1, ParallelConfig(), BatchConfig(), False),
    ],
    ids=["shared", "packed", "padded", "recompute", "windows", "tp2", "pp2", "sequence", "cp2", "experts"],
)
def test_leaving_out_what_nobody_reads_changes_nothing(ranks, head, cfg, world, parallel, bc, skips_layer):
    job = {"cfg": cfg, "parallel": parallel, "head": HEADS[head], "bc": bc}
    fewer, every = (ranks.run("tests.roles.jobs:read_or_all", world=world, **job, narrow=n) for n in (True, False))
    for a, b in zip(fewer, every, strict=True):
        assert relative(a["before"], b["before"]) <= 1e-5
        for name, wanted in b["weights"].items():
            assert relative(a["weights"][name], wanted) <= 1e-5, name
    assert (fewer[-1]["kept"] < 0.9 * every[-1]["kept"]) == skips_layer  # on the last stage
    if head == "policy":
        assert fewer[-1]["pairs"] < 0.95 * every[-1]["pairs"]  # rounded up, where shapes are compiled


def test_rows_of_any_length_are_a_choice_of_the_run():
    assert shape_of(replace(LLAMA, varlen_attention=True)) == shape_of(LLAMA)  # the identity of a checkpoint


def test_what_other_families_have_is_not_in_an_identity():
    """Or checkpoints from before there were those would not be resumed."""
    assert not shape_of(LLAMA).keys() & {"attention", "latent", "linear", "scales", "moe"}
    assert shape_of(MOE)["moe"].keys() == {"num_experts", "top_k", "ffn_hidden_size", "norm_topk_prob"}
    assert shape_of(MORE["qwen3_next"])["linear"]["key_heads"] == 4


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "head, cfg, world, parallel, bc",
    [
        ("policy", WHOLE, 1, ParallelConfig(), BatchConfig()),
        ("critic", WHOLE, 1, ParallelConfig(), BatchConfig(share_prompts=False)),
        ("reward model", WHOLE, 1, ParallelConfig(), BatchConfig(packing=False)),
        ("policy", replace(WHOLE, recompute="full"), 1, ParallelConfig(), BatchConfig()),
        ("policy", replace(WINDOWS["gemma3"], num_layers=3), 1, ParallelConfig(), BatchConfig()),
        ("policy", MODELS["qwen3"], 2, ParallelConfig(tensor=2, sequence=True), BatchConfig()),
        ("policy", WHOLE, 2, ParallelConfig(pipeline=2), BatchConfig(micro_batch_samples=2)),
        ("policy", WINDOWS["mistral"], 2, ParallelConfig(context=2), BatchConfig()),
        ("policy", WHOLE, 2, ParallelConfig(context=2, context_mode="alltoall"), BatchConfig()),
        ("policy", MOE, 1, ParallelConfig(), BatchConfig()),
    ],
    ids=["shared", "packed", "padded", "recompute", "windows", "sequence", "pp2", "cp2", "alltoall", "experts"],
)
def test_attention_of_rows_of_any_length_changes_nothing(ranks, head, cfg, world, parallel, bc):
    job = {"cfg": cfg, "parallel": parallel, "head": HEADS[head], "bc": bc}
    plain = ranks.run("tests.roles.jobs:read_or_all", world=world, **job, narrow=True)
    for a, b in zip(ranks.run("tests.roles.jobs:with_varlen", world=world, **job), plain, strict=True):
        assert a["calls"] >= cfg.num_layers / parallel.pipeline and a["kept"] == b["kept"]
        assert relative(a["before"], b["before"]) <= 1e-5
        for name, wanted in b["weights"].items():
            assert relative(a["weights"][name], wanted) <= 1e-5, name
