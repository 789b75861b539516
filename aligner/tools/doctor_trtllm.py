"""The doctor's rows about TensorRT-LLM: what of the table in `engines/trtllm_api` is installed, missing, not run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator

from aligner.engines.trtllm_api import NOT_RUN, VERSIONS, Findings
from aligner.engines.trtllm_process import clean_environment

Row = tuple[str, str, str]  # check, status, detail


def trtllm_checks(timeout_s: float) -> Iterator[Row]:
    if importlib.util.find_spec("tensorrt_llm") is None:
        yield "trtllm", "fail", "engine.name=trtllm needs `tensorrt_llm`: pip install 'aligner[trtllm]'"
        yield "trtllm not run", "warn", "\n".join(("comparing the installed package with the table", *NOT_RUN))
        return
    found, error = _compare(timeout_s)
    if found is None or found.error:
        yield "trtllm", "fail", error if found is None else f"cannot be imported: {found.error}"
        return
    yield _version(found)
    yield "trtllm present", "ok", "\n".join(found.present) or "nothing"
    yield "trtllm missing", "fail" if found.missing else "ok", "\n".join(found.missing) or "nothing"
    yield "trtllm not run", "warn", "\n".join(found.not_run)


def _version(found: Findings) -> Row:
    known = ", ".join(v.prefix for v in VERSIONS if not v.refused)
    if found.refused:
        return "trtllm", "fail", f"{found.version}: {found.refused}"
    if not found.row:
        return "trtllm", "fail", f"{found.version} is not in the table ({known}); compared with {VERSIONS[-1].prefix}"
    return "trtllm", "ok", f"{found.version}, compared with the table's {found.row}"


def _compare(timeout_s: float) -> tuple[Findings | None, str]:
    """In a process of its own: the package takes hold of MPI and the GPU when it is imported."""
    command = [sys.executable, "-m", "aligner.engines.trtllm_api"]
    environ = clean_environment(os.environ, {})
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None, f"its import has not ended after engine.trtllm.start_timeout_s={timeout_s:g} s"
    if done.returncode:
        return None, f"its import ended with exit code {done.returncode}: {done.stderr[-600:].strip()}"
    return Findings(**json.loads(done.stdout.strip().splitlines()[-1])), ""
