"""Process groups of the job's full size in one process: every other rank is thought to say what this one says, but for
objects that one rank tells the others, which are those that its own rehearsal told.

Each call is written down for its group, in order, so that ranks that were rehearsed apart can be compared: where one
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
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend "fake")
from torch.utils._pytree import tree_leaves

from aligner.rehearse.device import RehearsedDevice, on_device
from aligner.rehearse.record import RehearsalRecord, stack

BYTES_OF = {"_reduce_scatter_base_": 1, "alltoall_base_": 1, "reduce_scatter_tensor_coalesced_": 1}  # argument, else 0
P2P = ("send", "recv_")
SPOKEN, POLL_S = ".spoken", 0.05
UNEVEN = ("alltoall_base_", "alltoall_")  # ranks may send each other different amounts
AXES = ("tp", "pp", "cp", "dp", "ep", "dp_cp", "expt_dp", "mp", "embd", "tp_cp", "tp_dp_cp", "tp_ep", "tp_ep_pp")


class UnheardError(Exception):
    """The rank that is to speak has ended before."""


class Speech:
    """What this rank tells others, into a file that is there; and what the rank `hears` does, from its file as it
    comes, until there is its record too. In order for each subject: a group, for objects that are broadcast."""

    def __init__(self, own: Path, hears: int, record: Path):
        self.hears, self._record = hears, record
        self._own, self._other = own.with_suffix(SPOKEN).open("ab"), record.with_suffix(SPOKEN).open("rb")
        self._heard: dict[str, deque[Any]] = defaultdict(deque)

    def speak(self, subject: str, value: Any) -> None:
        pickle.dump((subject, value), self._own)
        self._own.flush()

    def hear(self, subject: str) -> Any:
        """Raises UnheardError where nothing more comes."""
        while not self._heard[subject]:
            start, ended = self._other.tell(), self._record.is_file()
            try:
                other, value = pickle.load(self._other)
                self._heard[other].append(value)
            except (EOFError, pickle.UnpicklingError):
                if ended:
                    raise UnheardError(f"rank {self.hears} says nothing more of {subject}") from None
                self._other.seek(start)
                time.sleep(POLL_S)
        return self._heard[subject].popleft()


def join(rank: int, world: int) -> None:
    warnings.filterwarnings("ignore", module="torch.distributed")
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world)


def _type(argument: Any) -> Any:
    return argument._type() if isinstance(argument, torch.ScriptObject) else None


class Collectives:
    """What `torch.distributed` does on this rank."""

    def __init__(self, device: RehearsedDevice, record: RehearsalRecord):
        self.record = record
        self.names: dict[str, str] = {}
        self._keys: dict[str, str] = {}
        self.rank = 0  # in the job
        self.speech: Speech | None = None
        device.collective = self.run
        self.device = device
        self._replace()

    def name(self, layout: Any) -> None:
        """Groups by the axes of the layout that they vary over."""
        for axis in AXES:
            group = getattr(layout.pgs, axis, None)
            if group is not None and group is not dist.group.WORLD:
                self.call(group, axis)

    def call(self, group: dist.ProcessGroup, name: str) -> None:
        """Every rank that is in such a group has a sequence of it, whether it speaks there or not."""
        self.names.setdefault(group.group_name, name)
        self._key(group)

    def _ranks(self, group: dist.ProcessGroup) -> list[int]:
        """In the job, of which the world may be a part that counts its ranks from 0 (`groups.split_world`)."""
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

    def note(self, group: dist.ProcessGroup, what: str, size: int, detail: str, peer: int | None = None) -> None:
        if group.size() == 1:
            return
        name = self._name(group)
        entry = self.record.phase.comm[name, what]
        entry[0] += 1
        entry[1] += size
        if peer is None:
            key = self._key(group)
        else:  # both ends write down the same
            me, other = self.rank, self._ranks(group)[peer]
            ends = [me, other] if what == "send" else [other, me]
            key, detail = f"{name} {ends[0]} to {ends[1]}", detail.removeprefix(what).strip()
            self.record.groups[key] = ends
        self.record.sequences[key].append((detail, f"[{self.record.name}] {stack(3)}"))

    def run(self, func: Any, args: tuple, kwargs: dict, cuda: bool) -> Any:
        op = func._overloadpacket.__name__
        what = op.strip("_")
        group = next(dist.ProcessGroup.unbox(a) for a in args if "ProcessGroup" in str(_type(a)))
        tensors = [t for t in tree_leaves(args[BYTES_OF.get(op, 0)]) if isinstance(t, Tensor)]
        size = sum(t.nbytes for t in tensors)
        if len({on_device(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}) > 1:
            raise RuntimeError(f"{what}: some of its tensors are on the CPU and some on cuda")
        kinds = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
        told = "" if op in UNEVEN else f"{size} bytes "
        detail = f"{what} {told}{kinds} {'cuda' if cuda else 'cpu'}"
        self.note(group, what, size, detail, args[2] if op in P2P else None)
        if not cuda:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if op.endswith("_coalesced_"):  # has no kernel for tensors without storage
            return FakeWork().boxed()
        out = func(*args, **kwargs)
        for t in tree_leaves(out):
            if on_device(t):
                self.device.track(t, what)
        return out

    def _replace(self) -> None:
        reduce = dist.all_reduce

        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
            done = reduce(tensor, op, group, async_op)
            if not on_device(tensor) and op == dist.ReduceOp.SUM:
                tensor.mul_(dist.get_world_size(group))
            return done

        def in_group(group: Any) -> dist.ProcessGroup:
            return group if group is not None else dist.group.WORLD

        def all_gather_object(found: list, value: Any, group: Any = None) -> None:
            self.note(in_group(group), "all_gather_object", 0, "all_gather_object")
            found[:] = [value] * len(found)

        def gather_object(value: Any, found: list | None = None, dst: Any = None, group: Any = None, **k: Any) -> None:
            self.note(in_group(group), "gather_object", 0, "gather_object")
            if found is not None:
                found[:] = [value] * len(found)

        def broadcast_object_list(values: list, src: int | None = None, group: Any = None, **k: Any) -> None:
            group = in_group(group)
            self.note(group, "broadcast_object_list", 0, f"broadcast_object_list of {len(values)}")
            if group.size() == 1:
                return
            key = self._key(group)
            assert self.speech is not None
            if src == dist.get_rank():
                self.speech.speak(key, values)
            elif src == self.speech.hears:
                values[:] = self.speech.hear(key)
            else:
                raise RuntimeError(f"rank {src} broadcasts objects to group {key}: nobody knows here what it says")

        for module in (dist, dist.distributed_c10d):
            module.all_gather_object, module.gather_object = all_gather_object, gather_object
            module.broadcast_object_list, module.all_reduce = broadcast_object_list, all_reduce
