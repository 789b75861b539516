"""Results as data and as a table, with the sizes of `plan`. Imports no torch."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from aligner.config.schema import Config
from aligner.config.sections.model.kernels import te_lacks
from aligner.plan.devices import GIB, Assumptions, Device
from aligner.plan.job import PlanJob, job_of
from aligner.plan.memory import engine_phases, stage_phases
from aligner.rehearse.compare import circle, mismatches
from aligner.rehearse.ranks import stage_of

MADE_IN_A_LAYER = 32  # tensors that one operation of one line may make in a layer of a micro-batch; 17 were seen
MADE_BY_TURNS = 32  # and of a layer's residual streams, for each normalisation of what mixes them
SHOWN = 8  # places of a list in the table; the file has all
KINDS = {  # of `prices.py`: head of a column
    "products": "products",
    "attention": "attention",
    "element-wise": "elements",
    "communication": "messages",
    "transfers": "transfers",
}
LISTS = {
    "waits": "the host waits for the device",
    "attention": "attention kernels",
    "float64": "float64 tensors on the device",
    "unpinned_copies": "copies to the device from memory that is not pinned",
}


@dataclass(frozen=True)
class Rehearsal:
    cfg: Config
    gpus: int
    device: Device
    records: Mapping[int, Mapping[str, Any]]  # of each rank: `record.Record.data`
    seconds: float

    @cached_property
    def mismatches(self) -> list[dict[str, Any]]:
        return mismatches(self.records)

    @cached_property
    def circle(self) -> list[dict[str, Any]]:
        return circle(self.records)

    @cached_property
    def job(self) -> PlanJob:
        """Job with rows as long as those that are rehearsed."""
        rows = job_of(self.cfg, self.gpus).rows
        longest = {"prompt_tokens": rows.prompt_longest, "response_tokens": rows.response_longest}
        return job_of(self.cfg, self.gpus, **longest)

    @cached_property
    def planned(self) -> dict[int, dict[str, float]]:
        """Rank -> phase -> bytes by `plan`."""
        return {rank: self._planned(stage_of(rank, self.cfg, self.gpus)) for rank in self.records}

    def _planned(self, stage: int | None) -> dict[str, float]:
        phases = engine_phases(self.job) if stage is None else stage_phases(self.job, stage)
        sizes = {name: sum(items.values()) for name, items in phases.items()}
        if stage is None:  # judges make it generate
            sizes["generate"] = max(sizes["generate"], sizes.pop("score", 0.0))
        return sizes

    @cached_property
    def update(self) -> tuple[float, float]:
        """Seconds of a step's update on the slowest rank, and its MFU: the share of the peak of matrix products, also
        recomputed ones, without attention's. (0, 0) if no rank trains."""
        phases = [record["phases"]["update"] for record in self.records.values() if "update" in record["phases"]]
        seconds = max((phase["seconds"] / phase["entries"] for phase in phases), default=0.0)
        if not seconds:
            return 0.0, 0.0
        products = fmean(phase["product_flops"] / phase["entries"] for phase in phases)
        return seconds, products / (seconds * self.device.flops)

    @cached_property
    def faults(self) -> list[str]:
        """Causes that would end the job, or block it."""
        assumed, faults = Assumptions(), []
        limit = self.device.memory_bytes * assumed.usable - assumed.context_bytes
        for rank, record in self.records.items():
            for error in record["errors"]:
                faults.append(f"rank {rank}, phase {error['phase']}, {error['place']}: {error['text']}")
            for line, what in record["grows"].items():
                faults.append(f"rank {rank}, {line}: {what}")
            for name, phase in record["phases"].items():
                if phase["peak_bytes"] > limit:
                    faults.append(
                        f"rank {rank}, phase {name}: {phase['peak_bytes'] / GIB:.1f} GiB on the device, of "
                        f"{limit / GIB:.1f} that a program can use of {self.device.name}"
                    )
        for mismatch in self.mismatches:
            faults.append(f"group {mismatch['group']}, call {mismatch['number'] + 1}: {_sides(mismatch['calls'])}")
        if self.circle:
            faults.append(f"ranks wait for each other: {_sides(self.circle)}")
        return faults

    @cached_property
    def one_by_one(self) -> Counter[str]:
        """Lines that make a tensor for each token of a row, all by one operation: a kernel for each, only launches.
        Megatron's and autograd's tensors of all layers have one line of ours, but many operations."""
        layers, lines = max(map(len, self.cfg.model.rank_layers(self.cfg.parallel))), Counter[str]()
        made = MADE_IN_A_LAYER + MADE_BY_TURNS * self.cfg.model.hyper.iterations
        many = max(self.job.rows.longest, made * layers)
        for record in self.records.values():
            for name in ("logprobs", "update"):
                phase = record["phases"].get(name, {"made": []})
                for line, operation, times in phase["made"]:
                    if times >= many * phase["micro_batches"]:
                        lines[f"{name:<9} {line}  {operation}"] += times
        return lines

    @property
    def path(self) -> str:
        lacks = {record["transformer_engine_lacks"] for record in self.records.values()} - {None}
        why = max(lacks, default="no rank reached it") or min(te_lacks(self.cfg.model).values())
        te, apex = not why, importlib.util.find_spec("apex") is not None
        if te or apex:
            there = " and ".join(["TransformerEngine"] * te + ["Apex"] * apex)
            return f"With {there}, whose own kernels fail on tensors without storage"
        return f"Without TransformerEngine ({why}) and Apex: Megatron's local path was rehearsed"

    def data(self) -> dict[str, Any]:
        kept = ("errors", "grows", "phases", "cpu_s", "host_bytes")
        ranks = {}
        for rank, record in self.records.items():
            ranks[rank] = {name: record[name] for name in kept} | {"stage": stage_of(rank, self.cfg, self.gpus)}
            for name, size in self.planned[rank].items():
                if name in record["phases"]:
                    record["phases"][name]["planned_bytes"] = size
        head = {"device": self.device.name, "gpus": self.gpus, "stage": self.cfg.stage.name, "seconds": self.seconds}
        head |= {"path": self.path, "faults": self.faults, "mismatches": self.mismatches}
        head |= {"circle": self.circle, "update_s": self.update[0], "update_mfu": self.update[1]}
        return head | {"one_by_one": dict(self.one_by_one), "ranks": ranks}


