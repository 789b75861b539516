"""`aligner doctor`: check that this machine, and this config, have all that a run needs. One table, exit code 1 on a
failure."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aligner.cluster.env import RankEnv
from aligner.config.schema import Config
from aligner.config.sections.vllm import VERSION as VLLM_VERSION
from aligner.config.sections.vllm import same_minor
from aligner.errors import AlignerError, ConfigError
from aligner.loading import TORCH, new_enough

OK, WARN, FAIL = "ok", "warn", "fail"
NONE = "none"  # not installed, and not needed
EXTRAS = {  # module -> extra, what it is for
    "tensorrt_llm": ("trtllm", "TensorRT-LLM generation on GPUs"),
    "modelopt": ("modelopt", "quantization"),
    "mpi4py": ("mpi", "ranks placed by MPI"),
    "uvicorn": ("serve", "agents, and `aligner serve`"),
    "fla": ("linear", "linear attention on GPUs"),
}
# in another interpreter: the version of the package with the module `vllm`, which is not imported
FIND_VLLM = """from importlib.metadata import *
print(*map(version, packages_distributions().get("vllm", [])))"""


@dataclass(frozen=True)
class Check:
    name: str
    status: str
    detail: str


def main(cfg: Config, env: RankEnv) -> int:
    """Print the table. Return 1 if any check failed, else 0."""
    results = list(checks(cfg, env))
    show(results)
    return int(any(check.status == FAIL for check in results))


def checks(cfg: Config, env: RankEnv) -> Iterator[Check]:
    yield _python()
    yield from _torch(env)
    yield _megatron()
    yield _transformer_engine(cfg.model.kernels)
    yield from _extras()
    yield _vllm(cfg)
    if cfg.engine.child is cfg.engine.trtllm:
        from aligner.tools.doctor_trtllm import trtllm_checks

        yield from (
            Check(*row) for row in trtllm_checks(cfg.engine.trtllm, cfg.engine.name, cfg.engine.tensor_parallel)
        )
    if cfg.engine.child is not None:
        from aligner.tools.doctor_ipc import ipc_checks

        yield from (Check(*row) for row in ipc_checks(cfg.engine.child))
    yield _run_dir(cfg)
    yield from _data(cfg)
    yield _tokenizer(cfg)
    yield from _rewards(cfg)
    yield from _algorithm(cfg)
    yield from _trackers(cfg)


def show(results: list[Check], title: str = "aligner doctor") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colors = {OK: "green", NONE: "dim", WARN: "yellow", FAIL: "bold red"}
    table = Table("check", "", "detail", title=title)
    for check in results:
        table.add_row(Text(check.name), Text(check.status, style=colors[check.status]), Text(check.detail))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _python() -> Check:
    good = sys.version_info[:2] == (3, 12)
    return Check("python", OK if good else FAIL, platform.python_version() + ("" if good else ": expected 3.12"))


def _torch(env: RankEnv) -> Iterator[Check]:
    try:
        import torch
    except ImportError as error:
        yield Check("torch", FAIL, f"cannot be imported: {error}")
        return
    late, bound = new_enough(torch.__version__), ".".join(map(str, TORCH))
    yield Check("torch", OK if late else FAIL, torch.__version__ + ("" if late else f": expected >= {bound}"))
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        bf16 = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16"
        enough = count >= env.local_world_size
        detail = f"{count} x {torch.cuda.get_device_name(0)}, {bf16}"
        yield Check("device", OK if enough else FAIL, detail + ("" if enough else f" for {env.local_world_size} ranks"))
    else:
        flags = _cpu_flags() & {"amx_bf16", "avx512_bf16"}
        speed = f"fast bfloat16 ({', '.join(sorted(flags))})" if flags else "bfloat16 is slow here: model.dtype=float32"
        yield Check("device", OK, f"CPU, {len(os.sched_getaffinity(0))} cores, {speed}")
    backends = {"gloo": torch.distributed.is_gloo_available(), "nccl": torch.distributed.is_nccl_available()}
    needed = "nccl" if torch.cuda.is_available() else "gloo"
    names = ", ".join(name for name, there in backends.items() if there) or "none"
    yield Check("collectives", OK if backends[needed] else FAIL, f"{names} ({needed} is used here)")


def _cpu_flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def _megatron() -> Check:
    try:
        version = importlib.metadata.version("megatron-core")
        from aligner.megatron.cpu import TESTED_VERSIONS
    except (importlib.metadata.PackageNotFoundError, ImportError) as error:
        return Check("megatron-core", FAIL, f"cannot be imported: {error}")
    tested = version in TESTED_VERSIONS
    detail = version if tested else f"{version}: tested with {', '.join(TESTED_VERSIONS)}"
    return Check("megatron-core", OK if tested else WARN, detail)


def _transformer_engine(kernels: str) -> Check:
    """Check it as the trainer would: it is tried when Megatron is imported."""
    name, use = "transformer_engine", "for fused Megatron layers on GPUs"
    try:
        from aligner.megatron.transformer_engine import TE
    except ImportError:
        return Check(name, NONE, f"{use}; not checked without Megatron-Core")
    if not TE.lacks:
        return Check(name, OK, use)
    if kernels == "te":
        return Check(name, FAIL, f"model.kernels=te: {TE.lacks}")
    if TE.broken:
        return Check(name, WARN, f"not used: {TE.lacks}. model.kernels=own leaves it out without a warning")
    return Check(name, NONE, f"not used: {TE.lacks}; {use}: pip install 'aligner[te]'")


def _extras() -> Iterator[Check]:
    for module, (extra, use) in EXTRAS.items():
        there = importlib.util.find_spec(module) is not None
        detail = f"for {use}" if there else f"not installed; for {use}: pip install 'aligner[{extra}]'"
        yield Check(module, OK if there else NONE, detail)


def _vllm(cfg: Config) -> Check:
    """Check vLLM's separate environment: its version, or how to install it; a failure if `cfg` needs it."""
    from aligner.engines.child.process import clean_environment, interpreter

    missing, options = FAIL if cfg.engine.child is cfg.engine.vllm else NONE, cfg.engine.vllm
    try:
        python, environ = interpreter(options.python, clean_environment(os.environ, {}), options.KEY)
    except ConfigError as error:
        return Check("vllm", missing, f"for engine=vllm. {error}")
    done = subprocess.run([python, "-c", FIND_VLLM], env=environ, capture_output=True, text=True)
    version = done.stdout.strip()
    if same_minor(version):
        return Check("vllm", OK, f"{version} in {options.python or python}, for engine=vllm")
    has = f"{version or 'none'} in {options.python or python}: expected {VLLM_VERSION}"
    return Check("vllm", missing, f"for engine=vllm. {has}; launchers/engine_env.sh vllm makes an environment with it")


