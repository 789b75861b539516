"""The example's tasks: the commands that its model learns solve them, and nothing else does."""

import random

import pytest

from aligner.config.sections.environment import EnvironmentConfig
from aligner.environments.tools import load_tools, schemas
from aligner.sandbox.terminal import lacks
from examples.terminal_tasks import COMMANDS, Shell, task

pytestmark = pytest.mark.skipif(bool(why := lacks()), reason=str(why))


@pytest.mark.parametrize("kind", COMMANDS)
def test_its_command_solves_a_task_and_nothing_else_does(kind):
    row = task(kind, 123, random.Random(0))
    for command, reward in (("true", 0.0), (COMMANDS[kind].format(n=124), 0.0), (COMMANDS[kind].format(n=123), 1.0)):
        made = Shell()
        made.reset(1, files=row["files"], tests=row["tests"])
        made.bash(command)
        assert made.get_reward() == reward, command


def test_it_offers_the_shell_alone():
    tools = load_tools(EnvironmentConfig(path="examples/terminal_tasks.py:Shell"))
    assert [one["function"]["name"] for one in schemas(tools)] == ["bash"]
