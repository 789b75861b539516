"""This project's sampling parameters in TensorRT-LLM's words, one by one, and what its logprobs are of."""

from __future__ import annotations

from typing import Any

from aligner.engines.trtllm_api import Version
from aligner.errors import ConfigError
from aligner.types import SamplingParams

NO_END_ID = -1  # never generated: the stop tokens end a response, and then belong to it
RESCORE, RAW, PROCESSED = "rescore", "raw", "processed"


def sampling_arguments(sampling: SamplingParams, row: Version, pad_id: int) -> dict[str, Any]:
    """Keyword arguments of `tensorrt_llm.SamplingParams`, without `seed`. `stop` is not among them: the engine has no
    tokenizer, so its caller cuts the responses. Every parameter is given: their defaults (32 tokens, greedy where
    nothing is said) are not ours. Raises ConfigError on what this version would ignore."""
    if sampling.min_p and not row.min_p:
        expected = f"0 with TensorRT-LLM {row.prefix}, whose default sampler ignores it"
        raise ConfigError("sampling.min_p", sampling.min_p, expected, "1.4 and engine.name=native know it.")
    greedy = sampling.temperature == 0
    found = {
        "end_id": NO_END_ID,
        "pad_id": pad_id,
        "max_tokens": sampling.max_response_tokens,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "include_stop_str_in_output": True,  # of stop tokens too: without it they are cut off
        "temperature": 1.0 if greedy else sampling.temperature,
        "top_k": 1 if greedy else sampling.top_k,  # 0: off
        "top_p": 1.0 if greedy else sampling.top_p,
        "logprobs": 1,  # some versions know 0 or 1 only; some give the likeliest token and not the sampled one
        "detokenize": False,
    }
    if sampling.min_p and not greedy:
        found["min_p"] = sampling.min_p
    if logprob_source(sampling, row) == PROCESSED:
        found["logprobs_mode"] = "PROCESSED"  # the child turns it into the package's own constant
    return found


def is_cut(sampling: SamplingParams) -> bool:
    """Whether the sampled-from distribution is not the whole tempered one."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)


def logprob_source(sampling: SamplingParams, row: Version) -> str:
    """RAW: the sampler's logprobs of the untempered distribution are the ones wanted. PROCESSED: those of the
    sampled-from one, where a version gives them. RESCORE: neither, or two kinds are wanted: a forward over the finished
    rows gives them."""
    if is_cut(sampling):
        return RESCORE
    if sampling.temperature in (0, 1):
        return RAW
    return PROCESSED if row.processed_logprobs else RESCORE
