"""Trials of Harbor in a terminal: its own agents and verifier, their files, and a server that outlives a command."""

import asyncio
import hashlib
import sys

import pytest

from aligner.errors import MissingExtraError
from aligner.sandbox.terminal import lacks
from tests.environments.test_terminal import write_files

TASK = {
    "task.toml": 'version = "1.0"\n[environment]\nmemory_mb = 512\nnetwork_mode = "no-network"\nenv = {ADDED = "4"}\n',
    "instruction.md": "Write seven.\n",
    "environment/Dockerfile": "FROM debian\nWORKDIR /srv/it\nCOPY start.txt .\n",
    "environment/start.txt": "3\n",
    "solution/solve.sh": "#!/bin/bash\n"
    "(while :; do date +%N > /tmp/beat; sleep 0.01; done) > /dev/null 2>&1 &\n"
    "head -c 9000000 /dev/urandom > /logs/agent/noise\n"
    "mkdir '/logs/agent/a b'; ln -s /etc/passwd '/logs/agent/a b/out'\n"
    "echo $(($(cat start.txt) + ADDED)) > n\n",
    "tests/test.sh": "#!/bin/bash\n"
    "sha256sum < /logs/agent/noise > /logs/verifier/sum\n"
    "before=$(cat /tmp/beat); sleep 1; [[ $(cat /tmp/beat) != $before && $(cat n) == 7 ]]\n"
    "echo $((1 - $?)) > /logs/verifier/reward.txt\n",
}


@pytest.mark.skipif(bool(why := lacks()), reason=str(why))
def test_its_trials_run_without_docker(tmp_path):
    pytest.importorskip("harbor")
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
    from harbor.trial.trial import Trial

    write_files(tmp_path / "task", TASK)
    environment = EnvironmentConfig(import_path="aligner.environments.harbor:HarborTerminal", kwargs={"processes": 99})

    async def played(agent):
        task, named = TaskConfig(path=tmp_path / "task"), AgentConfig(name=agent)
        config = TrialConfig(
            task=task, agent=named, environment=environment, trials_dir=tmp_path / "trials", trial_name=agent
        )
        return await (await Trial.create(config)).run()

    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        result = asyncio.run(played(agent))
        assert result.exception_info is None, result.exception_info
        assert result.verifier_result.rewards == {"reward": reward}
    folder = tmp_path / "trials" / "oracle"
    noise = (folder / "agent" / "noise").read_bytes()
    assert len(noise) == 9_000_000
    assert (folder / "verifier" / "sum").read_text().split()[0] == hashlib.sha256(noise).hexdigest()
    assert not (folder / "agent" / "a b" / "out").exists()  # a link out of the sandbox is not followed here


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "harbor.environments.base", None)
    monkeypatch.delitem(sys.modules, "aligner.environments.harbor", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'aligner\[harbor\]'"):
        import aligner.environments.harbor  # noqa: F401
