"""What a newcomer's installation needs."""

from __future__ import annotations

import ast
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def needed(name: str, extras: frozenset[str] = frozenset()) -> dict[str, Distribution]:
    """All distributions that `name` needs on this machine, by normalised name."""
    closure: dict[str, Distribution] = {}
    ahead = [(name, extras)]
    while ahead:
        current, wanted = ahead.pop()
        for text in requires(current) or ():
            requirement = Requirement(text)
            environments = [{"extra": extra} for extra in wanted] or [{"extra": ""}]
            key = re.sub(r"[-_.]+", "-", requirement.name).lower()
            marker = requirement.marker
            if (marker and not any(marker.evaluate(each) for each in environments)) or key in closure:
                continue
            closure[key] = distribution(requirement.name)
            ahead.append((requirement.name, frozenset(requirement.extras)))
    return closure


def built_here(package: Distribution) -> bool:
    """Whether a compiler made it on this machine: an index takes no wheel with the plain `linux` tag."""
    tags = re.findall(r"^Tag: .*-(\S+)$", package.read_text("WHEEL") or "", re.MULTILINE)
    return any(tag.startswith("linux_") for tag in tags)


@pytest.mark.parametrize("extras", [(), ("dev",)])
def test_an_installation_needs_no_compiler(extras):
    packages = needed("aligner", frozenset(extras))
    assert {"torch", "hydra-core", "wandb"} <= set(packages)
    assert not [name for name, package in packages.items() if built_here(package)]


def test_a_package_that_was_compiled_here_is_recognised():
    try:
        package = distribution("pycosat")
    except PackageNotFoundError:
        pytest.skip("reasoning-gym, which needs a compiler, is not installed")
    assert built_here(package)


def test_extras_have_the_names_that_every_pip_finds():
    """Metadata have `a-b` for an extra `a_b`; pip before 23.3 does not find it, warns and goes on without."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    table = next(n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "EXTRAS")
    names = [key.value for key in table.keys]
    assert "dev" in names and names == [canonicalize_name(name) for name in names]
