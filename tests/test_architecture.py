"""The house rules that imports and file contents can show."""

import ast
import io
import re
import subprocess
import tokenize
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from aligner.config.engines import ENGINES, NAMES
from aligner.config.on_demand import ON_DEMAND

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
        "pipe",
        "processes",
        "version",
    },
    {"ops", "plan", "sandbox"},
    {"models", "data", "rewards", "environments", "cluster"},
    {"megatron", "engines"},
    {"refit"},
    {"roles", "run"},
    {"rollout"},
    {"algorithms"},
    {"builders"},
    {"api", "training"},
    {"stages"},
    {"board"},
    {"tools"},
    {"rehearse"},
    {"shakedown"},
    {"__main__"},
]
LEVEL = {room: height for height, rooms in enumerate(LEVELS) for room in rooms}
FOUNDATION = LEVELS[0]  # these may know each other: config raises errors, for one
ONLY_IN: dict[str, tuple[str, ...]] = {
    "examples": (),
    "megatron": ("aligner/megatron/",),
    "tensorrt_llm": ("aligner/engines/trtllm/",),
    "mpi4py": ("aligner/cluster/",),
    "bitsandbytes": ("aligner/ops/kernels/frozen.py",),
    "modelopt": ("aligner/engines/quantized.py",),
    "fla": ("aligner/ops/kernels/cuda/linear.py",),
}
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
FILES = sorted((ROOT / "aligner").rglob("*.py"))


@cache
def imports(path: Path, top_level: bool = False, typed: bool = True) -> set[str]:
    """Dotted names imported anywhere in the file, or only when the module is imported itself; but for those that only
    type checkers import unless `typed`."""
    tree = ast.parse(path.read_text())
    hidden = {id(n) for n in ast.walk(tree) if not typed and _typing(n) for child in n.body for n in ast.walk(child)}
    nodes = [node for node in ast.walk(tree) if id(node) not in hidden]
    if top_level:
        nodes, open_ = [], list(tree.body)
        while open_:
            node = open_.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _elsewhere(node):
                continue
            nodes.append(node)
            open_ += ast.iter_child_nodes(node)
    results = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            results |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            results |= {f"{node.module}.{alias.name}" for alias in node.names}
    return results


def _typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _elsewhere(node: ast.AST) -> bool:
    """What the import of a module by the configuration leaves out."""
    return _typing(node) or (isinstance(node, ast.If) and ast.unparse(node.test) == "__package__ == 'aligner.stages'")


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
        own = room_of(path)
        if own == "__init__":
            continue
        for name in imports(path):
            if not name.startswith("aligner.") or room(name) == own:
                continue
            theirs = room(name)
            if LEVEL[theirs] > LEVEL[own] or (LEVEL[theirs] == LEVEL[own] and own not in FOUNDATION):
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
def test_these_packages_have_one_home(package):
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
        results = [location for location in places if location.is_file()]
        if results:
            return results[0]
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


def asks_who_an_engine_is(node: ast.AST) -> bool:
    """Whether it is an isinstance on engines, or a comparison of their names."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        return bool(re.search(r"Engine\b", ast.unparse(node.args[1])))
    if not isinstance(node, ast.Compare):
        return False
    named = any(isinstance(child, ast.Constant) and child.value in NAMES for child in (node.left, *node.comparators))
    return (named and isinstance(node.ops[0], ast.Eq | ast.NotEq)) or "engine.name" in ast.unparse(node)


def test_engines_are_asked_what_they_can_and_not_who_they_are():
    """By the table of config/engines.py."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if asks_who_an_engine_is(node)
    ]
    assert not wrong, "\n".join(wrong)


# lines of code and files that a stage reaches by imports, within functions too; a configuration or a GPU loads the rest
# Files and lines of code that a stage may reach: set to the next hundred lines when a change needs more.
CLOSURES = {
    "sft": (249, 22_700),
    "rm": (252, 23_000),
    "grpo": (286, 26_100),
    "ppo": (286, 26_200),
}
EXTENSIONS = (
    "board",
    "plan",
    "rehearse",
    "tools",
    "environments",
    "sandbox",
    "rewards.client",
    "rewards.judge",
)
EXTENSIONS += ("engines.native", "engines.child", "engines.vllm", "engines.trtllm", "engines.recorded")
EXTENSIONS += (
    "engines.quantized",
    "refit.serve",
    "refit.factors",
    "megatron.muon",
    "rollout.trajectory_generator",
    "rollout.agents",
    "rollout.replies",
)
EXTENSIONS += ("ops.kernels.cuda", "rollout.record", "rollout.replay", "engines.bridge", "models.peft")
NEVER_OF_SFT = (
    "builders.engines",
    "builders.rollouts",
    "rollout.sample_generator",
    "refit.transfer",
    "rewards",
    "algorithms.losses",
)


