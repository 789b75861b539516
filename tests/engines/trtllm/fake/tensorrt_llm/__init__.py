"""A strict stand-in for TensorRT-LLM, for tests: refuses what the real one refuses. Its PyTorch backend is here; the
TensorRT engine path of versions up to 1.2 (builder, models, plugin, runtime, and `tensorrt` beside this package)
computes with tests/engines/trtllm/oracle.py and has settings of its own: see tensorrt/__init__.py.

The backend computes with this project's native engine on the CPU, but loads, finalises, caches prefixes and releases
memory the way the package does, so that a caller that gets the order wrong gets wrong tokens or an error. Settings,
from the environment: FAKE_TRTLLM_VERSION; FAKE_TRTLLM_LOG, a file that gets one line per call; FAKE_TRTLLM_CRASH and
FAKE_TRTLLM_RAISE and FAKE_TRTLLM_HANG, the name of the call (with `:n`, the n-th) at which the process dies, raises or
stops; FAKE_TRTLLM_WHOLE, whose models cannot load partially; FAKE_TRTLLM_STALE,
whose models keep the first weights that they were given; FAKE_TRTLLM_STALE_GRAPHS, whose decode steps, but for a
response's first token, do (at temperature 1 or 0); FAKE_TRTLLM_BALANCER, which places experts by load;
FAKE_TRTLLM_DRAFTS, "within": drafts are part of the model, "drawn": logprobs are of drawn tokens, not of accepted
ones; FAKE_TRTLLM_ENDS, "end_id": a sampler that looks at no other stop token, "left out": one that leaves
that out.
"""

import os

from aligner.cluster.env import rank_env

__version__ = os.environ.get("FAKE_TRTLLM_VERSION", "1.4.0rc1")
if rank_env().world_size > 1:
    raise RuntimeError("MPI_Init: this process takes itself for a rank of the job")

from tensorrt_llm.llmapi import LLM
from tensorrt_llm.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