def _run_dir(cfg: Config) -> Check:
    """Check by a temporary file in run.dir, or in the nearest folder above it that exists, that it can be written.
    Creates no folder."""
    folder = Path(cfg.run.dir).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"aligner doctor")
    except OSError as error:
        return Check("run.dir", FAIL, f"{cfg.run.dir}: cannot write in {folder}: {error.strerror}")
    free = shutil.disk_usage(folder).free / 2**30
    return Check("run.dir", OK if free > 1 else WARN, f"{cfg.run.dir}, {free:.0f} GiB free")


def _data(cfg: Config) -> Iterator[Check]:
    if not (cfg.data.train or cfg.data.sources):
        yield Check("data.train", WARN, "not set; a run needs it")
    paths = {"data.train": cfg.data.train} if cfg.data.train else {}
    for key, text in (paths | {f"data.sources.{source.label}": source.path for source in cfg.data.sources}).items():
        path = Path(text).expanduser()
        try:
            if path.is_dir():
                yield Check(key, OK, f"{path}, {len(list(path.iterdir()))} entries")
                continue
            with path.open("rb") as file:
                file.read(1)
        except OSError as error:
            yield Check(key, FAIL, f"{path}: {error.strerror}")
            continue
        size = path.stat().st_size
        yield Check(key, OK, f"{path}, {f'{size / 2**20:.1f} MiB' if size > 2**20 else f'{size / 2**10:.1f} KiB'}")


def _tokenizer(cfg: Config) -> Check:
    init = Path(cfg.model.init).expanduser()  # perhaps a run, whose tokenizer is within
    own = next((str(path) for name in ("hf", "source") if (path := init / name).is_dir()), cfg.model.init)
    folder = cfg.model.tokenizer or ("" if cfg.model.init == "random" else own)
    if not folder:
        return Check("tokenizer", WARN, "model.tokenizer is not set; a run with model.init=random needs it")
    if not Path(folder).expanduser().is_dir():
        return Check("tokenizer", FAIL, f"{folder}: no such folder")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(Path(folder).expanduser(), local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        return Check("tokenizer", FAIL, f"{folder}: {str(error).splitlines()[0]}")
    if tokenizer.eos_token_id is None:
        return Check("tokenizer", FAIL, f"{folder}: has no EOS token")
    return Check("tokenizer", OK, f"{folder}, {len(tokenizer)} tokens, EOS {tokenizer.eos_token!r}")


def _algorithm(cfg: Config) -> Iterator[Check]:
    from aligner.algorithms.outside import check

    try:
        yield from (Check("algorithm", OK, note) for note in check(cfg.algorithm))
    except AlignerError as error:
        yield Check("algorithm", FAIL, str(error))


def _trackers(cfg: Config) -> Iterator[Check]:
    from aligner.run.trackers.sending import check

    try:
        yield from (Check("logging.trackers", OK, note) for note in check(cfg.logging))
    except AlignerError as error:
        yield Check("logging.trackers", FAIL, str(error))


def _rewards(cfg: Config) -> Iterator[Check]:
    if not cfg.stage.its.rollouts:
        return
    from aligner.rewards.functions import load_function

    if not (cfg.reward.functions or cfg.reward.model or cfg.reward.judges):
        yield Check(
            "reward",
            WARN,
            f"none of reward.functions, reward.model and reward.judges is set; stage {cfg.stage.name} needs one",
        )
    for index, function in enumerate(cfg.reward.functions):
        try:
            load_function(function, index)
        except AlignerError as error:
            yield Check(f"reward.functions[{index}]", FAIL, str(error))
        else:
            yield Check(f"reward.functions[{index}]", OK, function.path)
    if cfg.reward.model:
        there = Path(cfg.reward.model).expanduser().is_dir()
        yield Check("reward.model", OK if there else FAIL, cfg.reward.model + ("" if there else ": no such folder"))
