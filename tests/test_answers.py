"""The log of answers from outside: what a start reads, and what it forgets."""

import pytest

from aligner.answers import AnswerLog
from aligner.errors import WriteError


def test_a_start_reads_what_earlier_ones_were_told_and_not_what_others_are_writing(tmp_path):
    first, second = (AnswerLog(tmp_path, rank) for rank in range(2))
    for step in (1, 2):
        first.begin(step)
        first.write("a", 0, {"q": step}, {"value": step})
        if step == 1:  # before it has begun, so that it looks like an earlier start's
            second.begin(step)
            assert second.find("a", 0, {"q": 1}) == {"value": 1}
    second.begin(2)
    assert second.find("a", 0, {"q": 2}) is None
    later = AnswerLog(tmp_path, 1)
    later.begin(2)
    assert later.find("a", 0, {"q": 2}) == {"value": 2} and later.find("a", 0, {"q": 1}) is None


def test_failures_of_a_rollout_that_is_given_up_and_of_later_ones_are_asked_again(tmp_path):
    logs = [AnswerLog(tmp_path, rank) for rank in range(2)]
    for log, step in ((logs[0], 1), (logs[0], 2), (logs[1], 3)):
        log.begin(step)
        log.write("a", 0, {}, {"value": step})
        log.write("a", 1, {}, {"failed": "hung"})
    logs[0].forget_failures()
    log = AnswerLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.begin(step)
        assert log.find("a", 0, {}) == {"value": step}
        assert (log.find("a", 1, {}) is None) == (step > 1)


DAMAGE = {
    "a kill": (lambda lines: [*lines[:3], lines[3][:-9]], 1),
    "a bit": (lambda lines: [lines[0].replace("value", "walue"), *lines[1:]], 1),
    "text": (lambda lines: [*lines, "oops", "{}"], 2),
    "zeros": (lambda lines: ["\0" * 300, *lines[1:]], 1),
    "no UTF-8": (lambda lines: [lines[0] + "\udcff", *lines[1:]], 1),
    "blank lines": (lambda lines: ["", *lines, "", ""], 0),
    "nothing": (lambda lines: lines, 0),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_lines_that_are_damaged_are_reported_once_and_asked_again(tmp_path, capsys, kind):
    damage, count = DAMAGE[kind]
    log = AnswerLog(tmp_path, 0)
    log.begin(1)
    for number in range(4):
        log.write("a", number, {}, {"value": "x\u2028y\x0c\x85"})
    log.close()
    (path,) = tmp_path.iterdir()
    whole = path.read_text().splitlines()
    path.write_bytes("\n".join(damage(whole)).encode(errors="surrogateescape"))
    known = 0
    for rank in range(3):
        again = AnswerLog(tmp_path, rank)
        again.begin(1)
        again.begin(1)
        known = sum(again.find("a", number, {}) is not None for number in range(4))
    output = capsys.readouterr().err.splitlines()
    assert known == (4 if kind == "text" else 4 - count) and len(output) == bool(count)
    assert all(str(path) in line and f"{count} line" in line for line in output)
    path.unlink()


def test_files_are_made_with_their_first_answer(tmp_path):
    log = AnswerLog(tmp_path / "answers", 3)
    for step in (1, 2, 3):
        log.begin(step)
        if step == 2:
            log.write("a", 0, {}, {"value": step})
    assert [path.name for path in tmp_path.rglob("*.jsonl")] == ["step-00000002-rank-00003.jsonl"]
    log.forget_failures(1)  # none of which would be left
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1
    log.begin(4)
    log.write("a", 0, {}, {"failed": "hung"})
    AnswerLog(tmp_path / "answers", 0).forget_failures(2)
    assert [path.name for path in tmp_path.rglob("*.jsonl")] == ["step-00000002-rank-00003.jsonl"]


def test_rollouts_that_no_start_goes_through_any_more_are_dropped_by_rank_0(tmp_path):
    logs = [AnswerLog(tmp_path, rank) for rank in range(3)]
    for step in (9, 10, 11, 100_000_000):
        for log in logs:
            log.begin(step)
            log.write("a", 0, {}, {"value": step})
    others = ["notes.txt", "step-1.bak", "step-00000001-rank-00000.jsonl.bak", "step-\u00b2\u00b2-rank-00000.jsonl"]
    for name in others:
        (tmp_path / name).write_text("mine")
    logs[1].drop(11)
    assert len(list(tmp_path.iterdir())) == 12 + len(others)
    logs[0].drop(11)
    kept = sorted(path.name for path in tmp_path.iterdir() if path.name not in others)
    assert kept == [f"step-{step:08d}-rank-{rank:05d}.jsonl" for step in (11, 100_000_000) for rank in range(3)]
    assert len(list(tmp_path.iterdir())) == 6 + len(others)
    for log in logs:  # which write on
        log.write("a", 1, {}, {"value": 0})
    later = AnswerLog(tmp_path, 0)
    later.begin(11)
    assert later.find("a", 0, {}) == {"value": 11}


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.write_bytes(bytes(range(256)) * 99)])
@pytest.mark.parametrize(
    "name", ["step-00000001-rank-00001.jsonl", "step-1.bak", "\u00b2", "step--0000001-rank-00000.jsonl"]
)
def test_strange_files_are_reported_in_a_line_and_end_no_start(tmp_path, capsys, name, make):
    make(tmp_path / name)
    for rank in range(2):
        log = AnswerLog(tmp_path, rank)
        log.begin(1)
        assert log.find("a", 0, {}) is None
        log.begin(2)
    log.forget_failures(1)
    AnswerLog(tmp_path, 0).drop(9)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_log_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "answers").write_text("")
    (tmp_path / "other" / "step-00000001-rank-00000.jsonl").mkdir(parents=True)
    for folder in ("answers", "other"):
        log = AnswerLog(tmp_path / folder, 0)
        log.begin(1)
        with pytest.raises(WriteError, match="answers from outside cannot be kept"):
            log.write("a", 0, {}, {})
