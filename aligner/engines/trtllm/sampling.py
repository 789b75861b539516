"""This project's sampling parameters in TensorRT-LLM's terms, one by one, and the distribution of its logprobs."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch

from aligner.engines.trtllm.torch_api import Version
from aligner.errors import ConfigError
from aligner.types import STOP, SamplingParams

NO_END_ID = -1  # never generated
TOP_K_MAX = 1024  # of the sampling kernels of the TensorRT engine's runtime
RESCORE, RAW, PROCESSED = "rescore", "raw", "processed"


def sampling_arguments(
    sampling: SamplingParams, row: Version, features: Container[str], pad_id: int, drafts: bool = False
) -> dict[str, Any]:
    """Return keyword arguments of `tensorrt_llm.SamplingParams`, without `seed`. `stop` is not among them: the engine
    has no tokenizer, so its caller cuts the responses. Every parameter is given: their defaults (32 tokens, greedy) are
    not ours. Raises ConfigError on parameters that this version would ignore.

    The last stop token, a chat's end where there is one, is `end_id` as well: some samplers look at that alone (see
    `ended`). With `drafts` it is given alone: older ones look for others in tokens of another request.
    """
    if sampling.min_p and not row.min_p:
        expected = f"0 with TensorRT-LLM {row.prefix}, whose default sampler ignores it"
        raise ConfigError("sampling.min_p", sampling.min_p, expected, "1.4 and engine.name=native support it.")
    arguments = _distribution(sampling) | {
        "end_id": sampling.stop_token_ids[-1] if sampling.stop_token_ids else NO_END_ID,
        "pad_id": pad_id,
        "max_tokens": sampling.max_response_tokens,
        "stop_token_ids": None if drafts else list(sampling.stop_token_ids) or None,
        "include_stop_str_in_output": True,  # of stop tokens too: otherwise they are cut off
        "logprobs": 1,  # some versions accept 0 or 1 only; some give the likeliest token and not the sampled one
        "detokenize": False,
    }
    if "plain_logprobs" in features:
        arguments |= {"logprobs": 0, "logprobs_simple_format": True}  # of the sampled token alone, a number
    if sampling.min_p and sampling.temperature:
        arguments["min_p"] = sampling.min_p
    if logprob_source(sampling, features) == PROCESSED:
        arguments["logprobs_mode"] = "PROCESSED"  # the child turns it into the package's own constant
    return arguments


def ended(
    tokens: list[int], logprobs: list[float] | None, reason: int, stops: Sequence[int]
) -> tuple[list[int], list[float] | None, int]:
    """Return a response that ends with its stop token. Samplers treat stop tokens differently: one may continue
    after those that are not `end_id`, another leaves `end_id` out (then without logprobs)."""
    at = next((i + 1 for i, token in enumerate(tokens) if token in stops), 0)
    if at:
        return tokens[:at], None if logprobs is None else logprobs[:at], STOP
    if reason == STOP and stops:
        return [*tokens, stops[-1]], None, STOP
    return tokens, logprobs, reason


def _distribution(sampling: SamplingParams) -> dict[str, Any]:
    """Return the parameters with the same names in both runtimes. 0 turns top-k off."""
    if sampling.temperature == 0:
        return {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
    return {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}


def runner_arguments(sampling: SamplingParams, seeds: Sequence[int]) -> dict[str, Any]:
    """Return keyword arguments of `tensorrt_llm.runtime.SamplingConfig` for one row per seed. Its own defaults are
    greedy (`top_k=1`, `top_p=0`), 20 tokens, one seed for all. Raises ConfigError on values that its kernels would
    clip.

    No end id, as above: here it also fills the tokens after the end. With one, `min_length` (1 by default) masks the
    logit of that id, which for an invalid id is outside the row: so 0.
    """
    if sampling.top_k > TOP_K_MAX:
        expected = f"at most {TOP_K_MAX} with engine.name=trtllm_engine, the limit of its kernels"
        raise ConfigError("sampling.top_k", sampling.top_k, expected)
    return _distribution(sampling) | {
        "end_id": NO_END_ID,
        "pad_id": NO_END_ID,
        "max_new_tokens": sampling.max_response_tokens,
        "min_p": sampling.min_p if sampling.temperature else 0.0,
        "random_seed": torch.tensor(list(seeds), dtype=torch.int64),
        "min_length": 0,
        "num_beams": 1,
        "use_beam_hyps": False,
        "stop_words_list": _stop_words(sampling.stop_token_ids, len(seeds)),
        "output_sequence_lengths": True,
        "return_dict": True,
    }


def _stop_words(tokens: Sequence[int], rows: int) -> Any:
    """Return int32 [rows, 2, n] (numpy: a list would need a tokenizer): the words' tokens one after another, and the
    end of each word. Every word here is one token."""
    if not tokens:
        return None
    words = torch.tensor([list(tokens), list(range(1, len(tokens) + 1))], dtype=torch.int32)
    return words.expand(rows, -1, -1).contiguous().numpy()


def logprob_source(sampling: SamplingParams, features: Container[str]) -> str:
    """Return the source of logprobs. RAW: the sampler's logprobs of the untempered distribution are the ones wanted.
    PROCESSED: those of the sampled-from one, where a version gives them. RESCORE: neither, or two kinds are wanted:
    a forward over the finished rows gives them."""
    if sampling.truncates:
        return RESCORE
    if sampling.temperature in (0, 1):
        return RAW
    return PROCESSED if "processed_logprobs" in features else RESCORE