def _sides(calls: Sequence[Mapping[str, Any]]) -> str:
    return " | ".join(f"rank {side['rank']}: {side['call']} {side['stack']}".rstrip() for side in calls)


def show(rehearsal: Rehearsal) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{rehearsal.cfg.stage.name} on {rehearsal.gpus} x {rehearsal.device.name}, GiB without the driver's share"
    table = Table("rank", "stage", "phase", title=title)
    for name in ("peak", "plan", "plan %", "TFLOP", "collectives", "GB", "waits", "kernels"):
        table.add_column(name, justify="right")
    for rank, record in rehearsal.records.items():
        for name, phase in record["phases"].items():
            calls, size = (sum(entry[i] for entry in phase["collectives"]) for i in (2, 3))
            plan, peak = rehearsal.planned[rank].get(name), phase["peak_bytes"]
            beside = [f"{plan / GIB:.2f}", f"{100 * (plan / peak - 1):+.1f}"] if plan and peak else ["", ""]
            numbers = [f"{phase['flops'] / 1e12:.1f}", str(calls), f"{size / 1e9:.2f}"]
            numbers += [str(sum(entry[-1] for entry in phase["waits"])), str(phase["kernels"])]
            stage = stage_of(rank, rehearsal.cfg, rehearsal.gpus)
            where = [str(rank), "engine" if stage is None else str(stage), name]
            table.add_row(*where, f"{peak / GIB:.2f}", *beside, *numbers)
        table.add_section()
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(_times(rehearsal))
    seconds, mfu = rehearsal.update
    if seconds:
        of = "recomputed products count, attention does not"
        print(f"update: estimated {1000 * seconds:.0f} ms a step, MFU {100 * mfu:.0f} % ({of})")
    for kind, words in LISTS.items():
        counts: Counter[str] = Counter()
        for record in rehearsal.records.values():
            for name, phase in record["phases"].items():
                for *what, times in phase[kind]:
                    counts[f"{name:<9} {'  '.join(what)}"] += times
        _list(words, counts)
    _list("a tensor for each token", rehearsal.one_by_one)
    groups: Counter[tuple[str, str, str]] = Counter()
    for record in rehearsal.records.values():
        for name, phase in record["phases"].items():
            for group, what, _, size in phase["collectives"]:
                groups[name, group, what] += size
    print("\ncollectives (phase, group, kind: GB)")
    for (name, group, what), size in groups.most_common(SHOWN):
        print(f"  {size / 1e9:10.3f}  {name:<9} {group:<8} {what}")
    print(f"\n{rehearsal.path}. {rehearsal.seconds:.0f} s")
    for fault in rehearsal.faults:
        print(f"FAULT {fault}")
    if not rehearsal.faults:
        count = len(rehearsal.records)
        print(f"{count} rank{'s' * (count > 1)} rehearsed, no fault")


def _times(rehearsal: Rehearsal) -> Any:
    """Return a table of one entry of each phase, but of those that decode fewer steps than a job."""
    from rich.table import Table

    title = "estimated milliseconds: whole phase, device time by kind, wait for other stages, host time to launch"
    table = Table("rank", "phase", title=title)
    for name in ("all", *KINDS.values(), "bubble", "launches", "idle %"):
        table.add_column(name, justify="right")
    for rank, record in rehearsal.records.items():
        for name, phase in record["phases"].items():
            if not phase["seconds"] or phase["decode_steps"]:
                continue
            parts = [phase["device_s"].get(kind, 0.0) for kind in KINDS]
            every = [phase["seconds"], *parts, phase["bubble_s"], phase["launch_s"]]
            idle = 100 * phase["idle_s"] / phase["seconds"]
            numbers = [f"{1000 * seconds / phase['entries']:.1f}" for seconds in every]
            table.add_row(str(rank), name, *numbers, f"{idle:.0f}")
        table.add_section()
    return table


def _list(words: str, counts: Counter[str]) -> None:
    print(f"\n{words} (times, phase, place)" if counts else f"\n{words}: none")
    for text, times in counts.most_common(SHOWN):
        print(f"  {times:6d}  {text}")
    if len(counts) > SHOWN:
        print(f"  and {len(counts) - SHOWN} more")
