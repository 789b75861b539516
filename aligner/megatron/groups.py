"""Process groups of one model. Layouts belong to a model, not to the process: policy, critic and reward model may
differ."""

from __future__ import annotations

import datetime
import gc
import math
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from aligner.cluster.env import RankEnv
from aligner.cluster.handshake import session
from aligner.cluster.seal import VARIABLE, Seal
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import ConfigError, LayoutError
from aligner.megatron import cpu
from aligner.megatron.rendezvous import meet
from aligner.ops.reduce import max_over


@dataclass(frozen=True)
class Layout:
    """This rank's position in one model's layout. Rank order, fastest first: tensor, context, data, pipeline."""

    tensor: int
    pipeline: int
    virtual_stages: int
    stage_layers: tuple[int, ...]  # as `parallel.stage_layers`
    context: int
    data: int
    expert: int  # of the ranks of a pipeline stage, so many neighbours share the experts
    sequence: bool
    over_heads: bool  # context parallelism by all-to-all over heads, else by all-gather of keys and values
    pgs: ProcessGroupCollection
    peers: dist.ProcessGroup  # the tensor, context and pipeline ranks of one data-parallel rank: they share its rows
    expert_groups: tuple[dist.ProcessGroup, ...]  # to which tokens go one after the other, as in `dispatch.py`

    @property
    def tp_rank(self) -> int:
        return self.pgs.tp.rank()

    @property
    def pp_rank(self) -> int:
        return self.pgs.pp.rank()

    @property
    def dp_rank(self) -> int:
        return self.pgs.dp.rank()

    @property
    def ep_rank(self) -> int:
        return self.pgs.ep.rank()

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pipeline - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of this rank's peer on the last pipeline stage."""
        return dist.get_global_rank(self.pgs.pp, self.pipeline - 1)

    def copies(self, experts: bool) -> dist.ProcessGroup:
        """Return the ranks that hold the same parameters as this one: those of experts, or all others."""
        return self.pgs.expt_dp if experts else self.pgs.dp_cp

    def share(self, experts: bool) -> tuple[int, int]:
        """Return how many tensor ranks share a matrix, and which of the shares this rank has. An expert's are whole."""
        return (1, 0) if experts else (self.tensor, self.tp_rank)


def init_distributed(env: RankEnv, backend: str, timeout_s: float, folder: Path | None = None) -> torch.device:
    """Start torch.distributed; a single rank listens nowhere. Several need a `folder` of the job, with its secret
    (`cluster/seal.py`). Raises PeerError."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as Megatron wants it; it warns of anything else
    on_cpu = cpu.install()
    if backend == "nccl" and on_cpu:
        raise ConfigError("cluster.backend", "nccl", "auto or gloo: this machine has no CUDA device")
    if backend == "gloo" and not on_cpu:
        expected = "auto or nccl: Megatron puts its tensors on the CUDA device it sees"
        raise ConfigError("cluster.backend", "gloo", expected, "CUDA_VISIBLE_DEVICES='' hides it.")
    if on_cpu:
        device, name = torch.device("cpu"), "gloo"
    else:
        torch.cuda.set_device(env.local_rank)
        device, name = torch.device("cuda", env.local_rank), "cpu:gloo,cuda:nccl"
    if not dist.is_initialized():
        # Else gloo connects all ranks of every group as it is made: a rank of 1,024 is in a dozen, with 1,400 sockets
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        _raise_file_limit()
        timeout = _timeout[0] = datetime.timedelta(seconds=timeout_s)
        # of GB200 and GB300, nodes of a rack are as close as GPUs of a node
        rack = not on_cpu and "GB" in torch.cuda.get_device_name(device)
        ranks_per_node[0] = 1 if rack else env.local_world_size
        store: dist.Store = dist.HashStore()
        if env.world_size > 1:
            assert folder is not None, "ranks that have no secret cannot know each other"
            store = meet(env, timeout_s, folder)
        else:
            os.environ.pop(VARIABLE, None)  # the batch script's other stages may have several ranks
        within = dist.PrefixStore("default_pg", store)
        dist.init_process_group(name, store=within, rank=env.rank, world_size=env.world_size, timeout=timeout)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        # Sequence parallelism gathers into Megatron's one scratch buffer, which `initialize_model_parallel` would make;
        # nothing else of the global parallel state is used.
        parallel_state._set_global_memory_buffer()
    return device


def _raise_file_limit() -> None:
    """Raise the soft limit of open files, which schedulers leave at 1,024. Rank 0 serves the store with one socket
    per rank, and an all-to-all of CPU tensors connects all ranks of its group."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))


def split_world(last: int) -> tuple[dist.ProcessGroup, dist.Store, Seal]:
    """Split the world in two: the `last` ranks, and those before them. The default group becomes the rank's own
    world, and ranks are counted from 0 in both. Returns the group and the store of all, and the seal of their
    messages. Collective.

    `new_group` makes a group of all ranks that a smaller default group cannot have, so the world comes first and is
    then replaced. torch has no public function for that.
    """
    everyone, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
    first = everyone.size() - last
    worlds = [_new_group(list(range(first))), _new_group(list(range(first, everyone.size())))]
    dist.distributed_c10d._update_default_pg(worlds[everyone.rank() >= first])
    return everyone, store, session()


def leave_distributed() -> None:
    """Undo `init_distributed`, so that this process may run another stage."""
    _groups.clear()
    dist.destroy_process_group()
    gc.collect()  # models and layouts in reference cycles keep their groups' threads alive
    parallel_state.destroy_global_memory_buffer()


_timeout: list[datetime.timedelta | None] = [None]  # of the collectives of this start
ranks_per_node = [1]  # of this rank's
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # of the world under ()


