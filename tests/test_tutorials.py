"""The tutorials, executed as a reader would execute them.

The ```bash blocks of a page are one script, run with `set -e` in a fresh clone (`clone` below). A ```text block is the
output of the bash block before it: its lines appear there in this order. `...` in a line stands for any text, and one
blank for several. tests/examples/test_quickstart.py executes the first tutorial.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from tests.needs import lacking
from tests.slurm.conftest import NODES, PACKAGES, free_ports

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/tutorials"
BLOCK = re.compile(r"^```(bash|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARK = "=== end of block "
CODE = ("aligner", "conf", "examples", "launchers", "slurm", "setup.py", "pyproject.toml", "constraints.txt")


def blocks(page: Path) -> list[tuple[str, list[str]]]:
    """Return the commands of each bash block with the lines of output that the page shows for it."""
    pairs: list[tuple[str, list[str]]] = []
    for language, text in BLOCK.findall(page.read_text()):
        if language == "bash":
            pairs.append((text, []))
        else:
            pairs[-1][1].extend(line.strip() for line in text.splitlines() if line.strip() not in ("", "..."))
    return pairs


def script(pairs: list[tuple[str, list[str]]]) -> str:
    return "set -eo pipefail\n" + "".join(f"{text}echo '{MARK}{i}'\n" for i, (text, _) in enumerate(pairs))


def missing(expected: list[str], output: str) -> list[str]:
    """Return the expected lines that do not appear in `output` in their order, white space at the ends ignored."""
    lines, absent = iter([line.strip() for line in re.split(r"[\r\n]", output)]), []
    for line in expected:
        words = [r"\s+".join(re.escape(word) for word in re.split(r"\s+", text)) for text in line.split("...")]
        pattern = re.compile(".*".join(words))
        rest = list(lines)
        at = next((i for i, shown in enumerate(rest) if pattern.fullmatch(shown)), None)
        if at is None:
            absent.append(line)
        lines = iter(rest if at is None else rest[at + 1 :])
    return absent


def clone(folder: Path) -> Path:
    """Make a folder that looks like a clone whose `.venv` is installed."""
    for name in CODE:
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/python").symlink_to(sys.executable)
    (folder / ".venv/bin/activate").write_text(f"PATH={folder}/.venv/bin:{Path(sys.executable).parent}:$PATH\n")
    (folder / ".venv/lib").symlink_to(Path(sys.prefix) / "lib")
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", folder / ".venv/pyvenv.cfg")
    files = [(ROOT / name).read_bytes() for name in ("setup.py", "constraints.txt")]
    stamp = hashlib.sha256(b"".join(files) + f"{folder}\n".encode()).hexdigest()
    (folder / ".venv/aligner.stamp").write_text(stamp + "\n")
    return folder


def execute(name: str, folder: Path, limit_s: float = 900, **environ: str) -> str:
    """Run a page's commands in `folder`, and compare what they print, which is returned, with what the page shows."""
    pairs = blocks(FOLDER / f"{name}.md")
    assert pairs
    (folder / "tutorial.sh").write_text(script(pairs))
    environ = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "COLUMNS": "120"} | environ
    command = ["bash", "tutorial.sh"]
    with open(folder / "tutorial.log", "w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log, process_group=0)
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    output = (folder / "tutorial.log").read_text()
    assert process.wait() == 0, output[-4000:]
    shown = re.split(rf"^{MARK}\d+\n", output, flags=re.MULTILINE)
    for (commands, expected), printed in zip(pairs, shown, strict=False):
        assert missing(expected, printed) == [], f"{commands}\nprinted\n{printed[-4000:]}"
    return output


def test_a_line_that_was_not_printed_is_missed():
    output = "\rgrpo 1/2 loss=0.5\ngrpo 2/2 loss=0.25\nreport: /tmp/x/report.html\n"
    assert missing(["grpo 2/2 loss=...", "report: ...report.html"], output) == []
    assert missing(["report: ...report.html", "grpo 2/2 loss=..."], output) == ["grpo 2/2 loss=..."]
    assert missing(["grpo 3/2 loss=..."], output) == ["grpo 3/2 loss=..."]


def test_every_tutorial_shows_commands_and_output():
    for page in FOLDER.glob("*.md"):
        assert all(text.strip() for text, _ in blocks(page)) and any(expected for _, expected in blocks(page)), page


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("name", ["own-data", "tools", "hugging-face"])
def test_a_tutorial_does_what_it_shows(name, tmp_path):
    execute(name, clone(tmp_path))


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.multirank
def test_the_slurm_tutorial_does_what_it_shows(tmp_path):
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if lack := [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if not shutil.which(name, path=path)]:
        lacking(f"no Slurm ({', '.join(lack)}): apt-get install {PACKAGES}")
    folder = tmp_path / "clone"
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="slurm-") as short:  # Slurm makes sockets there
        root = Path(short, "cluster")
        environ = {"LOCALSLURM_ROOT": str(root), "LOCALSLURM_PORT": str(free_ports(NODES)), "PATH": path}
        environ["ALIGNER_PYTHON"] = sys.executable  # of the jobs, whose clone is ROOT
        try:
            execute("slurm", clone(folder), **environ)
        finally:
            if root.exists():
                subprocess.run([ROOT / "slurm/localslurm", "down"], env=os.environ | environ, check=False)
