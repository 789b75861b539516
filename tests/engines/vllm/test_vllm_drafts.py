"""Drafts in vLLM (`engine.draft_tokens`)."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

from aligner.config.sections.model.mtp import MtpConfig
from aligner.engines.child.worker import Settings
from aligner.engines.vllm.engine import has_linear_kernel
from aligner.engines.vllm.pages import Pages
from aligner.engines.vllm.worker import engine_arguments
from aligner.errors import ConfigError
from aligner.families.draft_folder import eagle_head
from aligner.families.hf_config import hf_config
from aligner.models.params import expected_hf_shapes
from aligner.models.safetensors_io import write_hf
from aligner.types import SamplingParams
from tests.engines.contract import PROMPTS, check_logprobs, fill, reference, responses, seeds_for
from tests.engines.vllm.setup import LINEAR, LLAMA, MODELS, make_engine, needs_vllm
from tests.engines.vllm.test_vllm_engine import apart, of_rows
from tests.engines.vllm.test_vllm_routing import function
from tests.megatron.test_mtp import Oracle
from tests.tiny import hf_weights

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
    """What vLLM's models for multi-token prediction compute, in float64: all but Qwen3.5's forget the embedding at
    position 0."""

    def __init__(self, cfg, share: float, layers: float = 0.01):
        """`share`: how much a draft follows from the last token alone, as the model's tokens do with small `layers`."""
        self.oracle = oracle = Oracle(cfg)
        self.normed = cfg.family == "deepseek_v3" or oracle.apart  # what a further draft reads
        for name, p in oracle.whole.named_parameters():
            if re.search("o_proj|out_proj|down_proj", name) and f"layers.{cfg.num_layers}." not in name:
                p *= layers
        oracle.own["norm"].copy_(oracle.whole.model.norm.weight)
        oracle.own["eh_proj"][:, : cfg.hidden_size] += share * torch.eye(cfg.hidden_size)

    def __call__(self, tokens):
        whole = self.oracle.whole
        return type("Output", (), {"logits": whole.lm_head(self.oracle.hidden(tokens)).float()})

    def drafts(self, tokens):
        oracle, embed, out = self.oracle, self.oracle.whole.model.embed_tokens, []
        h, e = oracle.hidden(torch.tensor([tokens[:-1]])), embed(torch.tensor([tokens[1:]]))
        e[:, 0] *= oracle.apart
        for _ in range(COUNT):
            x = oracle.layer_ahead(h, e)[:, -1:]
            y = oracle.normed("norm", x)
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


