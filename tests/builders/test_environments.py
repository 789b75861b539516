"""What environments may take of a node, before a run makes any."""

from __future__ import annotations

import pytest

from aligner.builders import environments
from aligner.builders.environments import find_tools
from aligner.cluster import node_memory
from aligner.cluster.env import RankEnv
from aligner.config.resolve import compose
from aligner.sandbox.terminal import lacks

LINE = ["stage=grpo", "model=tiny", "batch.prompts=6", "batch.group=4"]
SHELL = "environment.path=aligner.environments.terminal:Terminal"


@pytest.mark.parametrize(
    ("keys", "rank", "ranks", "local", "wanted"),
    [
        ([], 0, 1, 1, 24),
        ([], 2, 4, 2, 16),  # a rank has two groups of six at most
        (["engine.lag=2", "engine.ranks=1"], 2, 3, 1, 24),  # one order at a time
        (["engine.lag=2", "engine.ranks=1", "engine.window=3"], 2, 3, 1, 72),
        (["engine.lag=2", "engine.ranks=1", "engine.window=3"], 0, 3, 2, 0),
        (["engine.lag=1", "engine.ranks=2", "engine.window=3"], 2, 4, 4, 48),
        (["data.eval=e.jsonl", "eval.prompts=40", "eval.samples=2", "eval.temperature=1"], 0, 2, 1, 40),
    ],
)
def test_windows_hold_more_environments_than_orders(keys, rank, ranks, local, wanted):
    first = rank - rank % local
    env = RankEnv(rank, rank - first, ranks, local)
    assert environments._most_open(compose([*LINE, *keys]), env) == wanted


@pytest.mark.skipif(bool(why := lacks()), reason=str(why))
def test_a_node_that_terminals_may_fill_is_named_once(monkeypatch, tmp_path, capfd):
    (tmp_path / "cgroup").write_text("0::/system.slice/slurmstepd.scope/job_7\n")
    (tmp_path / "memory.max").write_text(f"{3000 << 20}\n")
    monkeypatch.setattr(node_memory, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(node_memory, "ROOT", tmp_path)
    monkeypatch.setattr(environments, "schemas", lambda tools: [])
    monkeypatch.setattr(environments, "_dialogue", lambda *whatever: None)
    cfg = compose([*LINE, SHELL, "environment.args={memory_mb: 100, disk_mb: 25}"])  # 24 x 125 = 3000
    find_tools(cfg, RankEnv(), None)
    assert capfd.readouterr().err == ""
    cfg.environment.args["memory_mb"] = 101
    find_tools(cfg, RankEnv(1, 1, 2, 2), None)
    assert capfd.readouterr().err == ""
    find_tools(cfg, RankEnv(), None)
    text = capfd.readouterr().err
    assert text.count("\n") == 1 and "3000 MiB" in text and "24 x 126 = 3024 MiB" in text and "memory_mb" in text
