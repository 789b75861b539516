"""Policy, critic and reward model against transformers, on several layouts."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron.model import Head
from aligner.roles.critic import Critic
from aligner.roles.model_init import shape_of
from aligner.roles.policy import Policy, Reference
from aligner.roles.reward_model import AttributeWeight, RewardModel
from aligner.types import LabelTargets, LossOutput, PolicyTargets, Prompt, Sample, TrainBatch, ValueTargets
from tests import linear_stand_in, varlen_stand_in
from tests.megatron.models import build, from_folder, same, shares, weights
from tests.ranks import on_ranks
from tests.tiny import ADAM, LLAMA, MODELS, MOE, MORE, SGD, WINDOWS, batch, relative, transformers_model, write_folder

pytestmark = pytest.mark.multirank

LAYOUTS = [
    (1, ParallelConfig()),
    (2, ParallelConfig(tensor=2)),
    (2, ParallelConfig(tensor=2, sequence=True)),
    (2, ParallelConfig(pipeline=2)),
]


def policy_update(cfg: ModelConfig, parallel: ParallelConfig, forked: bool = False) -> dict:
    """A loss sees inside `update` what `logprobs` says before; its metrics."""
    model = build(cfg, parallel, ADAM)
    full = in_forks(batch(cfg)) if forked else batch(cfg)
    policy = Policy(model, BatchConfig(micro_batch_tokens=40), temperature=0.7, hits=True)
    full = full.with_payloads(
        PolicyTargets(torch.zeros_like(full.loss_mask), policy.logprobs(full), row_keys=torch.arange(len(full.tokens)))
    )
    own, before = shares(model, full), weights(model)

    def loss(out, b):
        real = b.loss_mask
        gap = ((out.logprobs - b.of(PolicyTargets).old_logprobs).abs() * real).max()
        assert (
            b.forks is None or len(b.of(PolicyTargets).row_keys) == len(b.tokens) <= 4
        )  # rows as they are, whatever the model was given
        assert out.entropy.shape == out.hits.shape == out.logprobs.shape == b.tokens.shape
        value = -(out.logprobs * b.loss_mask).sum() / full.loss_mask.sum()
        return LossOutput(value, {"hits": ((out.hits * real).sum(), real.sum())}, {"gap": gap.detach()})

    stats = policy.update(own, loss)
    assert not same(before, weights(model)) and stats["gap"] <= 1e-5
    return stats


def in_forks(rows: TrainBatch) -> TrainBatch:
    """Every second row, and the first, is of a part up to column 4 and another."""
    forks = (torch.arange(rows.tokens.shape[1]) >= 4) & (torch.arange(len(rows.tokens))[:, None] % 2 == 0)
    mask = rows.loss_mask.clone()
    mask[0::2, 4] = 0
    return replace(rows, forks=forks.long(), loss_mask=mask)


def critic_update(cfg: ModelConfig, parallel: ParallelConfig, forked: bool = False) -> None:
    model = build(cfg, parallel, ADAM, Head("score"))
    full = in_forks(batch(cfg)) if forked else batch(cfg)
    critic = Critic(model, BatchConfig(micro_batch_samples=2), bias=0.3, scale=2.0)
    values = critic.values(full)
    full = full.with_payloads(ValueTargets(values, values))
    own = shares(model, full)

    def loss(values, b):
        mask = b.loss_mask
        assert b.forks is None or len(b.of(ValueTargets).values) == len(b.tokens) <= 2  # rows as they are
        value = ((values - 1.0).square() * mask).sum() / full.loss_mask.sum()
        return LossOutput(value, {}, {"gap": ((values - b.of(ValueTargets).values).abs() * mask).max().detach()})

    first, *_, last = (critic.update(own, loss) for _ in range(3))
    assert first["gap"] <= 1e-5 and last["critic/loss"] < first["critic/loss"]


def read_or_all(cfg: ModelConfig, parallel: ParallelConfig, head: Head, bc: BatchConfig, narrow: bool = True) -> dict:
    """An update that reads responses only (a score head of one output: values; of two: last tokens), and logprobs or
    values before it, with what nobody reads left out or (`narrow` false) computed."""
    model = build(cfg, parallel, SGD, head, packed=bc.packing, share=bc.share_prompts)
    packings, make = [], model._pack

    def pack(b: TrainBatch):
        packings.append(make(b if narrow else replace(b, wanted=None)))
        return packings[-1]

    model._pack = pack
    full = batch(cfg, width=40)
    full.tokens[:, :12] = full.tokens[0, :12]  # a prompt
    full.lengths.clamp_(min=13)
    full.loss_mask = ((torch.arange(40) >= 12) & (torch.arange(40) < full.lengths[:, None])).float()
    full.tokens.clamp_(min=1)
    own = shares(model, full)
    if head.kind == "lm":
        role = Policy(model, bc)
        before = role.logprobs(full, full.loss_mask) * full.loss_mask
        role.update(own, lambda out, b: LossOutput(-(out.logprobs * b.loss_mask).sum() / full.loss_mask.sum()))
    elif head.outputs == 1:
        role = Critic(model, bc)
        before = role.values(full, full.loss_mask) * full.loss_mask
        total = full.loss_mask.sum()
        role.update(own, lambda v, b: LossOutput(0.01 * ((v - 1).square() * b.loss_mask).sum() / total))
    else:
        role = RewardModel(model, bc)
        before = role.raw_scores(full)
        role.update(own, lambda s, b: LossOutput(0.01 * (s - 1).square().sum() / len(full.lengths)), unit=1)
    kept = sum(p.tokens if p.final is None else len(p.final.kept) for p in packings)
    pairs = sum(len(p.targets) for p in packings)
    return {"before": before, "weights": weights(model), "kept": kept, "pairs": pairs}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    model, raw = transformers_model(MODELS["qwen3"])
    return model, write_folder(model, raw, tmp_path_factory.mktemp("policy") / "hf")


@pytest.fixture(scope="module")
def scorers(tmp_path_factory):
    """By number of outputs: (transformers model, folder)."""
    made = {}
    for outputs in (1, 5):
        model, raw = transformers_model(LLAMA, "score", outputs)
        made[outputs] = model, write_folder(model, raw, tmp_path_factory.mktemp("score") / "hf")
    return made


@pytest.mark.parametrize("world, parallel", LAYOUTS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@on_ranks()
def test_logprobs_equal_log_softmax(policy, world, parallel, temperature):
    model, folder = policy
    rows = batch(MODELS["qwen3"])
    with torch.no_grad():
        logp = (model(rows.tokens).logits / temperature).log_softmax(-1)
    wanted = logp[:, :-1].gather(-1, rows.tokens[:, 1:, None])[..., 0]
    real = torch.arange(13)[None] < rows.lengths[:, None]
    got = Reference(from_folder(folder, parallel), BatchConfig(logprob_tokens=30), temperature).logprobs(rows)
    assert got.shape == rows.tokens.shape and got.dtype == torch.float32
    assert (got[:, 0] == 0).all()
    assert (got[:, 1:] - wanted)[real[:, 1:]].abs().max() <= 1e-4


@pytest.mark.parametrize("world, parallel", LAYOUTS)
@on_ranks()
def test_values_are_of_the_state_before_the_token(scorers, world, parallel):
    model, folder = scorers[1]
    rows = batch(LLAMA)
    with torch.no_grad():
        hidden = model.model(rows.tokens).last_hidden_state
        heads = model.score(hidden)[..., 0]
    wanted = torch.zeros(rows.tokens.shape)
    wanted[:, 1:] = (heads[:, :-1] - 0.25) / 3.0
    real = torch.arange(13)[None] < rows.lengths[:, None]
    critic = Critic(from_folder(folder, parallel, Head("score")), BatchConfig(logprob_tokens=30), bias=0.25, scale=3.0)
    got = critic.values(rows)
    assert (got[:, 0] == 0).all()
    assert (got - wanted)[real].abs().max() <= 1e-4


@pytest.mark.parametrize("world, parallel", LAYOUTS)
@pytest.mark.parametrize("outputs", [1, 5])
@on_ranks()
def test_scores_equal_sequence_classification(scorers, outputs, world, parallel):
    model, folder = scorers[outputs]
    rows = batch(LLAMA, width=4)  # more outputs than columns
    with torch.no_grad():
        wanted = model(rows.tokens).logits  # reads the last token that is not padding
    role = RewardModel(from_folder(folder, parallel, Head("score", outputs)), BatchConfig(logprob_tokens=40), -0.5, 4.0)
    raw, scores = role.raw_scores(rows), role.scores(rows)
    assert raw.shape == (8, outputs) and (raw - wanted).abs().max() <= 1e-4
    assert torch.allclose(scores, (wanted[:, 0] + 0.5) / 4, atol=1e-4)
    mixed = replace(role, mix=(AttributeWeight(outputs - 1, 2.0, 0.5, 4.0), AttributeWeight(0, -1.0, 0.0, 2.0)))
    assert torch.allclose(mixed.scores(rows), (wanted[:, -1] - 0.5) / 2 - wanted[:, 0] / 2, atol=1e-4)
    samples = [
        Sample(Prompt(id=i, tokens=tuple(row[:2]), text=""), 0, "", tuple(row[2:length]), finished=True)
        for i, (row, length) in enumerate(zip(rows.tokens.tolist(), rows.lengths.tolist(), strict=True))
    ]
    assert role(samples) == pytest.approx(scores.tolist(), abs=1e-5) and role([]) == []


ALL = [*LAYOUTS, (2, ParallelConfig()), (4, ParallelConfig(tensor=2))]


@pytest.mark.parametrize("world, parallel", ALL)
@on_ranks()
def test_the_first_update_sees_the_old_logprobs(world, parallel):
    stats = policy_update(MODELS["qwen2"], parallel)
    assert {"policy/loss", "policy/grad_norm", "policy/lr", "hits"} <= stats.keys()
    assert 0 <= stats["hits"] <= 1 and stats["policy/grad_norm"] > 0


@pytest.mark.parametrize(
    "world, parallel", [(1, ParallelConfig()), (2, ParallelConfig(tensor=2)), (2, ParallelConfig(context=2))]
)
@on_ranks()
def test_parts_of_a_trajectory_do_not_see_each_other_and_the_loss_sees_all_of_it(world, parallel):
    policy = Policy(build(MODELS["qwen2"], parallel), BatchConfig())
    rows = in_forks(batch(MODELS["qwen2"]))
    pieces = []
    for tokens, forks, length in zip(rows.tokens, rows.forks, rows.lengths.tolist(), strict=True):
        for fork in forks[:length].unique():
            piece = tokens[:length][forks[:length] == fork]
            alone = TrainBatch(piece[None], torch.tensor([len(piece)]), torch.ones(1, len(piece)))
            pieces.append(policy.logprobs(alone)[0])
    got = policy.logprobs(rows)
    actual = torch.cat([row[:n] for row, n in zip(got, rows.lengths, strict=True)])
    torch.testing.assert_close(actual, torch.cat(pieces), atol=2e-6, rtol=1e-6)  # CPUs add in different orders
    assert not got[0::2, 4].any()  # nothing is before it
    policy_update(MODELS["qwen2"], parallel, forked=True)
    critic_update(LLAMA, parallel, forked=True)


@pytest.mark.parametrize("world, parallel", ALL)
@on_ranks()
def test_the_critic_learns(world, parallel):
    critic_update(LLAMA, parallel)


@pytest.mark.parametrize("world, parallel", [(1, ParallelConfig()), (2, ParallelConfig())])
@pytest.mark.parametrize("bc", [BatchConfig(micro_batch_samples=1), BatchConfig(micro_batch_tokens=40)])
@on_ranks()
def test_pairs_stay_together_and_separate(world, parallel, bc):
    """Rows 2i (chosen) and 2i + 1 (rejected) come together."""
    cfg = replace(LLAMA, tie_embeddings=False)  # a score head is never tied
    model, full = build(cfg, parallel, ADAM, Head("score")), batch(cfg)
    full = full.with_payloads(LabelTargets(torch.arange(len(full.lengths)).float()))
    rows = torch.arange(len(full.lengths)).view(model.layout.data, -1)[model.layout.dp_rank]

    def loss(scores, b):
        chosen, rejected = b.of(LabelTargets).labels[0::2], b.of(LabelTargets).labels[1::2]
        assert torch.equal(rejected, chosen + 1) and (chosen % 2 == 0).all()
        margins = scores[0::2, 0] - scores[1::2, 0]
        return LossOutput(-torch.nn.functional.logsigmoid(margins).sum() / (len(full.lengths) // 2))

    role = RewardModel(model, bc)
    losses = [role.update(full.select(rows), loss, unit=2)["rm/loss"] for _ in range(4)]
    assert losses[-1] < losses[0]


HEADS = {"policy": Head(), "critic": Head("score"), "reward model": Head("score", 2)}
WHOLE = replace(LLAMA, tie_embeddings=False)
LINEAR = MORE["qwen3_next"]


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
        (replace(MORE["gemma4-inputs"], tie_embeddings=False), 1, ParallelConfig(), BatchConfig(), True),
        (WHOLE, 2, ParallelConfig(tensor=2), BatchConfig(), True),
        (WHOLE, 2, ParallelConfig(pipeline=2), BatchConfig(micro_batch_samples=2), True),
        (WHOLE, 2, ParallelConfig(tensor=2, sequence=True), BatchConfig(), False),
        (WHOLE, 2, ParallelConfig(context=2), BatchConfig(), False),
        (replace(MOE, tie_embeddings=False), 1, ParallelConfig(), BatchConfig(), False),
    ],
    ids=["shared", "packed", "padded", "recompute", "windows", "inputs", "tp2", "pp2", "sequence", "cp2", "experts"],
)
@on_ranks()
def test_leaving_out_what_nobody_reads_changes_nothing(head, cfg, world, parallel, bc, skips_layer):
    fewer, every = (read_or_all(cfg, parallel, HEADS[head], bc, narrow=narrow) for narrow in (True, False))
    equal(fewer, every)
    if dist.get_rank() == world - 1:  # on the last stage
        assert (fewer["kept"] < 0.9 * every["kept"]) == skips_layer
        if head == "policy":
            assert fewer["pairs"] < 0.95 * every["pairs"]  # rounded up, where shapes are compiled


def equal(a: dict, b: dict) -> None:
    assert relative(a["before"], b["before"]) <= 1e-5
    for name, wanted in b["weights"].items():
        assert relative(a["weights"][name], wanted) <= 1e-5, name


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
        ("policy", LINEAR, 1, ParallelConfig(), BatchConfig()),
        ("policy", LINEAR, 2, ParallelConfig(context=2), BatchConfig()),
        ("policy", LINEAR, 2, ParallelConfig(context=2, context_mode="alltoall"), BatchConfig()),
        ("policy", MORE["nemotron_h"], 1, ParallelConfig(), BatchConfig()),
    ],
    ids=[
        "shared",
        "packed",
        "padded",
        "recompute",
        "windows",
        "sequence",
        "pp2",
        "cp2",
        "alltoall",
        "experts",
        "linear",
        "linear cp2",
        "linear alltoall",
        "mamba2",
    ],
)
@on_ranks()
def test_attention_of_rows_of_any_length_changes_nothing(head, cfg, world, parallel, bc):
    """By `model.varlen_attention`, on its stand-in; likewise linear attention."""
    plain = read_or_all(cfg, parallel, HEADS[head], bc)
    with varlen_stand_in.in_place() as calls, linear_stand_in.in_place() as linear_calls:
        got = read_or_all(replace(cfg, varlen_attention=True), parallel, HEADS[head], bc)
    if cfg.linear.key_heads:
        rule = "chunk_simple_gla" if cfg.traits.mamba else "chunk_gated_delta_rule"
        assert set(linear_calls) == {f"{rule} packed", "causal_conv1d packed"}
    assert len(calls) >= len(cfg.layers_of("attention")) / parallel.pipeline and got["kept"] == plain["kept"]
    equal(got, plain)
