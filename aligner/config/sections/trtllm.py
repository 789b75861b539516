"""The section `engine.trtllm`: what the TensorRT-LLM engine needs beyond the other keys of `engine`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.checks import above, at_least
from aligner.errors import ConfigError

# why, and what would lift it
ONE_RANK = (
    "1 with engine.name=trtllm, one engine per rank: under MPI TensorRT-LLM has no way to replace the weights of an "
    "engine of several ranks; its own way for that is Ray (orchestrator_type=ray and WorkerExtension.update_weights), "
    "which this job does not start"
)


@dataclass
class TrtllmConfig:
    python: str = ""  # interpreter of the environment that has TensorRT-LLM, whose torch may be another; "": this one
    start_timeout_s: float = 1800.0  # the child imports TensorRT-LLM, creates the engine, captures CUDA graphs
    call_timeout_s: float = 300.0  # one bucket of weights, finalising, sleep, wake, one row of logprobs
    generate_timeout_s: float = 3600.0  # one `generate`
    max_seq_len: int = 0  # prompt + response tokens; 0: data.max_prompt_tokens and the longest response
    sleep: bool = True  # give back the KV cache between rollouts
    sleep_weights: bool = False  # and the weights, without a copy: the engine then needs a refit after each sleep
    prefix_reuse: bool = True  # the samples of a prompt share its KV blocks
    cuda_graphs: bool = True  # of decode steps

    def __post_init__(self) -> None:
        for name in ("start_timeout_s", "call_timeout_s", "generate_timeout_s"):
            above(f"engine.trtllm.{name}", getattr(self, name), 0)
        if self.sleep_weights and not self.sleep:
            raise ConfigError("engine.trtllm.sleep_weights", True, "false with engine.trtllm.sleep=false")
        at_least("engine.trtllm.max_seq_len", self.max_seq_len, 0)
