"""Windows of a token stream, in batches: shuffled for ever for training, in order for evaluation.

grain draws the training batches: batch i is a function of the seed and i alone, so the state of the
iterator is one number, and reading runs ahead of the device in threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32, Integer

from dsv3_jax import words


def check_length(tokens: Integer[np.ndarray, " N"], length: int) -> None:
    """Raises ValueError if a stream to train on is shorter than one window."""
    if len(tokens) < length:
        raise ValueError(
            f"data: expected at least one window of length {length}, "
            f"got {words.counted(len(tokens), 'token')} to train on"
        )


class TrainingBatches:
    """An endless iterator of int32 [B, T] windows.

    An epoch cuts the stream into neighbouring windows, at an offset of its own, and goes through
    them in an order of its own; a batch may hold the end of one epoch and the beginning of the
    next.

    Raises:
      ValueError: the stream is shorter than one window.
    """

    def __init__(self, tokens: Integer[np.ndarray, " N"], batch: int, length: int, seed: int):
        check_length(tokens, length)
        self._tokens, self._length, self._seed = tokens, length, seed
        # One window less than there could be: what is left over gives the offset its room.
        self._windows = max(len(tokens) // length - 1, 1)
        # Without a number of epochs grain counts past what len() can say where batch is 1.
        epochs = (1 << 62) // self._windows
        places = grain.MapDataset.range(self._windows).seed(seed).shuffle().repeat(epochs)
        batches = places.map_with_index(self._window).batch(batch)
        ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
        self._iterator = iter(batches.to_iter_dataset(ahead))

    def _window(self, index: int, place: int) -> Int32[np.ndarray, " T"]:
        epoch = index // self._windows
        room = min(len(self._tokens) - self._windows * self._length + 1, self._length)
        offset = int(np.random.default_rng([self._seed, epoch]).integers(room))
        start = offset + place * self._length
        return self._tokens[start : start + self._length].astype(np.int32)

    def __iter__(self) -> Iterator[Int32[np.ndarray, "B T"]]:
        return self

    def __next__(self) -> Int32[np.ndarray, "B T"]:
        return next(self._iterator)

    @property
    def state(self) -> dict[str, Any]:
        """Where the iterator stands: JSON, to be given to :meth:`restore`."""
        return self._iterator.get_state()

    def restore(self, state: dict[str, Any]) -> None:
        self._iterator.set_state(state)


def held_out_batches(
    tokens: Integer[np.ndarray, " M"], batch: int, length: int, bos: int, limit: int = 0
) -> list[Int32[np.ndarray, "B T"]]:
    """Neighbouring windows of the stream, the last one filled up with BOS.

    So is the last batch. A place whose target is BOS counts in no loss, so the filling counts
    nowhere; :func:`counted` gives the number of those that count.

    Args:
      limit: batches at most, of windows spread over the stream; 0 takes all.
    """
    count = -(-len(tokens) // length)
    places = range(count)
    if 0 < limit * batch < count:
        places = np.linspace(0, count - 1, limit * batch).round().astype(int)
    rows = np.full((-(-len(places) // batch) * batch, length), bos, np.int32)
    for row, place in zip(rows, places, strict=False):
        window = tokens[place * length : (place + 1) * length]
        row[: len(window)] = window
    return list(rows.reshape(-1, batch, length))


def counted(tokens: Int32[np.ndarray, "B T"], bos: int, ahead: int = 1) -> int:
    """Returns how many positions count when position i predicts token i+ahead: all but those with a
    BOS among tokens i+1 to i+ahead, as in :func:`~dsv3_jax.training.losses.counted_places`."""
    starts = tokens == bos
    span = tokens.shape[1] - ahead
    crossed = np.zeros_like(starts[:, :span])
    for step in range(1, ahead + 1):
        crossed |= starts[:, step : step + span]
    return int(np.count_nonzero(~crossed))
