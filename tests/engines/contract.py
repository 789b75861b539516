"""What every RolloutEngine must do. Subclass `EngineContract` in a test file and give it `make_engine`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from aligner.config.sections.model.attention import AttentionConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.moe import MoeConfig
from aligner.config.sections.model.rope import RopeScalingConfig
from aligner.engines.base import RolloutEngine
from aligner.errors import ConfigError, EngineError, RefitError
from aligner.families.hf_config import hf_config
from aligner.ops.kernels.checksum import tensor_checksum
from aligner.refit.verify import staleness
from aligner.types import LENGTH, STOP, SamplingParams
from tests.tiny import choice_biases, hf_weights, layer_scalars, norm_middle

SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 53,
}
LLAMA = ModelConfig(family="llama", max_position=256, **SHAPE)
SCALED = replace(LLAMA, rope_base=1000.0, rope_scaling=RopeScalingConfig(8.0, 1.0, 4.0, 16), tie_embeddings=False)
MODELS = {
    "llama": LLAMA,
    "llama3": SCALED,
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, num_kv_heads=4, tie_embeddings=False),
    "qwen3_moe": replace(
        LLAMA, family="qwen3_moe", qk_norm=True, moe=MoeConfig(6, 2, 24, norm_topk_prob=False), tie_embeddings=False
    ),
    "mixtral": replace(LLAMA, family="mixtral", moe=MoeConfig(4, 3, 48)),
    "mistral": replace(LLAMA, family="mistral", attention=AttentionConfig(window=4)),
    "gemma3": replace(
        LLAMA,
        family="gemma3_text",
        num_layers=3,
        qk_norm=True,
        tie_embeddings=False,
        attention=AttentionConfig(window=4, global_every=3, local_rope_base=100.0, query_scale_dim=5),
    ),
}
PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8], [50, 3], [9, 9, 9, 9, 1]]


def reference(cfg: ModelConfig, seed: int = 0):
    """A random transformers model in float32 whose distributions are far from uniform."""
    raw = hf_config(cfg, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(norm_middle(cfg, name), 0.2) if "norm" in name else p.normal_(
                0.0, 0.3 * (32 / cfg.hidden_size) ** 0.5
            )
        for b in choice_biases(model):
            b.normal_(0.0, 0.2)
        for b in layer_scalars(model):
            b.normal_(1.0, 0.2)
    return model


def fill(engine, model, version: int = 1):
    engine.begin_update(version)
    engine.update_weights(hf_weights(model).items())
    engine.finish_update()
    return engine


def seeds_for(prompts, group: int = 1):
    return [[1000 * i + j for j in range(group)] for i in range(len(prompts))]


def responses(generations) -> list[list[int]]:
    return [t[:n] for t, n in zip(generations.tokens.tolist(), generations.lengths.tolist(), strict=True)]


def check_logprobs(model, prompts, group, generations, temperature=1.0):
    for i, response in enumerate(responses(generations)):
        prompt = list(prompts[i // group])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0] / temperature
        wanted = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]
        got = generations.logprobs[i]
        assert torch.allclose(got[: len(response)], wanted, atol=1e-4), (i, got, wanted)
        assert not got[len(response) :].any() and not generations.tokens[i, len(response) :].any()


def check_greedy(model, prompts, count, generations):
    """Each of `count` tokens is the likeliest after those before it, as the model's own `generate` would have found one
    by one in as many passes."""
    for prompt, response in zip(prompts, responses(generations), strict=True):
        with torch.no_grad():
            likeliest = model(torch.tensor([prompt + response])).logits[0].argmax(-1)
        assert response == likeliest[len(prompt) - 1 : -1].tolist() and len(response) == count


class EngineContract:
    """`make_engine(cfg, decode=None, **engine_config)` builds an empty float32 engine."""

    table = MODELS
    models = tuple(MODELS)  # those of which every property of weights and numbers is tested
    batches: tuple[int, ...] = (1, 3, 7)  # of which results are compared

    def pytest_generate_tests(self, metafunc):
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", self.models, scope="class")  # one model after another: engines may be kept
        if "batched" in metafunc.fixturenames:
            metafunc.parametrize("batched", [name for name in ("llama", "mixtral") if name in self.models])

    @staticmethod
    def make_engine(cfg: ModelConfig, decode=None, **engine_config):
        raise NotImplementedError

    @staticmethod
    def bare(engine):
        """The engine under test, of what `make_engine` gives."""
        return engine

    # ---- what it can do

    def test_its_capabilities_are_those_of_its_methods(self):
        engine = self.bare(self.make_engine(self.table["llama"]))

        def does(name: str) -> bool:
            return getattr(type(engine), name, None) is not getattr(RolloutEngine, name)

        assert isinstance(engine, RolloutEngine)
        assert engine.can.in_place == does("weight_view") and engine.can.serves == does("serve")
        assert engine.can.own_process == does("decoded") and engine.can.computes_here == does("held_bytes")
        assert engine.can.scores == does("top_logprobs")
        assert not engine.can.tells_finished or engine.finished is None

    # ---- weights

    def test_refuses_until_an_update_is_complete(self):
        engine, model = self.make_engine(self.table["llama"]), reference(self.table["llama"])
        assert engine.weight_version == -1
        with pytest.raises(RefitError, match="no complete weights"):
            engine.generate([[1]], [[0]], SamplingParams(1))
        with pytest.raises(RefitError, match="begin_update"):
            engine.update_weights(hf_weights(model).items())
        fill(engine, model, 7)
        assert engine.weight_version == 7
        assert engine.generate([[1]], [[0]], SamplingParams(1)).weight_version == 7

    def test_every_fault_is_named_and_poisons(self):
        model = reference(self.table["llama"])
        engine = fill(self.make_engine(self.table["llama"]), model, 1)
        good = hf_weights(model)
        gone, wrong, twice = "model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
        engine.begin_update(2)
        engine.update_weights((n, t) for n, t in good.items() if n not in (gone, wrong))
        engine.update_weights([(wrong, torch.zeros(3)), (twice, good[twice]), ("model.extra", torch.zeros(1))])
        with pytest.raises(RefitError) as caught:
            engine.finish_update()
        text = str(caught.value)
        assert "version 2" in text and f"missing: {gone}" in text and f"doubled: {twice}" in text
        assert "unknown: model.extra" in text and f"wrong shape: {wrong} (3,)" in text
        assert engine.weight_version == 1
        for call in (
            lambda: engine.generate([[1]], [[0]], SamplingParams(1)),
            lambda: engine.logprobs(torch.ones(1, 2, dtype=torch.int64), torch.tensor([2])),
        ):
            with pytest.raises(RefitError, match="last complete version: 1"):
                call()
        fill(engine, model, 3)
        assert engine.generate([[1]], [[0]], SamplingParams(1)).weight_version == 3

    def test_refuses_during_an_update(self):
        model = reference(self.table["llama"])
        engine = fill(self.make_engine(self.table["llama"]), model)
        engine.begin_update(2)
        with pytest.raises(RefitError):
            engine.generate([[1]], [[0]], SamplingParams(1))

    def test_checksums_are_those_of_the_given_tensors(self, name):
        model = reference(self.table[name])
        engine = fill(self.make_engine(self.table[name]), model)
        assert dict(engine.checksums()) == {n: tensor_checksum(t) for n, t in hf_weights(model).items()}

    def test_the_given_tensors_are_copied(self):
        model = reference(self.table["llama"])
        engine = fill(self.make_engine(self.table["llama"]), model)
        before = engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(6, temperature=0))
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        after = engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(6, temperature=0))
        assert torch.equal(before.tokens, after.tokens)

    def test_new_weights_take_effect(self):
        engine = fill(self.make_engine(self.table["llama"]), reference(self.table["llama"]))
        other = reference(self.table["llama"], 1)
        fill(engine, other, 2)
        out = engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(6))
        check_logprobs(other, PROMPTS, 1, out)

    def test_weights_that_were_not_replaced_are_found(self):
        """What the verifier reads of an engine tells stale weights: checksums, and logprobs nearer to the old ones."""
        old, new = reference(self.table["llama"]), reference(self.table["llama"])
        with torch.no_grad():
            for p in new.parameters():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())), alpha=3e-3)
        engine = fill(self.make_engine(self.table["llama"]), old, 1)
        tokens = torch.randint(0, 53, (3, 12), generator=torch.Generator().manual_seed(5))
        lengths = torch.tensor([12, 12, 12])

        def trainer(model):
            with torch.no_grad():
                return model(tokens[:, :-1]).logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).flatten()

        before, current = trainer(old), trainer(new)
        logprobs = engine.logprobs(tokens, lengths)[:, 1:].flatten()
        stale, progress = staleness(logprobs, current, before)
        assert stale and abs(progress) < 0.05
        wanted = {name: tensor_checksum(t) for name, t in hf_weights(new).items()}
        assert all(engine.checksums()[name] != value for name, value in wanted.items())
        fill(engine, new, 2)
        stale, progress = staleness(engine.logprobs(tokens, lengths)[:, 1:].flatten(), current, before)
        assert not stale and abs(progress - 1) < 0.05 and dict(engine.checksums()) == wanted

    # ---- generation

    def test_greedy_equals_transformers(self, name):
        model = reference(self.table[name])
        engine = fill(self.make_engine(self.table[name]), model)
        out = engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(24, temperature=0))
        check_greedy(model, PROMPTS, 24, out)
        check_logprobs(model, PROMPTS, 1, out)

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_sampled_logprobs_equal_transformers(self, name, temperature):
        model = reference(self.table[name])
        engine = fill(self.make_engine(self.table[name]), model)
        sampling = SamplingParams(20, temperature=temperature, stop_token_ids=(3, 11))
        out = engine.generate(PROMPTS, seeds_for(PROMPTS, 3), sampling)
        check_logprobs(model, PROMPTS, 3, out, temperature)
        assert out.full_logprobs is None and len(set(map(tuple, responses(out)))) > 10

    def test_scoring_equals_transformers(self, name):
        model = reference(self.table[name])
        engine = fill(self.make_engine(self.table[name]), model)
        lengths = torch.tensor([12, 5, 1, 9])
        tokens = torch.randint(0, 53, (4, 12), generator=torch.Generator().manual_seed(3))
        tokens *= torch.arange(12) < lengths[:, None]
        for temperature in (1.0, 0.6):
            got = engine.logprobs(tokens, lengths, temperature=temperature)
            assert got.dtype is torch.float32 and got.shape == tokens.shape
            with torch.no_grad():
                logp = (model(tokens).logits / temperature).log_softmax(-1)
            wanted = torch.zeros(4, 12)
            wanted[:, 1:] = logp[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
            assert torch.allclose(got, wanted * (torch.arange(12) < lengths[:, None]), atol=1e-4)
        generated = engine.generate([[1, 2]], [[4]], SamplingParams(6))
        row = torch.tensor([[1, 2, *generated.tokens[0].tolist()]])
        again = engine.logprobs(row, torch.tensor([8]))[0, 2:]
        assert torch.allclose(again, generated.logprobs[0], atol=1e-5)

    def test_results_do_not_depend_on_the_batch(self, batched):
        cfg = self.table[batched]
        model = reference(cfg)
        sampling = SamplingParams(18, stop_token_ids=(3, 11, 20))
        seeds = seeds_for(PROMPTS, 4)
        whole = responses(fill(self.make_engine(cfg), model).generate(PROMPTS, seeds, sampling))
        for max_batch in self.batches:
            engine = fill(self.make_engine(cfg, max_batch=max_batch), model)
            assert responses(engine.generate(PROMPTS, seeds, sampling)) == whole
        turned = engine.generate(PROMPTS[::-1], [s[::-1] for s in seeds[::-1]], sampling)
        assert responses(turned) == whole[::-1]
        for i, prompt in enumerate(PROMPTS):
            assert responses(engine.generate([prompt], [[seeds[i][2]]], sampling)) == [whole[4 * i + 2]]

    def test_uneven_groups_and_no_rows(self):
        engine = fill(self.make_engine(self.table["llama"]), reference(self.table["llama"]))
        sampling = SamplingParams(5)
        out = engine.generate([[1, 2], [3], [4, 5, 6]], [[7, 8], [], [9]], sampling)
        assert out.tokens.shape == (3, 5)
        assert responses(engine.generate([[4, 5, 6]], [[9]], sampling)) == responses(out)[2:]
        for prompts, seeds in (([], []), ([[1, 2]], [[]])):
            empty = engine.generate(prompts, seeds, sampling)
            assert empty.tokens.shape == (0, 0) and len(empty.lengths) == 0 and empty.weight_version == 1

    def test_a_seed_decides_a_sample(self):
        engine = fill(self.make_engine(self.table["llama"]), reference(self.table["llama"]))
        again = [[7] * 3, [8] * 3]
        same = responses(engine.generate(PROMPTS[:2], again, SamplingParams(12)))
        assert same[0] == same[1] == same[2] and same[3] == same[4] == same[5]
        large = [[2**40 + i for i in range(12)]]  # also where the low bits are all that differs
        assert len(set(map(tuple, responses(engine.generate(PROMPTS[:1], large, SamplingParams(12)))))) == 12

    def test_long_prompts(self):
        """Longer than what an engine may take by default."""
        cfg = replace(self.table["llama"], max_position=1600)
        model, prompt = reference(cfg), [1 + i % 50 for i in range(1500)]
        out = fill(self.make_engine(cfg), model).generate([prompt, [3]], [[0], [1]], SamplingParams(3))
        check_logprobs(model, [prompt, [3]], 1, out)

    def test_stop_tokens_end_a_response_and_belong_to_it(self):
        engine = fill(self.make_engine(self.table["llama"]), reference(self.table["llama"]))
        seeds = seeds_for(PROMPTS, 8)
        free = responses(engine.generate(PROMPTS, seeds, SamplingParams(12)))
        out = engine.generate(PROMPTS, seeds, SamplingParams(12, stop_token_ids=(3, 11, 20)))
        for full, got, reason in zip(free, responses(out), out.finish_reason.tolist(), strict=True):
            hits = [i for i, t in enumerate(full) if t in (3, 11, 20)]
            assert got == (full[: hits[0] + 1] if hits else full)
            assert reason == (STOP if hits else LENGTH)
        assert {STOP, LENGTH} == set(out.finish_reason.tolist())
        short = engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(40, stop_token_ids=tuple(range(40))))
        assert short.tokens.shape[1] == short.logprobs.shape[1] == short.lengths.max() < 40

    def test_stop_strings(self):
        def decode(tokens):
            return "".join(chr(60 + t) for t in tokens)

        model = reference(self.table["llama"])
        engine = fill(self.make_engine(self.table["llama"], decode=decode), model)
        seeds = seeds_for(PROMPTS, 4)
        free = responses(engine.generate(PROMPTS, seeds, SamplingParams(16)))
        stops = (decode(free[0][2:5]), decode(free[7][6:8]))
        out = engine.generate(PROMPTS, seeds, SamplingParams(16, stop=stops))
        stopped = 0
        for full, got, reason in zip(free, responses(out), out.finish_reason.tolist(), strict=True):
            ends = [n for n in range(1, 17) if any(s in decode(full[:n]) for s in stops)]
            assert got == (full[: ends[0]] if ends else full) and reason == (STOP if ends else LENGTH)
            stopped += bool(ends)
        assert 2 <= stopped < len(free)

    def test_stop_strings_need_a_decoder(self):
        with pytest.raises(ConfigError, match=r"sampling.stop"):
            fill(self.make_engine(self.table["llama"]), reference(self.table["llama"])).generate(
                [[1]], [[0]], SamplingParams(4, stop=("x",))
            )

    def test_cut_distributions_report_both_logprobs(self):
        model = reference(self.table["llama"])
        engine = fill(self.make_engine(self.table["llama"]), model)
        sampling = SamplingParams(8, temperature=0.9, top_p=0.7, top_k=9, min_p=0.02)
        out = engine.generate(PROMPTS, seeds_for(PROMPTS, 4), sampling)
        full = replace(out, logprobs=out.full_logprobs)
        check_logprobs(model, PROMPTS, 4, full, 0.9)
        assert (out.logprobs >= out.full_logprobs - 1e-6).all() and (out.logprobs > out.full_logprobs + 0.01).any()

    @pytest.mark.parametrize("cut", [{"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.15}], ids=["top_k", "top_p", "min_p"])
    def test_each_cut_by_itself(self, cut):
        """Against its definition on transformers' distribution: every token is one that is left, with its share."""
        model, temperature = reference(self.table["llama"]), 1.3
        engine = fill(self.make_engine(self.table["llama"]), model)
        sampling = SamplingParams(6, temperature=temperature, **cut)
        out = engine.generate(PROMPTS, seeds_for(PROMPTS, 6), sampling)
        for i, response in enumerate(responses(out)):
            prompt = PROMPTS[i // 6]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
            probs, order = logits.softmax(-1).sort(-1, descending=True)
            position = (order == torch.tensor(response)[:, None]).int().argmax(-1, keepdim=True)
            kept = {
                "top_k": torch.arange(probs.shape[1]) < cut.get("top_k", 0),
                "top_p": probs.cumsum(-1) - probs < cut.get("top_p", 0.0),
                "min_p": probs >= cut.get("min_p", 0.0) * probs[:, :1],
            }[next(iter(cut))].expand_as(probs)
            assert kept.gather(1, position).all(), (cut, response)
            wanted = (probs.gather(1, position)[:, 0] / (probs * kept).sum(-1)).log()
            assert torch.allclose(out.logprobs[i, : len(response)], wanted, atol=1e-4)

    def test_a_row_that_can_never_fit_is_refused(self):
        model = reference(self.table["llama"])
        position = 2 * 2 * 2 * 8 * 4  # layers, k and v, kv heads, head_dim, float32
        needed = (3 + 10 - 1 + 3) * position
        engine = fill(self.make_engine(self.table["llama"], kv_cache_bytes=needed), model)
        assert engine.generate([[1, 2, 3]] * 3, [[0], [1], [2]], SamplingParams(10)).tokens.shape == (3, 10)
        small = fill(self.make_engine(self.table["llama"], kv_cache_bytes=needed - 1), model)
        with pytest.raises(ConfigError, match=f"engine.kv_cache_bytes.*{needed} bytes"):
            small.generate([[1, 2, 3]], [[0]], SamplingParams(10))
        with pytest.raises(ConfigError, match=r"model.max_position"):
            engine = fill(self.make_engine(replace(self.table["llama"], max_position=12)), model)
            engine.generate([[1, 2, 3]], [[0]], SamplingParams(10))

    def test_progress_counts_up_to_all(self):
        engine = fill(self.make_engine(self.table["llama"], max_batch=4), reference(self.table["llama"]))
        calls = []
        sampling = SamplingParams(9, stop_token_ids=(3, 11, 20))
        engine.generate(PROMPTS, seeds_for(PROMPTS, 4), sampling, lambda done, total: calls.append((done, total)))
        done = [d for d, _ in calls]
        assert done == sorted(set(done)) and calls[-1] == (20, 20) and len(calls) > 2

    def test_sleep_and_wake_keep_the_weights(self):
        engine = fill(self.make_engine(self.table["llama"]), reference(self.table["llama"]))
        before = engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(6))
        engine.sleep()
        engine.wake()
        after = engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(6))
        assert torch.equal(before.tokens, after.tokens) and after.weight_version == 1

    def test_an_interrupted_generation_leaves_a_usable_engine(self):
        engine = fill(self.make_engine(self.table["llama"], max_batch=2), reference(self.table["llama"]))
        wanted = responses(engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(5)))

        def stop(done, total):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, seeds_for(PROMPTS, 8), SamplingParams(20), stop)
        assert responses(engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(5))) == wanted

    def test_sleep_changes_nothing_but_memory(self):
        """Asleep it refuses; weights may be replaced in sleep; waking twice, or awake, is no fault."""
        engine, other = (
            fill(self.make_engine(self.table["llama"]), reference(self.table["llama"])),
            reference(self.table["llama"], 1),
        )
        engine.wake()
        engine.sleep()
        engine.sleep()
        with pytest.raises(AssertionError, match="wake"):
            engine.generate([[1]], [[0]], SamplingParams(1))
        engine.sleep(weights=True)
        fill(engine, other, 2)
        engine.wake()
        engine.wake()
        out = engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(4))
        check_logprobs(other, PROMPTS, 1, out)
        assert out.weight_version == 2

    def test_a_closed_engine_refuses(self):
        engine = fill(self.make_engine(self.table["llama"]), reference(self.table["llama"]))
        engine.close()
        engine.close()
        with pytest.raises(RefitError, match="no complete weights"):
            engine.generate([[1]], [[0]], SamplingParams(1))

    def test_outputs_can_enter_autograd(self):
        engine = fill(self.make_engine(self.table["llama"]), reference(self.table["llama"]))
        out = engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(6))
        scored = engine.logprobs(out.tokens, out.lengths)
        w = torch.zeros(5, 6, requires_grad=True)
        (w * out.logprobs * scored).sum().backward()
        torch.zeros(5, 60, requires_grad=True).gather(1, out.tokens).sum().backward()
        assert torch.equal(w.grad, out.logprobs * scored)


class ChildEngineContract:
    """Of engines whose work is done by another process. `make_crashing(where)` builds an empty engine whose process
    ends at its first "generate", or at its second call of "refit"."""

    table = MODELS
    last_words = ""  # what that process writes before it ends

    def make_crashing(self, where: str):
        raise NotImplementedError

    def test_the_end_of_the_process_in_generate(self):
        engine = fill(self.make_crashing("generate"), reference(self.table["llama"]))
        for _ in range(2):  # and every later call tells the same
            with pytest.raises(EngineError, match=rf"(?s)ended by signal 6 in generate.*{self.last_words}"):
                engine.generate([[1]], [[0]], SamplingParams(1))
        with pytest.raises(RefitError, match=self.last_words):
            engine.begin_update(2)
        engine.close()

    def test_the_end_of_the_process_in_a_refit(self):
        engine, model = self.make_crashing("refit"), reference(self.table["llama"])
        engine.begin_update(1)
        with pytest.raises(RefitError, match=rf"(?s)ended by signal 6.*{self.last_words}"):
            engine.update_weights(hf_weights(model).items())
        with pytest.raises(RefitError, match="no complete weights"):
            engine.generate([[1]], [[0]], SamplingParams(1))
        engine.close()
