"""What changed and nothing else: any numbers, any gaps; what counts as held by the others."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aligner.errors import RefitError
from aligner.refit.changes import LIMIT, SKIP, WHOLE, Changes, Head, apply, encode
from aligner.refit.plan import EngineGrid, TrainerGrid
from tests.tiny import LLAMA, MODELS

NUMBERS = [0.0, -0.0, 1.0, float("nan"), float("inf")]


@given(
    st.lists(st.integers(0, 4 * SKIP), max_size=20), st.sampled_from([torch.bfloat16, torch.float32]), st.integers(0)
)
def test_changed_numbers_and_their_places_are_all_that_is_needed(gaps, dtype, seed):
    chance = torch.Generator().manual_seed(seed % 1000)
    at, last = [], -1
    for gap in gaps:
        last += gap + 1
        at.append(last)
    old = torch.tensor(NUMBERS)[torch.randint(5, (last + 2 + LIMIT * len(at),), generator=chance)].to(dtype)
    new = old.clone()
    new[at] = -old[at].nan_to_num(2.0)  # 0 becomes -0, which is another number here
    count, data = encode(old, new)
    assert count == len(at)
    assert data.nbytes == count * (dtype.itemsize + 1) + sum(gap // SKIP for gap in gaps)
    apply(data, count, old)
    kind = torch.int16 if dtype is torch.bfloat16 else torch.int32
    assert torch.equal(old.view(kind), new.view(kind))


def test_too_many_changes_are_not_worth_it():
    old = torch.zeros(100)
    for count, worth in ((12, True), (13, False)):
        new = old.clone()
        new[:count] = 1
        assert (encode(old, new) is not None) == worth


def test_what_a_run_builds_on_has_succeeded_everywhere():
    sender, receiver, words = Changes(), Changes(), torch.arange(100.0)

    def run(committed=True) -> Head:
        sender.begin(), receiver.begin()
        head, data = sender.pack(7, words)
        if head.changed != WHOLE:
            receiver.unpack(head, data, held)
        held.copy_(words)
        if committed:
            sender.commit(), receiver.commit()
        return head

    held = words.clone()
    assert run() == Head(400)
    assert run() == Head(0, 0, 1)
    words[3] = -1
    assert run(committed=False) == Head(5, 1, 2)
    assert run() == Head(400), "nobody knows what came of the last one"
    assert run().changed == 0
    receiver = Changes()  # of a new process
    with pytest.raises(RefitError, match="since run 5 came to an engine that is as it was before any that succeeded"):
        run()


CASES = {  # world, model, trainer, engines, engine's dtype
    "tp2 to 2 engines": (2, MODELS["qwen3"], TrainerGrid(2, 2), EngineGrid((0, 1)), torch.bfloat16),
    "one to two others": (3, LLAMA, TrainerGrid(2), EngineGrid((1, 2)), torch.bfloat16),
    "pp2 to tp2, other ranks": (4, LLAMA, TrainerGrid(2, 1, 2), EngineGrid((2, 3), 2), torch.float32),
}


@pytest.mark.multirank
@pytest.mark.parametrize("name", CASES)
def test_engines_hold_what_whole_messages_bring(ranks, name):
    world, cfg, trainer, engines, dtype = CASES[name]
    told = ranks.run("tests.refit.jobs:followed", world=world, cfg=cfg, trainer=trainer, engines=engines, dtype=dtype)
    check_followed([told[rank] for rank in engines.ranks])


def check_followed(told):
    """Of ranks with engines, by what `jobs.FOLLOWED` says of each run."""
    for runs in told:
        assert all(run["same"] for run in runs)
        first, same, few, all_, few_again, failed, after = (run["wire"] for run in runs)
        assert first == all_ == after == runs[0]["whole"] and same == 0
        assert 0 < few < first / 8 and 0 < few_again < first / 8
        assert failed < first / 8
