"""Replacements of files and of other ranks for a rehearsed rank: weights without numbers, the longest responses, a
checkpoint that stays in host memory. The rest of the program is the job's own.

Patches that stay. `agree` and `model_init` must be patched before the modules that import their names.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from aligner.config.sections.model.moe import MoeConfig
from aligner.ops import agree
from aligner.ops.packing.turns import Turn
from aligner.rehearse.device import RehearsedDevice, on_device
from aligner.rehearse.record import BETWEEN
from aligner.types import Sample, Stop

DECODED = 7  # steps of the engine, at most, until all rows have ended, a single one after `record.GROWN_MARKS` and one


def reward(samples: Sequence[Sample]) -> list[float]:
    """Score the samples of a rehearsal."""
    return [float(i % 2) for i in range(len(samples))]


def files_are_the_same() -> None:
    """Let every rank look at files itself, as there is no other rank."""
    agree.by_rank_0 = lambda work: work()
    agree.same_view = lambda path, look, by_node=False: look()


def install(device: RehearsedDevice, names: Callable[[Any], None]) -> None:
    """Install the patches, after `files_are_the_same`. `names` is called with each layout."""
    from aligner.rehearse import fp8, user_buffers

    _models(device)
    _engine(device)
    route_evenly(device)
    fp8.install(device.pricing.device)
    user_buffers.install()
    _rollouts()
    _checkpoints(device)
    _phases(device)
    from aligner.builders import job as job_module
    from aligner.builders import teachers
    from aligner.megatron import groups

    groups.ranks_per_node[0] = device.pricing.gpus_per_node
    build = job_module.build_layout

    def built(parallel: Any) -> Any:
        layout = build(parallel)
        names(layout)
        return layout

    job_module.build_layout = teachers.build_layout = built


def _models(device: RehearsedDevice) -> None:
    """Replace the initial weights, before the builders import the functions that read them."""
    from aligner.data.tokenizer import load_tokenizer
    from aligner.engines.native import load
    from aligner.models.params import expected_hf_shapes
    from aligner.plan.job import shape_at
    from aligner.roles import model_init

    class Initial(model_init.InitialModel):
        has_scores, extra = False, {}

        def source(self, head: Any) -> Any:
            return lambda spec: device.on_host(spec.shape)

    tokenizer: list[str] = []  # the policy's, used for all

    def resolve(cfg: Any, init: str, seed: int, key: str = "model.init") -> Any:
        if key == "model.init":
            tokenizer[:] = [cfg.tokenizer]
        initial = Initial(shape_at(cfg, init), load_tokenizer(tokenizer[0], announce=False), seed=seed)
        initial.has_scores = key in ("reward.model", "critic.init")
        initial.folder = Path(init) if key.startswith("reward.judges") else None
        return initial

    def fill(engine: Any, folder: Path) -> None:
        """Fill a judge's engine."""
        engine.begin_update(0)
        shapes = expected_hf_shapes(engine.model.cfg)
        engine.update_weights((name, device.on_host(shape)) for name, shape in shapes.items())
        engine.finish_update()

    model_init.resolve, load.fill = resolve, fill


