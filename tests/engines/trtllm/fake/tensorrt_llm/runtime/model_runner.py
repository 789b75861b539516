import copy

import numpy as np
import torch

from tensorrt_llm.builder import Engine
from tensorrt_llm.runtime.generation import GenerationSession, SamplingConfig


class ModelRunner:
    def __init__(self, session, build_config):
        self.session, self.build_config = session, build_config

    @classmethod
    def from_engine(
        cls,
        engine: Engine,
        *,
        max_output_len,
        lora_dir,
        rank,
        debug_mode,
        lora_ckpt_source,
        medusa_choices,
        stream,
        gpu_weights_percent,
        enable_context_fmha_fp32_acc,
        multi_block_mode,
    ) -> "ModelRunner":
        assert isinstance(engine, Engine) and medusa_choices is None and lora_dir is None and rank == 0
        return cls(GenerationSession(engine), engine.config.build_config)

    def generate(
        self,
        batch_input_ids,
        position_ids=None,
        sampling_config=None,
        output_generation_logits=False,
        stopping_criteria=None,
        logits_processor=None,
        **kwargs,
    ):
        unknown = set(kwargs) - set(SamplingConfig.__dataclass_fields__)
        if unknown:
            raise TypeError(f"the real one would ignore {sorted(unknown)}")
        config = copy.deepcopy(sampling_config)
        limits, longest = self.build_config, max(len(x) for x in batch_input_ids)
        if any(x.dim() != 1 or x.dtype != torch.int32 for x in batch_input_ids):
            raise TypeError("input ids")
        if len(batch_input_ids) > limits.max_batch_size:
            raise RuntimeError(f"Input batch size ({len(batch_input_ids)}) exceeds the engine or specified limit")
        if longest > limits.max_input_len or longest + config.max_new_tokens > limits.max_seq_len:
            raise RuntimeError("Maximum input length exceeds the engine or specified limit")
        if sum(map(len, batch_input_ids)) > limits.max_num_tokens:
            raise RuntimeError("set_input_shape: the tokens of the prompts exceed the profile")
        if not isinstance(config.stop_words_list, None | np.ndarray):
            raise AssertionError("need to set tokenizer")
        return self.session.decode(batch_input_ids, config, logits_processor, stopping_criteria)
