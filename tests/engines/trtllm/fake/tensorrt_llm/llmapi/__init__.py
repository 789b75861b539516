from tensorrt_llm.llmapi.llm import LLM, RequestOutput
from tensorrt_llm.llmapi.llm_args import CudaGraphConfig, KvCacheConfig

__all__ = ["LLM", "CudaGraphConfig", "KvCacheConfig", "RequestOutput"]
