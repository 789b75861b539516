"""What a run imports: nothing that its configuration does not ask for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from aligner.config.engines import ENGINES
from aligner.config.freeze import load_frozen
from aligner.config.on_demand import ON_DEMAND, demanded
from tests import stages

# a run's process, which at its end writes down what it has imported
PROGRAM = """
import json, sys
from pathlib import Path
from aligner.__main__ import main
code = main(sys.argv[2:])
Path(sys.argv[1]).write_text(json.dumps([name for name in sys.modules if name.startswith("aligner.")]))
sys.exit(code)
"""
UNUSED = ("environments", "sandbox", "rewards.client", "rollout.trajectory_generator", "rollout.record")
UNUSED += ("engines.child", "plan", "rehearse", "tools", "board.compose", "board.chat", "board.server")
USED = ("plan.options", "rehearse.options", "tools.report")  # arguments, and the page of a run
USED += tuple(f"tools.{command}_options" for command in ("check", "recipe", "replay", "show", "translate"))
SIZED = ["batch.logprob_tokens=512"]  # `auto` would ask `plan`
CASES = {
    "sft": (SIZED, ("engines.native", "engines.vllm", "engines.trtllm", "refit.transfer", "rewards", "algorithms")),
    "grpo": ([*SIZED, "engine.kv_cache_bytes=1000000"], ()),
}


def within(name: str, rooms: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"aligner.{room}.") for room in rooms)


@pytest.mark.slow
@pytest.mark.parametrize("stage", CASES)
def test_a_run_imports_what_its_configuration_asks_for(stage, tiny_data, tmp_path):
    run_dir, noted, (overrides, unused) = tmp_path / "run", tmp_path / "modules.json", CASES[stage]
    arguments = ["run", *stages.overrides(stage, tiny_data, run_dir, "run.steps=1", *overrides)]
    subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM, noted, *arguments], check=True)
    loaded = set(json.loads(noted.read_text()))
    assert f"aligner.stages.{stage}" in loaded
    wrong = {name for name in loaded if within(name, UNUSED + unused) and name.count(".") > 1}
    assert not sorted(name for name in wrong if not within(name, USED))
    extensions = {path for path, _ in ON_DEMAND.values()} | {one.made_by for one in ENGINES.values()}
    unasked = {path.partition(":")[0] for path in extensions} - set(demanded(load_frozen(run_dir / "config.yaml")))
    assert sorted(loaded & unasked) == (["aligner.builders.engines"] if stage == "grpo" else [])  # a part of that stage