def closure(start: str) -> set[str]:
    seen, todo = set(), [start]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        todo += [known for known in map(module_of, imports(module_path(name), typed=False)) if known]
    return seen


@cache
def module_path(name: str) -> Path:
    base = ROOT / Path(*name.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


@cache
def module_of(name: str) -> str:
    """The module of the project that an imported name is or is in; empty for others."""
    while name.startswith("aligner"):
        if module_path(name).is_file():
            return name
        name = name.rpartition(".")[0]
    return ""


@pytest.mark.parametrize("stage", sorted(path.stem for path in (ROOT / "aligner/stages").glob("[a-z]*.py")))
def test_a_stage_reaches_no_extension_and_only_so_much(stage):
    reached = closure(f"aligner.stages.{stage}") | closure("aligner.builders.stage")
    rooms = EXTENSIONS + (NEVER_OF_SFT if stage in ("sft", "rm", "dpo", "kto") else ())
    assert not [name for name in reached for room in rooms if f"{name}.".startswith(f"aligner.{room}.")]
    if stage in CLOSURES:
        files, lines = size(stage)
        assert files <= CLOSURES[stage][0] and lines <= CLOSURES[stage][1]


def size(stage: str) -> tuple[int, int]:
    """Return how many files and lines of code a stage reaches."""
    reached = closure(f"aligner.stages.{stage}")
    return len(reached), sum(code_lines(module_path(name).read_text()) for name in reached)


def code_lines(text: str) -> int:
    """Lines that hold code: no blanks, comments or docstrings."""
    tree, lines = ast.parse(text), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_a_class_has_a_name_of_its_own():
    homes: dict[str, set[Path]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, set()).add(path)
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}


def test_functions_and_files_are_short():
    files = {path.name: count for path in FILES if (count := code_lines(path.read_text())) > 400}
    functions = {
        f"{path.name}:{node.name}": node.end_lineno - node.lineno + 1
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 60
    }
    assert not files and set(functions) <= {"decode.py:_attend"}  # one kernel is one function


def test_what_is_loaded_on_demand_is_there():
    engines = [path for one in ENGINES.values() for path in (one.made_by, one.made_apart_by) if path]
    for path in (*engines, *(path for path, _ in ON_DEMAND.values())):
        module, _, name = path.partition(":")
        assert re.search(rf"^(?:class|def) {name}\b", module_path(module).read_text(), re.MULTILINE), path


PARTS = (
    "data",
    "engines",
    "environments",
    "megatron",
    "refit",
    "rewards",
    "roles",
    "rollout",
)  # of which runs are made
OTHER_PROGRAMS = ("__main__", "board", "plan", "rehearse", "shakedown", "tools")
# what one call works with, which nobody chooses
WITHIN_A_CALL = ("engines.base.UpdateLedger", "megatron.checkpoint.ModelSave", "megatron.weight_hashes.WeightHashes")


def behaves(node: ast.AST) -> bool:
    """Whether it is a class, but for values and errors."""
    if not isinstance(node, ast.ClassDef):
        return False
    kinds = " ".join(map(ast.unparse, [*node.decorator_list, *node.bases]))
    return not re.search(r"dataclass|Enum|NamedTuple|TypedDict|Error|Exception", kinds)


def test_only_builders_choose_what_a_run_is_made_of():
    """No other room constructs a class of another."""
    classes = {
        f"aligner.{'.'.join(path.relative_to(ROOT / 'aligner').with_suffix('').parts)}.{node.name}"
        for path in FILES
        if room_of(path) in PARTS
        for node in ast.walk(ast.parse(path.read_text()))
        if behaves(node)
    } - {f"aligner.{name}" for name in WITHIN_A_CALL}
    wrong = []
    for path in FILES:
        if room_of(path) in ("builders", *OTHER_PROGRAMS):
            continue
        known = {name.rpartition(".")[2]: name for name in imports(path) & classes if room(name) != room_of(path)}
        called = {
            ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        }
        wrong += [f"{path.relative_to(ROOT)} constructs {known[name]}" for name in called & known.keys()]
    assert not wrong, "\n".join(wrong)


@cache
def project_texts() -> dict[Path, str]:
    """Of all files that are text."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    results = {}
    for path in (ROOT / name for name in listed.splitlines()):
        with suppress(UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            results[path] = path.read_text(encoding="utf-8")
    return results


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


def main() -> None:
    """Print how many files and lines of code each stage reaches: `python -m tests.test_architecture`."""
    for stage in sorted(path.stem for path in (ROOT / "aligner/stages").glob("[a-z]*.py")):
        files, lines = size(stage)
        own = code_lines(module_path(f"aligner.stages.{stage}").read_text())
        print(f"{stage:11} {own:4} lines in its file, {lines:6} in {files} files that it reaches")


if __name__ == "__main__":
    main()
