"""What a newcomer's installation needs."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from aligner.version import VERSION

ROOT = Path(__file__).parents[1]
BUILD = "import setuptools.build_meta as b; b.build_{kind}({folder!r})"
PIP = ("-m", "pip", "--disable-pip-version-check")


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
    assert {"torch", "hydra-core", "tensorboard"} <= set(packages)
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


def call(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command and return its stdout; PYTHONPATH is not handed on."""
    path = f"{sysconfig.get_path('scripts')}:/usr/bin:/bin"
    environment = {"PATH": path, "HOME": str(cwd), **variables}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The scripts of an environment with a wheel that was made of the sdist. Other packages are those of the tests."""
    folder = tmp_path_factory.mktemp("packaging")
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/", "docs/")):
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "tree" / name)
    call(sys.executable, "-c", BUILD.format(kind="sdist", folder=str(folder)), cwd=folder / "tree")
    (source,) = folder.glob("aligner-*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (tree,) = (folder / "unpacked").iterdir()
    call(sys.executable, "-c", BUILD.format(kind="wheel", folder=str(folder)), cwd=tree)
    (wheel,) = folder.glob("aligner-*.whl")
    venv.create(folder / "venv")
    python = folder / "venv/bin/python"
    call(sys.executable, *PIP, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    (packages / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv/bin"


@pytest.mark.slow
def test_an_installation_from_sdist_and_wheel_runs_in_any_folder(installed, tmp_path):
    where = call(installed / "python", "-c", "import aligner; print(aligner.__file__)", cwd=tmp_path)
    assert where.startswith(str(installed.parent))
    assert call(installed / "aligner", "--version", cwd=tmp_path) == f"aligner {VERSION}\n"
    assert "optim.lr " in call(installed / "aligner", "keys", "optim", cwd=tmp_path)
    plan = call(installed / "aligner", "plan", "--gpus", "8", "experiment=dapo", "model=qwen3_0.6b", cwd=tmp_path)
    assert "tokens/s/GPU" in plan
    assert list((installed.parent / "share/aligner").glob("examples/*.py"))


def test_the_version_needs_no_torch():
    code = "import sys; from aligner.__main__ import parser; parser(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "False\n"


def test_the_changelog_names_the_version():
    assert re.search(rf"^## \[?{re.escape(VERSION)}", (ROOT / "CHANGELOG.md").read_text(), re.M)
