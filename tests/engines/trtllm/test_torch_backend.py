"""The TensorRT-LLM engine over the strict fake: the contract of all engines, and what is its own."""

import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from aligner.engines.child.process import clean_environment
from aligner.errors import ConfigError, EngineError, MissingExtraError, RefitError
from aligner.ops.kernels.checksum import tensor_checksum
from aligner.types import LENGTH, SamplingParams
from tests.engines.contract import (
    LLAMA,
    PROMPTS,
    ChildEngineContract,
    EngineContract,
    check_logprobs,
    fill,
    reference,
    responses,
    seeds_for,
)
from tests.engines.trtllm.setup import forget_fake, make_engine, other_python, use_fake
from tests.tiny import hf_weights


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    use_fake(monkeypatch)
    yield
    forget_fake()


class TestTrtllmEngine(EngineContract):
    models = ("llama", "qwen2", "qwen3", "qwen3_moe")
    make_engine = staticmethod(make_engine)

    def test_a_row_that_can_never_fit_is_refused(self):
        model, position = reference(LLAMA), 2 * 2 * 2 * 8 * 4  # layers, k and v, kv heads, head_dim, float32
        needed = 32 * position  # blocks of 32 tokens
        engine = fill(make_engine(LLAMA, kv_cache_bytes=needed), model)
        assert engine.generate([[1, 2, 3]], [[0]], SamplingParams(29)).tokens.shape == (1, 29)
        with pytest.raises(ConfigError, match=f"engine.kv_cache_bytes.*{2 * needed} bytes"):
            engine.generate([[1, 2, 3]], [[0]], SamplingParams(30))
        short = fill(make_engine(replace(LLAMA, max_position=12)), model)
        with pytest.raises(ConfigError, match=r"model.max_position"):
            short.generate([[1, 2, 3]], [[0]], SamplingParams(10))
        limited = fill(make_engine(LLAMA, max_seq_len=12), model)
        with pytest.raises(ConfigError, match=r"engine.trtllm.max_seq_len=12.*at least 13"):
            limited.generate([[1, 2, 3]], [[0]], SamplingParams(10))


def test_options_of_the_package(monkeypatch, tmp_path):
    use_fake(monkeypatch, log=str(tmp_path / "log"))
    make_engine(LLAMA, args={"enable_attention_dp": True}).close()
    assert "enable_attention_dp" in (tmp_path / "log").read_text()
    with pytest.raises(ConfigError, match=r"args.enable_attention_dp=3: expected what TensorRT-LLM .* a valid bool"):
        make_engine(LLAMA, args={"enable_attention_dp": 3})
    with pytest.raises(ConfigError, match=r"args.enable_dp=True: expected an option that TorchLlmArgs of .*attention"):
        make_engine(LLAMA, args={"enable_dp": True})


def test_each_update_goes_through_the_same_order_of_calls(monkeypatch, tmp_path):
    use_fake(monkeypatch, log=str(tmp_path / "log"))
    model = reference(LLAMA)
    engine = make_engine(LLAMA)
    fill(engine, model, 1)
    engine.generate([[1]], [[0]], SamplingParams(1))
    engine.sleep()
    engine.wake()
    engine.close()
    calls = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    reloads = calls.count("reload")
    assert reloads > 3  # so that fused parts came in different buckets
    sweep = ["begin", "modules", *["reload"] * reloads, "finalize", "modules", "reset_prefix_cache"]
    assert calls == ["LLM", *sweep, "run", "release", "materialize", "reset_prefix_cache", "shutdown"]


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc24", "1.4.0rc1"])
def test_experts_that_are_placed_by_load_get_their_weights(monkeypatch, tmp_path, version):
    """At the end of each update, in versions that keep a state of it and in others."""
    use_fake(monkeypatch, version=version, balancer="1", log=str(tmp_path / "log"))
    model = reference(LLAMA)
    engine = make_engine(LLAMA, sleep=False)
    for number in (1, 2):
        fill(engine, model, number)
    engine.close()
    calls = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    new = version.startswith("1.4")
    ends = [["finalize"] * new + ["modules", "slots", "placed", "reset_prefix_cache"]] * 2
    results = [call for call in calls if call not in ("reload", "LLM", "shutdown", "begin")]
    assert results == [call for end in ends for call in ("modules", *end)]
    assert engine.described["features"] and ("update_hooks" in engine.described["features"]) == new


