"""Tasks as folders in Harbor's shape: task.toml, instruction.md, environment/ and tests/test.sh.

No Dockerfile is built here. One that only names a folder and copies files is followed. A task that needs more brings
its built image: environment/image (a folder or OCI layout) or environment/image.tar.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MOST_BYTES = 64 << 20  # of a task's files, which are copied into each sandbox
IGNORED = ("FROM", "ENV", "ARG", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "SHELL", "USER", "MAINTAINER", "STOPSIGNAL")
IMAGES = ("image", "image.tar", "image.tar.gz", "image.sif", "image.sqsh")


@dataclass(frozen=True)
class TaskFolder:
    """A task: what the agent reads and is given, and how its work is tested. "" and 0: as the environment has it."""

    instruction: str = ""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    tests: Mapping[str, str | bytes] = field(default_factory=dict)
    image: str = ""
    folder: str = ""
    test_s: float = 0.0
    environ: Mapping[str, str] = field(default_factory=dict)  # of the tests


def read_task(path: str) -> TaskFolder:
    """Read a task. Raises ValueError, FileNotFoundError."""
    root = Path(path)
    with (root / "task.toml").open("rb") as file:
        settings = tomllib.load(file)
    verifier = settings.get("verifier", {})
    image, folder, files = read_environment(root / "environment")
    tests = _files(root / "tests")
    if "test.sh" not in tests:
        raise ValueError(f"{root}/tests: expected test.sh")
    instruction = (root / "instruction.md").read_text(encoding="utf-8").strip()
    environ = {str(name): str(value) for name, value in verifier.get("env", {}).items()}
    return TaskFolder(instruction, files, tests, image, folder, float(verifier.get("timeout_sec", 0)), environ)


def read_environment(context: Path, image: str = "") -> tuple[str, str, dict[str, bytes]]:
    """Return the image, the working directory and the files of a task's environment. Raises ValueError."""
    image = image or next((str(context / name) for name in IMAGES if (context / name).exists()), "")
    return image, *(_build(context, image) if context.is_dir() else ("", {}))


def _build(context: Path, image: str) -> tuple[str, dict[str, bytes]]:
    """Return the working directory and the files of an environment: with an image, they are in it."""
    dockerfile = context / "Dockerfile"
    if not dockerfile.exists():
        return "", {} if image else _files(context)
    folder, files = "", {}
    for line in dockerfile.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "WORKDIR":
            folder = os.path.normpath(os.path.join(folder or "/", rest.strip()))
        elif image or not word or word.startswith("#") or word.upper() in IGNORED:
            continue
        elif word.upper() in ("COPY", "ADD") and not rest.strip().startswith(("--", "[", "http")):
            files |= _copied(context, shlex.split(rest), folder)
        else:
            expected = f"WORKDIR and COPY of files alone, or the built image as {context}/image.tar"
            raise ValueError(f"{dockerfile}: {line.strip()[:80]!r}: expected {expected}")
    return folder, files


def _copied(context: Path, words: list[str], folder: str) -> dict[str, bytes]:
    *sources, target = words
    into = os.path.normpath(os.path.join(folder or "/", target))
    results: dict[str, bytes] = {}
    for source in sources:
        path = context / source
        if path.is_dir():
            results |= {os.path.join(into, name): data for name, data in _files(path).items()}
        else:
            named = target.endswith(("/", ".")) or len(sources) > 1
            results[os.path.join(into, path.name) if named else into] = path.read_bytes()
    return results


def _files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    if (size := sum(path.stat().st_size for path in paths)) > MOST_BYTES:
        raise ValueError(
            f"{folder}: expected at most {MOST_BYTES} bytes of files, found {size}: put them into an image"
        )
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
