"""Process groups of the job's full size in one process. Every other rank is taken to send what this one sends. Objects
that one rank sends to others come from its own rehearsal instead.

Each call is recorded for its group, in order, so that ranks that were rehearsed separately can be compared: if one
makes another call than its peer, both would wait for ever.
"""

from __future__ import annotations

import pickle
import time
import warnings
import zlib
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, Work
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend "fake")
from torch.utils._pytree import tree_leaves

from aligner.rehearse.device import RehearsedDevice, on_device
from aligner.rehearse.forks import SUFFIX
from aligner.rehearse.order import Communication
from aligner.rehearse.record import RehearsalRecord, stack

# argument, else 0
BYTES_OF = {"_reduce_scatter_base_": 1, "alltoall_base_": 1, "reduce_scatter_tensor_coalesced_": 1, "gather_": 1}
P2P = ("send", "recv_")
POLL_S = 0.05
UNEVEN = ("alltoall_base_", "alltoall_")  # ranks may send each other different amounts
AXES = ("tp", "pp", "cp", "dp", "ep", "dp_cp", "expt_dp", "mp", "embd", "tp_cp", "tp_dp_cp", "tp_ep", "tp_ep_pp")


class NoMessageError(Exception):
    """The end of the rank that should send before it has sent."""


class MessageLog:
    """Messages that this rank sends, into an existing file, and those of the rank `source`. The latter are read
    from that rank's file as they come, until its record exists too. They are in order for each subject: a group, for
    objects that are broadcast."""

    def __init__(self, own: Path, source: int, record: Path):
        self.source, self._record = source, record
        self._own, self._other = own.with_suffix(SUFFIX).open("ab"), record.with_suffix(SUFFIX).open("rb")
        self._received: dict[str, deque[Any]] = defaultdict(deque)

    def send(self, subject: str, value: Any) -> None:
        pickle.dump((subject, value), self._own)
        self._own.flush()

    def receive(self, subject: str) -> Any:
        """Return the next message. Raises NoMessageError if no more come."""
        while not self._received[subject]:
            start, ended = self._other.tell(), self._record.is_file()
            try:
                other, value = pickle.load(self._other)
                self._received[other].append(value)
            except (EOFError, pickle.UnpicklingError):
                if ended:
                    raise NoMessageError(f"rank {self.source} sends nothing more about {subject}") from None
                self._other.seek(start)
                time.sleep(POLL_S)
        return self._received[subject].popleft()


def join(rank: int, world: int) -> None:
    warnings.filterwarnings("ignore", module="torch.distributed")
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world)


def _type(argument: Any) -> Any:
    return argument._type() if isinstance(argument, torch.ScriptObject) else None


def _refuse(what: str, args: tuple, ranks: int) -> None:
    """Raise RuntimeError for tensors that NCCL does not take."""
    tensors = [t for t in tree_leaves(args[:2]) if isinstance(t, Tensor)]
    for t in tensors:
        if not t.is_contiguous():
            raise RuntimeError(f"{what} of a tensor of {tuple(t.shape)} with strides {t.stride()}: NCCL wants it whole")
        if t.dtype != tensors[0].dtype:
            raise RuntimeError(f"{what} of {t.dtype} and {tensors[0].dtype}: NCCL wants one dtype")
    if what in ("allgather_base", "reduce_scatter_base"):
        few, many = sorted(t.numel() for t in args[:2])
        if many != few * ranks:
            raise RuntimeError(f"{what} of {few} and {many} numbers over {ranks} ranks: NCCL wants {few * ranks}")
    for t, sizes in zip(args[:2], args[3:5], strict=True) if what == "alltoall_base" else ():
        if sum(sizes) != len(t) if sizes else len(t) % ranks:
            raise RuntimeError(f"{what} of {len(t)} rows over {ranks} ranks, with split sizes {list(sizes)}")


