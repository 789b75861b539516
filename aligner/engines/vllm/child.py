"""The process of one vLLM engine; its environment is free of the launcher's variables."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from aligner.engines.child.serve import serve
from aligner.engines.vllm.worker import Worker

if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), Worker)
