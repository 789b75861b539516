"""The engine that repeats another one's answers: the contract, what it refuses, and a whole run without generation."""

import contextlib
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from aligner.config.resolve import compose
from aligner.config.sections.engine import EngineConfig
from aligner.engines.native import NativeEngine
from aligner.engines.recorded import RecordedEngine, RecordingEngine
from aligner.errors import ConfigError, DataError, EngineError, RefitError
from aligner.types import SamplingParams
from tests import stages
from tests.engines.contract import LLAMA, PROMPTS, EngineContract, fill, reference, seeds_for


class Replayed:
    """Each answer is given by a native engine, written to disk, and given again by the engine under test, which sees
    the same updates."""

    def __init__(self, cfg, decode, **config):
        self.folder = Path(tempfile.mkdtemp())
        native = NativeEngine(cfg, EngineConfig(**config), device="cpu", dtype=torch.float32, pad_id=0, decode=decode)
        self.live, self.cfg = RecordingEngine(native, self.folder, 3), cfg
        fill(self.live, reference(cfg))
        self.live.generate([[1]], [[99]], SamplingParams(1))
        self.recorded = RecordedEngine(cfg, self.folder, dtype=torch.float32)

    def __del__(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def __getattr__(self, name):
        return getattr(self.recorded, name)

    def update_weights(self, tensors):
        tensors = list(tensors)
        self.live.update_weights(tensors)
        self.recorded.update_weights(tensors)

    def begin_update(self, version):
        self.live.begin_update(version)
        self.recorded.begin_update(version)

    def finish_update(self):
        with contextlib.suppress(RefitError):
            self.live.finish_update()
        self.recorded.finish_update()

    def answered(self, method, *arguments):
        """Live first; its refusals are not what is tested."""
        with contextlib.suppress(RefitError):
            self.live.wake()
            getattr(self.live, method)(*arguments)
        self.recorded.answers.__init__(self.folder)

    def generate(self, prompts, seeds, sampling, progress=None):
        self.answered("generate", prompts, seeds, sampling)
        return self.recorded.generate(prompts, seeds, sampling, progress)

    def logprobs(self, tokens, lengths, temperature=1.0):
        self.answered("logprobs", tokens, lengths, temperature)
        return self.recorded.logprobs(tokens, lengths, temperature)


class TestRecordedEngine(EngineContract):
    models = ("llama",)

    @staticmethod
    def make_engine(cfg, decode=None, **config):
        return Replayed(cfg, decode, **config)

    @staticmethod
    def bare(engine):
        return engine.recorded

    # of engines that compute
    test_a_row_that_can_never_fit_is_refused = None
    test_stop_strings_need_a_decoder = None


def recording(tmp_path, model):
    live = RecordingEngine(
        NativeEngine(LLAMA, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0), tmp_path / "answers", 0
    )
    fill(live, model, 4).generate(PROMPTS, seeds_for(PROMPTS, 2), SamplingParams(6))
    return tmp_path / "answers"


def test_only_what_was_asked_before_is_answered(tmp_path):
    model = reference(LLAMA)
    folder = recording(tmp_path, model)
    engine = fill(RecordedEngine(LLAMA, folder, dtype=torch.float32), model, 4)
    assert engine.generate(PROMPTS[1:3], seeds_for(PROMPTS, 2)[1:3], SamplingParams(6)).tokens.shape == (4, 6)
    for prompts, seeds, sampling in (
        ([[5, 9, 3]], [[0]], SamplingParams(6)),
        (PROMPTS[:1], [[5]], SamplingParams(6)),
        (PROMPTS[:1], [[0]], SamplingParams(6, temperature=0.9)),
    ):
        with pytest.raises(EngineError, match=r"no answer to sample 0 of 1 at weight version 4.*engine.answers"):
            engine.generate(prompts, seeds, sampling)
    with pytest.raises(EngineError, match=r"no answer to sample 0 of 2 at weight version 5"):
        fill(engine, model, 5).generate(PROMPTS[:1], [[0, 1]], SamplingParams(6))


def test_folders_and_files_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match=r"engine.answers.*debug.record_answers"):
        RecordedEngine(LLAMA, tmp_path, dtype=torch.float32)
    folder = recording(tmp_path, reference(LLAMA))
    (folder / "00000-0000009.safetensors").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"0000009.safetensors: cannot be read"):
        RecordedEngine(LLAMA, folder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["engine.answers=here"], "engine.answers"),
        (["engine.name=recorded", "engine.answers=here", "debug.train_only=there"], "engine.answers"),
        (["engine.name=recorded", "engine.answers=here", "debug.record_answers=true"], "debug.record_answers"),
        (["engine.name=recorded"], "debug.train_only"),
    ],
)
def test_keys_that_do_not_fit_together(overrides, key):
    with pytest.raises(ConfigError) as caught:
        compose(["stage=grpo", *overrides])
    assert caught.value.key == key


@pytest.mark.slow
def test_a_run_repeats_without_generating_and_notices_other_weights(tiny_data, tiny_runs, tmp_path):
    def grpo(name, *more):
        more = (f"model.init={tiny_runs['sft']}", "run.steps=3", "checkpoint.final=false", *more)
        return stages.stage("grpo", tiny_data, tmp_path / name, *more)

    first = grpo("first", "debug.record_answers=true")
    answers = ["engine.name=recorded", f"engine.answers={first / 'answers'}"]
    again = grpo("again", *answers)
    assert stages.same_weights(first, again) and not stages.differences(first, again)
    with pytest.raises(RefitError, match="sentinel"):  # from the second step on the weights are others
        grpo("other", *answers, "optim.lr=3e-2")
