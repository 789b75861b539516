"""Write what the pages of docs/reference/ take from the code.

    python -m tests.reference_pages

keys.md is written as a whole, of other pages what stands between `<!-- generated: NAME -->` and `<!-- end -->`.
tests/test_docs.py compares the pages with what this would write.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from aligner import errors
from aligner.__main__ import COMMANDS, parser
from aligner.config import engines, reference
from aligner.config.resolve import compose
from aligner.config.sections.model.kernels import te_lacks
from aligner.config.sections.trtllm import NOT_SERVED
from aligner.config.stages import STAGES
from aligner.families import FAMILIES
from aligner.families.family import Family
from aligner.shakedown.toy import family_keys
from aligner.tools import recipes as complete

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/reference"
NOTE = "<!-- Written by `python -m tests.reference_pages`. Change the code, not this page. -->\n\n"
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
COMMON = ("config_dir", "frozen", "cfg")  # options that nearly all commands have
NAMED = re.compile(r"\bdocs/([\w/-]+\.md(?:#[\w-]+)?)")
PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(cell.replace('|', '\\|').strip() for cell in line)} |\n" for line in lines)


def sentence(text: str) -> str:
    """Return the text with a capital and a full stop."""
    text = " ".join(text.split())
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def yes(value: object) -> str:
    return "yes" if value else ""


# ---- cli.md ----


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    choices = next(a.choices for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {name: choices[name] for name in COMMANDS}


def option(action: argparse.Action) -> tuple[str, str]:
    """Return how an option or argument is written, and its meaning."""
    shown = f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
    value = "" if action.nargs == 0 else str(action.metavar or shown).replace("|", " or ")
    names = ", ".join(f"`{name} {value}`".replace(" `", "`") for name in action.option_strings) or f"`{value}`"
    meaning = (action.help or "") % {"default": action.default}
    return names, meaning + ("; required" if action.required and action.option_strings else "")


def usage(name: str, sub: argparse.ArgumentParser) -> str:
    """Return a line that shows how to call the command."""
    words = [f"aligner {name}"]
    optional = [action for action in sub._actions if action.option_strings and not action.required]
    if len(optional) > 1:  # than --help
        words.append("[OPTION...]")
    for action in sub._actions:
        shown = str(action.metavar or action.dest)
        if action.option_strings and action.required:
            words.append(f"{action.option_strings[0]} {shown}")
        elif not action.option_strings:
            words.append(f"[{shown}...]" if action.nargs == "*" else shown)
    return " ".join(words)


def common_options() -> str:
    return table(("option", "meaning"), (option(a) for a in parsers()["run"]._actions if a.dest in COMMON))


def commands() -> str:
    """Return a section for each command."""
    out = []
    for name, sub in parsers().items():
        out.append(f"## {name}\n\n{sentence(sub.description or COMMANDS[name])}\n")
        out.append(f"\n```text\n{usage(name, sub)}\n```\n\n")
        own = [a for a in sub._actions if a.dest not in ("help", *COMMON) and (a.option_strings or a.help)]
        if own:
            out.append(table(("option", "meaning"), map(option, own)) + "\n")
        if not {action.dest for action in sub._actions} & set(COMMON):
            out.append("It has none of the options above.\n\n")
    return "".join(out)


# ---- recipes.md ----


def recipe(path: Path) -> tuple[str, str, str, list[str]]:
    """Return a recipe's name, stage, meaning and settings."""
    text = path.read_text()
    comment = " ".join(line[1:].strip() for line in re.match(r"(?:#.*\n)+", text)[0].splitlines()[1:])
    values = OmegaConf.to_container(OmegaConf.create(text))
    chosen = values.pop("defaults", [])
    groups = {k.removeprefix("override /"): v for item in chosen if isinstance(item, dict) for k, v in item.items()}
    below = [path.with_name(f"{item}.yaml") for item in chosen if isinstance(item, str) and item != "_self_"]
    stage = groups.pop("stage", "") or recipe(below[0])[1]
    return path.stem, stage, comment, [*(f"{group}={name}" for group, name in groups.items()), *flat(values)]


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield each setting as KEY=VALUE."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value).replace("'", "")
            yield f"{prefix}{key}={text.replace('\n', r'\n')}"


def recipes(whole: bool) -> Iterator[list[str]]:
    """Yield a row for each recipe: those of `whole` runs, which name their folder, or the others."""
    for path in sorted((ROOT / "conf/experiment").glob("*.yaml")):
        if path.stem in complete.recipes():
            continue
        name, stage, comment, settings = recipe(path)
        if whole == any(text.startswith("run.dir=") for text in settings):
            cited = PAPER.sub(r"[\1](https://arxiv.org/abs/\1)", comment)
            yield [f"`{name}`", f"`{stage}`", cited, ", ".join(f"`{text}`" for text in settings)]


