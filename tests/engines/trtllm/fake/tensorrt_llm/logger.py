from types import SimpleNamespace

logger = SimpleNamespace(trt_logger="trt logger")