def test_an_update_that_fails_or_is_given_up_leaves_the_loader_free(monkeypatch, tmp_path):
    use_fake(monkeypatch, log=str(tmp_path / "log"))
    model = reference(LLAMA)
    engine = make_engine(LLAMA)
    import tensorrt_llm.calls as calls

    monkeypatch.setenv("FAKE_TRTLLM_RAISE", "reload:2")
    engine.begin_update(1)
    with pytest.raises(RefitError, match="out of memory in reload"):
        engine.update_weights(hf_weights(model).items())
    monkeypatch.delenv("FAKE_TRTLLM_RAISE")
    assert calls.COUNTS["abort"] == 1
    engine.begin_update(2)
    engine.update_weights(list(hf_weights(model).items())[:3])
    fill(engine, model, 3)  # which begins where that was left
    assert calls.COUNTS["abort"] == 2
    check_logprobs(model, PROMPTS, 1, engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(6)))


@pytest.mark.parametrize("version", ["1.2.1", "1.4.0rc1"])
@pytest.mark.parametrize("ends", ["end_id", "left out"])
def test_a_response_ends_with_its_stop_token_whatever_a_sampler_makes_of_it(monkeypatch, version, ends):
    """One that looks at one stop token alone, or leaves it out: as one that looks at all."""
    model, sampling = reference(LLAMA), SamplingParams(12, stop_token_ids=(3, 11, 20))
    seeds = seeds_for(PROMPTS, 8)

    def generated(**settings):
        use_fake(monkeypatch, version=version, **settings)
        return fill(make_engine(LLAMA, sleep=False), model).generate(PROMPTS, seeds, sampling)

    wanted = generated()
    monkeypatch.setenv("FAKE_TRTLLM_ENDS", ends)
    outputs = generated()
    assert responses(outputs) == responses(wanted) and torch.equal(outputs.finish_reason, wanted.finish_reason)
    assert {3, 11, 20} <= {row[-1] for row in responses(outputs)} and LENGTH in outputs.finish_reason
    check_logprobs(model, PROMPTS, 8, outputs)


def test_a_prefix_of_old_weights_is_not_reused():
    engine = fill(make_engine(LLAMA), reference(LLAMA))
    sampling = SamplingParams(8, temperature=0)
    engine.generate(PROMPTS, seeds_for(PROMPTS), sampling)
    other = reference(LLAMA, 1)
    out = fill(engine, other, 2).generate(PROMPTS, seeds_for(PROMPTS), sampling)
    check_logprobs(other, PROMPTS, 1, out)


def test_models_that_load_all_weights_or_none(monkeypatch):
    use_fake(monkeypatch, whole="1")
    engine, model = make_engine(LLAMA), reference(LLAMA)
    assert not engine.described["partial"]
    out = fill(engine, model).generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(6))
    check_logprobs(model, PROMPTS, 1, out)


def test_a_failed_bucket_poisons_until_a_whole_update(monkeypatch):
    model = reference(LLAMA)
    engine = fill(make_engine(LLAMA), model)
    import tensorrt_llm.calls as calls

    monkeypatch.setenv("FAKE_TRTLLM_RAISE", f"reload:{calls.COUNTS['reload'] + 2}")
    engine.begin_update(2)
    with pytest.raises(RefitError, match="out of memory in reload"):
        engine.update_weights(hf_weights(model).items())
    with pytest.raises(RefitError, match="last complete version: 1"):
        engine.generate([[1]], [[0]], SamplingParams(1))
    with pytest.raises(RefitError, match="no complete weights"):  # the child refuses too, whoever asks
        engine._call("generate", [([1], 0)], SamplingParams(1))
    monkeypatch.delenv("FAKE_TRTLLM_RAISE")
    assert fill(engine, model, 3).generate([[1]], [[0]], SamplingParams(1)).weight_version == 3


