"""The shakedown in a Slurm job of several nodes."""

import json
import re
import sys

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
PROGRAM = """import sys
from aligner.__main__ import main
from aligner.shakedown import rungs
rungs.LAYOUTS = {"tensor": rungs.LAYOUTS["tensor"]}
sys.exit(main(["shakedown", "--cpu", sys.argv[1], "--only", "nodes"]))
"""


def test_layouts_and_a_sum_span_two_nodes(cluster, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    script = f"#!/bin/sh\nexec {sys.executable} {tmp_path}/program.py {tmp_path}/out\n"
    (tmp_path / "job.sh").write_text(script)
    log = tmp_path / "job.log"
    job = cluster.run(
        "sbatch", "--parsable", "-N2", "-n2", f"--output={log}", tmp_path / "job.sh", cwd=tmp_path
    ).strip()
    assert cluster.ended(job) == "COMPLETED", log.read_text()
    assert "1 rungs on 2 nodes with the CPU" in log.read_text()
    measured = json.loads((tmp_path / "out/rungs/nodes.json").read_text())["measured"]
    assert measured["layouts"] == ["tensor"]
    ranks = [re.fullmatch(r"(node\d) rank (\d) \(CPU\)", card).groups() for card in measured["all-reduce, GB/s"]]
    # any two nodes: an earlier test's job may still hold the first
    assert {rank for _, rank in ranks} == {"0", "1"} and len({node for node, _ in ranks}) == 2
