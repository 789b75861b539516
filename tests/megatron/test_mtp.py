"""The layer for multi-token prediction against an independent formula: transformers' own decoder layer behind the
model's last, in float64, with the paper's equations 21 to 25 written out."""

from dataclasses import replace

import pytest
import torch

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import with_ahead
from aligner.config.sections.model.mtp import MtpConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import AlignerError
from aligner.families.hf_config import hf_config
from aligner.families.table import parameters
from aligner.megatron.train import ShardedModel
from aligner.models.folder_check import check_folder
from aligner.models.params import from_hf
from aligner.models.safetensors_io import open_hf, write_hf
from aligner.roles.batching import micro_batches
from tests.megatron.models import (
    agreed,
    build,
    equal_shares,
    load_and_step,
    nll_loss,
    same,
    save_and_go_on,
    weights,
)
from tests.ranks import on_ranks
from tests.tiny import ADAM, GLM, MORE, SGD, batch, hf_weights, relative, transformers_model

pytestmark = pytest.mark.multirank
LOSS = 0.3


NAMES = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
# as vLLM's `Qwen3_5MultiTokenPredictor` has them: (fc [norm(embedding); norm(hidden)]), a layer with attention, norm
APART = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}


def rms(x, weight, eps):
    return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


class Oracle(torch.nn.Module):
    """transformers' model of one layer more, whose last layer is the one for multi-token prediction."""

    def __init__(self, cfg):
        super().__init__()
        whole, self.raw = transformers_model(with_ahead(cfg))
        self.apart = cfg.family.startswith("qwen3_5")
        whole.set_experts_implementation("eager")  # others have no float64
        self.whole, self.cfg, g = whole.double(), cfg, torch.Generator().manual_seed(5)
        size, eps = cfg.hidden_size, cfg.norm_eps
        noise = lambda *shape: torch.nn.Parameter(0.2 * torch.randn(*shape, generator=g).double())  # noqa: E731
        self.own = torch.nn.ParameterDict({"eh_proj": noise(size, 2 * size)})
        self.middle = 0 if self.apart else 1  # of norms' weights
        self.own |= {n: torch.nn.Parameter(self.middle + noise(size).data) for n in ("enorm", "hnorm", "norm")}
        self.eps = eps
        self.raw = hf_config(replace(cfg, mtp=MtpConfig(1)), bos_token_id=None, eos_token_id=None, pad_token_id=0)

    def tensors(self):
        """By their names in files, with the copies of embedding and output matrix that published folders have."""
        body, at = hf_weights(self.whole), f"model.layers.{self.cfg.num_layers}."
        if self.apart:
            own = {f"mtp.{APART[n]}.weight": t.detach().clone() for n, t in self.own.items()}
            return {n.replace(at, "mtp.layers.0."): t.float() for n, t in (body | own).items()}
        body |= {f"{at}{NAMES[n]}.weight": t.detach().clone() for n, t in self.own.items()}
        body[f"{at}embed_tokens.weight"] = body["model.embed_tokens.weight"].clone()
        body[f"{at}shared_head.head.weight"] = body.get("lm_head.weight", body["model.embed_tokens.weight"]).clone()
        return {name: t.float() for name, t in body.items()}

    def through(self, layers, h):
        width = h.shape[1]
        position = torch.arange(width)[None]
        seen = torch.full((width, width), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        around = {"attention_mask": seen, "position_ids": position}
        around["position_embeddings"] = self.whole.model.rotary_emb(h, position)
        for layer in layers:
            plain = {"attention_mask": None} if hasattr(layer, "linear_attn") else {}
            h = layer(h, **around | plain)
        return h

    def hidden(self, tokens):
        model = self.whole.model
        return model.norm(self.through(model.layers[:-1], model.embed_tokens(tokens)))

    def normed(self, name, x):
        return rms(x, 1 - self.middle + self.own[name], self.eps)

    def layer_ahead(self, h, e):
        """What the layer makes of hidden states and of the embeddings of the tokens that follow, before its last
        norm."""
        both = torch.cat([self.normed("enorm", e), self.normed("hnorm", h)], 2)
        return self.through(self.whole.model.layers[-1:], both @ self.own["eh_proj"].T)

    def ahead(self, h, e):
        return self.normed("norm", self.layer_ahead(h, e))

    def losses(self, rows, detach):
        """The stage's loss, the layer's, and the share of tokens that it would guess."""
        model, tokens = self.whole.model, rows.tokens
        h, head = self.hidden(tokens), self.whole.get_output_embeddings().weight
        first = torch.log_softmax(h[:, :-1] @ head.T, -1).gather(2, tokens[:, 1:, None])[..., 0]
        e = model.embed_tokens(tokens[:, 1:])
        h, e, head = (x.detach() if detach else x for x in (h, e, head))
        x = self.ahead(h[:, :-1], e)
        guesses = torch.log_softmax(x[:, :-1] @ head.T, -1)
        second, mask = guesses.gather(2, tokens[:, 2:, None])[..., 0], rows.loss_mask[:, 2:]
        hits = ((guesses.argmax(-1) == tokens[:, 2:]) * mask).sum() / mask.sum()
        plain = -(first * rows.loss_mask[:, 1:]).sum() / rows.loss_mask.sum()
        return plain, -(second * mask).sum() / mask.sum(), hits


def from_files(folder, cfg, **options) -> ShardedModel:
    tensors = open_hf(folder, ahead=True)
    check_folder(tensors, cfg)
    return build(cfg, source=lambda spec: from_hf(spec, tensors, cfg), **options)


def step(folder, cfg, rows, optim=SGD):
    model = from_files(folder, cfg, optim=optim)
    before, parts = weights(model), micro_batches(rows, BatchConfig(micro_batch_samples=3))
    metrics = model.step(parts, nll_loss(model, rows))
    assert parameters(cfg) == sum(p.numel() for p in model.module.parameters())
    return before, metrics, weights(model)


@pytest.mark.few(2)
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "qwen3_5", "qwen3_5_moe"])
def test_loss_and_gradients_are_the_papers(ranks, tmp_path, name, detach):
    cfg = MORE[name]
    oracle, rows = Oracle(cfg), batch(cfg)
    write_hf(tmp_path / "hf", oracle.tensors().items(), oracle.raw)
    plain, loss, hits = oracle.losses(rows, detach)
    (plain + LOSS * loss).backward()
    shape = replace(cfg, mtp=MtpConfig(1, LOSS, detach))
    before, metrics, after = ranks.run(step, folder=str(tmp_path / "hf"), cfg=shape, rows=rows)[0]
    assert metrics["nll"] == pytest.approx(plain.item(), rel=1e-5)
    assert metrics["mtp/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["mtp/acceptance"] == pytest.approx(hits.item(), abs=1e-6)
    for parameter in oracle.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    gradients = {n: t for n, t in oracle.tensors().items() if n in before and "correction_bias" not in n}
    assert gradients.keys() == {n for n in before if "correction_bias" not in n}
    for name, gradient in gradients.items():
        assert relative(before[name] - after[name], gradient) <= 1e-3, name


def test_a_checkpoint_has_the_layer_for_any_layout(ranks, tmp_path):
    model = {"cfg": replace(GLM, mtp=MtpConfig(1)), "optim": replace(ADAM, lr=1e-3)}
    (saved,) = ranks.run(save_and_go_on, folder=tmp_path, **model)
    (again,) = ranks.run(load_and_step, folder=tmp_path, **model)
    assert same(again["after"], saved["after"]) and again["metrics"] == saved["metrics"]
    for parallel in (ParallelConfig(tensor=2), ParallelConfig(pipeline=2)):
        for other in ranks.run(load_and_step, world=2, folder=tmp_path, parallel=parallel, **model):
            assert same(other["weights"], saved["weights"])
            assert other["metrics"]["mtp/loss"] == pytest.approx(saved["metrics"]["mtp/loss"], rel=1e-5)


@on_ranks(1)
def test_a_layer_that_is_lost_ends_the_run():
    """A detached one leaves the norm of the other gradients finite."""
    cfg = replace(GLM, mtp=MtpConfig(1))
    model, rows = build(cfg, optim=SGD), batch(cfg)
    for parameter in model.module.ahead.parameters():
        parameter.data.fill_(torch.nan)
    with pytest.raises(AlignerError, match=r"mtp/loss nan at optimizer step 1: expected a finite number"):
        model.step(micro_batches(rows, BatchConfig(micro_batch_samples=3)), nll_loss(model, rows))


def test_experts_on_several_ranks_learn_the_same(ranks):
    """Also where a pass without gradient counts the experts' load before."""
    moe = replace(GLM.moe, aux_coef=0.1, aux_over="minibatch")
    cfg = replace(GLM, moe=moe, mtp=MtpConfig(1, 0.5, detach=False))
    model = {"cfg": cfg, "optim": SGD, "bc": BatchConfig(micro_batch_samples=2), "each": equal_shares}
    start = agreed(ranks, 1, **model, steps=0)["weights"]
    alone, apart = agreed(ranks, 1, **model), agreed(ranks, 2, **model, parallel=ParallelConfig(expert=2))
    for ours, theirs in zip(apart["metrics"], alone["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for name, value in alone["weights"].items():
        if "correction_bias" not in name:
            assert relative(apart["weights"][name], value, value - start[name]) <= 2e-5, name
