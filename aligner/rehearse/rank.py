"""Rehearsals, each in its own process, forked from this one after its imports: `python -m aligner.rehearse.rank CASES`,
a JSON file."""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import resource
import sys
import time
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from aligner import loading
from aligner.cluster.env import RankEnv
from aligner.config.freeze import load_frozen
from aligner.config.stages import STAGES
from aligner.data.tokenizer import byte_tokenizer
from aligner.files import write_whole
from aligner.plan.devices import find_device
from aligner.rehearse import cuda, engine_ranks, program, shortened
from aligner.rehearse.collectives import Collectives, MessageLog, NoMessageError, join
from aligner.rehearse.device import RehearsedDevice
from aligner.rehearse.forks import SUFFIX, fork, send
from aligner.rehearse.kernels import LOCAL_RANK
from aligner.rehearse.record import RehearsalRecord
from aligner.run.chain import code


def main(path: str) -> None:
    """Run the cases of a file: `device`, `gpus_per_node`, `processes` at a time, and `cases`: config, tokenizer, gpus,
    rank, `out` for its record, and the rank `source` with its record `source_record`, which comes before it. Prints the
    events of `progress.py`."""
    asked = json.loads(Path(path).read_text())
    warnings.filterwarnings("ignore")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    record = RehearsalRecord()
    device = RehearsedDevice(record, find_device(asked["device"]), asked["gpus_per_node"])
    loading.kernels = load_frozen(asked["cases"][0]["config"]).model.kernels
    cuda.install(device, asked["device"])
    program.files_are_the_same()
    collectives = Collectives(device, record)
    program.install(device, collectives.name)
    engine_ranks.install(collectives)
    shortened.install(record)
    for module in ("aligner.builders.stage", *(f"aligner.stages.{name}" for name in STAGES)):
        import_module(module)  # once, for all forks
    code()
    for folder in {case["tokenizer"] for case in asked["cases"]}:
        byte_tokenizer(folder)
    gc.collect()
    gc.freeze()  # existing objects are not scanned again in each process, and their pages stay shared
    for case in asked["cases"]:
        Path(case["out"]).with_suffix(SUFFIX).touch()
    fork(asked["cases"], asked["processes"], lambda case: rehearse(case, device, collectives))


def rehearse(case: dict[str, Any], device: RehearsedDevice, collectives: Collectives) -> None:
    """Rehearse a case and end the process."""
    out, start = Path(case["out"]), time.process_time()
    log, events = out.with_suffix(".log").open("w"), os.dup(1)
    device.record.listener = lambda phase: send(events, rank=case["rank"], phase=phase)
    device.record.listener(device.record.name)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    from aligner.builders.stage import run_stage
    from aligner.megatron.transformer_engine import TE

    torch.set_num_threads(1)  # makes the pools that a fork has lost, before two threads need them at once
    record, source_record = device.record, Path(case["source_record"])
    collectives.rank, collectives.messages = case["rank"], MessageLog(out, case["source"], source_record)
    try:
        join(case["rank"], case["gpus"])
        cfg = load_frozen(case["config"])
        cfg.run.dir = str(out.with_suffix(".run"))
        Path(cfg.run.dir).mkdir()
        with device:
            code = run_stage(cfg, RankEnv(case["rank"], LOCAL_RANK, case["gpus"], 1))
        record.whole = code == 0  # else a rank that failed has dismissed it
    except NoMessageError:  # if the other rank has ended, this is a mismatch
        traceback.print_exc()
        record.whole = not json.loads(source_record.read_text(encoding="utf-8"))["errors"]
    except BaseException as error:  # any error: a rehearsal looks for them
        traceback.print_exc()
        record.fail(error)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    measured = {"rank": case["rank"], "cpu_s": time.process_time() - start, "host_bytes": usage.ru_maxrss * 1024}
    measured["transformer_engine_lacks"] = TE.lacks
    write_whole(out, json.dumps(record.data() | measured))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # destructors in C++ would ask the driver


if __name__ == "__main__":
    main(sys.argv[1])
