"""Windows of the stream: what an epoch covers, and where an iterator goes on."""

import numpy as np
import pytest

from dsv3_jax.training.batches import TrainingBatches, held_out_batches, target_count

STREAM = np.arange(1000, 1107).astype(np.uint16)  # a token tells its place


def take(batches: TrainingBatches, count: int) -> list[np.ndarray]:
    return [next(batches) for _ in range(count)]


@pytest.mark.parametrize("rows", [1, 4, 30])
def test_batches_are_windows_of_the_stream(rows):
    for batch in take(TrainingBatches(STREAM, batch=rows, length=10, seed=0), 20):
        assert batch.dtype == np.int32
        assert batch.shape == (rows, 10)
        starts = batch[:, :1]
        np.testing.assert_array_equal(batch, starts + np.arange(10))
        assert starts.min() >= 1000
        assert batch.max() < 1107


def test_an_epoch_has_every_window_once_and_its_own_offset_and_order():
    """107 tokens and 10 a window: 9 windows an epoch, 3 batches of 3."""
    batches = TrainingBatches(STREAM, batch=3, length=10, seed=0)
    offsets, orders = [], []
    for _ in range(6):
        starts = np.concatenate([b[:, 0] for b in take(batches, 3)]) - 1000
        offsets.append(starts.min())
        orders.append(((starts - starts.min()) // 10).tolist())
        np.testing.assert_array_equal(np.sort(starts), offsets[-1] + 10 * np.arange(9))
    assert len(set(offsets)) > 2
    assert len(set(map(tuple, orders))) == 6
    assert orders[0] != sorted(orders[0])


def test_a_stream_of_one_window():
    (batch,) = take(TrainingBatches(STREAM[:10], batch=3, length=10, seed=0), 1)
    np.testing.assert_array_equal(batch, np.tile(STREAM[:10], (3, 1)))
    with pytest.raises(ValueError, match="one sequence of 11 tokens, got 10 tokens"):
        TrainingBatches(STREAM[:10], batch=1, length=11, seed=0)


def test_seeds_decide():
    one, same, other = (take(TrainingBatches(STREAM, 4, 10, seed), 5) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_restored_iterator_goes_on(at):
    """In the middle of an epoch, while threads have read further than was asked for."""
    first = TrainingBatches(STREAM, 4, 10, seed=3)
    take(first, at)
    state = first.state
    want = take(first, 9)
    second = TrainingBatches(STREAM, 4, 10, seed=3)
    take(second, 2)
    second.restore(state)
    np.testing.assert_array_equal(take(second, 9), want)


def test_held_out_batches_cover_the_stream_once():
    batches = held_out_batches(STREAM, batch=4, length=10, bos=0)
    rows = np.concatenate(batches)
    assert [b.shape for b in batches] == [(4, 10)] * 3
    np.testing.assert_array_equal(rows.reshape(-1)[:107], STREAM)
    assert (rows.reshape(-1)[107:] == 0).all()
    # Each row predicts all of its tokens but the first; the last one has 7 of 10, and fillings.
    assert [target_count(b, bos=0) for b in batches] == [36, 36, 2 * 9 + 6]


def test_a_limit_spreads_the_windows():
    (batch,) = held_out_batches(STREAM, batch=3, length=10, bos=0, limit=1)
    np.testing.assert_array_equal(batch[:, 0], [1000, 1050, 1100])
    assert len(held_out_batches(STREAM, batch=3, length=10, bos=0, limit=100)) == 4