def _group(ranks: list[int]) -> dist.ProcessGroup:
    """Return the group of these ranks, made once for all its roles. gloo keeps two threads per group, which wake
    often, and most axes of a layout have one rank. Collective: every rank asks in the same order."""
    if _groups.get(()) is not dist.group.WORLD:  # torch.distributed was started anew
        _groups.clear()
        _groups[()] = dist.group.WORLD
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    key = tuple(ranks)
    if key not in _groups:
        _groups[key] = _new_group(ranks)
    return _groups[key]


def _new_group(ranks: list[int]) -> dist.ProcessGroup:
    """Make a group whose collectives wait as long as the world's. torch's default for a new group is half an hour."""
    return dist.new_group(ranks, timeout=_timeout[0])


def neighbours(size: int) -> dist.ProcessGroup | None:
    """Return the group of this rank and the others of its `size` consecutive ranks, None if it is alone. Collective."""
    if size == 1:
        return None
    groups = [_group(list(range(first, first + size))) for first in range(0, dist.get_world_size(), size)]
    return groups[dist.get_rank() // size]


def _own_of(groups: torch.Tensor) -> dist.ProcessGroup | None:
    """Make the groups of these ranks [groups, size]. Returns the one this rank is in."""
    own = None
    for ranks in groups.tolist():
        group = _group(ranks)
        if dist.get_rank() in ranks:
            own = group
    return own


def _group_over(grid: torch.Tensor, order: str, axes: Sequence[str]) -> dist.ProcessGroup:
    """Make the groups of a grid of all ranks, whose dimensions `order` names, that vary over `axes`. Returns the one
    this rank is in."""
    names = order.split()
    keep = [i for i, axis in enumerate(names) if axis not in axes]
    vary = [i for i, axis in enumerate(names) if axis in axes]
    size = math.prod(grid.shape[i] for i in vary)
    own = _own_of(grid.permute(*keep, *vary).reshape(-1, size))
    assert own is not None
    return own


def _expert_groups(experts: torch.Tensor, ep: dist.ProcessGroup) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups that tokens go to from a grid of all ranks, "pp expt_dp ep": of one rank in each node and then
    of a node, where experts are on several ranks of several nodes, all alike. Else it is `ep`. Collective."""
    size = experts.shape[2]
    if size == 1:
        return ()
    node, least = max_over(torch.tensor([ranks_per_node[0], -ranks_per_node[0]]), dist.group.WORLD).tolist()
    if node != -least or size % node or node in (1, size):
        return (ep,)
    grid = experts.unflatten(2, (size // node, node))
    return tuple(_group_over(grid, "pp expt_dp nodes ep", [axis]) for axis in ("nodes", "ep"))


def build_layout(parallel: ParallelConfig) -> Layout:
    """Create this model's groups over the whole world. Collective: every rank calls it in the same order."""
    world = dist.get_world_size()
    tp, cp, pp, ep = parallel.tensor, parallel.context, parallel.pipeline, parallel.expert
    if world % (tp * cp * pp):
        raise LayoutError(
            "parallel", f"{tp}x{pp}x{cp}", f"tensor x pipeline x context to divide the world size {world}"
        )
    dp = world // (tp * cp * pp)
    if tp * cp * dp % ep:
        raise LayoutError("parallel.expert", ep, f"a divisor of the {tp * cp * dp} ranks of a pipeline stage")
    grid = torch.arange(world).view(pp, dp, cp, tp)
    # for the experts' parameters, as Megatron orders with expert_tensor_parallel_size = 1
    experts = torch.arange(world).view(pp, -1, ep)

    def groups_over(*axes: str) -> dist.ProcessGroup:
        return _group_over(grid, "pp dp cp tp", axes)

    def expert_groups_over(*axes: str) -> dist.ProcessGroup:
        return _group_over(experts, "pp expt_dp ep", axes)

    tp_group, pp_group, cp_group, dp_group = (groups_over(axis) for axis in ("tp", "pp", "cp", "dp"))
    first_and_last = grid[[0, -1]] if pp > 1 else grid[:1]
    embedding = _own_of(first_and_last.reshape(len(first_and_last), -1).T)
    position = _own_of(grid[0].reshape(-1, 1))
    dp_cp, model_parallel = groups_over("dp", "cp"), groups_over("tp", "pp")
    expert_data, ep_group = expert_groups_over("expt_dp"), expert_groups_over("ep")
    pgs = ProcessGroupCollection(
        tp=tp_group,
        pp=pp_group,
        cp=cp_group,
        dp=dp_group,
        dp_cp=dp_cp,
        mp=model_parallel,
        tp_cp=groups_over("tp", "cp"),
        tp_dp_cp=groups_over("tp", "dp", "cp"),
        embd=embedding,
        pos_embd=position,
        ep=ep_group,
        expt_tp=expert_groups_over(),
        tp_ep=ep_group,
        tp_ep_pp=expert_groups_over("pp", "ep"),
        expt_dp=expert_data,
        intra_dp_cp=dp_cp,
        intra_expt_dp=expert_data,
        # gradient norms of the distributed optimizer are summed over everything that shards state
        intra_dist_opt=groups_over("tp", "pp", "dp", "cp"),
    )
    over_heads = parallel.context_mode == "alltoall"
    sizes, peers = tuple(parallel.stage_layers), groups_over("tp", "cp", "pp")
    scales = tp, pp, parallel.virtual_stages, sizes, cp, dp, ep
    return Layout(*scales, parallel.sequence, over_heads, pgs, peers, _expert_groups(experts, ep_group))
