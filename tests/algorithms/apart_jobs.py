"""What the ranks run for test_apart.py."""

from __future__ import annotations

import torch.distributed as dist

from aligner.engines import bridge
from aligner.engines.native.engine import NativeEngine
from aligner.errors import AlignerError, EngineError
from tests.run import jobs


class Breaking:
    """In this world's last rank the engine fails in its `at`-th call of generate."""

    def __init__(self, at: int, error: Exception):
        self.calls, self.at, self.error = 0, at, error
        self.mine, self.generate = dist.get_rank() == dist.get_world_size() - 1, NativeEngine._generated

    def __enter__(self) -> None:
        breaking, generate = self, self.generate

        def counted(engine, *args, **kwargs):
            breaking.calls += 1
            if breaking.mine and breaking.calls == breaking.at:
                raise breaking.error
            return generate(engine, *args, **kwargs)

        NativeEngine._generated = counted

    def __exit__(self, *_: object) -> None:
        NativeEngine._generated = self.generate


def cut_in_update(arguments: list[str], step: int) -> bool:
    """The power goes off where there is a trainer; engines leave."""
    bridge.LAST_WORDS_S = 0.1
    return jobs.cut_in_update(arguments, step)


def refuses(arguments: list[str], at: int) -> str:
    """The last rank's engine raises what an engine may raise; how the stage ends here."""
    bridge.LAST_WORDS_S = 0.1
    with Breaking(at, EngineError("no answer from the device")):
        try:
            return str(jobs.run_stage(arguments))
        except AlignerError as error:
            return f"{type(error).__name__}: {error}"
