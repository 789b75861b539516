from tensorrt_llm.llmapi.llm import LLM, RequestOutput
from tensorrt_llm.llmapi.llm_args import CudaGraphConfig, KvCacheConfig, NGramDecodingConfig

__all__ = ["LLM", "CudaGraphConfig", "KvCacheConfig", "NGramDecodingConfig", "RequestOutput"]
