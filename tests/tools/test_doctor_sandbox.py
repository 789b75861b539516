"""Attacks on the sandboxes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from aligner.__main__ import main
from aligner.errors import ConfigError
from aligner.sandbox.run import TIERS, Sandbox
from aligner.sandbox.terminal import lacks
from aligner.tools.doctor_sandbox import ATTACKS, attack
from aligner.tools.terminal_attacks import ATTACKS as ON_TERMINALS
from aligner.tools.terminal_attacks import attack_terminal, program

# that succeed in namespaces alone, for any user: the others need rights, devices or a network there
SEEN = """see the job's files; look into the first process; write to the kernel's settings; escape the watch for memory
make namespaces by unshare; make a namespace by clone; make a namespace by clone3; enter a namespace; mount
mount by the new calls; change the root; open a file by its handle; climb out by links and ..; open devices; trace
read another process; take descriptors of another process; signal outside; keys of the kernel; memory without a name
shared memory and queues of System V; name the host; gain capabilities by a file; raise its limits; take precedence
open ever more files; sockets of packets and rare protocols; make a network by netlink; write a map of users"""
needs_terminals = pytest.mark.skipif(bool(why := lacks()), reason=str(why))


@needs_terminals
def test_a_terminal_contains_all_attacks():
    assert len(ON_TERMINALS) > 50
    assert attack_terminal() == {name: [] for name in ON_TERMINALS}


@needs_terminals
def test_attacks_on_a_terminal_are_seen_where_there_is_none(tmp_path):
    """No attack harms a machine that does not contain it. Yet this one's names and network are left out."""
    (tmp_path / "secret").touch()
    host = {"home": str(tmp_path), "port": 1, "name": "x", "pids": [os.getpid()], "folders": []}
    apart = ["unshare", "--user", "--map-root-user", "--net", "--uts", "--ipc", "--mount"]
    command = [*apart, sys.executable, "-c", program(host)]
    could = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout)
    assert {name.strip() for line in SEEN.splitlines() for name in line.split(";")} <= {
        name for name, lines in could.items() if lines and "broken" not in lines[0]
    }


@pytest.mark.parametrize("what", [name for name in ATTACKS if "file" not in name and "orphan" not in name])
def test_an_attack_is_seen_where_there_is_no_sandbox(what):
    """Limits alone, which hold files and nothing else."""
    assert attack(Sandbox("unsafe", cpu_s=1), ATTACKS[what])


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_each_tier_contains_all_attacks(tier):
    try:
        sandbox = Sandbox(tier, cpu_s=1)
    except ConfigError as error:
        pytest.skip(str(error))
    assert {what: attack(sandbox, text) for what, text in ATTACKS.items()} == {what: [] for what in ATTACKS}


@pytest.mark.slow
def test_the_command_tells_of_each_tier(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    code = main(["doctor", "sandbox"])
    shown = capsys.readouterr().out
    assert "package `bubblewrap`" in shown.replace("\n", " ") or "bwrap" in shown
    assert (code == 0) == ("is what `auto` takes" in shown) and "not contained" not in shown
