"""The log of answers from outside: what a start reads, and what it forgets."""

from aligner.answers import AnswerLog


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
