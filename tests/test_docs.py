"""Pages of the documentation: what they name exists, and commands compose."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from aligner.__main__ import OF_A_FOLDER, OF_A_STAGE, parser
from aligner.config.resolve import compose, sweep
from aligner.config.stages import STAGES
from aligner.config.unread import compose_run
from aligner.errors import ConfigError
from aligner.run.metrics import read_jsonl
from tests import reference_pages, stages

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")), *sorted(DOCS.rglob("*.md"))]
LINKED = re.compile(r"\]\(([^)#:\s]+)(?:#[\w-]+)?\)")
FUNCTION = re.compile(r"`([\w.]+)`\s+\(`(aligner/[\w/]+\.py)`\)")
NAMED = re.compile(r"`(tests/[\w/]+\.py|benchmarks/\w+\.(?:py|md))(?:::(\w+))?`")
BLOCK = re.compile(r"```\w*\n(.*?)```|`([^`\n]+)`", re.DOTALL)
CHAINS = re.compile(r"launchers/(?:pipeline|iterate)\.sh")
LAUNCHER = re.compile(rf"launchers/({'|'.join(STAGES)})\.sbatch")
COMMAND = re.compile(r"(?:python -m )?aligner (\w[\w-]*) ?(.*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tests_and_measurements_that_a_page_names_exist(page):
    for file, name in NAMED.findall(page.read_text()):
        path = ROOT / file
        assert path.is_file(), file
        assert not name or re.search(rf"^ *def {name}\(", path.read_text(), re.MULTILINE), (file, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert [link for link in LINKED.findall(page.read_text()) if not (page.parent / link).exists()] == []


def test_the_functions_of_one_step_are_where_the_page_says():
    named = FUNCTION.findall((ROOT / "docs/explanation/one-step.md").read_text())
    assert len(named) > 40
    for name, file in named:
        body = ast.parse((ROOT / file).read_text()).body
        for word in name.split("."):
            (body,) = [_body(node) for node in body if word in _names(node)] or [None]
            assert body is not None, (name, file)


def _names(node: ast.stmt) -> list[str]:
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [getattr(node, "name", ""), *(target.id for target in targets if isinstance(target, ast.Name))]


def _body(node: ast.stmt) -> list[ast.stmt]:
    return getattr(node, "body", [])


def test_every_page_is_in_the_navigation_once():
    named = re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_generated_pages_are_what_the_code_says(name):
    assert (DOCS / "reference" / name).read_text() == reference_pages.page(name), "python -m tests.reference_pages"


def test_home_and_readme_say_the_same_of_what_has_run():
    home, readme = (
        path.read_text().partition("## What has run where\n")[2].partition("\n## ")[0]
        for path in (DOCS / "index.md", ROOT / "README.md")
    )
    assert home == readme and home.count("\n| ") > 5


def test_every_threat_has_a_test():
    page = (ROOT / "docs/explanation/security.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 10
    for row in rows:
        assert re.search(r"`tests/[\w/]+\.py::\w+`", row), row


def commands(page: Path) -> Iterator[str]:
    """What a page has of shell commands, each in one line: those of its blocks, and those within its sentences."""
    for block, inline in BLOCK.findall(page.read_text()):
        for line in re.sub(r" *\\\n *", " ", block or inline).splitlines():
            if COMMAND.search(line) or CHAINS.search(line) or LAUNCHER.search(line):
                yield line


def settings(text: str) -> list[str]:
    """The words of a command line, without what stands for something: `...`, <a run>, $1, "$question"."""
    words = shlex.split(re.sub(r"<[^>]*>", "some", text), comments=True)
    return [word for word in words if "..." not in word and "$" not in word]


def composed(line: str) -> int:
    """Compose what a command line runs as the command would; how many configs that were."""
    if match := CHAINS.search(line):
        return composed_chain(settings(line[match.end() :]))
    if match := LAUNCHER.search(line):
        arguments = [word for word in settings(line[match.end() :]) if "=" in word and not word.startswith("-")]
        compose_run([f"stage={match[1]}", *arguments])
        return 1
    command, rest = COMMAND.search(line).groups()
    words = settings(rest)
    if command not in (*OF_A_STAGE, *OF_A_FOLDER, "doctor") or not any("=" in word for word in words):
        return 0
    args, _ = parser().parse_known_args([command, *words])
    arguments = [word for word in args.overrides if "=" in word]
    if args.config_dir or args.frozen:  # files of the reader's own
        return 0
    arguments = ["stage=sample", *arguments] if command == "sample" else arguments
    jobs = sweep(arguments) if getattr(args, "multirun", False) else [arguments]
    for job in jobs:
        (compose_run if command in OF_A_STAGE else compose)(job)
    return len(jobs)


def composed_chain(words: list[str]) -> int:
    """launchers/pipeline.sh and iterate.sh: what stands before the first stage is for all that read it."""
    first = next((i for i, word in enumerate(words) if word.startswith("@")), len(words))
    shared = [f"?{word}" for word in words[:first] if "=" in word and not word.startswith("-")]
    chain: list[list[str]] = []
    for word in words[first:]:
        chain.append([f"stage={word[1:]}", *shared]) if word.startswith("@") else chain[-1].append(word)
    for stage in chain:
        compose_run(stage)
    return len(chain)


@pytest.mark.slow
def test_the_commands_of_all_pages_set_what_their_stages_read():
    wrong, tried = [], 0
    for file, line in ((page, line) for page in PAGES for line in commands(page)):
        try:
            tried += composed(line) > 0
        except ConfigError as error:
            wrong.append(f"{file.name}: {line}: {error}")
    assert not wrong, "\n".join(wrong)
    assert tried > 60


@pytest.mark.parametrize(
    "line",
    [
        "python -m aligner run stage=sft critic.clip=0.1 ...",
        "aligner plan --gpus 8 stage=dpo model=llama3_8b batch.prompts=4",
        "launchers/iterate.sh runs/x 3 @sample optim.lr=1",
        "bash launchers/dpo.sbatch --ranks 2 batch.group=3",
        "aligner eval runs/x data.evil=x",
    ],
)
def test_a_command_with_a_key_that_its_stage_does_not_read_is_seen(line):
    with pytest.raises(ConfigError):
        composed(line)


def test_what_a_chain_shares_is_for_the_stages_that_read_it():
    shared = "launchers/pipeline.sh runs/x critic.clip=0.1"
    assert composed(f"{shared} @sft @rm run.steps=2 @ppo optim.lr=1e-4  # three") == 3


HOW_TO = sorted((DOCS / "how-to").glob("*.md"))


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_a_how_to_has_at_most_500_words(page):
    assert len(page.read_text().split()) <= 500


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_a_variation_of_the_quick_start_has_a_folder_of_its_own(page):
    varied = [line for line in commands(page) if re.search(r"experiment=\[?quickstart_(sft|rm|grpo|ppo)\b", line)]
    folders = [re.findall(r"run\.dir=(\S+)", line) for line in varied]
    assert [] not in folders and len({name for (name,) in folders}) == len(folders)


NEEDS_NO_MORE = re.compile(
    r"\.\.\.|<|\$\w|\{common|--cfg|--frozen|-c |experiment=\[?(?:(?:quickstart|tools|gsm8k)_|[\w.]+_\d+)"
)


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_a_command_that_trains_names_model_and_data(page):
    runs = [line for line in commands(page) if re.search(r"aligner (?:run|launch|submit|sample) .*=", line)]
    bare = [line for line in runs if not NEEDS_NO_MORE.search(line)]
    assert [line for line in bare if not re.search(r"model\.(init|tokenizer)=", line) or "data." not in line] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_no_two_commands_of_a_how_to_write_to_one_folder(page):
    lines = [line for line in commands(page) if re.search(r"aligner (?:run|launch) .*=", line)]
    words = [settings(COMMAND.search(line)[2]) for line in lines if not NEEDS_NO_MORE.search(line)]
    folders = [compose_run([word for word in line if "=" in word]).run.dir for line in words]
    assert len(set(folders)) == len(folders)


def test_every_stage_has_a_launcher():
    assert {path.stem for path in (ROOT / "launchers").glob("*.sbatch")} == set(STAGES)


TOPICS = (
    "advantage|batch|critic|data|distill|dpo|engine|environment|eval|filter|kl|kto|length|logps|lora|memory|mismatch|moe|"
    "policy|preference|ptx|refit|response|reward|rewards|rm|sample|sft|staleness|stop|throughput|time|window"
)
METRIC = re.compile(rf"(?:{TOPICS})/[\w/]+")
PARTLY = re.compile(r"[_/]$|/[xq]$|[_q]x")  # of a name that is put together
SUMS = re.compile(r"mismatch/moment_\w+|.*/(?:mean_square|negative_min)")  # of which the metrics are made


def documented() -> re.Pattern[str]:
    """Matches the names in the tables of the page of metrics."""
    rows = [line for line in (DOCS / "reference/metrics.md").read_text().splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`([a-z][\w/<>]*)`", row.split("|")[1])}
    assert len(names) > 100
    return re.compile("|".join(re.sub(r"<\w+>", r"[\\w.]+", name) for name in names))


def in_code() -> Iterator[str]:
    """Yield names of metrics in the package; what they are formatted with is `x`."""
    for path in sorted((ROOT / "aligner").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(child.value if isinstance(child, ast.Constant) else "x" for child in node.values)


def test_every_metric_of_the_code_is_documented():
    page = documented()
    names = {name for name in in_code() if METRIC.fullmatch(name) and not PARTLY.search(name)}
    assert len(names) > 100
    assert sorted(name for name in names if not (page.fullmatch(name) or SUMS.fullmatch(name))) == []


@pytest.mark.slow
def test_every_metric_of_runs_is_documented(tiny_data, tiny_runs, tmp_path):
    short = ["run.steps=1", "eval.prompts=2", f"model.init={tiny_runs['sft']}"]
    grpo = stages.stage("grpo", tiny_data, tmp_path / "grpo", *short)
    page = documented()
    for folder in (*tiny_runs.values(), grpo):
        names = {name for record in read_jsonl(Path(folder) / "metrics.jsonl") for name in record}
        assert sorted(name for name in names - {"step", "wall_time"} if not page.fullmatch(name)) == []


@pytest.mark.slow
def test_every_file_of_a_run_is_documented(tiny_runs):
    page = (DOCS / "reference/files.md").read_text()
    for folder in tiny_runs.values():
        assert [path.name for path in Path(folder).iterdir() if f"`{path.name}" not in page] == []
