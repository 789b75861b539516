"""Attacks on the sandboxes of this machine."""

from __future__ import annotations

import pytest

from aligner.__main__ import main
from aligner.errors import ConfigError
from aligner.sandbox.run import TIERS, Sandbox
from aligner.tools.doctor_sandbox import ATTACKS, attack


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
