"""The symbols and arguments of TensorRT-LLM that this project needs, and their meaning. Data.

Read from its sources; nothing here has been run against a real package. `aligner doctor engine=trtllm` compares the
table with the installed package: `python -m aligner.engines.trtllm.torch_api` prints that comparison as JSON, on its
last line. With `--source DIR` it compares the sources in DIR (an unpacked wheel, a checkout) without importing them,
and prints for people.

Release candidates of one version differ, so features are looked for in the package one by one. Where a signature does
not tell, the version does:
  logprobs_mode   RAW (default: of the untempered distribution) or PROCESSED (of the sampled one): pull request 9675
  logprobs        1: of the likeliest token, later of that and the sampled one (pull request 9374 asked for it)
  seed            ignored by the default sampler (TorchSampler) before pull request 17172; since then by request, but
                  the pinned FlashInfer (0.6.15) draws all rows of a batch by the first one's
  min_p           honoured by that sampler since pull request 16590, ignored before
  drafts          only those of prompt lookup come from outside the model. The default sampler then samples behind each
                  drafted token and keeps those that equal it, so the distribution and its logprobs stay. Where the
                  model's own layer or a head drafts, or a model beside it in one engine, another sampler takes its
                  place, which refuses (before pull request 18401: leaves out, or fails at) logprobs and context logits.
                  A model in an engine of its own (1.3 and earlier) keeps the random weights of load_format=dummy,
                  and the sampler names logprobs of tokens that it drew and not of those that it accepts
  stop words      up to 1.3 are looked for in tokens of another request for a row's first token, with drafts; end_id is
                  not
  sleep           `enable_sleep`, later `sleep_config`, which also says whether released memory is restored. The type of
                  the tags has moved between modules; their names, which both functions take, have not
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from aligner.engines.trtllm.features import ARGS, EXECUTOR, FEATURES, KV, LOADER, NAME, PARAMS
from aligner.engines.trtllm.package import Installed, Package, Sources
from aligner.errors import ConfigError

_SYMBOLS = (
    "tensorrt_llm:LLM",
    PARAMS,
    "tensorrt_llm:LLM.generate_async",
    "tensorrt_llm:LLM.shutdown",
    KV,
    "tensorrt_llm.llmapi:CudaGraphConfig",
    "tensorrt_llm.llmapi:RequestOutput.result",
    "tensorrt_llm.llmapi:RequestOutput.abort",
    f"{LOADER}.reload",
    f"{EXECUTOR}.control_action",
    f"{EXECUTOR}.reset_prefix_cache",
)
_ARGUMENTS = {
    symbol: tuple(names.split())
    for symbol, names in {
        ARGS: (
            "model load_format skip_tokenizer_init tensor_parallel_size dtype max_input_len max_seq_len max_batch_size "
            "max_num_tokens kv_cache_config cuda_graph_config allreduce_strategy"
        ),
        PARAMS: (
            "end_id pad_id max_tokens stop_token_ids include_stop_str_in_output temperature top_k top_p min_p seed "
            "logprobs return_context_logits detokenize"
        ),
        KV: "enable_block_reuse max_gpu_total_bytes",
        "tensorrt_llm.llmapi:CudaGraphConfig": "max_batch_size enable_padding",
        "tensorrt_llm:LLM.generate_async": "inputs sampling_params",
        f"{LOADER}.reload": "model weights allow_partial_loading",
    }.items()
}


@dataclass(frozen=True)
class Version:
    """A version of the table. `prefix`: of the version string. `refused`: why the engine does not run on it."""

    prefix: str
    symbols: tuple[str, ...] = _SYMBOLS
    # symbol -> what it must accept
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _ARGUMENTS)
    min_p: bool = False
    refused: str = ""


_RELOADS = "its weights cannot be replaced after loading (no ModelLoader.reload); 1.2 and later can"
VERSIONS = (
    Version(
        "1.1",
        tuple(symbol for symbol in _SYMBOLS if not symbol.startswith((LOADER, EXECUTOR))),
        {symbol: names for symbol, names in _ARGUMENTS.items() if not symbol.startswith(LOADER)},
        refused=_RELOADS,
    ),
    Version("1.2"),
    Version("1.3"),
    Version("1.4", min_p=True),
)
NOT_RUN = (
    "creating an engine from config.json with load_format=dummy",
    "an engine of several ranks without MPI and Ray",
    "drafts: how many are accepted, and whether their distribution stays",
    "partial reloads, finalising and the prefix cache on a GPU",
    "CUDA IPC between trainer and child",
    "release and return of memory",
    "which tokens end a response, and whether they belong to it",
    "logprobs of a real sampler against the trainer's (the sentinel does that in every run)",
)


def version_row(version: str) -> Version:
    """Return the row of an installed version. Raises ConfigError for one that is not in the table or is refused."""
    return require_row(version, VERSIONS, "trtllm")


def require_row(version: str, table: Sequence[Version], name: str) -> Version:
    row = find_row(version, table)
    known = ", ".join(v.prefix for v in table if not v.refused)
    if row is None:
        raise ConfigError("engine.name", name, f"TensorRT-LLM {known}", f"Installed is {version}.")
    if row.refused:
        raise ConfigError("engine.name", name, f"TensorRT-LLM {known}", f"Of {version} {row.refused}.")
    return row


def find_row(version: str, table: Sequence[Version] = VERSIONS) -> Version | None:
    return next((v for v in table if version.split("+")[0].startswith(v.prefix + ".")), None)


@dataclass
class Findings:
    """The symbols and features of a package, compared with a row of the table."""

    version: str = ""
    row: str = ""  # "" where the version is not in the table: then compared with the newest row
    refused: str = ""
    present: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    features: dict[str, bool] = field(default_factory=dict)
    lacking: dict[str, list[str]] = field(default_factory=dict)  # feature -> what of it is missing
    not_run: list[str] = field(default_factory=list)
    error: str = ""  # why the package could not be imported


def compare(
    table: Sequence[Version] = VERSIONS,
    not_run: Sequence[str] = NOT_RUN,
    wanted: Iterable[str] = FEATURES,
    package: Package | None = None,
) -> Findings:
    """Compare `package`, else the installed one, with the table. The installed one is imported: do that in a
    separate process, without the launcher's variables. A version that is not in the table is compared with the last
    row that is not refused."""
    findings = Findings(not_run=list(not_run))
    try:
        package = package or Installed(NAME)
    except Exception as error:  # a broken CUDA or MPI underneath raises anything; it is the finding
        findings.error = f"{type(error).__name__}: {error}"
        return findings
    findings.version = package.version
    row = find_row(findings.version, table)
    findings.row = row.prefix if row else ""
    row = row or [v for v in table if not v.refused][-1]
    findings.refused = row.refused
    for symbol in row.symbols:
        (findings.present if package.has(symbol) else findings.missing).append(symbol)
    for symbol, names in row.arguments.items():
        has = package.accepts(symbol)
        for name in names:
            (findings.present if name in has else findings.missing).append(f"{symbol}({name})")
    findings.lacking = {name: FEATURES[name].lacking(package) for name in wanted}
    findings.features = {name: not lacking for name, lacking in findings.lacking.items()}
    return findings


def report(findings: Findings) -> str:
    """Return a report for people, a line for each feature and each missing symbol."""
    if findings.refused:
        known = f"refused: {findings.refused}"
    else:
        known = f"compared with the table's {findings.row or 'newest row, as the version is not in it'}"
    lines = [f"TensorRT-LLM {findings.version or '(no version found)'}, {known}"]
    for name, there in findings.features.items():
        feature = FEATURES[name]
        lines.append(
            f"  {name:<19} {'yes' if there else 'no '}  {feature.use}" + f"; without: {feature.without}" * (not there)
        )
    lines += [f"  missing: {symbol}" for symbol in findings.missing] or ["  nothing that is always needed is missing"]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Print the comparison; return 1 where a required symbol is missing from `--source`, or the version is refused."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__spec__.name}", description="Compare TensorRT-LLM with the table."
    )
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help=f"the folder that holds {NAME}/, instead of importing it"
    )
    source = parser.parse_args(arguments).source
    if source is None:
        sys.stdout.write(f"\n{json.dumps(asdict(compare()))}\n")  # the package prints a banner
        return 0
    if not (source / NAME / "__init__.py").is_file():
        parser.error(f"--source {source}: expected a folder that holds {NAME}/__init__.py")
    findings = compare(package=Sources(source, NAME))
    print(report(findings))
    return int(bool(findings.missing or findings.refused))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
