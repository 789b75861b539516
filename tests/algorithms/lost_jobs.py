"""What the ranks run for test_lost.py."""

from __future__ import annotations

import io
import os
import signal
from contextlib import redirect_stdout
from itertools import count
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from aligner.config.resolve import compose
from aligner.engines import bridge
from aligner.engines.native.engine import NativeEngine
from aligner.engines.order_barrier import OrderBarrier
from aligner.errors import AlignerError
from tests.run import jobs


def lose(arguments: list[str], rank: int, step: int, how: int = signal.SIGKILL) -> str:
    """`run_stage`, in which a signal comes to the process of this rank, which has an engine, in its `step`-th step of
    decoding: what this rank prints and raises. Until then it is heard, and all others are, however late they are."""
    bridge.LAST_WORDS_S = 0.1
    calls, decode, out, me = [0], NativeEngine.step, io.StringIO(), dist.get_rank()
    last_beat, numbers, gone = OrderBarrier._last_beat, count(), Path(compose(arguments).run.dir).with_name("gone")

    def counted(engine: NativeEngine, *args, **kwargs):
        calls[0] += me == rank
        if calls[0] == step:
            gone.touch()
            os.kill(os.getpid(), how)
        return decode(engine, *args, **kwargs)

    def loud(barrier: OrderBarrier, other: int) -> tuple[str, str, str]:
        host, beat, why = last_beat(barrier, other)
        return host, beat if other == rank and gone.exists() else str(next(numbers)), why

    with (
        patch.object(NativeEngine, "step", counted),
        patch.object(OrderBarrier, "_last_beat", loud),
        redirect_stdout(out),
    ):
        try:
            jobs.run_stage(arguments)
        except AlignerError as error:
            return f"{out.getvalue()}{type(error).__name__}: {error}"
    return out.getvalue()
