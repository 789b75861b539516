"""What makes an executor: this process's own, or of other processes, in which its weights cannot be reached."""

import os
from types import SimpleNamespace

from tensorrt_llm._utils import mpi_disabled, mpi_rank


class GenerationExecutor:
    @staticmethod
    def create(engine, *, hf_model_dir, tokenizer, llm_args, is_llm_executor, **others):
        if getattr(llm_args, "orchestrator_type", None) == "ray":
            raise ModuleNotFoundError("No module named 'ray'")
        if llm_args.tensor_parallel_size > 1 or os.environ.get("TLLM_WORKER_USE_SINGLE_PROCESS") != "1":
            return SimpleNamespace()
        return GenerationExecutorWorker(engine, hf_model_dir=hf_model_dir, llm_args=llm_args)


class GenerationExecutorWorker(GenerationExecutor):
    def __init__(
        self,
        engine,
        executor_config=None,
        batched_logits_processor=None,
        postproc_worker_config=None,
        is_llm_executor=None,
        hf_model_dir=None,
        tokenizer=None,
        llm_args=None,
    ):
        self.llm_args, self.rank, self.global_rank = llm_args, mpi_rank(), 0
        self.setup_engine()

    def _get_comm_ranks_device_id(self):
        if mpi_disabled():
            raise RuntimeError("MPI_Allgather: one process is not all ranks")
        return [0], [0]

    def setup_engine(self) -> None:
        from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor

        ranks, devices = self._get_comm_ranks_device_id()
        if len(ranks) != self.llm_args.tensor_parallel_size or ranks[self.global_rank] != self.rank:
            raise RuntimeError(f"rank {self.global_rank} of {ranks}, devices {devices}")
        self.engine = PyExecutor(self.llm_args)

    def submit(self, request) -> None:
        if self.rank != 0:
            raise RuntimeError("Only rank 0 can submit requests.")
        self.engine.queue.append(request)

    def shutdown(self) -> None:
        self.engine.shutdown()
