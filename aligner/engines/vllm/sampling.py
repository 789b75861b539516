"""This project's sampling parameters in vLLM's terms, one by one."""

from __future__ import annotations

from typing import Any

from aligner.types import SamplingParams


def sampling_arguments(sampling: SamplingParams) -> dict[str, Any]:
    """Return keyword arguments of `vllm.SamplingParams`, without `seed`. `stop` is not among them: the engine has no
    tokenizer, so its caller cuts the responses. Every parameter is given: defaults (16 tokens, the end of a text as
    in config.json) are not ours."""
    cut = sampling if sampling.truncates else SamplingParams(1)  # vLLM ignores cuts of greedy sampling too
    return {
        "max_tokens": sampling.max_response_tokens,
        "temperature": sampling.temperature,
        "top_p": cut.top_p,
        "top_k": cut.top_k,
        "min_p": cut.min_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # ends are the stop tokens above
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
    }