def test_a_failed_finish_does_not_count(monkeypatch):
    engine, model = make_engine(LLAMA), reference(LLAMA)
    engine.begin_update(5)
    engine.update_weights(hf_weights(model).items())
    import tensorrt_llm.calls as calls

    monkeypatch.setenv("FAKE_TRTLLM_RAISE", f"reset_prefix_cache:{calls.COUNTS['reset_prefix_cache'] + 1}")
    with pytest.raises(RefitError, match="finish failed"):
        engine.finish_update()
    assert engine.weight_version == -1
    with pytest.raises(RefitError, match="no complete weights"):
        engine.generate([[1]], [[0]], SamplingParams(1))


@pytest.mark.few(4)
@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc24", "1.4.0rc1"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(7),
        SamplingParams(7, temperature=0),
        SamplingParams(7, temperature=0.6),
        SamplingParams(7, top_k=5),
        SamplingParams(7, temperature=1.3, top_p=0.8),
    ],
)
def test_logprobs_mean_the_same_in_every_version(monkeypatch, version, sampling):
    use_fake(monkeypatch, version=version)
    model = reference(LLAMA)
    engine = fill(make_engine(LLAMA, cuda_graphs=not version.startswith("1.2")), model)
    assert engine.version == version
    out = engine.generate(PROMPTS[:2], seeds_for(PROMPTS[:2], 2), sampling)
    full = out.full_logprobs if out.full_logprobs is not None else out.logprobs
    check_logprobs(model, PROMPTS, 2, replace(out, logprobs=full), sampling.temperature or 1.0)
    cut = sampling.top_k > 0 or sampling.top_p < 1
    assert (out.full_logprobs is not None) == cut and (out.logprobs >= full - 1e-5).all()
    assert not cut or (out.logprobs > full + 0.01).any()


def test_what_a_version_would_ignore_is_refused(monkeypatch):
    use_fake(monkeypatch, version="1.3.0rc24")
    engine = fill(make_engine(LLAMA), reference(LLAMA))
    with pytest.raises(ConfigError, match=r"sampling.min_p=0.1: expected 0 with TensorRT-LLM 1.3"):
        engine.generate([[1]], [[0]], SamplingParams(2, min_p=0.1))


@pytest.mark.parametrize(("version", "why"), [("1.1.0", "cannot be replaced"), ("0.21.0", "Installed is 0.21.0")])
def test_versions_that_cannot_serve_are_refused(monkeypatch, version, why):
    use_fake(monkeypatch, version=version)
    with pytest.raises(ConfigError, match=why):
        make_engine(LLAMA)


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"aligner\[trtllm\]"):
        make_engine(LLAMA)


def test_an_interpreter_that_is_none():
    with pytest.raises(ConfigError, match=r"engine.trtllm.python='/nowhere/python': expected the path of a Python"):
        make_engine(LLAMA, python="/nowhere/python")


def test_memory_that_was_released_is_not_used():
    engine = fill(make_engine(LLAMA), reference(LLAMA))
    engine.sleep()
    with pytest.raises(AssertionError, match="wake"):
        engine.generate([[1]], [[0]], SamplingParams(1))
    with pytest.raises(EngineError, match=r"illegal memory access.*'kv_cache', 'model', 'sampler'"):
        engine._call("generate", [([1], 0)], SamplingParams(1))