@torch.no_grad()
def check_distribution(model, prompts, group, generations):
    """Samples at temperature 1 are on average as likely as the model's own."""
    excess, variance = 0.0, 0.0
    for i, response in enumerate(responses(generations)):
        prompt = list(prompts[i // group])
        own = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        mean = (own.exp() * own).sum(-1)
        excess += (own.gather(1, torch.tensor(response)[:, None])[:, 0] - mean).sum()
        variance += (own.exp() * own.square()).sum(-1).sub(mean.square()).sum()
    assert abs(excess) < 3 * variance**0.5, (excess, variance)


def rates_of(engine, policies, temperature):
    """Return the acceptance rate after an update with each of the policies, of samples that are theirs."""
    sampling, seeds, rates = SamplingParams(LENGTH, temperature=temperature), seeds_for(PROMPTS, 8), []
    for version, policy in enumerate(policies, engine.weight_version + 1):
        fill(engine, policy, version)
        outs = [engine.generate(PROMPTS, seeds, sampling) for _ in range(2)]
        assert responses(outs[0]) == responses(outs[1])
        check_logprobs(policy, PROMPTS, 8, outs[0], temperature or 1.0)
        if temperature:
            check_distribution(policy, PROMPTS, 8, outs[0])
        sums = engine.take_sums()
        accepted, drafted = sums["engine/draft_acceptance_rate"]
        gained, drafts = sums["engine/mean_acceptance_length"]
        assert gained - drafts == accepted
        rates.append(accepted / drafted)
    return rates


def tight(folder, own):
    """An engine with a cache of the longest row, but for little, and pages that hold what drafts, too. For fewer layers
    vLLM would refuse the row."""
    bytes_, rows = Pages.of(LLAMA, torch.float32, 1, 32, 1, own).bytes, 8 * len(PROMPTS)  # of a page
    drafts = {"draft_tokens": COUNT, "draft_model": str(folder)}
    return make_engine(replace(LLAMA, max_position=64 * rows), **drafts, kv_cache_bytes=(rows + 1) * bytes_)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_smaller_model_drafts_and_no_update_changes_it(name, tmp_path):
    """Where it equals the policy, drafts are drawn from the very distribution that accepts them."""
    model, other, cfg = reference(LLAMA), reference(LLAMA, 1), replace(MODELS[name], tie_embeddings=name == "llama")
    raw = hf_config(cfg, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    write_hf(tmp_path / "hf", hf_weights(reference(cfg)).items(), raw)
    same, unlike, again = rates_of(tight(tmp_path, cfg), (model, other, model), 1.0)
    assert 0 < unlike < 0.5 and same == again
    assert (same > 0.99) == (name == "llama")


def test_rows_that_join_others_keep_every_token(tmp_path):
    """A prompt of one token joins with drafts that are none, which vLLM's kernel on a CPU kept at some seeds."""
    model = reference(LLAMA, 1)
    raw = hf_config(LLAMA, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    write_hf(tmp_path / "hf", hf_weights(reference(LLAMA)).items(), raw)
    engine = fill(make_engine(LLAMA, draft_tokens=COUNT, draft_model=str(tmp_path), max_batch=4), model)
    out = engine.generate(PROMPTS, seeds_for(PROMPTS, 8), SamplingParams(LENGTH, temperature=1.0))
    check_logprobs(model, PROMPTS, 8, out)


@torch.no_grad()
def write_head(folder, policy):
    """Write an EAGLE-3 head, as published ones, that drafts what was sampled last. Its layer adds nothing to the hidden
    states of the model's last layer, and it knows the tokens 1 to 40."""
    size, heads, kv, width, ffn, known = LLAMA.hidden_size, 4, 2, 32, 48, 40
    shapes = {"q": (heads * width, 2 * size), "k": (kv * width, 2 * size), "v": (kv * width, 2 * size)}
    weights = {f"midlayer.self_attn.{n}_proj.weight": torch.randn(shape) for n, shape in shapes.items()}
    weights |= {f"midlayer.mlp.{n}_proj.weight": torch.randn(ffn, size) for n in ("gate", "up")}
    weights |= {f"midlayer.{n}.weight": torch.ones(size) for n in ("input_layernorm", "hidden_norm")}
    weights |= {
        "midlayer.post_attention_layernorm.weight": torch.ones(size),
        "midlayer.self_attn.o_proj.weight": torch.zeros(size, heads * width),
        "midlayer.mlp.down_proj.weight": torch.zeros(size, ffn),
        "fc.weight": torch.cat([torch.zeros(size, 2 * size), torch.eye(size)], 1),
        "norm.weight": policy.model.norm.weight.clone(),
        "lm_head.weight": policy.lm_head.weight[1 : 1 + known].clone(),
        "d2t": torch.ones(known, dtype=torch.int64),
        "t2d": (torch.arange(LLAMA.vocab_size) - 1).lt(known),
    }
    raw = hf_config(replace(LLAMA, num_layers=1), bos_token_id=None, eos_token_id=None, pad_token_id=0)
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    raw |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": known, "tie_word_embeddings": False}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw | layers))


@torch.no_grad()
def repeating():
    """A model whose likeliest token is the last one: its layers add little to the embedding, which is the output."""
    model = reference(LLAMA)
    for name, weight in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight *= 0.01
    return model


def test_an_eagle_head_reads_hidden_states_of_the_newest_weights(tmp_path):
    model, other = repeating(), reference(LLAMA, 1)
    write_head(tmp_path, model)
    engine = tight(tmp_path, eagle_head(str(tmp_path)))
    same, unlike, again = rates_of(engine, (model, other, model), 0.0)
    assert same == again == 1 and unlike < 0.2
    assert 0 < rates_of(engine, (other,), 1.0)[0] < 0.5


def test_heads_that_vllm_lacks_or_cannot_feed_are_refused(tmp_path):
    write_head(tmp_path, reference(LLAMA))
    for cfg, change, expected in (
        (MODELS["glm4_moe"], {}, r"expected a smaller model: Glm4MoeForCausalLM of vLLM .* takes no EAGLE-3 head"),
        (LLAMA, {"architectures": ["Eagle3OurForCausalLM"]}, r"expected a head that vLLM .* has: .*Eagle3Llama"),
    ):
        raw = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(ConfigError, match=rf"^engine\.draft_model='{tmp_path}': {expected}"):
            make_engine(cfg, draft_tokens=COUNT, draft_model=str(tmp_path))


def update(engine, model, version=1):
    names = expected_hf_shapes(engine.cfg)
    engine.begin_update(version)
    engine.update_weights((n, t) for n, t in model.oracle.tensors().items() if n in names)
    engine.finish_update()


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "glm4_moe_lite"])
@torch.no_grad()
def test_the_models_layer_drafts_what_its_formula_says_after_every_update(name):
    cfg, counts = replace(MODELS[name], mtp=MtpConfig(1)), []
    pages = Pages.of(cfg, torch.float32, 1, 16 if cfg.latent.kv_rank else 32, states=1)
    # which the layer's cache is part of: for fewer layers vLLM would refuse the longest row
    engine = make_engine(cfg, draft_tokens=COUNT, kv_cache_bytes=12 * pages.bytes)
    for version, share in enumerate((0.0, 6.0), 1):
        model = Drafter(MODELS[name], share)
        update(engine, model, version)
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


@pytest.mark.skipif(not has_linear_kernel(), reason="vLLM's linear layers need AVX-512 on a CPU")
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
@torch.no_grad()
def test_states_go_back_to_the_last_token_that_was_kept(name):
    """In bfloat16, so numbers are near to the formula's: as near as of a pass that reads whole rows. The cache has room
    for two rows, and the states of their drafts."""
    cfg, prompts, rates = replace(LINEAR[name], mtp=MtpConfig(1)), [p for p in PROMPTS if len(p) > 1], []
    pages = Pages.of(cfg, torch.bfloat16, 1, 32, 1, drafts=COUNT)
    room = 2 * (pages.kept + pages.groups) - 1  # of the pages one is vLLM's own
    engine = make_engine(cfg, dtype=torch.bfloat16, draft_tokens=COUNT, kv_cache_bytes=room * pages.bytes)
    for version, share in enumerate((0.0, 6.0), 1):
        model = Drafter(LINEAR[name], share)
        update(engine, model, version)
        out = engine.generate(prompts, seeds_for(prompts), SamplingParams(LENGTH, temperature=0.0))
        expected = sum(model.accepted(*row) for row in zip(prompts, responses(out), strict=True))
        assert engine.take_sums()["engine/draft_acceptance_rate"][0] == pytest.approx(expected, abs=1)
        rates.append(expected)
    assert rates[0] < 4 < rates[1]
    model = Drafter(LINEAR[name], 6.0, layers=0.3)
    update(engine, model, 3)
    outs = [engine.generate(prompts, seeds_for(prompts, 8), SamplingParams(LENGTH, temperature=1.0)) for _ in range(2)]
    assert responses(outs[0]) == responses(outs[1])
    accepted, drafted = engine.take_sums()["engine/draft_acceptance_rate"]
    assert 0 < accepted < 0.8 * drafted
    check_distribution(model, prompts, 8, outs[0])
    rows = [[*prompts[i // 8], *response] for i, response in enumerate(responses(outs[0]))]
    lengths, tokens = torch.tensor([len(row) for row in rows]), pad_sequence(list(map(torch.tensor, rows)), True)
    exact, scores = of_rows(model, rows), engine.logprobs(tokens, lengths)
    scored = [row[n - LENGTH : n] for row, n in zip(scores, lengths, strict=True)]
    exact = [row[-LENGTH:] for row in exact]
    assert apart(outs[0].logprobs, exact) < 2 * apart(scored, exact)


def test_a_gpu_worker_brings_back_what_drafts_where_weights_were_released():
    """By its sources: its CPU build never releases them. What it shares with the model comes by the next refit."""
    worker = partial(function, "v1/worker/gpu_worker.py")
    kept = worker("_get_sleep_parameters")
    assert "parameters.update(((f'draft.{name}', parameter)" in kept and "id(parameter) not in shared" in kept
    assert "pattern != 'draft.*'" in worker("_save_sleep_parameters")  # one that may fit none
    assert re.search(r"if level == 2:\n(.*\n)?\s+self._save_sleep_parameters\(model\)", worker("sleep"))
    assert "wake_weights = tags is None or 'weights' in tags" in worker("wake_up")
    assert re.search(r"if wake_weights and .*:\n\s+self._restore_sleep_parameters", worker("wake_up"))
    settings = Settings("", None, 53, "float32", 64, 4, 1 << 24, *[True] * 4, 0, False, draft_folder="here")
    assert engine_arguments(settings)["sleep_preserve_parameter_names"] == ["draft.*"]


def test_what_the_worker_replaces_is_called_as_it_was_read():
    """The second model runner, which does neither, never drafts: routing is refused with drafts."""
    proposer = partial(function, "v1/spec_decode/llm_base_proposer.py")
    assert "compute_probs_and_sample_next_token(logits, sampling_metadata, self.use" in proposer("_sample_from_logits")
    assert "if sampling_metadata.all_greedy:" in proposer("_sample_from_logits")
    assert "get_draft_load_config" in proposer("_get_model")
    loads = function("v1/spec_decode/draft_model.py", "_get_model")
    assert "get_model(vllm_config=draft_vllm_config, prefix='draft_model')" in loads
