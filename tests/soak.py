"""Kill runs at random moments, resume them to their end, and compare with the uninterrupted run bit by bit.

    python -m tests.soak --kills 50 [--seed S] [--stages sft,rm,dpo,...] [--layouts one,dp2,tp2,tp2-lora,lag1,...,vllm]
    python -m tests.soak --kills 50 --async    # stages and layouts of engines on ranks of their own: lags, windows

Each case is a random stage on one rank, two data-parallel or two tensor ranks (also with adapters), grpo, ppo and turns
also on one or two trainer's ranks and one or two engines that are ahead of them (engine.lag, engine.window), and if
asked for with vLLM (`--layouts vllm`), whose process is then killed too (SIGKILL at any call of it), or 61 layers on
eight ranks (`lag-deep`), or in terminals (`--stages terminal`), also killed while a call runs;
with or without checkpoint.async_save, killed (SIGKILL of one rank or of all) up to four
times: half of the kills at a random time, half at a point that a random time would seldom hit: within a save, a
commit, a refit, a window, a step of decoding, between two minibatches, at the end of an epoch.
One of several ranks may first see the run folder as it was some time ago, as on a network file system. Ranks are forked
from this process, which has everything imported, so a kill costs seconds. Prints kills, resumes and mismatches; the
exit code is 1 if there is a mismatch.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":  # before torch
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", NO_PROXY="127.0.0.1")
    os.environ.update(SCORE_KEY="of-the-score", JUDGE_KEY="of-the-judge")

import torch

import aligner.builders.runs
import aligner.builders.stage
import aligner.data.dialogue
import aligner.run.candidates
import aligner.run.checkpoints
import aligner.run.retention
from aligner.answers import FOLDER as ANSWERS
from aligner.answers import AnswerLog
from aligner.cluster.env import RankEnv
from aligner.cluster.lock import RunLock
from aligner.config.freeze import freeze
from aligner.config.resolve import compose
from aligner.config.schema import Config
from aligner.config.validate import validate
from aligner.data.stream import IndexStream
from aligner.data.tool_calls import Call
from aligner.engines.child.process import ChildChannel
from aligner.engines.native.engine import NativeEngine
from aligner.megatron.checkpoint import ModelSave
from aligner.megatron.train import ShardedModel
from aligner.refit import serve
from aligner.refit.transfer import Refit
from aligner.rollout.sample_generator import SampleGenerator
from aligner.rollout.samples_file import SamplesFile
from aligner.rollout.score import Scorer
from aligner.rollout.store import Store
from aligner.run.loop import Run
from aligner.run.metrics import MetricsLogger
from aligner.run.retention import Retention
from aligner.tools.bisect import bisect
from tests import soak_terminal, stages
from tests.ranks import _free_port
from tests.servers import Server, fickle, scored_by

TOTAL = 6
DROPPED = "dropped"  # where a run's deleted logs of answers go, for the run that reads all of them
GOES_ON = ("The run goes on with engines", soak_terminal.ENDED)
STAGES = ("sft", "rm", "dpo", "kto", "distill", "online_dpo", "sample", "grpo", "ppo", "turns", "outside", "sdpo")
TERMINAL = "terminal"  # a sandbox for each trajectory, so only if asked for
ASKING = ("turns", "outside", TERMINAL)  # whom nobody answers the same again
LAYOUTS: dict[str, tuple[int, list[str]]] = {"one": (1, []), "dp2": (2, []), "tp2": (2, ["parallel.tensor=2"])}
LAYOUTS["pages"] = (1, ["engine.page_tokens=4", "engine.kv_cache_bytes=35840", "sampling.max_response_tokens=10"])
LAYOUTS["drafts"] = (1, ["engine.draft_tokens=3", "sampling.temperature=0.3", "sampling.max_response_tokens=10"])
LAYOUTS["tp2-lora"] = (2, ["parallel.tensor=2", "model.lora.rank=2", "model.lora.dora=true"])
LAYOUTS |= {f"lag{lag}": (2, ["engine.ranks=1", f"engine.lag={lag}"]) for lag in (1, 2)}
VLLM = "vllm"  # needs an environment of its own, and seconds to start
LAYOUTS[VLLM] = (1, ["engine=vllm", "engine.kv_cache_bytes=16777216", "model.init=random", "model.head_dim=32"])
LAYOUTS["lag-windows"] = (2, [*LAYOUTS["lag1"][1], "engine.window=3", "sampling.max_response_tokens=10"])
LAYOUTS["lag0"] = (2, ["engine.ranks=1"])
TWO = ["engine.ranks=2", "engine.silent_s=15", "cluster.timeout_s=60", "refit.timeout_s=60"]
LAYOUTS["lag-two"] = (3, [*TWO, "engine.lag=2"])
DEEP = (
    "lag-deep"  # minutes: 61 layers with experts in stages of unequal size that take turns, and an engine of two ranks
)
STAGED = ["parallel.pipeline=4", "parallel.virtual_stages=2", "parallel.stage_layers=[8,9,8,8,7,7,7,7]"]
MIXTURE = ["model.init=random", "model=tiny_moe", "model.num_layers=61", "parallel.expert=2"]
LAYOUTS[DEEP] = (10, [*MIXTURE, *STAGED, *TWO, "engine.tensor_parallel=2", "engine.lag=1"])
LAYOUTS["lag-windows-two"] = (4, [*TWO, *LAYOUTS["lag-windows"][1][1:]])
# experts whose choice the trainer repeats, and a head that drafts. The model is random, so an answer that ends is a
# call (`attempt`)
ROUTED = ["model.init=random", "model.family=glm4_moe", "model.tie_embeddings=false", "model.init_std=0.3"]
ROUTED += ["model.moe={num_experts: 4, top_k: 2, ffn_hidden_size: 20, shared_ffn_hidden_size: 20, dense_layers: [0]}"]
ROUTED += ["mismatch.replay_routing=true", "model.mtp.layers=1", "batch.share_prompts=false", "engine.draft_tokens=2"]
LAYOUTS["lag-windows-routing"] = (2, [*LAYOUTS["lag-windows"][1], *ROUTED])
# requests of agents are held where a window ends: of stage `turns`, and of `terminal`, there in sandboxes
AGENT = "lag-windows-agent"
LAYOUTS[AGENT] = (
    2,
    [*LAYOUTS["lag-windows"][1], "environment.path=''", "environment.agent=tests/assets/agents.py:dice"],
)
ASYNC = [name for name in LAYOUTS if name.startswith("lag")]
COMMON = [f"run.steps={TOTAL}", "checkpoint.every=2", "run.eval_every=3", "logging.progress=false"]
COMMON += ["optim.schedule=cosine", "optim.warmup_steps=2", "batch.micro_batch_samples=4"]
ADAPTIVE = "algorithm.kl={coef: 0.1, placement: %s, controller: {kind: adaptive, target: 0.01, horizon: 100}}"
POINTS: dict[str, tuple[object, str]] = {
    "the plan of a save": (ModelSave, "__init__"),
    "the files of a save": (ModelSave, "write"),
    "the end of a save": (ModelSave, "finish"),
    "the manifest": (aligner.run.checkpoints, "write_manifest"),
    "the rename": (aligner.run.checkpoints, "put_in_place"),
    "the deletion of a checkpoint": (aligner.run.retention, "remove_whole"),
    "housekeeping": (Retention, "delete_old"),
    "the comparison of views": (aligner.run.checkpoints, "same_view"),
    "a record of metrics": (MetricsLogger, "_write"),
    "a refit": (Refit, "__call__"),
    "a bucket of a refit": (Refit, "_ask"),
    "generation": (SampleGenerator, "advance"),
    "scoring": (Scorer, "__call__"),
    "an answer from outside": (AnswerLog, "write"),
    "a stored rollout": (Store, "write"),
    "samples in their file": (SamplesFile, "append"),
    "files of samples": (SamplesFile, "finish"),
    "a minibatch": (ShardedModel, "step"),
    "an epoch": (IndexStream, "take"),
    "an evaluation": (Run, "_evaluate"),
    "a step": (Run, "finish"),
    "the export": (aligner.builders.runs, "export_hf"),
}
ENGINES = {  # on a rank that only generates
    "a step of decoding": (NativeEngine, "step"),
    "weights that come": (serve.OrderServer, "_load"),
    "samples that go": (serve.OrderServer, "_deliver"),
}
POINTS |= ENGINES
CHILD = "a call of the engine's process"
POINTS[CHILD] = (ChildChannel, "call")
CALL = "a running call"
POINTS[CALL] = (soak_terminal.RunningCall, "begun")
WAIT_S = 5.0  # for the other ranks of a killed one, before they are killed too, as a launcher would
LIMIT_S = 900.0  # of a start on a busy machine; and, beside a rank that ended by itself, of the others' end: a tenth


@dataclass(frozen=True)
class Kill:
    """Of `rank` (None: of all), at a time in seconds, or at the `call`-th call of a point, before or after it."""

    rank: int | None
    after_s: float = 0.0
    point: str = ""
    call: int = 0
    before: bool = True
    child: bool = False  # of the engine's process, which ends the run by an error, or of the environments'

    def __str__(self) -> str:
        who = "all ranks" if self.rank is None else f"rank {self.rank}"
        who = f"the process of {who}" if self.child else who
        if not self.point:
            return f"{who} after {self.after_s:.2f} s"
        return f"{who} {'before' if self.before else 'after'} {self.point}, call {self.call}"


def install(kill: Kill, rank: int) -> None:
    """In a rank that is to die at a point: wrap the function."""
    if kill.rank not in (None, rank):
        return
    owner, name = POINTS[kill.point]
    original, calls = getattr(owner, name), [0]

    def wrapped(*args, **kwargs):
        epochs = kill.point != "an epoch" or args[0].cursor // args[0].size < (args[0].cursor + args[1]) / args[0].size
        calls[0] += epochs
        die = bool(epochs) and calls[0] == kill.call
        if die and kill.before:
            _die(kill, args[0])
        result = original(*args, **kwargs)
        if die:
            _die(kill, args[0])
        return result

    setattr(owner, name, wrapped)


def see_late(rank: int) -> None:
    """In the last of several ranks: the newest checkpoint shows at the third look, and never in listings of its own."""
    reader, lister, looks = aligner.run.checkpoints, aligner.run.candidates, [0]
    listing, look = lister.complete_checkpoints, reader.view

    def late(folder: Path) -> dict[str, str]:
        looks[0] += 1
        return look(folder) if looks[0] > 2 else {}

    if rank:
        reader.view, lister.complete_checkpoints = late, lambda folder: listing(folder)[:-1]


def _die(kill: Kill, owner: Any) -> None:
    """`owner`: what is called at the point."""
    if kill.child:
        soak_terminal.end(owner) if kill.point == CALL else os.kill(owner.child.process.pid, signal.SIGKILL)
        return
    if kill.rank is None:
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def fork(work: Callable[[], None], log: Path, group: int = 0) -> int:
    """A child that does `work`, in the process group of `group` (0: its own)."""
    pid = os.fork()
    if pid:
        os.setpgid(pid, group or pid)
        return pid
    code = 1
    try:
        os.setpgid(0, group)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1), os.dup2(out, 2)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def frozen(arguments: list[str], world: int) -> Config:
    """The config of a run of `world` ranks, checked, and in its folder."""
    cfg = compose(arguments)
    validate(cfg, world)
    freeze(cfg, cfg.run.dir)
    return cfg


def attempt(cfg: Config, world: int, log: Path, kill: Kill | None, late: bool = False) -> tuple[bool, float]:
    """Start all ranks, with `late` one that sees checkpoints late; (whether the run came to its end, seconds). Raises
    RuntimeError if it failed unkilled."""
    port, started = _free_port(), time.monotonic()

    def work(rank: int) -> Callable[[], None]:
        def run() -> None:
            torch.set_num_threads(1)
            if kill is not None and kill.point:
                install(kill, rank)
            if late:
                see_late(rank)
            if cfg.environment.path == soak_terminal.SHELL:
                soak_terminal.tell_begun()
                soak_terminal.as_commands().start()
            if cfg.mismatch.replay_routing:
                aligner.data.dialogue.read_calls = lambda text, *_: (text, [Call("roll", {})])
            with RunLock(Path(cfg.run.dir)) if rank == 0 else nullcontext():  # of a killed process: no reason to wait
                aligner.builders.stage.run_stage(cfg, RankEnv(rank, rank, world, world, master_port=port))

        return run

    pids: list[int] = []
    for rank in range(world):
        pids.append(fork(work(rank), log, pids[0] if pids else 0))
    open_, sent, deadline, killed = list(pids), False, None, False
    while open_:
        for pid in list(open_):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                open_.remove(pid)
                killed |= os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        passed = time.monotonic() - started
        if kill is not None and not kill.point and passed >= kill.after_s and not sent:
            sent = True
            for pid in open_ if kill.rank is None else [p for p in pids[kill.rank : kill.rank + 1] if p in open_]:
                os.kill(pid, signal.SIGKILL)
        if 0 < len(open_) < len(pids) and deadline is None:
            deadline = time.monotonic() + (WAIT_S if killed else LIMIT_S / 10)
        if passed > LIMIT_S or (deadline is not None and time.monotonic() > deadline):
            if not killed:
                raise RuntimeError(f"ranks hang or failed by themselves, planned was {kill}: see {log}")
            for pid in open_:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    done = (Path(cfg.run.dir) / "DONE").exists()
    if not done and not killed and not (kill is not None and kill.child and "ended by signal 9" in log.read_text()):
        raise RuntimeError(f"the run failed by itself, planned was {kill}: see {log}")
    return done, time.monotonic() - started


def _started(reply: Callable) -> Server:
    """In a process of its own: this one forks, and shall have no threads."""
    server = Server(reply)
    atexit.register(os.kill, fork(server.server.serve_forever, Path(os.devnull)), signal.SIGKILL)
    server.server.socket.close()
    return server


class Soak:
    def __init__(self, folder: Path, seed: int, names: list[str], layouts: list[str]):
        self.folder, self.random, self.names, self.layouts = folder, random.Random(seed), names, layouts
        self.data = folder / "data"
        self.done: dict[tuple[str, str], tuple[Path, float]] = {}
        self.kills = self.resumes = self.cases = 0
        self.without = 0  # kills without which the run went on to its end
        self.late = 0  # resumes in which a rank saw the checkpoints late
        self.mismatches: list[str] = []
        self.kinds: collections.Counter = collections.Counter()
        self._run(lambda: stages.make_data(self.data))
        self.server = _started(fickle) if "outside" in names else None
        if "turns" in names:
            self._run(lambda: stages.make_dice(self.folder / "dice"))
        if TERMINAL in names:
            self._run(lambda: soak_terminal.make_data(self.folder / TERMINAL))
        if not {*names} <= {"sft", "turns", TERMINAL}:
            self._start("sft", "run.steps=20")
        if "ppo" in names:
            self._start("rm", "run.steps=10", f"model.init={folder / 'start_sft'}")

    def _run(self, work: Callable[[], object]) -> None:
        _, status = os.waitpid(fork(lambda: work() and None, self.folder / "log"), 0)
        assert status == 0, (self.folder / "log").read_text()

    def _start(self, stage: str, *more: str) -> None:
        self._run(lambda: stages.stage(stage, self.data, self.folder / f"start_{stage}", *more))

    def config(self, stage: str, layout: str, run: Path, async_save: bool = False) -> Config:
        """Everything that a checkpoint has to keep is in use."""
        world, where = LAYOUTS[layout]
        if stage == TERMINAL:
            saved = f"checkpoint.async_save={str(async_save).lower()}"
            where = [*where, *[soak_terminal.PAGES] * (layout == "pages")]
            data = self.folder / TERMINAL
            if layout == AGENT:
                where = [*LAYOUTS["lag-windows"][1], *soak_terminal.as_agent(data)]
            own = soak_terminal.overrides(data, run, *COMMON, "run.eval_every=0", *where, saved)
            return frozen(own, world)
        if stage == "turns":
            return self._turns(world, run, *where, f"checkpoint.async_save={str(async_save).lower()}")
        outside, own_teacher = stage == "outside", stage == "sdpo"
        stage = {"outside": "grpo", "sdpo": "distill"}.get(stage, stage)
        overrides = [*COMMON, *where, f"checkpoint.async_save={str(async_save).lower()}"]
        if stage != "sft" and "model.init=random" not in where:
            overrides.append(f"model.init={self.folder / 'start_sft'}")
        if stage in ("grpo", "ppo"):
            overrides += ["reward.normalize=true", "batch.epochs=2", "batch.minibatch_samples=8", "eval.prompts=4"]
            overrides += [ADAPTIVE % ("loss" if stage == "grpo" else "reward")]
        if stage == "grpo" and not outside:
            overrides += ["curriculum={skip_epochs: 1, learnability: true}", "eval.full_score=0.25"]
        if outside:
            assert self.server is not None
            overrides += [*scored_by(self.server.base_url), "run.eval_every=0", "eval.generate=false"]
        if stage == "ppo":
            overrides.append(f"reward.model={self.folder / 'start_rm'}")
            overrides += ["critic.trunk=policy"] if layout.endswith("lora") else []
        if stage == "sample":
            overrides += ["batch.prompts=6", "stage.sample.reward_above=0"]
        elif stage == "online_dpo":
            overrides += ["eval.prompts=4", "algorithm.preference.wpo=true"]
        elif stage == "dpo":
            overrides += [
                f"data.eval={self.data / 'pairs.jsonl'}",
                "eval.prompts=4",
                "algorithm.preference.nll_coef=0.1",
            ]
        elif stage == "kto":
            overrides += [f"data.eval={self.data / 'labels.jsonl'}", "eval.prompts=4"]
        if own_teacher:
            overrides += ["algorithm.distill={teacher: self, on_policy: 1}", "ema.decay=0.5", "batch.group=4"]
            overrides += ["algorithm.distill.teacher_prompt='like {right_answer}:'", "eval.prompts=4"]
            overrides.append("reward.functions=[{path: tests/assets/tiny_rewards.py:even_first}]")
        elif stage == "distill":
            overrides += [f"algorithm.distill.teacher={self.folder / 'start_sft'}", "algorithm.distill.on_policy=0.5"]
            overrides[overrides.index(f"model.init={self.folder / 'start_sft'}")] = "model.init=random"
        if stage not in ("rm", "dpo", "kto"):
            overrides.append(f"data.eval={self.data / 'eval.jsonl'}")
        return frozen(stages.overrides(stage, self.data, run, *overrides), world)

    def _turns(self, world: int, run: Path, *overrides: str) -> Config:
        """Stage grpo with an environment whose answers are others each time, and late."""
        dice = self.folder / "dice"
        ends = [f"sampling.stop=[{','.join(stages.LETTERS[:26])}]"] if "model.init=random" in overrides else []
        overrides = (*COMMON, *stages.DICE, f"model.init={dice / 'sft'}", "run.eval_every=0", *overrides, *ends)
        return frozen(stages.overrides("grpo", dice, run, *overrides), world)

    def _reread(self, stage: str, layout: str, run: Path) -> Path:
        """An uninterrupted run that is given the answers which this one was given."""
        again = run.with_name(f"{run.name}-again")
        cfg = self.config(stage, layout, again)
        for folder in (ANSWERS, DROPPED):
            if (run / folder).exists():
                shutil.copytree(run / folder, again / ANSWERS, dirs_exist_ok=True)
        if not attempt(cfg, LAYOUTS[layout][0], self.folder / "log", None)[0]:
            raise RuntimeError(f"the run with the answers of {run} failed:\n{self.tail(self.folder / 'log')}")
        return again

    def reference(self, stage: str, layout: str) -> tuple[Path, float]:
        """The uninterrupted run, made once, and its seconds."""
        if (stage, layout) not in self.done:
            run = self.folder / f"whole-{stage}-{layout}"
            ended, seconds = attempt(self.config(stage, layout, run), LAYOUTS[layout][0], self.folder / "log", None)
            if not ended:
                raise RuntimeError(f"the uninterrupted {stage} on {layout} failed:\n{self.tail(self.folder / 'log')}")
            self.done[stage, layout] = run, seconds
        return self.done[stage, layout]

    def draw(self, stage: str, layout: str, seconds: float) -> Kill:
        rank = self.random.choice([None, *range(LAYOUTS[layout][0])])
        if layout == VLLM and self.random.random() < 0.4:
            return Kill(0, 0.0, CHILD, self.random.randint(1, 40), self.random.random() < 0.5, child=True)
        if stage == TERMINAL and self.random.random() < 0.5:
            engine = LAYOUTS[layout][0] - 1
            child, call = self.random.random() < 0.3, self.random.randint(1, 30)
            return Kill(engine if child else self.random.choice([None, engine]), 0.0, CALL, call, True, child)
        if self.random.random() < 0.5:
            return Kill(rank, after_s=self.random.uniform(0.05, seconds))
        if layout in ASYNC and self.random.random() < 0.4:
            (world, where), point = LAYOUTS[layout], self.random.choice(list(ENGINES))
            first = world - (2 if "engine.ranks=2" in where else 1)
            last = 80 if point == "a step of decoding" else 6
            engine, before = self.random.randrange(first, world), self.random.random() < 0.5
            return Kill(engine, 0.0, point, self.random.randint(1, last), before)
        online = stage in ("online_dpo", "sample", "grpo", "ppo", *ASKING)
        rollout_points = (
            "a refit",
            "a bucket of a refit",
            "generation",
            "scoring",
            "a stored rollout",
        )
        points = [p for p in POINTS if online or p not in rollout_points]
        points = [p for p in points if p not in ENGINES and p != CALL and (p != CHILD or layout == VLLM)]
        points = [p for p in points if stage not in ("rm", "sample") or p != "an evaluation"]
        points = [p for p in points if (p == "an answer from outside") <= (stage in ASKING)]
        points = [p for p in points if stage not in ASKING or p != "an evaluation"]
        points = [p for p in points if stage not in ("turns", TERMINAL) or p != "generation"]
        points = [p for p in points if stage == "sample" or p not in ("samples in their file", "files of samples")]
        return Kill(
            None if rank == 1 else rank,
            0.0,
            self.random.choice(points),
            self.random.randint(1, 6),
            self.random.random() < 0.5,
        )

    def case(self, left: int) -> None:
        """One run, killed up to four times, then brought to its end and compared."""
        stage = self.random.choice(self.names)
        layout = self._layout(stage)
        async_save = self.random.random() < 0.5
        whole, seconds = self.reference(stage, layout)
        self.cases += 1
        run, log, world = self.folder / f"case-{self.cases:03d}", self.folder / "log", LAYOUTS[layout][0]
        log.unlink(missing_ok=True)
        cfg, messages, ended, tries = self.config(stage, layout, run, async_save), [], False, 0
        for _ in range(min(left, self.random.randint(1, 4))):
            kill = self.draw(stage, layout, seconds)
            tries += 1
            before = went_on(log)
            ended, _ = attempt(cfg, world, log, kill)
            without = went_on(log) > before
            if ended and not without:  # before its time, or the point was not reached
                break
            self.kills += 1
            self.without += ended
            self.kinds[kill.point or "a random time"] += 1
            messages.append(f"{kill}{' (it went on)' * ended}")
            if ended:
                break
        if not ended:
            tries += 1
            late = world > 1 and self.random.random() < 0.5
            self.late += late
            ended, _ = attempt(cfg, world, log, None, late)
        self.resumes += tries - 1
        if ended and stage in ASKING:
            whole = self._reread(stage, layout, run)
        wrong = differences(run, whole) if ended else [f"it did not end:\n{self.tail(log)}"]
        saved = " async_save" if async_save else ""
        print(f"{stage}, {layout}{saved}: killed {'; '.join(messages) or 'never'}: {wrong or 'ok'}", flush=True)
        if wrong:
            self.mismatches.append(f"{run}: {wrong}")
        else:
            shutil.rmtree(run)
            shutil.rmtree(run.with_name(f"{run.name}-again"), ignore_errors=True)

    def _layout(self, stage: str) -> str:
        special = (VLLM,) if stage in ("turns", TERMINAL) else ("lag", "pages", VLLM)
        able = [name for name in self.layouts if stage in ("grpo", "ppo") or not name.startswith(special)]
        able = [name for name in able if stage in ("turns", TERMINAL) or name != AGENT]
        weights = [2 if LAYOUTS[name][0] == 1 else 1 for name in able]  # several ranks take longer
        return self.random.choices(able, weights)[0]

    @staticmethod
    def tail(log: Path) -> str:
        return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


def differences(run: Path, whole: Path) -> list[str]:
    """What differs: exported weights, files of samples, the last checkpoint's weights, optimizers and small states,
    metrics, the hashes of each step."""
    results = [name for name, digest in hashes(whole).items() if hashes(run).get(name) != digest]
    states = [json.loads((d / f"checkpoints/step-{TOTAL:08d}/state.json").read_text())["state"] for d in (run, whole)]
    results += [f"state of {name}" for name in states[1] if states[0].get(name) != states[1][name]]
    reported = next(bisect(whole, run))
    results += [] if reported == f"the same: steps 1 to {TOTAL}" else [reported]
    return results + [f"metric {text}" for text in stages.differences(run, whole)]


def went_on(log: Path) -> int:
    """Return how many kills a run has survived."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return sum(map(text.count, GOES_ON))


