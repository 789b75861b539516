import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.data.stream import IndexStream
from aligner.errors import CheckpointError, ConfigError

SIZES = st.integers(1, 40)


@given(size=SIZES, batch=st.integers(1, 50), seed=st.integers(0, 9), shuffle=st.booleans())
@settings(deadline=None)
def test_each_epoch_visits_each_row_once(size, batch, seed, shuffle):
    stream = IndexStream(size, seed, shuffle, batch)
    rows = np.concatenate([stream.next() for _ in range(-(-3 * size // batch))])[: 3 * size]
    for epoch in rows.reshape(3, size):
        assert sorted(epoch.tolist()) == list(range(size))


@given(size=SIZES, batch=st.integers(1, 50), steps=st.integers(0, 9))
def test_the_same_sequence_goes_on_after_a_restore(size, batch, steps):
    stream = IndexStream(size, 3, True, batch)
    for step in range(steps):
        np.testing.assert_array_equal(stream.batch_at(step), stream.next())
    resumed = IndexStream(size, 3, True, batch)
    resumed.load_state_dict(stream.state_dict())
    for _ in range(4):
        np.testing.assert_array_equal(resumed.next(), stream.next())


def test_batches_are_slices_of_one_order_whatever_their_size():
    def rows(batch):
        stream = IndexStream(10, 5, True, batch)
        return np.concatenate([stream.next() for _ in range(60 // batch)]).tolist()

    assert rows(2) == rows(3) == rows(20) == rows(60)


def test_seed_and_epoch_change_the_order_and_shuffle_off_does_not():
    first, other = IndexStream(50, 0, True, 50), IndexStream(50, 1, True, 50)
    assert first.batch_at(0).tolist() != first.batch_at(1).tolist() != other.batch_at(0).tolist()
    plain = IndexStream(5, 0, False, 4)
    assert [plain.next().tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]
    assert plain.epoch == 12 / 5


def test_batch_at_does_not_move_the_cursor_and_is_random_access():
    stream = IndexStream(7, 0, True, 3)
    late = stream.batch_at(9).tolist()
    assert stream.cursor == 0
    for _ in range(9):
        stream.next()
    assert stream.next().tolist() == late


def test_resume_with_another_batch_size_continues_at_the_same_row():
    stream = IndexStream(12, 0, True, 4)
    taken = [*stream.next(), *stream.next()]
    resumed = IndexStream(12, 99, True, 2)
    resumed.load_state_dict(stream.state_dict())
    assert sorted([*taken, *resumed.next(), *resumed.next()]) == list(range(12))


def test_another_dataset_size_is_refused():
    with pytest.raises(CheckpointError, match=r"dataset of 5 rows, found 6"):
        IndexStream(6, 0).load_state_dict(IndexStream(5, 0).state_dict())


@pytest.mark.parametrize("size, batch", [(0, 1), (3, 0)])
def test_a_batch_that_no_dataset_fills_is_refused(size, batch):
    with pytest.raises(ConfigError):
        IndexStream(size, 0, True, batch)