def algorithms() -> str:
    return table(("recipe", "stage", "meaning", "settings beside the stage's defaults"), recipes(False))


def complete_recipes() -> str:
    """Return a table of the recipes that name model, data and GPUs."""
    rows = []
    for name, each in complete.recipes().items():
        cfg = each.config
        published = re.sub(r" ?\((https://[^)]+)\)", r" ([source](\1))", each.published)
        cells = (
            f"`{name}`",
            f"`{cfg.stage.name}`",
            f"`{complete.data_name(cfg)}`",
            f"{cfg.cluster.gpus} {each.device.upper()}",
        )
        rows.append((*cells, PAPER.sub(r"[\1](https://arxiv.org/abs/\1)", each.meaning), published, each.status))
    return table(("recipe", "stage", "data", "GPUs", "meaning", "published", "status"), rows)


def whole_runs() -> str:
    return table(("recipe", "stage", "meaning"), (row[:3] for row in recipes(True)))


# ---- exit-codes.md ----


def error_codes() -> str:
    """Return a table of errors with their exit codes."""
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.AlignerError)]
    rows = (
        (
            f"`{kind.__name__}`",
            str(kind.exit_code),
            str(kind.exit_code if kind.transient else errors.NO_RESTART),
            re.split(r"(?<=\.)\s", " ".join((kind.__doc__ or "").split()))[0],
        )
        for kind in sorted(kinds, key=lambda kind: inspect.getsourcelines(kind)[1])
        if kind is not errors.AlignerError
    )
    return table(("error", "by hand", "in a batch job", "meaning"), rows)


# ---- support.md ----


def families() -> str:
    """Return a table of families and the engines that serve them."""
    rows = (
        (
            f"`{name}`",
            family.models,
            "yes",
            yes("vllm" in family.served_by),
            yes(not any(getattr(family, trait) for trait in NOT_SERVED)),
            yes("trtllm_engine" in family.served_by),
        )
        for name, family in FAMILIES.items()
    )
    return table(("`model_type`", "models", "`native`", "`vllm`", "`trtllm`", "`trtllm_engine`"), rows)


def structures() -> str:
    head = ("family", "experts", "attention", "windows", "biases", "norms", "files", "varlen")
    return table(head, map(structure, FAMILIES.values()))


def structure(family: Family) -> tuple[str, ...]:
    """Return a family's row of the table of structures."""
    attention = [name for name in ("latent", "linear", "sinks") if getattr(family, name)]
    capped = ["capped scores"] if "attention.softcap" in family.varies else []
    norms = [text for text, has in (("qk", family.qk_norm), ("after", family.post_norms)) if has]
    return (
        f"`{family.model_type}`",
        yes(family.moe),
        ", ".join([*attention, *capped]),
        {"every": "every layer", "layers": "some layers", "": ""}[family.windows],
        ("config" if "qkv_bias" in family.varies else "always") if family.qkv_bias else "",
        ", ".join(norms),
        "joined" if family.joined else "",
        yes(not (family.latent or family.sinks or family.global_heads or capped)),
    )


def modules() -> str:
    """Return a table of whose modules compute each family where TransformerEngine is loaded."""
    rows = []
    for name, family in FAMILIES.items():
        usual = ["model.latent.rotary_dim=4", "model.latent.value_dim=8"] * family.latent  # widths of fused attention
        usual += ["model.attention.softcap=50"] * ("attention.softcap" in family.varies)
        usual += ["model.attention.global_head_dim=512"] * family.global_heads
        rule = "Mamba-2" if family.mamba else "the delta rule"
        own = {
            "attention": [rule.removeprefix("the ")] * family.linear,
            "linear layers": ["router, experts"] * bool(family.moe)
            + ["what all tensor ranks have whole"] * (family.latent or family.entries),
            "norms": ["over all heads"] * family.wide_qk_norm + [f"of {rule}"] * family.linear,
        }
        lacks = te_lacks(compose(["stage=sft", *family_keys(name), *usual]).model)
        cells = [f"own: {lack}" if lack else ", own: ".join(["TE", *own[kind]]) for kind, lack in lacks.items()]
        rows.append((f"`{name}`", *cells))
    return table(("family", "attention", "linear layers", "norms"), rows)


def capabilities() -> str:
    return engines.matrix()


def reasons() -> str:
    """Return a list of why engines cannot do what they cannot."""
    meanings = {one.name: one.metadata["meaning"].partition(":")[0] for one in fields(engines.Capabilities)}
    return "".join(
        f"- `{name}`, {meanings[capability]}: no{reason}.\n"
        for name, entry in engines.ENGINES.items()
        for capability, reason in entry.reasons.items()
    )


def stages() -> str:
    """Return a table of stages."""
    rows = (
        (
            f"`{name}`",
            yes(stage.rollouts),
            "" if stage.rollouts else stage.unit,
            yes(stage.trains),
            "scores" if stage.scores else "logits",
        )
        for name, stage in STAGES.items()
    )
    return table(("stage", "generates", "counts", "trains", "head"), rows)


