"""The TensorRT engine path over the strict fake: the contract of all engines, and what is its own."""

from dataclasses import replace

import pytest
import torch

from aligner.config.sections.model.attention import AttentionConfig
from aligner.engines.child.worker import Settings
from aligner.engines.trtllm.built_worker import EngineWorker
from aligner.engines.trtllm.steps import LogprobWatch
from aligner.errors import ConfigError, EngineError, MissingExtraError, RefitError
from aligner.ops.kernels.checksum import tensor_checksum
from aligner.refit.verify import staleness
from aligner.types import STOP, SamplingParams
from tests.engines.contract import (
    LLAMA,
    MODELS,
    PROMPTS,
    ChildEngineContract,
    EngineContract,
    check_logprobs,
    fill,
    reference,
    responses,
    seeds_for,
)
from tests.engines.trtllm.setup import forget_fake, make_built, other_python, use_fake
from tests.tiny import hf_weights

FC, GATE = "transformer.layers.1.mlp.fc.weight", "transformer.layers.1.mlp.gate.weight"


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    use_fake(monkeypatch, version="1.2.1")
    yield
    forget_fake()


class TestTrtllmBuiltEngine(EngineContract):
    models = ("llama", "qwen2", "qwen3")
    make_engine = staticmethod(make_built)

    def test_a_row_that_can_never_fit_is_refused(self):
        model, position = reference(LLAMA), 2 * 2 * 2 * 8 * 4  # layers, k and v, kv heads, head_dim, float32
        needed = 13 * position
        engine = fill(make_built(LLAMA, kv_cache_bytes=needed), model)
        assert engine.generate([[1, 2, 3]] * 3, [[0], [1], [2]], SamplingParams(10)).tokens.shape == (3, 10)
        with pytest.raises(ConfigError, match=f"engine.kv_cache_bytes.*{14 * position} bytes"):
            engine.generate([[1, 2, 3]], [[0]], SamplingParams(11))
        limited = fill(make_built(LLAMA, max_seq_len=12), model)
        with pytest.raises(ConfigError, match=r"engine.trtllm.max_seq_len=12.*at least 13"):
            limited.generate([[1, 2, 3]], [[0]], SamplingParams(10))


def log_of(tmp_path) -> list[str]:
    return (tmp_path / "log").read_text().splitlines()


def test_it_is_built_once_and_refitted_each_time(monkeypatch, tmp_path):
    use_fake(monkeypatch, log=str(tmp_path / "log"))
    monkeypatch.chdir(tmp_path)
    engine = make_built(LLAMA)
    for version in (1, 2):
        fill(engine, reference(LLAMA, version), version)
    engine.generate([[1]], [[0]], SamplingParams(1))
    engine.close()
    calls = [line.split()[0] for line in log_of(tmp_path)]
    parameters = 2 * 7 + 3  # of a layer; both embeddings and a norm
    sweep = ["Refitter", *["set_named_weights"] * parameters, "refit_cuda_engine"]
    assert calls == ["build", *sweep, *sweep, "run"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log"]  # no timing cache in the working directory


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        ("fused", "1", rf"lacks .*{FC}.*{GATE}.*; also transformer.layers.0.mlp.fused_fc.weight"),
        ("extra", "lm_head.bias", "it lists 18, 17 are delivered; also lm_head.bias"),
        ("lacks", GATE, f"it lists 16, 17 are delivered; lacks {GATE}"),
    ],
)
def test_an_engine_with_other_parameters_is_refused(monkeypatch, setting, value, text):
    """It would keep the random values of those it is not given, and say nothing."""
    use_fake(monkeypatch, **{setting: value})
    with pytest.raises(RefitError, match=text):
        make_built(LLAMA).begin_update(1)


def test_the_plugins_name_of_older_versions_would_do_nothing(monkeypatch):
    """What makes the comparison of names matter: the setting that older versions have is taken and ignored."""
    import tensorrt_llm.plugin

    plugins = tensorrt_llm.plugin.PluginConfig()
    plugins._use_fused_mlp = False
    assert plugins.use_fused_mlp
    monkeypatch.setattr("aligner.engines.trtllm.build._plugins", lambda: plugins)
    plugins.use_paged_context_fmha = False
    with pytest.raises(RefitError, match="fused_fc"):
        make_built(LLAMA).begin_update(1)


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        ("refused", GATE, f"TensorRT refused {GATE}, 48x32 in float32"),
        ("combined", f"{FC}+lm_head.bias", "has combined parameters and lacks lm_head.bias"),
        ("refit_fails", "2", "refit_cuda_engine failed"),
        ("raise", "refit_cuda_engine:2", "out of memory"),
        ("raise", "set_named_weights:20", "out of memory"),
    ],
)
def test_a_failed_refit_poisons_until_a_whole_one(monkeypatch, setting, value, text):
    model = reference(LLAMA)
    engine = fill(make_built(LLAMA), model)
    monkeypatch.setenv(f"FAKE_TRTLLM_{setting.upper()}", value)
    with pytest.raises(RefitError, match=text):
        fill(engine, reference(LLAMA, 1), 2)
    for ask in (lambda: engine.generate([[1]], [[0]], SamplingParams(1)), lambda: engine._call("score", [], None)):
        with pytest.raises(RefitError, match="no complete weights"):  # the child refuses too, whoever asks
            ask()
    monkeypatch.delenv(f"FAKE_TRTLLM_{setting.upper()}")
    out = fill(engine, model, 3).generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(4))
    check_logprobs(model, PROMPTS, 1, out)


