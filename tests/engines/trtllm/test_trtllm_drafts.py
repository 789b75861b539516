"""Drafts of TensorRT-LLM (`engine.draft_tokens`), over the strict fake."""

import pytest
import torch

from aligner.errors import ConfigError
from aligner.types import LENGTH, SamplingParams
from tests.engines.contract import LLAMA, PROMPTS, check_logprobs, fill, reference, responses, seeds_for
from tests.engines.trtllm.setup import forget_fake, make_engine, use_fake

COUNT, GROUP = 3, 8


@pytest.fixture(autouse=True)
def no_fake_left():
    yield
    forget_fake()


@pytest.fixture
def start(monkeypatch):
    def started(version="1.4.0rc1", model=None, **config):
        use_fake(monkeypatch, version=version)
        return fill(make_engine(LLAMA, sleep=False, **config), model or reference(LLAMA))

    return started


def length_of(engine):
    gained, passes = engine.take_sums()["engine/mean_acceptance_length"]
    return gained / passes


@pytest.mark.few(4)
@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc24", "1.4.0rc1"])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_responses_and_logprobs_are_those_without_drafts(start, version, temperature):
    """Though a row's first token is compared with stop tokens where there is one of an earlier row, in older ones."""
    sampling = SamplingParams(24, temperature=temperature, stop_token_ids=(3, 11, 20))
    seeds, model = seeds_for(PROMPTS, GROUP), reference(LLAMA)
    wanted = start(version).generate(PROMPTS, seeds, sampling)
    engine = start(version, draft_tokens=COUNT)
    for out in (engine.generate(PROMPTS, seeds, sampling) for _ in range(2)):
        assert responses(out) == responses(wanted) and torch.equal(out.finish_reason, wanted.finish_reason)
        check_logprobs(model, PROMPTS, GROUP, out, temperature or 1.0)
    ends = {row[-1] for row in responses(wanted)}
    assert not temperature or ({3, 11, 20} <= ends and LENGTH in wanted.finish_reason)
    assert 1 < length_of(engine) < 1 + COUNT


def test_passes_that_score_or_read_a_prompt_are_not_counted(start):
    engine = start(draft_tokens=COUNT)
    engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(1))
    engine.logprobs(torch.ones(1, 4, dtype=torch.int64), torch.tensor([4]))
    assert engine.take_sums()["engine/mean_acceptance_length"] == (0, 0)
    assert "engine/mean_acceptance_length" not in start().take_sums()


def test_what_a_row_drafts_depends_on_the_row_alone(start):
    engine, sampling, passes = start(draft_tokens=COUNT), SamplingParams(24, temperature=0.3), []
    groups = [[prompt] for prompt in PROMPTS]
    for batches in (groups, groups[::-1], [PROMPTS]):
        for batch in batches:
            engine.generate(batch, [[7] for _ in batch], sampling)
        passes.append(engine.take_sums()["engine/mean_acceptance_length"])
    assert passes[0] == passes[1] == passes[2]


def test_a_package_that_drafts_otherwise_is_refused(monkeypatch):
    use_fake(monkeypatch, drafts="within")
    with pytest.raises(ConfigError, match=r"^engine.draft_tokens=3: expected 0 with TensorRT-LLM .*SpecSampler would"):
        make_engine(LLAMA, draft_tokens=COUNT)
    make_engine(LLAMA)
    from tensorrt_llm._torch.speculative.ngram import NGramDrafter

    monkeypatch.delattr(NGramDrafter, "prepare_draft_tokens")
    with pytest.raises(ConfigError, match=r"^engine.draft_tokens=3: expected 0 with TensorRT-LLM .*way to draft"):
        make_engine(LLAMA, draft_tokens=COUNT)
