"""Tests of batches: the sequences of an epoch, and restoring the iterator."""

import numpy as np
import pytest

from dsv3_jax.training.batches import TrainingBatches, held_out_batches, target_count

STREAM = np.arange(1000, 1107).astype(np.uint16)  # each token is 1000 plus its position


def take(batches: TrainingBatches, count: int) -> list[np.ndarray]:
    return [next(batches) for _ in range(count)]


@pytest.mark.parametrize("batch_size", [1, 4, 30])
def test_batches_are_windows_of_the_stream(batch_size):
    for batch in take(TrainingBatches(STREAM, batch=batch_size, length=10, seed=0), 20):
        assert batch.dtype == np.int32
        assert batch.shape == (batch_size, 10)
        starts = batch[:, :1]
        np.testing.assert_array_equal(batch, starts + np.arange(10))
        assert starts.min() >= 1000
        assert batch.max() < 1107


def test_an_epoch_has_every_window_once_and_its_own_offset_and_order():
    """107 tokens in sequences of 10 give 9 sequences per epoch, in 3 batches of 3."""
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
@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_restored_iterator_goes_on(count):
    """The state is that of the consumer, although threads have read ahead."""
    first = TrainingBatches(STREAM, 4, 10, seed=3)
    take(first, count)
    state = first.state
    want = take(first, 9)
    second = TrainingBatches(STREAM, 4, 10, seed=3)
    take(second, 2)
    second.restore(state)
    np.testing.assert_array_equal(take(second, 9), want)


def test_held_out_batches_cover_the_stream_once():
    batches = held_out_batches(STREAM, batch=4, length=10, bos=0)
    sequences = np.concatenate(batches)
    assert [b.shape for b in batches] == [(4, 10)] * 3
    np.testing.assert_array_equal(sequences.reshape(-1)[:107], STREAM)
    assert (sequences.reshape(-1)[107:] == 0).all()
    # Each sequence has a target for every token but the first. The last sequence has 7 tokens and
    # padding.
    assert [target_count(b, bos=0) for b in batches] == [36, 36, 2 * 9 + 6]


def test_a_limit_spreads_the_windows():
    (batch,) = held_out_batches(STREAM, batch=3, length=10, bos=0, limit=1)
    np.testing.assert_array_equal(batch[:, 0], [1000, 1050, 1100])
    assert len(held_out_batches(STREAM, batch=3, length=10, bos=0, limit=100)) == 4
