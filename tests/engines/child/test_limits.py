"""How long ranks wait for another rank's child."""

import pytest

from aligner.builders import job
from aligner.cluster.env import RankEnv
from aligner.config.resolve import compose

TRTLLM = ["engine=trtllm", "engine.trtllm.python=python3"]


class Asked(Exception):
    pass


@pytest.mark.parametrize(
    ("overrides", "least"),
    [
        (["engine=native"], 3900),
        (TRTLLM, 3900),
        ([*TRTLLM, "engine.trtllm.start_timeout_s=9000"], 9001),
        ([*TRTLLM, "cluster.timeout_s=9000"], 9000),
    ],
)
def test_ranks_wait_in_a_collective_for_as_long_as_a_child_may_take(overrides, least, monkeypatch):
    def joined(env, backend, timeout_s, secret):
        raise Asked(timeout_s)

    monkeypatch.setattr(job, "init_distributed", joined)
    with pytest.raises(Asked) as asked:
        job.start(compose(["stage=grpo", "model=tiny", *overrides]), RankEnv(0, 0, 2, 2))
    assert least <= asked.value.args[0] <= least + 99
