"""How the documentation reads: words, length of sentences, Flesch's reading ease, by page and in all.

    pip install readability
    python -m benchmarks.readability [--revisions main,HEAD] [--pages] [--json FILE]

Counted is prose: paragraphs and items of lists, without code, tables and headings. What stands in
backticks is one word. A revision is one of git, `.` the working tree. Generated pages are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = re.compile(r"(?:docs/.*|README|CONTRIBUTING)\.md")
GENERATED = ("docs/keys.md", "docs/reference/keys.md", "docs/reference/cli.md", "docs/reference/recipes.md")
FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
MARKS = re.compile(r"^ *(?:[-*]|\d+\.) +|[*]", re.MULTILINE)
END = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[A-Z\"'(`])")
LONG = 30  # words of a sentence that is too long


class Measures(NamedTuple):
    words: int
    sentences: int
    long: int
    syllables: int

    def row(self) -> str:
        length, share = self.words / self.sentences, self.long / self.sentences
        flesch = 206.835 - 1.015 * length - 84.6 * self.syllables / self.words
        return f"| {self.words} | {length:.1f} | {share:.1%} | {flesch:.0f} |"


def texts(revision: str) -> dict[str, str]:
    """Return the pages of a revision."""
    if revision == ".":
        listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
        return {name: (ROOT / name).read_text() for name in listed if chosen(name) and (ROOT / name).exists()}
    listed = subprocess.check_output(
        ["git", "ls-tree", "-r", "--name-only", revision], cwd=ROOT, text=True
    ).splitlines()
    show = ["git", "show"]
    return {
        name: subprocess.check_output([*show, f"{revision}:{name}"], cwd=ROOT, text=True)
        for name in listed
        if chosen(name)
    }


def chosen(name: str) -> bool:
    return bool(PAGES.fullmatch(name)) and name not in GENERATED


def sentences(page: str) -> list[list[str]]:
    """Return the words of each sentence of a page's prose."""
    text = re.sub(r"<!--.*?-->", "", FENCED.sub("\n\n", page), flags=re.DOTALL)
    lines = ["" if line.lstrip().startswith(("|", "#", "<")) else line for line in text.splitlines()]
    text = re.sub(r"^( *(?:[-*]|\d+\.) )", r"\n\1", "\n".join(lines), flags=re.MULTILINE)
    text = MARKS.sub("", re.sub(r"`[^`]*`", "Key", LINK.sub(r"\1", text)))
    found = [re.findall(r"[\w'’-]+", part) for block in re.split(r"\n\s*\n", text) for part in END.split(block.strip())]
    return [words for words in found if words]


def measure(page: str) -> Measures:
    """Return the measures of a page. `readability` counts syllables."""
    import readability

    found = sentences(page)
    if not found:
        return Measures(0, 0, 0, 0)
    info = readability.getmeasures("\n".join(f"{' '.join(words)} ." for words in found), lang="en")["sentence info"]
    return Measures(info["words"], len(found), sum(len(words) > LONG for words in found), info["syllables"])


def total(pages: dict[str, Measures]) -> Measures:
    return Measures(*(sum(column) for column in zip(*pages.values(), strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readability", description=__doc__.splitlines()[0])
    parser.add_argument("--revisions", default=".", help="of git, by commas; . is the working tree")
    parser.add_argument("--pages", action="store_true", help="a row for each page, too")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found = {
        revision: {name: measure(page) for name, page in texts(revision).items()}
        for revision in args.revisions.split(",")
    }
    print(f"| pages | words | words of a sentence | sentences over {LONG} words | Flesch |\n|---|---|---|---|---|")
    for revision, pages in found.items():
        print(f"| {revision}: {len(pages)} {total(pages).row()}")
        if args.pages:
            print(*(f"| {name} {each.row()}" for name, each in pages.items() if each.words), sep="\n")
    if args.json:
        args.json.write_text(json.dumps({r: {n: m._asdict() for n, m in p.items()} for r, p in found.items()}))


if __name__ == "__main__":
    main()
