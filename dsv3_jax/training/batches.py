"""Batches of sequences from a token stream: shuffled and endless for training, in order for
evaluation.

grain shuffles the training sequences. Batch i depends only on the seed and i, so the state of the
iterator is one number, and threads can read ahead of the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32, Integer

from dsv3_jax import words
from dsv3_jax.training.corpus import EndToken


def check_length(tokens: Integer[np.ndarray, " N"], length: int) -> None:
    """Checks that a training stream is at least as long as one sequence.

    Raises:
      ValueError: it is shorter.
    """
    if len(tokens) < length:
        raise ValueError(
            f"data: expected at least one sequence of {length} tokens, "
            f"got {words.counted(len(tokens), 'token')} to train on"
        )


class TrainingBatches:
    """An endless iterator over int32 [B, T] batches.

    Each epoch cuts the stream into consecutive sequences, at an offset of its own, and shuffles
    them. A batch may contain the end of one epoch and the beginning of the next.

    Raises:
      ValueError: the stream is shorter than one sequence.
    """

    def __init__(self, tokens: Integer[np.ndarray, " N"], batch: int, length: int, seed: int):
        check_length(tokens, length)
        self._tokens, self._length, self._seed = tokens, length, seed
        # One sequence fewer than would fit: the remaining tokens leave room for the offset.
        self._sequences = max(len(tokens) // length - 1, 1)
        # Without a number of epochs, grain counts beyond what len() can return if batch is 1.
        epochs = (1 << 62) // self._sequences
        indices = grain.MapDataset.range(self._sequences).seed(seed).shuffle().repeat(epochs)
        batches = indices.map_with_index(self._sequence).batch(batch)
        read_options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
        self._iterator = iter(batches.to_iter_dataset(read_options))

    def _sequence(self, count: int, index: int) -> Int32[np.ndarray, " T"]:
        """Returns the tokens of a sequence.

        Args:
          count: number of earlier sequences in the run, which determines the epoch.
          index: index of the sequence in the stream.
        """
        epoch = count // self._sequences
        room = min(len(self._tokens) - self._sequences * self._length + 1, self._length)
        offset = int(np.random.default_rng([self._seed, epoch]).integers(room))
        start = offset + index * self._length
        return self._tokens[start : start + self._length].astype(np.int32)

    def __iter__(self) -> Iterator[Int32[np.ndarray, "B T"]]:
        return self

    def __next__(self) -> Int32[np.ndarray, "B T"]:
        return next(self._iterator)

    @property
    def state(self) -> dict[str, Any]:
        """State of the iterator in JSON types, for :meth:`restore`."""
        return self._iterator.get_state()

    def restore(self, state: dict[str, Any]) -> None:
        """Sets the iterator to an earlier :attr:`state`."""
        self._iterator.set_state(state)


def held_out_batches(
    tokens: Integer[np.ndarray, " M"], batch: int, length: int, bos: int, limit: int = 0
) -> list[Int32[np.ndarray, "B T"]]:
    """Returns consecutive sequences of the stream, in batches.

    The last sequence and the last batch are padded with BOS, or with the token that ends documents.
    Padding contributes to no loss, because a position has no loss if its target begins a document;
    :func:`target_count` counts the others.

    Args:
      limit: maximum number of batches. Their sequences are spread over the stream. 0 means all.
    """
    count = -(-len(tokens) // length)
    indices = range(count)
    if 0 < limit * batch < count:
        indices = np.linspace(0, count - 1, limit * batch).round().astype(int)
    sequences = np.full((-(-len(indices) // batch) * batch, length), bos, np.int32)
    for sequence, index in zip(sequences, indices, strict=False):
        window = tokens[index * length : (index + 1) * length]
        sequence[: len(window)] = window
    return list(sequences.reshape(-1, batch, length))


def target_count(tokens: Int32[np.ndarray, "B T"], bos: int, ahead: int = 1) -> int:
    """Returns the number of targets when position i predicts token i+ahead.

    Positions with the beginning of a document among tokens i+1 to i+ahead have none. This is the
    NumPy counterpart of :func:`~dsv3_jax.training.losses.target_mask`.
    """
    starts = tokens == bos
    if isinstance(bos, EndToken):
        starts = np.pad(starts, ((0, 0), (1, 0)))[:, :-1]
    span = tokens.shape[1] - ahead
    crossed = np.zeros_like(starts[:, :span])
    for step in range(1, ahead + 1):
        crossed |= starts[:, step : step + span]
    return int(np.count_nonzero(~crossed))