def test_a_refit_without_effect_shows_in_the_logprobs(monkeypatch):
    """Every call has returned True, the checksums are those of what was delivered; the sentinel asks for logprobs."""
    old, new = reference(LLAMA), reference(LLAMA, 1)
    engine = fill(make_built(LLAMA), old)
    monkeypatch.setenv("FAKE_TRTLLM_STALE", "1")
    fill(engine, new, 2)
    assert dict(engine.checksums()) == {n: tensor_checksum(t) for n, t in hf_weights(new).items()}
    tokens = torch.randint(0, 53, (3, 12), generator=torch.Generator().manual_seed(5))
    logprobs = engine.logprobs(tokens, torch.full((3,), 12))[:, 1:]
    with torch.no_grad():
        before, current = (
            m(tokens[:, :-1]).logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0] for m in (old, new)
        )
    assert torch.allclose(logprobs, before, atol=1e-4)
    assert staleness(logprobs.flatten(), current.flatten(), before.flatten())[0]


def test_an_update_that_was_abandoned_leaves_nothing_behind():
    model, other = reference(LLAMA), reference(LLAMA, 1)
    engine = fill(make_built(LLAMA), model)
    engine.begin_update(2)
    engine.update_weights(list(hf_weights(other).items())[:9])
    fill(engine, model, 3)
    check_logprobs(model, PROMPTS, 1, engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(4)))


def test_half_of_a_fused_parameter_is_not_a_parameter():
    engine = make_built(LLAMA)
    engine.begin_update(1)
    engine.update_weights([(n, t) for n, t in hf_weights(reference(LLAMA)).items() if "1.self_attn.k" not in n])
    with pytest.raises(RefitError, match=r"delivered were 16, 17 .* lacks transformer.layers.1.attention.qkv.weight"):
        engine._call("finish", error=RefitError)  # whatever the trainer's ledger says
    with pytest.raises(RefitError, match=r"missing: model.layers.1.self_attn.k_proj.weight"):
        engine.finish_update()


def test_a_model_that_the_package_reads_otherwise_is_not_built(monkeypatch, tmp_path):
    use_fake(monkeypatch, transformers5="1", log=str(tmp_path / "log"))
    with pytest.raises(EngineError, match=r"reads rotary_base=10000.0 from config.json: expected rope_theta=1000.0"):
        make_built(MODELS["llama3"])
    import tensorrt_llm.models

    monkeypatch.delenv("FAKE_TRTLLM_TRANSFORMERS5")
    monkeypatch.setattr(tensorrt_llm.models.QWenForCausalLM, "qwen", False)
    with pytest.raises(EngineError, match=r"attention.qkv.bias: missing \(expected \(64,\)\)"):
        make_built(MODELS["qwen2"])
    monkeypatch.delitem(tensorrt_llm.models.MODEL_MAP, "Qwen3ForCausalLM")
    with pytest.raises(EngineError, match="has no Qwen3ForCausalLM"):
        make_built(MODELS["qwen3"])
    assert not (tmp_path / "log").exists()


def test_tokens_beyond_the_vocabulary_are_an_error(monkeypatch):
    engine = fill(make_built(LLAMA), reference(LLAMA))
    monkeypatch.setenv("FAKE_TRTLLM_BEYOND", "1")
    with pytest.raises(EngineError, match="token 53 was generated: the vocabulary has 53"):
        engine.generate([[1]], [[0]], SamplingParams(3))


def test_rows_are_taken_together_as_far_as_they_have_room(monkeypatch, tmp_path):
    use_fake(monkeypatch, log=str(tmp_path / "log"))
    position = 2 * 2 * 2 * 8 * 4
    engine = fill(make_built(LLAMA, kv_cache_bytes=3 * 20 * position, max_batch=4, max_seq_len=64), reference(LLAMA))
    prompts = [[1] * 4] * 3 + [[2] * 10] * 3 + [[3]] * 5
    whole = engine.generate(prompts, seeds_for(prompts), SamplingParams(10))
    sizes = [int(line.split()[1]) for line in log_of(tmp_path) if line.startswith("run")]
    # rows of 14, of 20, then of 11: three of 20 have room; four rows at most
    assert sizes == [3, 3, 4, 1]
    pairs = zip(prompts, seeds_for(prompts), strict=True)
    alone = [responses(engine.generate([p], [s], SamplingParams(10)))[0] for p, s in pairs]
    assert responses(whole) == alone


def test_the_prompts_of_a_chunk_go_through_one_forward():
    worker = EngineWorker.__new__(EngineWorker)
    worker.cfg, sizes = LLAMA, (53, "float32", 4096, 8, 1 << 40)
    worker.settings = Settings("", None, *sizes, True, False, False, False, 0, True)
    assert worker.settings.max_num_tokens == 8192
    assert list(worker._chunks([3000] * 5 + [10] * 4, 9)) == [range(2), range(2, 4), range(4, 9)]