def test_weights_released_in_sleep_are_gone_until_a_refit(monkeypatch, tmp_path):
    use_fake(monkeypatch, log=str(tmp_path / "log"))
    model = reference(LLAMA)
    engine = fill(make_engine(LLAMA, sleep_weights=True), model)
    before = engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(4))
    engine.sleep(weights=True)
    engine.wake()
    assert engine.weight_version == -1
    with pytest.raises(RefitError, match="no complete weights"):
        engine.generate([[1]], [[0]], SamplingParams(1))
    with pytest.raises(RefitError, match="no complete weights"):  # the child refuses too, whoever asks
        engine._call("generate", [([1], 0)], SamplingParams(1))
    fill(engine, model, 2)
    assert torch.equal(engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(4)).tokens, before.tokens)
    engine.sleep(weights=True)
    fill(engine, model, 3)  # which needs the weights' memory and not the cache's
    engine.wake()
    assert torch.equal(engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(4)).tokens, before.tokens)
    moves = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith(("release", "mat"))]
    rest = "model_weights sampler executor_extra model"
    both = [f"release kv_cache {rest}", f"materialize kv_cache {rest}"]
    assert moves == [*both, both[0], f"materialize {rest}", "materialize kv_cache"]


@pytest.mark.parametrize(
    ("version", "away"), [("1.2.1", "kv_cache"), ("1.3.0rc24", "kv_cache sampler executor_extra model")]
)
def test_all_memory_but_the_weights_is_given_back_and_an_update_needs_all_but_the_cache(
    monkeypatch, tmp_path, version, away
):
    """In the oldest versions the weights have the tag of the engine's other memory."""
    use_fake(monkeypatch, version=version, log=str(tmp_path / "log"))
    model = reference(LLAMA)
    engine = fill(make_engine(LLAMA, cuda_graphs=False), model)
    engine.sleep()
    fill(engine, model, 2)
    engine.wake()
    check_logprobs(model, PROMPTS, 1, engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(4)))
    moves = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith(("release", "mat"))]
    rest = [f"materialize {extra}"] if (extra := away.partition(" ")[2]) else []
    assert moves == [f"release {away}", *rest, "materialize kv_cache"]


def test_what_sleep_cannot_do_in_old_versions(monkeypatch):
    use_fake(monkeypatch, version="1.2.1")
    with pytest.raises(ConfigError, match=r"engine.sleep_weights=True.*1\.2"):
        make_engine(LLAMA, sleep_weights=True, cuda_graphs=False)
    with pytest.raises(ConfigError, match=r"engine.cuda_graphs=True.*1\.2.*engine.sleep=false"):
        make_engine(LLAMA, cuda_graphs=True)
    make_engine(LLAMA, sleep=False).close()


def test_without_sleep_the_memory_stays(monkeypatch, tmp_path):
    use_fake(monkeypatch, log=str(tmp_path / "log"))
    engine = fill(make_engine(LLAMA, sleep=False), reference(LLAMA))
    engine.sleep()
    engine.wake()
    assert "release" not in (tmp_path / "log").read_text()
    assert engine.generate([[1]], [[0]], SamplingParams(1)).lengths.tolist() == [1]


def test_an_exception_of_progress_lets_the_requests_go():
    engine = fill(make_engine(LLAMA, max_batch=1), reference(LLAMA))

    def stop(done, total):
        time.sleep(0.2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([[i % 50] for i in range(400)], [[0]] * 400, SamplingParams(20), stop)
    out = engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(5))
    assert out.finish_reason.tolist() == [LENGTH] * len(PROMPTS)


def test_bfloat16_travels_as_bfloat16():
    model = reference(LLAMA)
    engine = fill(make_engine(LLAMA, dtype=torch.bfloat16), model)
    wanted = {n: tensor_checksum(t.to(torch.bfloat16)) for n, t in hf_weights(model).items()}
    assert dict(engine.checksums()) == wanted


def test_checksums_only_where_they_were_taken():
    engine = fill(make_engine(LLAMA, checksums=False), reference(LLAMA))
    with pytest.raises(ConfigError, match=r"refit\.verify"):
        engine.checksums()


def test_the_launchers_variables_do_not_reach_a_child():
    launcher = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PMI_RANK": "1", "SLURM_PROCID": "1", "RANK": "1"}
    launcher |= {"WORLD_SIZE": "2", "MASTER_ADDR": "here", "SLURM_STEP_ID": "0", "ALIGNER_LAUNCHED": "1"}
    kept = {"PATH": "/bin", "LD_LIBRARY_PATH": "/lib", "CUDA_VISIBLE_DEVICES": "3", "HOME": "/"}
    actual = clean_environment(launcher | kept, {"CUDA_VISIBLE_DEVICES": "0"})
    assert actual == kept | {"CUDA_VISIBLE_DEVICES": "0"}


