"""The doctor's row about CUDA IPC: try once whether an engine's process can read the trainer's memory."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Iterator

import torch

from aligner.config.sections.child import ChildConfig
from aligner.engines.child.buckets import CudaMemory, Memory, cuda_buffer
from aligner.engines.child.process import clean_environment, interpreter
from aligner.errors import ConfigError

NAME, SIZE, LIMIT_S = "cuda ipc", 64, 300.0
# prints what another process reads in the memory
READ = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).tensor().tolist())"
HINT = "Containers need one IPC and PID namespace for both (docker: --ipc=host); see docs/how-to/vllm.md."


def ipc_checks(options: ChildConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (check, status, detail), only for the first device; none without a GPU, where weights go through host
    memory."""
    if not torch.cuda.is_available():
        return
    buffer = cuda_buffer(SIZE, torch.device("cuda", 0))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    buffer.copy_(torch.arange(SIZE))
    torch.cuda.synchronize()
    wrong = unread(CudaMemory.of(buffer), options, {"CUDA_VISIBLE_DEVICES": visible})
    if wrong:
        yield NAME, "fail", f"{wrong}. {HINT}"
    else:
        yield NAME, "ok", "an engine's process reads the trainer's memory"


def unread(memory: Memory, options: ChildConfig, extra: dict[str, str]) -> str:
    """Return why the engine's interpreter does not read 0, 1, 2, ... there; "" if it does. Its torch may be another
    version."""
    try:
        python, environ = interpreter(options.python, clean_environment(os.environ, extra), options.KEY)
        command = [python, "-c", READ, pickle.dumps(memory).hex()]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    except ConfigError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"an engine's process has not read the trainer's memory within {LIMIT_S:g} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return f"an engine's process cannot read the trainer's memory: {lines[-1] if lines else done.returncode}"
    printed, wanted = done.stdout.strip().splitlines()[-1:], str(list(range(SIZE)))
    return "" if printed == [wanted] else "an engine's process finds other numbers in the trainer's memory"
