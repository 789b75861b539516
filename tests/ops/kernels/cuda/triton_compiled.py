"""Triton kernels in the interpreter, and as they are compiled for GPUs that are not here."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

SHARED_BYTES = 227 << 10  # of a multiprocessor of compute capability 9.0 and 10.0
CAPABILITIES = (90, 100)
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def lines_of_cases(name: str, *arguments: str) -> list[str]:
    """Run `tests/ops/kernels/cuda/NAME.py`, which must pass, and return what it prints. In a process of its own: Triton
    decides whether it interprets when it is imported."""
    command = [sys.executable, "-m", f"tests.ops.kernels.cuda.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def compiled(
    kernel: Any,
    kinds: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    odd: Collection[str] = (),
    **options: int,
) -> dict[str, int]:
    """Compile for a GPU. `kinds`: argument -> Triton's name of its type, i32 where there is none; `odd`: those that may
    be no multiple of 16. Prints and returns registers, spilled bytes, shared bytes and how many
    instructions load 16 bytes for each thread."""
    names = kernel.arg_names
    kinds = dict.fromkeys(names, "i32") | dict(kinds) | dict.fromkeys(constants, "constexpr")
    kinds = {name: kinds[name] for name in names}
    even = [i for i, name in enumerate(names) if kinds[name] not in ("constexpr", "fp32") and name not in odd]
    source = ASTSource(kernel, kinds, dict(constants), {(i,): [["tt.divisibility", 16]] for i in even})
    made = compile(source, GPUTarget("cuda", capability, 32), options)
    assert made.metadata.shared <= SHARED_BYTES
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        text = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = {key: int(number) for key, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    numbers = {"registers": usage["REG"], "spilled": usage["STACK"] + usage["LOCAL"], "shared": made.metadata.shared}
    numbers["wide"] = len(re.findall(r"(?:ld\.global|cp\.async)\S*(?:\.v4|\.cg)", made.asm["ptx"]))
    print(kernel.__name__, f"sm_{capability}", *(f"{n} {what}" for what, n in numbers.items()))
    return numbers
