"""GSM8K (grade-school word problems, by OpenAI) as data for SFT, a reward model and GRPO.

    python -m examples.gsm8k SOURCE_FOLDER [--out runs/gsm8k/data]

SOURCE_FOLDER holds train.jsonl and test.jsonl ({question, answer}, answers end in `#### 42`) and
example_model_solutions.jsonl ({question, <model>: {is_correct, solution}, ...}). Written are train.jsonl, test.jsonl,
pairs_train.jsonl, pairs_test.jsonl and tokenizer/.

The labelled solutions belong to the TEST problems: a reward model trained on the pairs has seen those problems and
their answers, and must not judge, or train, a policy whose test score is reported. See docs/how-to/data.md#gsm8k.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aligner.data.readers import Rows, read_rows
from aligner.errors import AlignerError, ConfigError, DataError
from examples.gym_tasks import split, write_jsonl

TRAIN, TEST, SOLUTIONS = "train.jsonl", "test.jsonl", "example_model_solutions.jsonl"
VOCABULARY = 2048
PAIR_SPLITS = {"train": 0.8, "test": 0.2}  # by hash of the question: a problem is in exactly one of them
_MARK = re.compile(r"####[ \t]*(\S.*)\s*\Z")
_LABELLED_END = re.compile(r"\nA:[ \t]*(?=\S[^\n]*\s*\Z)")

Row = dict[str, Any]


class Made(NamedTuple):
    train: list[Row]  # {prompt, completion, answer}
    test: list[Row]
    pairs: dict[str, list[Row]]  # split -> {prompt, chosen, rejected, chosen_by, rejected_by}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gsm8k", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SOURCE_FOLDER")
    parser.add_argument("--out", default="runs/gsm8k/data", metavar="FOLDER")
    parser.add_argument("--vocab-size", type=int, default=VOCABULARY, metavar="N", help=f"default {VOCABULARY}")
    args = parser.parse_args(argv)
    try:
        prepare(args.source, args.out, args.vocab_size)
    except AlignerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def prepare(source: str, out: str, vocab_size: int = VOCABULARY) -> Made:
    """Read `source`, write all files below `out` and print their sizes.

    Raises DataError for a missing file, malformed JSON, other columns, an answer without `####` or solutions that make
    no pair, before anything is written; ConfigError for `out` or `vocab_size`."""
    from aligner.data.tokenizer import train_tokenizer

    made = read(source)
    root = Path(out).expanduser()
    parts = {"train": made.train, "test": made.test} | {f"pairs_{name}": rows for name, rows in made.pairs.items()}
    try:
        # the tokenizer first: it checks vocab_size. It learns from the train split alone.
        texts = (row["prompt"] + row["completion"] for row in made.train)
        tokenizer = train_tokenizer(texts, str(root / "tokenizer"), vocab_size, chat_template=None)  # plain texts
        for name, rows in parts.items():
            write_jsonl(rows, str(root / f"{name}.jsonl"))
    except OSError as error:
        raise ConfigError("--out", out, "a folder that can be written", str(error)) from error
    for name, rows in parts.items():
        problems = len({row["prompt"] for row in rows})
        print(f"{root / name}.jsonl: {len(rows)} rows, {problems} problems")
    print(f"{root / 'tokenizer'}: {len(tokenizer)} tokens, trained on {TRAIN} alone")
    print(f"The pairs are about problems of {TEST}: their reward model must not judge or train what is tested on it.")
    return made


def read(source: str) -> Made:
    """Read the rows of the three files of the folder `source`. Raises DataError."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise DataError(f"SOURCE_FOLDER={source!r}: expected a folder with {TRAIN}, {TEST} and {SOLUTIONS}")
    missing = [name for name in (TRAIN, TEST, SOLUTIONS) if not (folder / name).is_file()]
    if missing:
        lack = " and no ".join(missing)
        raise DataError(f"SOURCE_FOLDER={source!r}: expected {TRAIN}, {TEST} and {SOLUTIONS} there, found no {lack}")
    train, test, labelled = (read_rows(str(folder / name), "SOURCE_FOLDER") for name in (TRAIN, TEST, SOLUTIONS))
    made = Made(_problems(train), _problems(test), split(_pairs(labelled), PAIR_SPLITS))
    shared = {row["prompt"] for row in made.train} & {row["prompt"] for row in made.test}
    if shared:
        raise DataError(
            f"SOURCE_FOLDER={source!r}: expected no question in both {TRAIN} and {TEST}, found {len(shared)}, such as "
            f"{min(shared)[:80]!r}"
        )
    for name, pairs in made.pairs.items():
        if not pairs:
            raise DataError(
                f"{folder / SOLUTIONS}: expected problems with a correct and an incorrect solution for pairs_train and "
                f"pairs_test, found too few: pairs_{name} is empty"
            )
    return made


def _problems(rows: Rows) -> list[Row]:
    """Return {prompt, completion, answer}: the completion is the worked solution, the answer its last line, as in
    `#### 42`."""
    problems = []
    for index, row in enumerate(rows):
        where = rows.where(index)
        question, solution = _string(row, "question", where), _string(row, "answer", where)
        final = _MARK.search(solution)
        if final is None:
            raise DataError(f"{where}: expected `answer` to end in `#### <number>`, found {solution[-60:]!r}")
        problems.append({"prompt": prompt(question), "completion": solution, "answer": f"#### {final[1].strip()}"})
    return problems


def _pairs(rows: Rows) -> list[Row]:
    """Pair every correct solution of a problem with every incorrect one of the same problem; no text pair twice."""
    pairs: dict[tuple[str, str, str], Row] = {}
    for index, row in enumerate(rows):
        where = rows.where(index)
        question = prompt(_string(row, "question", where))
        solutions = [_solution(value, name, where) for name, value in row.items() if isinstance(value, Mapping)]
        if not solutions:
            raise DataError(
                f"{where}: expected columns {{is_correct, solution}} of at least one model, found {', '.join(row)}"
            )
        for good_name, correct, good in solutions:
            for bad_name, other_correct, bad in solutions:
                if correct and not other_correct and good != bad:
                    names = {"chosen_by": good_name, "rejected_by": bad_name}
                    pair = {"prompt": question, "chosen": good, "rejected": bad} | names
                    pairs.setdefault((question, good, bad), pair)
    return list(pairs.values())


def _solution(value: Mapping[str, Any], name: str, where: str) -> tuple[str, bool, str]:
    correct, text = value.get("is_correct"), value.get("solution")
    if not isinstance(correct, bool) or not isinstance(text, str) or not text:
        raise DataError(
            f"{where}: expected `{name}` to be {{is_correct: true or false, solution: text}}, found {str(value)[:80]}"
        )
    # these end in `A: 42`, the answers of train and test in `#### 42`: one form for all
    return name, correct, _LABELLED_END.sub("\n#### ", text)


def prompt(question: str) -> str:
    """Return the text that the model continues: the question and a line break."""
    return question.strip() + "\n"


def _string(row: Mapping[str, Any], column: str, where: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        have = ", ".join(f"{name} ({type(v).__name__})" for name, v in row.items()) or "none"
        raise DataError(f"{where}: expected a text in the column `{column}`, found the columns {have}")
    return value


if __name__ == "__main__":
    sys.exit(main())
