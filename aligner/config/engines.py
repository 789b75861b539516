"""Table of rollout engines, as data: the capabilities of each one, and the reasons for those it lacks. Config,
`plan`, builders and the matrix in docs/reference/support.md read it, without torch. A new engine is an entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from aligner.config.sections import trtllm, vllm
from aligner.errors import EngineCodeError
from aligner.user_code import load_instance

if TYPE_CHECKING:
    from aligner.config.schema import Config
    from aligner.config.sections.model.config import ModelConfig


def _can(meaning: str) -> bool:
    """Declare a capability, with its words in docs/reference/support.md."""
    return field(default=False, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Capabilities:
    computes_here: bool = _can("computes in the rank's own process")
    own_process: bool = _can("runs in a child process, in an environment of its own")
    replays: bool = _can("answers from what was recorded (`engine.answers`)")
    in_place: bool = _can("a refit writes its shards in place; else it is given whole tensors")
    apart: bool = _can("ranks of its own: `engine.ranks`, `engine.lag`")
    windows: bool = _can("samples pause between decode steps: `engine.window`")
    serves: bool = _can("takes the next turn of a trajectory between decode steps; else turns go in rounds")
    tells_finished: bool = _can("tells of finished samples while it generates others: `reward.overlap`")
    any_prompt: bool = _can("prompts longer than the data's: `reward.judges` without a model of their own")
    scores: bool = _can("scores given tokens, and names the likeliest: tasks by likelihood in `eval.tasks`")
    routing: bool = _can("tells the experts of its tokens: `mismatch.replay_routing`")
    drafts: bool = _can("drafts tokens, to save decode steps: `engine.draft_tokens`")
    merges_adapters: bool = _can("merges adapters itself: `refit.adapters=factors`")
    tensor_parallel: bool = _can("several ranks for a replica, also on several nodes: `engine.tensor_parallel`")
    request_seeds: bool = _can("a sample follows its own seed")
    repeats: bool = _can("repeats bit-for-bit: `run.deterministic`")
    cuda_graphs: bool = _can("decode steps as CUDA graphs: `engine.cuda_graphs`")
    sleep_weights: bool = _can("gives back its weights too: `engine.sleep_weights`")
    arguments: bool = _can("options of the package itself: `args`")
    prefix_reuse: bool = _can("a key for sharing prefixes: `prefix_reuse`")


@dataclass(frozen=True)
class EngineEntry:
    """Entry of an engine. `made_by`: module:class (of a user's also path.py:class), imported where a run uses the
    engine; `made_apart_by`: on ranks of its own, if that differs. `section`: of `engine`, its options. `reasons`:
    capability -> why it is lacking, after "with engine.name=NAME". `check`: raises ConfigError for a model or a run
    that the engine does not support. `args`: of a user's engine, the dataclass of its own keys, engine.args.<key>.
    `planned`: what `plan` assumes of it, as fields of `plan.job.Engine`."""

    can: Capabilities
    made_by: str
    made_apart_by: str = ""
    section: str = ""
    by_default: tuple[str, ...] = ("sleep",)  # of cuda_graphs, sleep and sleep_weights, which `auto` turns on
    reasons: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Config, ModelConfig], None] | None = None
    args: type | None = None
    planned: Mapping[str, Any] = field(default_factory=dict)


_OWN_PROCESS = {"own_process": True, "cuda_graphs": True, "sleep_weights": True, "arguments": True}
_OWN_PROCESS |= {"prefix_reuse": True, "apart": True, "tensor_parallel": True, "drafts": True}
ENGINES = {
    "native": EngineEntry(
        Capabilities(
            computes_here=True,
            in_place=True,
            apart=True,
            windows=True,
            serves=True,
            tells_finished=True,
            any_prompt=True,
            scores=True,
            routing=True,
            drafts=True,
            merges_adapters=True,
            tensor_parallel=True,
            request_seeds=True,
            repeats=True,
            cuda_graphs=True,
            sleep_weights=True,
        ),
        made_by="aligner.engines.native.fleet:FleetEngine",
        by_default=("cuda_graphs", "sleep", "sleep_weights"),
    ),
    "vllm": EngineEntry(
        Capabilities(**_OWN_PROCESS, routing=True, request_seeds=True, repeats=True),
        made_by="aligner.engines.vllm.engine:VllmEngine",
        made_apart_by="aligner.engines.vllm.in_place:InPlaceVllmEngine",
        section="vllm",
        by_default=("cuda_graphs",),
        check=vllm.check_model,
    ),
    "trtllm": EngineEntry(
        Capabilities(**_OWN_PROCESS),
        made_by="aligner.engines.trtllm.torch_backend:TrtllmEngine",
        made_apart_by="aligner.engines.trtllm.in_place:InPlaceTrtllmEngine",
        section="trtllm",
        by_default=("cuda_graphs", "sleep"),
        reasons={"repeats": ", whose sampler ignores seeds (1.2, 1.3) or draws a batch by its first row's (1.4)"},
        check=trtllm.check_model,
    ),
    "trtllm_engine": EngineEntry(
        Capabilities(own_process=True, request_seeds=True),
        made_by="aligner.engines.trtllm.built:TrtllmBuiltEngine",
        section="trtllm",
        reasons={
            "tensor_parallel": ", one engine per rank: an engine of several ranks needs the launcher's MPI, which its "
            "process must not have. Ranks have replicas instead",
            "repeats": ", whose builder picks kernels by timing them",
            "sleep_weights": ", which keeps its weights: they are part of the engine",
            "arguments": ", whose Python runtime does not take them",
            "prefix_reuse": ", whose Python runtime shares no prefixes",
            "cuda_graphs": ", whose Python runtime captures none",
        },
        check=trtllm.check_built,
    ),
    "recorded": EngineEntry(
        Capabilities(replays=True, tensor_parallel=True, request_seeds=True, repeats=True),
        made_by="aligner.engines.recorded:RecordedEngine",
    ),
}
NAMES = tuple(ENGINES)
# of a user's engine: those of methods that `RolloutEngine` documents, called in the trainer's process
OF_USERS = ("any_prompt", "scores", "request_seeds", "repeats", "tensor_parallel", "cuda_graphs", "sleep_weights")


@cache
def entry_of(name: str) -> EngineEntry:
    """Return an engine's entry, by name or by the path of a user's. Raises EngineCodeError."""
    if name in ENGINES:
        return ENGINES[name]
    entry = load_instance(name, "engine.name", EngineEntry, EngineCodeError)
    for one in fields(Capabilities):
        if getattr(entry.can, one.name) and one.name not in OF_USERS:
            expected = f"capabilities among {', '.join(OF_USERS)}"
            raise EngineCodeError(f"engine.name={name!r}: expected {expected}; it has {one.name}")
    return entry


def empties(cfg: Config) -> bool:
    """Return whether a sleeping engine releases its weights where a refit comes before its next use. One that merges
    adapters keeps frozen weights."""
    return cfg.engine.sleeps_weights and cfg.refit.adapters == "merged" and not cfg.debug.skip_refit


def able(capability: str) -> str:
    """Return the names of the engines with a capability, for a message: "native or vllm"."""
    return " or ".join(name for name, entry in ENGINES.items() if getattr(entry.can, capability))


def matrix() -> str:
    """Return the capabilities as a Markdown table."""
    lines = [f"| | {' | '.join(f'`{name}`' for name in ENGINES)} |", f"|---|{'---|' * len(ENGINES)}"]
    for one in fields(Capabilities):
        cells = ("yes" if getattr(entry.can, one.name) else "" for entry in ENGINES.values())
        lines.append(f"| {one.metadata['meaning']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
