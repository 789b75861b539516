import os

import torch.distributed as dist


def mpi_disabled() -> bool:
    return os.environ.get("TLLM_DISABLE_MPI") == "1"


def mpi_rank() -> int:
    return dist.get_rank() if mpi_disabled() and dist.is_initialized() else 0
