"""Drafts in vLLM (`engine.draft_tokens`)."""

from dataclasses import replace

import pytest
import torch

from aligner.config.sections.model.mtp import MtpConfig
from aligner.engines.vllm.pages import Pages
from aligner.models.params import expected_hf_shapes
from aligner.types import SamplingParams
from tests.engines.contract import PROMPTS, check_logprobs, fill, reference, responses, seeds_for
from tests.engines.vllm.setup import LLAMA, MODELS, make_engine, needs_vllm
from tests.megatron.test_mtp import Oracle, rms

pytestmark = [needs_vllm, pytest.mark.slow]
COUNT, LENGTH = 2, 12


def test_logprobs_are_the_models_samples_repeat_and_drafts_are_counted():
    """With one engine: to start it compiles the search for drafts."""
    model, count = reference(LLAMA), 3
    engine = fill(make_engine(LLAMA, draft_tokens=count), model)
    for temperature in (0.05, 0.7):
        sampling = SamplingParams(24, temperature=temperature, stop_token_ids=(3,))
        outs = [engine.generate(PROMPTS, seeds_for(PROMPTS, 3), sampling) for _ in range(2)]
        check_logprobs(model, PROMPTS, 3, outs[0], temperature or 1.0)
        assert responses(outs[0]) == responses(outs[1])
        sums = engine.take_sums()
        accepted, drafted = sums["engine/draft_acceptance_rate"]
        gained, drafts = sums["engine/mean_acceptance_length"]
        assert 0 < accepted == gained - drafts < drafted <= count * drafts
        assert 24 < sums["engine/decode_passes"][0] <= 48
        engine.logprobs(torch.ones(1, 4, dtype=torch.int64), torch.tensor([4]), 0.4)  # whose temperature does not stay
    for prompt in PROMPTS[3:]:  # alone: a pass gives a row one token, and those of its draft that were accepted
        engine.generate([prompt], [[0]], SamplingParams(40, temperature=0.0))
        sums = engine.take_sums()
        assert sums["engine/decode_passes"][0] == 40 - sums["engine/draft_acceptance_rate"][0]


class Drafter:
    """What vLLM's models for multi-token prediction compute, in float64: they forget the embedding at position 0."""

    def __init__(self, cfg, share: float):
        """`share`: how much a draft follows from the last token alone, as the model's tokens do."""
        self.oracle = oracle = Oracle(cfg)
        self.normed = cfg.family == "deepseek_v3"  # what a further draft reads
        for name, p in oracle.whole.named_parameters():
            if ("o_proj" in name or "down_proj" in name) and f"layers.{cfg.num_layers}." not in name:
                p *= 0.01
        oracle.own["norm"].copy_(oracle.whole.model.norm.weight)
        oracle.own["eh_proj"][:, : cfg.hidden_size] += share * torch.eye(cfg.hidden_size)

    def __call__(self, tokens):
        whole = self.oracle.whole
        return type("Output", (), {"logits": whole.lm_head(self.oracle.hidden(tokens)).float()})

    def drafts(self, tokens):
        oracle, embed, out = self.oracle, self.oracle.whole.model.embed_tokens, []
        h, e = oracle.hidden(torch.tensor([tokens[:-1]])), embed(torch.tensor([tokens[1:]]))
        e[:, 0] = 0
        for _ in range(COUNT):
            both = torch.cat([rms(e, oracle.own["enorm"], oracle.eps), rms(h, oracle.own["hnorm"], oracle.eps)], 2)
            x = oracle.through(oracle.whole.model.layers[-1:], both @ oracle.own["eh_proj"].T)[:, -1:]
            y = rms(x, oracle.own["norm"], oracle.eps)
            out.append(int(oracle.whole.lm_head(y).argmax()))
            h, e = torch.cat([h, y if self.normed else x], 1), torch.cat([e, embed(torch.tensor([out[-1:]]))], 1)
        return out

    def accepted(self, prompt, response):
        """Count accepted tokens, of a greedy response."""
        done, total = 1, 0
        while done < len(response):
            drafts, n = self.drafts([*prompt, *response[:done]]), 0
            while n < COUNT and done + n < len(response) and drafts[n] == response[done + n]:
                n += 1
            done, total = done + n + 1, total + n
        return total


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "glm4_moe_lite"])
@torch.no_grad()
def test_the_models_layer_drafts_what_its_formula_says_after_every_update(name):
    cfg, counts = replace(MODELS[name], mtp=MtpConfig(1)), []
    pages, names = Pages.of(cfg, torch.float32, 1, 16 if cfg.latent.kv_rank else 32, states=1), expected_hf_shapes(cfg)
    # which the layer's cache is part of: for fewer layers vLLM would refuse the longest row
    engine = make_engine(cfg, draft_tokens=COUNT, kv_cache_bytes=12 * pages.bytes)
    for version, share in enumerate((0.0, 6.0), 1):
        model = Drafter(MODELS[name], share)
        engine.begin_update(version)
        engine.update_weights((n, t) for n, t in model.oracle.tensors().items() if n in names)
        engine.finish_update()
        out = engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(LENGTH, temperature=0.0))
        check_logprobs(model, PROMPTS, 1, out)
        sums = engine.take_sums()
        counts.append(sums["engine/draft_acceptance_rate"][0])
        assert counts[-1] == sum(model.accepted(*row) for row in zip(PROMPTS, responses(out), strict=True))
    assert counts[0] < 4 < counts[1]
    seeds, sampling = seeds_for(PROMPTS), SamplingParams(LENGTH, temperature=0.7, top_p=0.9)
    outs = [engine.generate(PROMPTS, seeds, sampling) for _ in range(2)]  # the first ends with a pass that scores
    assert responses(outs[0]) == responses(outs[1])
    check_logprobs(model, PROMPTS, 1, replace(outs[1], logprobs=outs[1].full_logprobs), 0.7)
    plain = engine.generate(PROMPTS, seeds, replace(sampling, top_p=1.0))
    check_logprobs(model, PROMPTS, 1, plain, 0.7)