def _engine(device: RehearsedDevice) -> None:
    from aligner.engines.native import mlp
    from aligner.engines.native.engine import NativeEngine
    from aligner.engines.native.fleet import FleetEngine

    FleetEngine.generate = NativeEngine.generate  # this rank gets no other rank's requests
    step = NativeEngine.step

    def stepped(self: Any, *arguments: Any) -> Any:
        moves = step(self, *arguments)
        device.record.mark("step of the engine", device.by_line())
        device.record.phase.decode_steps += 1
        return moves

    def ended(flags: Tensor, inside: dict[str, Any]) -> Tensor:
        """End the first row two steps before the others, so that the last one moves. With the second end the last
        quarter of the rows, so that others get their slots. All have drafts, and keep one token of a step."""
        batch = inside["self"]
        batch.rehearsed = getattr(batch, "rehearsed", 0) + 1
        last = min(DECODED, batch._limit)
        step, rows = batch.rehearsed % last, flags.shape[-1]
        ends = torch.full((rows,), step == 0)
        ends[:1] |= step >= last - 2
        ends[3 * rows // 4 :] |= step == last - 1
        return ends if flags.dim() == 1 else torch.stack([ends, *torch.ones(2, rows, dtype=torch.bool)])

    def own(source: Tensor, inside: dict[str, Any]) -> Tensor:
        return torch.tensor(inside["values"])

    own_rows, sort, multiply = 0, mlp.sort_own_pairs, mlp.grouped_linear

    def sorted_evenly(experts: Tensor, num_experts: int, own: range, x: Tensor) -> tuple[Any, Tensor]:
        nonlocal own_rows
        own_rows = experts.numel() * len(own) // num_experts
        return sort(experts, num_experts, own, x)

    def multiplied(x: Tensor, weight: Tensor, sizes: Tensor, *unused: bool) -> Tensor:
        """Compute the rows that a rank's experts get if all are chosen as often, and leave memory for the others."""
        multiply(x[:own_rows], weight, sizes)
        return x.new_empty(len(x), weight.shape[1])

    mlp.sort_own_pairs, mlp.grouped_linear = sorted_evenly, multiplied
    NativeEngine.step = stepped
    device.answers["engines/native/batch.py", "settle"] = ended
    device.answers["refit/transfer.py", "largest"] = own  # else a refit that fails here would continue


def route_evenly(device: RehearsedDevice) -> None:
    """Route equal shares of the tokens to experts."""

    def even(source: Tensor, inside: dict[str, Any]) -> Tensor:
        experts, ranks, sizes = inside["experts"], 1, []
        tokens, top_k = experts.shape
        moe = MoeConfig(inside["num_experts"], top_k)
        for group in inside["groups"]:
            ranks *= group.size()
            rows = round(tokens * moe.reached(ranks))
            sizes += 2 * [rows // group.size() + (rank < rows % group.size()) for rank in range(group.size())]
        return torch.tensor([*sizes, tokens * top_k])

    device.answers["megatron/dispatch.py", "exchange_sizes"] = even
    device.answers["megatron/expert_load.py", "metrics"] = lambda source, inside: torch.ones(source.shape)


def _rollouts() -> None:
    from aligner.rollout.groups import GroupFilter, Groups
    from aligner.rollout.sample_generator import ByPrompt, SampleGenerator
    from aligner.rollout.sample_state import SampleState, by_prompt
    from aligner.rollout.score import Scorer

    advance = SampleGenerator.advance

    def asked(self: SampleGenerator, together: ByPrompt) -> ByPrompt:
        """Return this replica's share of all ranks' samples. Every rank asks engines on other ranks."""
        world, engine, peers = dist.get_world_size(), self.engine, self.peers.size()
        replicas = world if engine.bridge is not None else world // engine.tensor_parallel
        share = math.ceil(len(together) * (world // peers) / replicas)
        return [together[i % len(together)] for i in range(share)]

    def called(self: SampleGenerator, requests: Sequence, sampling: Any = None, score: Any = None) -> Groups:
        states = self.fresh_of(range(len(requests)), requests)
        with self.timers("generate"):
            self._generated(asked(self, by_prompt(states)), sampling or self.sampling)
        return self.ended(requests, answered(self, states), sampling=sampling)

    def advanced(
        self: SampleGenerator, together: ByPrompt, sampling: Any = None, score: Any = None
    ) -> Callable[[], list[SampleState]]:
        answer = advance(self, asked(self, together) * self.peers.size(), sampling)  # of which it takes its share
        return lambda: answer() and answered(self, [state for same in together for state in same])

    def answered(self: SampleGenerator, states: list[SampleState]) -> list[SampleState]:
        """Replace the engine's responses by ones of the longest length, as rows come from all ranks."""
        width, cut = self.sampling.max_response_tokens, self.sampling.truncates
        zeros, versions = array("f", bytes(4 * width)), array("i", [self.engine.weight_version]) * width
        for row, state in enumerate(states):
            tokens = array("i", range(row * width, row * width + width))
            tokens = array("i", (torch.frombuffer(tokens, dtype=torch.int32) % 200 + 5).tolist())
            tokens[-1] = self.tokenizer.eos_token_id
            state.turns = [Turn(state.next_prompt.tokens, tokens, zeros, zeros if cut else None, versions)]
            state.begun, state.stop = None, Stop.ANSWER
        return states

    def score(self: Any, groups: Groups) -> Groups:
        with self.timers("score"):
            values = reward(groups.samples)
            functions = {reward.name: values for reward, _ in self.rewards.rewards if not reward.main_thread}
            groups.components = functions | self.rewards.models(groups.samples)
        return groups

    def filled_alike(self: GroupFilter, filled: list[int], *counts: Any) -> None:
        """Let every rank fill its slots if this one does."""
        add_round(self, self.open if filled else [], *counts)

    SampleGenerator.__call__, SampleGenerator.advance, Scorer.__call__ = called, advanced, score
    add_round, GroupFilter._add_round = GroupFilter._add_round, filled_alike


def _checkpoints(device: RehearsedDevice) -> None:
    """Copy what this rank would write, also of an export, to host memory. Copy a tensor at a time, as all may be more
    than this machine has. Before the first step, copy the state from there, as if there were a checkpoint. Files are
    the CPU's work."""
    from aligner.megatron import checkpoint
    from aligner.models.shards import HfTensor
    from aligner.refit import export, transfer
    from aligner.run import chain
    from aligner.run.checkpoints import Checkpoints

    def save(self: Any, step: int, *arguments: Any) -> None:
        for model in self.models.values():
            tensors = [getattr(item, "data", item) for item in tree_leaves(checkpoint.own_state(model))]
            for tensor in filter(on_device, tensors):
                device.on_host(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
            torch.cuda.synchronize()
        self.last_saved = step

    def restore(self: Any, resume: str) -> int:
        device.enter("load")
        for name, model in self.models.items():
            checkpoint.load_model(model, self.folder / name)
        device.enter(BETWEEN)
        return 0

    def load(state: dict[str, Any], folder: str, strict: Any = None) -> dict[str, Any]:
        """Load like Megatron."""
        sharded, common, factories = megatron.load_preprocess(state)
        megatron.merge(common, tree_map(read, sharded))
        return megatron.apply_factory_merges(common, factories)

    def read(item: Any) -> Any:
        data = getattr(item, "data", None)
        return data.detach().copy_(device.on_host(data.shape, data.dtype)) if on_device(data) else item

    def write_hf(folder: Path, tensors: Iterable[tuple[str, Tensor]], config: Any, extra: Any = None) -> None:
        for _ in tensors:
            pass

    def stage_names(self: Any) -> list[list[str]]:
        """Return the tensor names of all stages, which other ranks would send."""
        own = own_names(self)
        names: list[list[str]] = [[] for _ in own]
        for spec in self.table():
            for stage in transfer.trainer_grid(self.model).stages(HfTensor(spec.canonical, spec.shape, spec, 0)):
                names[stage].append(spec.canonical)
        here = self.model.layout.pp_rank
        names[here] = own[here]
        return names

    megatron = checkpoint.dist_checkpointing.serialization
    own_names, transfer.WeightStream._stage_names = transfer.WeightStream._stage_names, stage_names
    Checkpoints.save, Checkpoints.restore = save, restore
    chain.gathered = lambda own: [[]]  # names of other stages' tensors, of which all have a sum, are not sent
    export.write_hf, export.joined = write_hf, lambda tensors, parts: tensors
    checkpoint._verified = lambda folder: set()
    checkpoint.dist_checkpointing.load = load


def _phases(device: RehearsedDevice) -> None:
    """Record, by the timers' outermost phase, the bytes on the device at its end, by owner."""
    from aligner.run.phases import PhaseMemory
    from aligner.run.timers import Timers

    call, sort = Timers.__call__, PhaseMemory._enter
    memory: list[PhaseMemory] = []  # of this rank, after a first phase with a rule

    def sorted_out(self: Any, leaf: str, rule: Any) -> None:
        """Enter a phase's memory rule: on a rank that only generates after the timers' phase has begun, on others
        before."""
        memory[:] = [self]
        sort(self, leaf, rule)
        if not self._open and device.record.name == leaf:
            device.settle()

    @contextmanager
    def timed(self: Any, phase: str) -> Any:
        if self._path:
            with call(self, phase):
                yield
            return
        with call(self, phase):
            device.enter(phase)  # when tensors that it does not use have left (run/phases.py)
            yield
            for phase_memory in memory:
                device.record.phase.held = {k: int(v) for k, v in phase_memory.held_bytes().items() if v}
        device.enter(BETWEEN)

    Timers.__call__, PhaseMemory._enter = timed, sorted_out
