"""The executor of one rank of an engine of several. It is in a process group (`child/ranks.py`), which TensorRT-LLM
knows from MPI or Ray only."""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist

from aligner.ops.reduce import gathered


def _device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def executor_class() -> type:
    """Return the class of the executor of one rank, which is in a process group."""
    from tensorrt_llm._torch.distributed.communicator import TorchDist
    from tensorrt_llm.executor.worker import GenerationExecutorWorker

    def cluster_info(self: Any) -> list[tuple[str, int]]:
        """Return each rank's node and device, which otherwise Ray tells."""
        if self.cluster_info is None:
            self.cluster_info = gathered((socket.gethostname(), _device()))
        return self.cluster_info

    TorchDist._get_cluster_info = cluster_info

    class RankExecutor(GenerationExecutorWorker):
        @classmethod
        def create(cls, engine: Any, **arguments: Any) -> Any:
            kept = ("hf_model_dir", "tokenizer", "llm_args", "is_llm_executor")
            return cls(engine=engine, **{name: arguments[name] for name in kept})

        def setup_engine(self) -> None:
            self.global_rank = dist.get_rank()  # without MPI it is 0 on each
            dist.barrier()
            super().setup_engine()

        def _get_comm_ranks_device_id(self) -> tuple[list[int], list[int]]:
            return gathered(dist.get_rank()), gathered(_device())

    return RankExecutor
