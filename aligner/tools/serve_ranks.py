"""`aligner serve` on the ranks of a job: one address on rank 0, and the engines of all ranks behind it.

srun --ntasks=16 python -m aligner serve runs/grpo --host 0.0.0.0
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aligner.cluster.env import RankEnv
from aligner.cluster.signals import StopSignals
from aligner.cluster.threads import use
from aligner.config.schema import Config
from aligner.engines.native.fleet import FleetEngine
from aligner.environments.endpoint import listening, make_app
from aligner.errors import ConfigError
from aligner.megatron.groups import init_distributed, leave_distributed, neighbours
from aligner.rollout.rounds import EngineRounds
from aligner.tools.generate import Answerer, model_folder
from aligner.tools.serve import announced, opened, read_key, served_model

if TYPE_CHECKING:
    from socket import socket as Socket


def main(cfg: Config, env: RankEnv, host: str, port: int) -> int:
    """Serve until a request to stop. Raises ConfigError, EngineError on every rank."""
    if env.world_size % cfg.engine.tensor_parallel:
        expected = f"a divisor of the {env.world_size} ranks that serve"
        raise ConfigError("engine.tensor_parallel", cfg.engine.tensor_parallel, expected)
    folder, key = model_folder(cfg), read_key()
    listener = opened(host, port) if env.rank == 0 else None
    use(cfg.cluster.threads, env.local_world_size)
    init_distributed(env, cfg.cluster.backend, cfg.cluster.timeout_s, Path(cfg.run.dir))
    try:
        group = neighbours(cfg.engine.tensor_parallel)
        model = Answerer.load(folder, cfg.engine, cfg.model.dtype, kind=FleetEngine, group=group)
        serve_together(cfg, model, key, listener)
    finally:
        leave_distributed()
    return 0


def serve_together(cfg: Config, model: Answerer, key: str, listener: Socket | None) -> None:
    """Serve at `listener`, which rank 0 has, by the engines of all ranks. Collective over the world."""
    rounds = EngineRounds(model.engine, model.tokenizer.pad_token_id)
    with StopSignals(last=True) as signals:
        if listener is None:
            rounds.serve(lambda: False)
            return
        served = served_model(cfg, model, rounds, key)
        app = make_app(served, continue_text=served.continue_text, by_key=True)
        with listening(app, listener), announced(cfg, served, listener):
            rounds.serve(lambda: bool(signals.received))