def hashes(run: Path) -> dict[str, str]:
    files = [*(run / "hf").glob("*.safetensors"), *(run / "sampled").glob("*.jsonl")]
    files += (run / f"checkpoints/step-{TOTAL:08d}").glob("*/*.distcp")
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def set_aside(log: AnswerLog, first: int) -> None:
    """In place of the deletion of logs of rollouts before the `first`."""
    aside = log.folder.with_name(DROPPED)
    aside.mkdir(exist_ok=True)
    for path in log.folder.glob("step-*.jsonl") if log.rank == 0 else ():
        if int(path.name[5:13]) < first:
            path.rename(aside / path.name)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kill, resume, compare.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stages")
    parser.add_argument("--layouts")
    parser.add_argument("--async", dest="ahead", action="store_true", help="all of engines on ranks of their own")
    parser.add_argument("--folder", help="where the runs go; a temporary folder unless given, where failed ones stay")
    args = parser.parse_args(argv)
    folder = Path(args.folder or tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    names = args.stages.split(",") if args.stages else ["grpo", "ppo", "turns"] if args.ahead else list(STAGES)
    layouts = [name for name in (ASYNC if args.ahead else LAYOUTS) if name not in (VLLM, DEEP)]
    soak = Soak(folder, args.seed, names, args.layouts.split(",") if args.layouts else layouts)
    with patch.object(AnswerLog, "drop", set_aside):
        while soak.kills < args.kills:
            soak.case(args.kills - soak.kills)
    kinds = ", ".join(f"{kind} {count}" for kind, count in soak.kinds.most_common())
    print(f"at {kinds}")
    print(
        f"{soak.kills} kills, {soak.resumes} resumes ({soak.late} with a late view), {len(soak.mismatches)} mismatches "
        f"({soak.cases} runs, of which {soak.without} went on after a kill, {time.monotonic() - started:.0f} s, "
        f"seed {args.seed})"
    )
    if not soak.mismatches:
        shutil.rmtree(folder)
    return 1 if soak.mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
