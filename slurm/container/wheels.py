"""Check that pinned packages have wheels for a machine, or are built from source everywhere; exit code 1 if not.

pip itself looks them up, and installs nothing. Flags after -- go to it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = ("constraints.txt", "constraints-kernels.txt", "constraints-vllm-gpu.txt")  # what goes on nodes with GPUs
GLIBC = 39  # minor version, of Ubuntu 24.04
MISSING = re.compile(r"No matching distribution found for (\S+)")


def pins(path: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "==" in line]


def without_wheel(wanted: Sequence[str], machine: str, options: Sequence[str] = ()) -> list[str]:
    """Return the pins that pip finds no wheel for, for Python 3.12 on Linux. Raises RuntimeError for other errors of
    pip, with its text."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC, 4, -1)]
    platforms += [f"manylinux2014_{machine}", f"linux_{machine}"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp", "--target=none", *options]
    command += [f"--platform={platform}" for platform in platforms]
    left, missing = list(wanted), list[str]()
    while left:  # pip stops at the first
        done = subprocess.run([*command, *left], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            break
        names = [name for name in MISSING.findall(done.stderr) if name in left]
        if not names or "Retrying (" in done.stderr:  # without an index all are missing
            raise RuntimeError(done.stderr)
        missing += names
        left = [pin for pin in left if pin not in names]
    return missing


def main(argv: Sequence[str]) -> int:
    end = argv.index("--") if "--" in argv else len(argv)
    before, options = argv[:end], argv[end + 1 :]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=[ROOT / name for name in FILES], metavar="FILE")
    parser.add_argument("--machine", default="aarch64", help="as `uname -m` says it (default: aarch64)")
    args = parser.parse_args(before)
    lacking = 0
    for path in args.files:
        wanted = pins(path)
        missing = without_wheel(wanted, args.machine, options)
        source = without_wheel(missing, "x86_64", options)
        there = len(wanted) - len(missing)
        print(f"{path.name}: {there} of {len(wanted)} pins have a wheel for {args.machine}")
        print("".join(f"  {pin}: from source, for x86_64 too\n" for pin in source), end="")
        print("".join(f"  {pin}: only for x86_64\n" for pin in missing if pin not in source), end="")
        lacking += len(missing) - len(source)
    return int(lacking > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
