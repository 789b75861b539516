"""The house rules that imports and file contents can show."""

import ast
import re
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# imports point down only; rooms on one level do not import each other
LEVELS = [
    {
        "types",
        "errors",
        "config",
        "families",
        "files",
        "foreign",
        "loading",
        "user_code",
        "answers",
        "awaited",
        "processes",
    },
    {"ops", "plan"},
    {"models", "data", "rewards", "environments", "cluster"},
    {"megatron", "engines"},
    {"refit"},
    {"roles", "run"},
    {"rollout"},
    {"algorithms"},
    {"builders"},
    {"stages"},
    {"board"},
    {"build", "tools"},
    {"rehearse"},
    {"__main__"},
]
LEVEL = {room: height for height, rooms in enumerate(LEVELS) for room in rooms}
FOUNDATION = LEVELS[0]  # these may know each other: config raises errors, for one
ONLY_IN = {
    "megatron": ("aligner/megatron/",),
    "tensorrt_llm": ("aligner/engines/trtllm/",),
    "mpi4py": ("aligner/cluster/",),
    "bitsandbytes": ("aligner/ops/kernels/frozen.py",),
    "modelopt": ("aligner/engines/quantized.py",),
}
FILES = sorted((ROOT / "aligner").rglob("*.py"))


@cache
def imports(path: Path, top_level: bool = False) -> set[str]:
    """Dotted names imported anywhere in the file, or only when the module is imported itself."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    if top_level:
        nodes, open_ = [], list(tree.body)
        while open_:
            node = open_.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _elsewhere(node):
                continue
            nodes.append(node)
            open_ += ast.iter_child_nodes(node)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _elsewhere(node: ast.AST) -> bool:
    """What the import of a module by the configuration leaves out."""
    tests = ("TYPE_CHECKING", "__package__ == 'aligner.stages'")
    return isinstance(node, ast.If) and ast.unparse(node.test) in tests


def room(name: str) -> str:
    return name.split(".")[1]


def room_of(path: Path) -> str:
    first = path.relative_to(ROOT / "aligner").parts[0]
    return first.removesuffix(".py")


def test_every_room_has_a_level():
    assert {room_of(path) for path in FILES} - {"__init__"} <= set(LEVEL)


def test_imports_point_down_only():
    wrong = []
    for path in FILES:
        mine = room_of(path)
        if mine == "__init__":
            continue
        for name in imports(path):
            if not name.startswith("aligner.") or room(name) == mine:
                continue
            theirs = room(name)
            if LEVEL[theirs] > LEVEL[mine] or (LEVEL[theirs] == LEVEL[mine] and mine not in FOUNDATION):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_algorithms_know_no_backend():
    """Stages and what they share speak to roles and protocols; megatron, engines and refit are below those."""
    wrong = [
        f"{path.name} imports {name}"
        for path in FILES
        if room_of(path) in ("algorithms", "stages")
        for name in imports(path)
        if name.startswith("aligner.") and room(name) in ("megatron", "engines", "refit", "cluster", "models")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ONLY_IN)
def test_heavy_packages_have_one_home(package):
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in FILES
        for name in imports(path)
        if name.split(".")[0] == package and not str(path.relative_to(ROOT)).startswith(ONLY_IN[package])
    ]
    assert not wrong, "\n".join(wrong)


def test_config_and_the_command_line_import_no_torch():
    """Followed through the modules they import: `--help` and a login node's `submit` must not wait for torch."""

    def module_file(name: str) -> Path | None:
        base = ROOT / Path(*name.split("."))
        places = (base.with_suffix(".py"), base / "__init__.py")
        found = [place for place in places if place.is_file()]
        if found:
            return found[0]
        return module_file(name.rpartition(".")[0]) if name.count(".") > 1 else None  # a name in a module

    starts = [path for path in FILES if room_of(path) in ("config", "families", "plan", "cluster", "__main__")]
    seen, open_, wrong = set(starts), [(path, path.name) for path in starts], []
    while open_:
        path, chain = open_.pop()
        for name in imports(path, top_level=True):
            if name.split(".")[0] in ("torch", "transformers", "megatron", "datasets"):
                wrong.append(f"{chain} imports {name}")
            below = module_file(name) if name.startswith("aligner.") else None
            if below is not None and below not in seen:
                seen.add(below)
                open_.append((below, f"{chain} -> {below.relative_to(ROOT)}"))
    assert not wrong, "\n".join(wrong)


@cache
def project_texts() -> dict[Path, str]:
    """Of all files that are text."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    found = {}
    for path in (ROOT / name for name in listed.splitlines()):
        with suppress(UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            found[path] = path.read_text(encoding="utf-8")
    return found


# written so that this file does not match itself
FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.~$}\]/])/(?:work|home|Users|root|scratch|opt/dev)/\w"),
    "a package index": re.compile(r"(?:--(?:extra-)?index-(?:url)|(?:PIP|UV)_\w*INDEX\w*=|trusted-(?:host))"),
    "a registry host": re.compile(r"https?://[\w.:-]*(?:artifactory|nexus|mirror|registry|proxy|jfrog)[\w.:-]*/"),
    "a private address": re.compile(r"(?<![\d.=])(?:10\.\d+|192\.168|172\.(?:1[6-9]|2\d|3[01]))\.\d+\.\d+(?![\d.])"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names_this_machine_or_a_registry(what):
    wrong = []
    for path, text in project_texts().items():
        for number, line in enumerate(text.splitlines(), 1):
            if FORBIDDEN[what].search(line) and path != Path(__file__).resolve():
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not wrong, "\n".join(wrong)
