"""The symbols of TensorRT-LLM that `engine.name=trtllm_engine` needs, per version: as `torch_api`, for the TensorRT
engine path.

Read from its sources; nothing here has been run against a real package. `python -m aligner.engines.trtllm.built_api`
prints the comparison with the installed package as JSON, on its last line.

Differences and surprises:
  use_fused_mlp   of PluginConfig, on by default: the MLP then has one parameter, fused_fc = [gate; fc]. A property over
                  `_use_fused_mlp` in older versions, a pydantic field later, where setting the old name does nothing
  rotary tables   are named parameters (`is_buffer`) of the engine: it lists them as refittable. They are constants
  min_length      1 by default: masks the logit of end_id in the first step without asking whether there is one
  refit           the engine silently keeps parameters that are not supplied
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from aligner.config.sections.trtllm import NAME
from aligner.engines.trtllm.torch_api import Version, compare, require_row

_SYMBOLS = (
    "tensorrt_llm.builder:build",
    "tensorrt_llm.builder:KVCacheType.CONTINUOUS",
    "tensorrt_llm.logger:logger.trt_logger",
    "tensorrt_llm.models:MODEL_MAP",
    "tensorrt_llm.models:LLaMAForCausalLM.from_config",
    "tensorrt_llm.models:LLaMAForCausalLM.config_class.from_hugging_face",
    "tensorrt_llm.models:LLaMAForCausalLM.named_parameters",
    "tensorrt_llm.models:QWenForCausalLM.from_config",
    "tensorrt_llm.models:QWenForCausalLM.config_class.from_hugging_face",
    "tensorrt_llm.plugin:PluginConfig",
    "tensorrt_llm.runtime:ModelRunner.from_engine",
    "tensorrt:DataType.FLOAT",
    "tensorrt:DataType.BF16",
    "tensorrt:TensorLocation.HOST",
    "tensorrt:Weights",
    "tensorrt:Refitter.get_all_weights",
    "tensorrt:Refitter.get_missing_weights",
    "tensorrt:Refitter.set_named_weights",
    "tensorrt:Refitter.refit_cuda_engine",
)
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    symbol: tuple(names.split())
    for symbol, names in {
        "tensorrt_llm.builder:BuildConfig": (
            "max_input_len max_seq_len max_batch_size max_beam_width max_num_tokens kv_cache_type strongly_typed "
            "use_refit plugin_config output_timing_cache"
        ),
        "tensorrt_llm.plugin:PluginConfig": "use_fused_mlp use_paged_context_fmha",
        "tensorrt_llm.runtime:ModelRunner.from_engine": (
            "engine max_output_len lora_dir rank debug_mode lora_ckpt_source medusa_choices stream gpu_weights_percent "
            "enable_context_fmha_fp32_acc multi_block_mode"
        ),
        "tensorrt_llm.runtime:ModelRunner.generate": (
            "batch_input_ids sampling_config stopping_criteria logits_processor"
        ),
        "tensorrt_llm.runtime:SamplingConfig": (
            "end_id pad_id max_new_tokens temperature top_k top_p min_p random_seed min_length num_beams use_beam_hyps "
            "stop_words_list output_sequence_lengths return_dict"
        ),
    }.items()
}


_GONE = "the builder and its runtime are gone; engine=trtllm runs on it"
VERSIONS = (
    *(Version(prefix, _SYMBOLS, _ARGUMENTS, min_p=True) for prefix in ("1.0", "1.1", "1.2")),
    *(Version(prefix, (), {}, refused=_GONE) for prefix in ("1.3", "1.4")),
)
NOT_RUN = (
    "building an engine, and how long that takes",
    "the names a real engine lists for refitting, and what a refit changes",
    "CUDA IPC between trainer and child",
    "generation: stop words, seeds, tokens after the end of a row",
    "logprobs against the trainer's (the sentinel does that in every run)",
)


def version_row(version: str) -> Version:
    """Return the row of an installed version. Raises ConfigError for one that is not in the table or is refused."""
    return require_row(version, VERSIONS, NAME)


if __name__ == "__main__":
    report = json.dumps(asdict(compare(VERSIONS, NOT_RUN, wanted=())))
    sys.stdout.write(f"\n{report}\n")  # the package prints a banner
