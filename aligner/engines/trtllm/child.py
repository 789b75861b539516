"""The process of one TensorRT-LLM engine; its environment is free of the launcher's variables."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection

from aligner.engines.child.serve import serve
from aligner.engines.child.worker import BaseWorker, Settings
from aligner.engines.trtllm.built_worker import EngineWorker
from aligner.engines.trtllm.torch_worker import Worker

PYTORCH, TENSORRT = "pytorch", "tensorrt"  # Settings.backend
SINGLE_PROCESS = {"TLLM_WORKER_USE_SINGLE_PROCESS": "1"}
WORKERS: dict[str, type[BaseWorker]] = {PYTORCH: Worker, TENSORRT: EngineWorker}


def make_worker(settings: Settings) -> BaseWorker:
    return WORKERS[settings.backend](settings)


def main() -> None:
    os.environ.update(SINGLE_PROCESS)
    serve(Connection(int(sys.argv[1])), make_worker)


if __name__ == "__main__":
    main()