class TestInAProcess(ChildEngineContract):
    """With a real child: its environment, its memory, and its deaths."""

    last_words = "illegal memory access"

    @pytest.fixture(autouse=True)
    def _environment(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def make_crashing(self, where):
        self.monkeypatch.setenv("FAKE_TRTLLM_CRASH", {"generate": "run", "refit": "reload:2"}[where])
        return make_engine(LLAMA, process=True)

    @pytest.mark.slow
    def test_the_end_of_the_process_in_sleep(self):
        self.monkeypatch.setenv("FAKE_TRTLLM_CRASH", "release")
        engine = fill(make_engine(LLAMA, process=True), reference(LLAMA))
        for call in (engine.sleep, engine.wake, lambda: engine.generate([[1]], [[0]], SamplingParams(1))):
            with pytest.raises(EngineError, match=rf"(?s)ended by signal 6 in sleep.*{self.last_words}"):
                call()
        with pytest.raises(RefitError, match="ended by signal 6 in sleep"):
            engine.begin_update(2)

    @pytest.mark.slow
    def test_a_child_of_a_rank_is_no_rank(self, monkeypatch):
        for name, value in {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMI_RANK": "1"}.items():
            monkeypatch.setenv(name, value)
        model = reference(LLAMA)
        engine = fill(make_engine(LLAMA, process=True), model)
        process = engine._channel.child.process
        check_logprobs(model, PROMPTS, 1, engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(6)))
        assert dict(engine.checksums()) == {n: tensor_checksum(t) for n, t in hf_weights(model).items()}
        folder = Path(engine._folder.name)
        assert [p.name for p in folder.iterdir()] == ["config.json"]
        engine.close()
        assert process.poll() == 0 and not folder.exists() and not engine._channel.child.log.exists()
        with pytest.raises(RefitError):
            engine.generate([[1]], [[0]], SamplingParams(1))

    @pytest.mark.slow
    def test_a_child_goes_when_the_trainer_is_killed(self, tmp_path):
        self.monkeypatch.setenv("TMPDIR", str(tmp_path))  # nobody is left to remove its log
        script = (
            "import os; from aligner.engines.child.process import spawn; "
            "child, connection = spawn('aligner.engines.trtllm.torch_worker:Worker', os.environ); "
            "print(child.process.pid, flush=True); os.kill(os.getpid(), 9)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
        deadline = time.monotonic() + 300
        while psutil.pid_exists(int(done.stdout)) and psutil.Process(int(done.stdout)).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert done.returncode == -9

    @pytest.mark.slow
    def test_a_child_that_hangs_is_stopped(self, monkeypatch):
        monkeypatch.setenv("FAKE_TRTLLM_HANG", "run")
        engine = fill(make_engine(LLAMA, process=True, generate_timeout_s=999), reference(LLAMA))
        looks = count()

        def monotonic():
            """The time is up when it hangs; the first look is that from which on it counts."""
            hangs = next(looks) and "waiting for a barrier" in engine._channel.child.last_words()
            return time.monotonic() + 1000 * bool(hangs)

        clock = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
        monkeypatch.setattr("aligner.engines.child.process.time", clock)
        with pytest.raises(EngineError, match=r"(?s)engine.trtllm.generate_timeout_s=999 s.*waiting for a barrier"):
            engine.generate([[1]], [[0]], SamplingParams(1))
        assert engine._channel.child.ended() == "ended by signal 9"
        engine.close()

    @pytest.mark.slow
    def test_a_child_of_another_python_goes_when_nobody_holds_it(self, tmp_path):
        for name in ("PYTHONPATH", "FAKE_TRTLLM_VERSION"):
            self.monkeypatch.delenv(name, raising=False)
        self.monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        process = make_engine(LLAMA, process=True, python=str(other_python(tmp_path)))._channel.child.process
        assert process.wait(300) == 0