def test_a_row_that_ends_early_beside_others():
    """What the engine puts after its end is no token, and counts in no logprob."""
    model = reference(LLAMA)
    engine = fill(make_built(LLAMA), model)
    sampling = SamplingParams(16, stop_token_ids=(3, 11, 20, 33))
    out = engine.generate(PROMPTS, seeds_for(PROMPTS, 4), sampling)
    assert len(set(out.lengths.tolist())) > 3 and (out.finish_reason == STOP).any()
    check_logprobs(model, PROMPTS, 4, out)


def test_a_processor_that_returns_another_tensor_would_be_stale():
    """The runtime goes on to read what it got back, the engine writes what it was given."""
    scores = torch.randn(2, 5)
    watch = LogprobWatch([1, 1], SamplingParams(2), 5)
    assert watch(0, torch.zeros(2, 3, dtype=torch.int32), scores) is scores


def test_logprobs_are_those_before_the_sampler_scales_in_place():
    model = reference(LLAMA)
    engine = fill(make_built(LLAMA), model)
    out = engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(8, temperature=0.5))
    check_logprobs(model, PROMPTS, 1, out, 0.5)


def test_what_the_kernels_would_clip_is_refused():
    engine = fill(make_built(replace(LLAMA, vocab_size=2000)), reference(replace(LLAMA, vocab_size=2000)))
    with pytest.raises(ConfigError, match=r"sampling.top_k=1025: expected at most 1024"):
        engine.generate([[1]], [[0]], SamplingParams(2, top_k=1025))


def test_memory_that_was_released_is_not_used():
    engine = fill(make_built(LLAMA), reference(LLAMA))
    engine.sleep()
    with pytest.raises(EngineError, match="KV cache has been released"):
        engine._call("generate", [([1], 0)], SamplingParams(1))


def test_bfloat16_travels_as_bfloat16():
    model = reference(LLAMA)
    engine = fill(make_built(LLAMA, dtype=torch.bfloat16), model)
    wanted = {n: tensor_checksum(t.to(torch.bfloat16)) for n, t in hf_weights(model).items()}
    assert dict(engine.checksums()) == wanted
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    check_logprobs(model, PROMPTS, 1, engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(6)))


@pytest.mark.parametrize("version", ["1.3.0rc24", "1.4.0rc1", "2.0.0"])
def test_later_versions_are_refused_with_the_engine_that_runs_on_them(monkeypatch, version):
    use_fake(monkeypatch, version=version)
    text = r"engine.name='trtllm_engine': expected TensorRT-LLM 1.0, 1.1, 1.2"
    with pytest.raises(ConfigError, match=text) as caught:
        make_built(LLAMA)
    assert "\n" not in str(caught.value) and version in str(caught.value)
    assert ("engine=trtllm runs on it" in str(caught.value)) == (version != "2.0.0")


def test_what_this_engine_cannot_do_is_refused():
    for options, text in (
        ({"tensor_parallel": 2}, r"engine.tensor_parallel=2: expected 1 with engine.name=trtllm_engine"),
        ({"sleep_weights": True}, r"engine.sleep_weights=True: expected false"),
        ({"cuda_graphs": True}, r"engine.cuda_graphs=True: expected false"),
        ({"prefix_reuse": True}, r"engine.trtllm.prefix_reuse=True: expected false"),
    ):
        with pytest.raises(ConfigError, match=text):
            make_built(LLAMA, **options)
    with pytest.raises(ConfigError, match=r"model.attention.window=4: expected at least 256"):
        make_built(MODELS["mistral"])
    make_built(replace(MODELS["mistral"], attention=AttentionConfig(window=256))).close()


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = r"engine.name=trtllm_engine needs `tensorrt_llm`: .*aligner\[trtllm-engine\]"
    with pytest.raises(MissingExtraError, match=text):
        make_built(LLAMA)


@pytest.mark.slow
class TestInAProcess(ChildEngineContract):
    """With a real child."""

    last_words = "illegal memory access"

    @pytest.fixture(autouse=True)
    def _environment(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def make_crashing(self, where):
        self.monkeypatch.setenv("FAKE_TRTLLM_CRASH", {"generate": "run", "refit": "set_named_weights:2"}[where])
        return make_built(LLAMA, process=True)

    def test_a_child_of_another_python_that_is_a_rank(self, tmp_path):
        for name in ("PYTHONPATH", "FAKE_TRTLLM_VERSION"):
            self.monkeypatch.delenv(name, raising=False)
        self.monkeypatch.setenv("FAKE_TRTLLM_VERSION", "1.2.1")
        self.monkeypatch.setenv("PMI_RANK", "0")
        self.monkeypatch.setenv("PMI_SIZE", "2")
        model = reference(LLAMA)
        engine = fill(make_built(LLAMA, process=True, python=str(other_python(tmp_path))), model)
        check_logprobs(model, PROMPTS, 1, engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(5)))
        process = engine._channel.child.process
        engine.close()
        assert process.poll() == 0
