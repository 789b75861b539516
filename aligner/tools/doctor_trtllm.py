"""The doctor's rows about TensorRT-LLM: entries of the engine's table that are installed, missing, or not run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence

from aligner.config.sections.trtllm import TrtllmConfig
from aligner.engines.child.process import clean_environment, interpreter
from aligner.engines.trtllm import built_api, torch_api
from aligner.engines.trtllm.torch_api import Findings, Version
from aligner.engines.trtllm.torch_backend import require_package
from aligner.errors import AlignerError

Row = tuple[str, str, str]  # check, status, detail
TABLES = {"trtllm": torch_api, "trtllm_engine": built_api}


def trtllm_checks(options: TrtllmConfig, name: str = "trtllm", ranks: int = 1) -> Iterator[Row]:
    table = TABLES[name]
    try:
        require_package(options.python, name)
    except AlignerError as error:
        yield "trtllm", "fail", str(error)
        yield "trtllm not run", "warn", "\n".join(("comparing the installed package with the table", *table.NOT_RUN))
        return
    findings, error = _compare(options, table.__name__)
    if findings is None or findings.error:
        yield "trtllm", "fail", error if findings is None else f"cannot be imported: {findings.error}"
        return
    yield _version(findings, table.VERSIONS)
    yield "trtllm present", "ok", "\n".join(findings.present) or "nothing"
    yield "trtllm missing", "fail" if findings.missing else "ok", "\n".join(findings.missing) or "nothing"
    if findings.features:
        features = [f"{name}: {'yes' if there else 'no'}" for name, there in findings.features.items()]
        yield "trtllm features", "ok", "\n".join(features)
    if ranks > 1:
        lacking = findings.lacking["ranks"]
        yield "trtllm engine.tensor_parallel", "fail" if lacking else "ok", "\n".join(lacking) or "nothing is missing"
    yield "trtllm not run", "warn", "\n".join(findings.not_run)


def _version(findings: Findings, versions: Sequence[Version]) -> Row:
    known = [v.prefix for v in versions if not v.refused]
    if findings.refused:
        return "trtllm", "fail", f"{findings.version}: {findings.refused}"
    if not findings.row:
        return (
            "trtllm",
            "fail",
            f"{findings.version} is not in the table ({', '.join(known)}); compared with {known[-1]}",
        )
    return "trtllm", "ok", f"{findings.version}, compared with the table's {findings.row}"


def _compare(options: TrtllmConfig, module: str) -> tuple[Findings | None, str]:
    """Compare in a process of its own, as the package initializes MPI and the GPU when it is imported."""
    executable, environ = interpreter(options.python, clean_environment(os.environ, {}), options.KEY)
    command, timeout_s = [executable, "-m", module], options.start_timeout_s
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None, f"its import has not ended after engine.trtllm.start_timeout_s={timeout_s:g} s"
    if done.returncode:
        return None, f"its import ended with exit code {done.returncode}: {done.stderr[-600:].strip()}"
    return Findings(**json.loads(done.stdout.strip().splitlines()[-1])), ""