def shapes() -> str:
    """Return a table of the files of conf/model."""
    rows = []
    for path in sorted((ROOT / "conf/model").glob("*.yaml")):
        text = path.read_text()
        family = re.search(r"^family: (\w+)", text, re.MULTILINE)
        rows.append((f"`{path.stem}`", f"`{family[1] if family else 'llama'}`", text.partition("\n")[0].lstrip("# ")))
    return table(("model", "family", "meaning"), rows)


# ---- api.md ----


def definitions(node: ast.Module | ast.ClassDef) -> dict[str, Any]:
    """Return the functions and classes of a module or a class by name."""
    kinds = ast.FunctionDef | ast.ClassDef
    return {each.name: each for each in node.body if isinstance(each, kinds)}


def meaning(node: Any) -> str:
    """Return a docstring with a line for each paragraph."""
    paragraphs = (ast.get_docstring(node) or "").split("\n\n")
    return "\n\n    ".join(" ".join(text.split()) for text in paragraphs)


def signature(node: ast.FunctionDef) -> str:
    """Return the parameters and the result of a function or a method."""
    node.args.args = [each for each in node.args.args if each.arg != "self"]
    return f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns) if node.returns else 'None'}"


def field_lines(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    """Yield the lines of a class's fields, with the comment above."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_"):
            first = each.lineno - 1
            while lines[first - 1].strip().startswith("#"):
                first -= 1
            yield from (f"{line}\n" for line in lines[first : each.end_lineno])


def api_rows(name: str, node: Any, text: str) -> Iterator[str]:
    """Yield the entry of a name: of a function its signature, of a class its fields, and its methods."""
    if isinstance(node, ast.FunctionDef):
        yield f"`{name}{signature(node)}`\n:   {meaning(node)}\n\n"
        return
    methods = {n: each for n, each in definitions(node).items() if not n.startswith("_") and meaning(each)}
    yield f"`{name}`\n:   {meaning(node)}\n\n"
    shown = "" if name == "Config" else "".join(field_lines(node, text.splitlines()))  # whose keys have a page
    if shown:
        yield textwrap.indent(f"```python\n{textwrap.dedent(shown)}```", "    ") + "\n\n"
    for method, each in methods.items():
        shown = "" if any(ast.unparse(d).endswith("property") for d in each.decorator_list) else signature(each)
        yield f"`{name}.{method}{shown}`\n:   {meaning(each)}\n\n"


def api_names() -> str:
    """Return the names of `aligner` and of `aligner.api` by section, with signatures, fields and meanings."""
    source = "".join((ROOT / f"aligner/{file}.py").read_text() for file in ("__init__", "api"))
    entries: list[str] = []
    for heading, module, name in re.findall(r"^    (?:# ([A-Z].*)|from ([\w.]+) import \w+ as (\w+))$", source, re.M):
        if heading:
            entries.append(f"## {heading}\n\n")
            continue
        path = ROOT / module.replace(".", "/")
        if path.is_dir():
            tree = ast.parse((path / f"{name}.py").read_text())
            names = re.findall(r"^(?:def )?([a-zA-Z]\w*)(?: = |\()", ast.unparse(tree), re.M)
            entries.append(f"`{name}`\n:   {meaning(tree)} {', '.join(f'`{name}.{each}`' for each in names)}.\n\n")
            continue
        text = path.with_suffix(".py").read_text()
        entries += api_rows(name, definitions(ast.parse(text))[name], text)
    return "".join(entries)


PAGES = ("api.md", "cli.md", "keys.md", "recipes.md", "exit-codes.md", "support.md")
BLOCKS: tuple[Callable[[], str], ...] = (
    common_options,
    commands,
    algorithms,
    whole_runs,
    complete_recipes,
    error_codes,
)
BLOCKS += (families, structures, modules, capabilities, reasons, stages, shapes, api_names)


def page(name: str) -> str:
    """Return a page of docs/reference/ as it should be. Names of other pages become links."""
    if name == "keys.md":
        return NOTE + NAMED.sub(link, reference.page())
    made = {block.__name__: block for block in BLOCKS}
    text = (FOLDER / name).read_text()
    return BLOCK.sub(lambda block: f"{block[1]}\n{NAMED.sub(link, made[block[2]]())}\n{block[3]}", text)


def link(named: re.Match[str]) -> str:
    """Return a link to the page, if it exists, else its name."""
    exists = (ROOT / named[0].partition("#")[0]).is_file()
    return f"[{named[0].removeprefix('docs/')}](../{named[1]})" if exists else named[0]


def main() -> None:
    for name in PAGES:
        (FOLDER / name).write_text(page(name))
        print(f"wrote docs/reference/{name}")


if __name__ == "__main__":
    main()