class Collectives:
    """Replacement of `torch.distributed` on this rank."""

    def __init__(self, device: RehearsedDevice, record: RehearsalRecord):
        self.record = record
        self.names: dict[str, str] = {}
        self._keys: dict[str, str] = {}
        self.rank = 0  # in the job
        self.messages: MessageLog | None = None
        # calls that nobody has waited for, with their entries in the record
        self.pending: dict[Work, tuple[list[Any] | None, Communication | None]] = {}
        device.collective = self.run
        self.device = device
        self._replace()

    def name(self, layout: Any) -> None:
        """Name groups by the axes of the layout that they vary over."""
        for axis in AXES:
            group = getattr(layout.pgs, axis, None)
            if group is not None and group is not dist.group.WORLD:
                self.call(group, axis)
        for group in layout.expert_groups:
            self.call(group, "ep")

    def call(self, group: dist.ProcessGroup, name: str) -> None:
        """Name a group. Every member has its sequence, whether it calls anything or not."""
        self.names.setdefault(group.group_name, name)
        self._key(group)

    def _ranks(self, group: dist.ProcessGroup) -> list[int]:
        """Return ranks in the job. The world may be a subset of it that counts its ranks from 0
        (`groups.split_world`)."""
        ranks = dist.get_process_group_ranks(group)
        before = self.rank - ranks[group.rank()]
        return [before + rank for rank in ranks]

    def _key(self, group: dist.ProcessGroup) -> str:
        if group.group_name not in self._keys:
            ranks = self._ranks(group)
            name = self._name(group)
            key = f"{name} {ranks[0]}..{ranks[-1]} ({len(ranks)} ranks, {zlib.crc32(repr(ranks).encode()):08x})"
            self._keys[group.group_name] = key
            self.record.groups[key] = ranks
        return self._keys[group.group_name]

    def _name(self, group: dist.ProcessGroup) -> str:
        return "world" if group is dist.group.WORLD else self.names.get(group.group_name, "others")

    def wait(self, group: dist.ProcessGroup, what: str, detail: str = "") -> None:
        """Note a call that returns when all ranks have made it."""
        if (entry := self.note(group, what, 0, detail or what)) is not None:
            entry[-1] = entry[-2]
            self._price(group, what, 0, None)

    def note(self, group: dist.ProcessGroup, what: str, size: int, detail: str, peer: int | None = None) -> Any:
        """Note a call, and return its entry in the record."""
        if group.size() == 1:
            return None
        name = self._name(group)
        entry = self.record.phase.comm[name, what]
        entry[0] += 1
        entry[1] += size
        if peer is None:
            key = self._key(group)
        else:  # both ends record the same
            me, other = self.rank, self._ranks(group)[peer]
            ends = [me, other] if what == "send" else [other, me]
            key, detail = f"{name} {ends[0]} to {ends[1]}", detail.removeprefix(what).strip()
            self.record.groups[key] = ends
        return self.record.call(key, detail, f"[{self.record.name}] {stack(3)}")

    def run(self, func: Any, args: tuple, kwargs: dict, cuda: bool) -> Any:
        op = func._overloadpacket.__name__
        what = op.strip("_")
        group = next(dist.ProcessGroup.unbox(a) for a in args if "ProcessGroup" in str(_type(a)))
        tensors = [t for t in tree_leaves(args[BYTES_OF.get(op, 0)]) if isinstance(t, Tensor)]
        size = sum(t.nbytes for t in tensors)
        if len({on_device(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}) > 1:
            raise RuntimeError(f"{what}: some of its tensors are on the CPU and some on cuda")
        if cuda:
            _refuse(what, args, group.size())
        kinds = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
        size_text = "" if op in UNEVEN else f"{size} bytes "
        detail = f"{what} {size_text}{kinds} {'cuda' if cuda else 'cpu'}"
        entry = self.note(group, what, size, detail, args[2] if op in P2P else None)
        if cuda:  # nothing is computed, and `_refuse` has looked
            boxed = FakeWork().boxed()
            out = boxed if len(func._schema.returns) == 1 else (args[0], boxed)
        else:
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
        work = Work.unbox(next(x for x in tree_leaves(out) if isinstance(x, torch.ScriptObject)))
        first, second = ([t for t in tree_leaves(argument) if on_device(t)] for argument in args[:2])
        sends = op == "send" or (op == "broadcast_" and args[2] == group.rank())
        ends = (first, []) if sends else (second, first)
        message = self.device.order.send(*ends) if cuda else None
        self._price(group, what, size, args[2] if op in P2P else None, message)
        self.pending[work] = entry, message
        for t in tree_leaves(out):
            if on_device(t):
                self.device.track(t, what)
        return out

    def _price(
        self, group: dist.ProcessGroup, what: str, size: int, peer: int | None, message: Communication | None = None
    ) -> None:
        ranks, pricing = self._ranks(group), self.device.pricing
        end = None if peer is None else ranks[peer]
        seconds = pricing.seconds_of(what, size, ranks, self.rank, end)
        pricing.send(seconds, (group.group_name, what if peer is not None else ""), message)

    def _replace(self) -> None:
        reduce, wait = dist.all_reduce, FakeWork.wait

        def waited(work: Work, *arguments: Any) -> bool:
            if (call := self.pending.pop(work, None)) is not None:
                entry, message = call
                if entry is not None:
                    entry[-1] = self.record.moment()
                if message is not None:
                    self.device.order.arrive(message)
            return wait(work, *arguments)

        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
            done = reduce(tensor, op, group, async_op)
            if not on_device(tensor) and op == dist.ReduceOp.SUM:
                tensor.mul_(dist.get_world_size(group))
            return done

        def in_group(group: Any) -> dist.ProcessGroup:
            return group if group is not None else dist.group.WORLD

        def all_gather_object(values: list, value: Any, group: Any = None) -> None:
            self.wait(in_group(group), "all_gather_object")
            values[:] = [value] * len(values)

        def gather_object(value: Any, values: list | None = None, dst: Any = None, group: Any = None, **k: Any) -> None:
            self.wait(in_group(group), "gather_object")
            if values is not None:
                values[:] = [value] * len(values)

        def broadcast_object_list(values: list, src: int | None = None, group: Any = None, **k: Any) -> None:
            group = in_group(group)
            self.wait(group, "broadcast_object_list", f"broadcast_object_list of {len(values)}")
            if group.size() == 1:
                return
            key = self._key(group)
            assert self.messages is not None
            if src == dist.get_rank():
                self.messages.send(key, values)
            elif src == self.messages.source:
                values[:] = self.messages.receive(key)
            else:
                raise RuntimeError(f"rank {src} broadcasts objects to group {key}: they are unknown here")

        FakeWork.wait = waited
        for module in (dist, dist.distributed_c10d):
            module.all_gather_object, module.gather_object = all_gather_object, gather_object
            module.broadcast_object_list, module.all_reduce = broadcast_object_list, all_reduce
