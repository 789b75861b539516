"""Run of a frozen config's stage. Only this room picks concrete classes."""

from __future__ import annotations

from pathlib import Path

from aligner.builders.job import POLICY, Job, start
from aligner.cluster.env import RankEnv
from aligner.cluster.signals import StopSignals
from aligner.config.on_demand import on_demand
from aligner.config.schema import Config
from aligner.config.stages import entry_point
from aligner.errors import AlignerError
from aligner.megatron.groups import leave_distributed
from aligner.run.marker_files import DONE, STOPPED
from aligner.run.stop import StopRequested, restarted
from aligner.run.watchdog import Watchdog


def run_stage(cfg: Config, env: RankEnv, signals: StopSignals | None = None) -> int:
    """Build and run the configured stage to its end, or to the step of a stop request; returns the exit code. Raises
    AlignerError."""
    if cfg.run.resume == "never" and restarted():
        cfg.run.resume = "auto"  # `never` was for the first start of the job
    run_dir = Path(cfg.run.dir).absolute()
    cfg.run.dir = str(run_dir)  # a reward function may change the current folder
    if env.rank == 0:
        (run_dir / STOPPED).unlink(missing_ok=True)
        Watchdog.clear(run_dir)
    job = start(cfg, env, signals or StopSignals())
    job.watchdog.start()
    well = False
    try:
        if job.layout is None:
            return on_demand("engine.ranks")(job)
        with job.start.ends():
            entry_point("rollout_only" if cfg.debug.rollout_only else cfg.stage.name)(job)
            if env.rank == 0:
                (run_dir / DONE).write_text(f"{cfg.stage.name}\n", encoding="utf-8")
        well = True
    except StopRequested as stopped:
        job.say(stopped)
        well = True
    except AlignerError as error:
        _report(job, error)
        raise
    except Exception as error:
        _report(job, error)
        job.watchdog.ask_for_stacks(repr(error))
        raise
    finally:
        job.watchdog.stop()
        if POLICY in job.built.engines:
            job.built.engines[POLICY].close()
        if job.bridge is not None:
            job.bridge.dismiss(well)
        leave_distributed()
    return 0


def _report(job: Job, error: Exception) -> None:
    if job.bridge is not None:
        job.bridge.tell(error)
