"""Drafts in vLLM (`engine.draft_tokens`)."""

import pytest

from aligner.types import SamplingParams
from tests.engines.contract import PROMPTS, check_logprobs, fill, reference, responses, seeds_for
from tests.engines.vllm.setup import LLAMA, make_engine, needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow]


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
    for prompt in PROMPTS[3:]:  # alone: a pass gives a row one token, and those of its draft that were accepted
        engine.generate([prompt], [[0]], SamplingParams(40, temperature=0.0))
        sums = engine.take_sums()
        assert sums["engine/decode_passes"][0] == 40 - sums["engine/draft_acceptance_rate"][0]
