"""Refusals of input that a model cannot run: shapes and dtypes always, values where they are known.

Inside ``jax.jit`` values are not known. The methods of :class:`~dsv3_jax.model.DeepSeekV3` document
what happens to wrong ones there.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from dsv3_jax.config import ModelConfig
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.words import counted


def check_tokens(config: ModelConfig, tokens: Any, *, mtp: bool) -> None:
    """Raises ValueError unless ``tokens`` are ids [B, T] of whole sequences.

    Args:
      mtp: the MTP layers run too. Layer k predicts T - 1 - k tokens, so each needs one more.
    """
    _check_ids(tokens)
    T, reach = tokens.shape[1], config.max_position_embeddings
    shortest = 1 + config.num_nextn_predict_layers if mtp else 1
    if not shortest <= T <= reach:
        layers = f" for {shortest - 1} MTP layers" if mtp and shortest > T else ""
        raise ValueError(
            f"tokens: expected {shortest} to {reach} (max_position_embeddings) a sequence{layers},"
            f" got {T}"
        )
    ids = _values(tokens)
    if ids is not None and (ids.min() < 0 or ids.max() >= config.vocab_size):
        wrong = ids[(ids < 0) | (ids >= config.vocab_size)]
        raise ValueError(f"tokens: expected ids from 0 to {config.vocab_size - 1}, got {wrong[0]}")


def check_extension(
    config: ModelConfig, tokens: Any, starts: Any, counts: Any, cache: LatentKVCache
) -> None:
    """Raises ValueError unless ``tokens`` are ids [B, T], ``starts`` and ``counts`` [B] of the
    cache's B sequences, and all ``starts + counts`` tokens have room, if they are known."""
    _check_ids(tokens)
    B = len(cache.block_tables)
    shapes = tokens.shape[:1], np.shape(starts), np.shape(counts)
    if shapes != ((B,),) * 3:
        raise ValueError(
            f"tokens, starts, counts: expected {counted(B, 'sequence')} as the cache has, got"
            f" shapes {tokens.shape}, {shapes[1]} and {shapes[2]}"
        )
    known = _values(starts), _values(counts)
    if known[0] is None or known[1] is None:
        return
    length, limit = int((known[0] + known[1]).max()), cache.limit(config)
    if length > limit:
        which = "max_position_embeddings" if limit < cache.room else "the cache's room"
        raise ValueError(
            f"cache: expected sequences of at most {counted(limit, 'token')} ({which}), got"
            f" {length}"
        )


def _check_ids(tokens: Any) -> None:
    if not isinstance(tokens, jax.Array | np.ndarray):
        raise ValueError(f"tokens: expected an array [B, T], got {type(tokens).__name__}")
    if tokens.ndim != 2:
        raise ValueError(f"tokens: expected shape [B, T], got {tokens.shape}")
    if 0 in tokens.shape:
        raise ValueError(f"tokens: expected a token at least, got shape {tokens.shape}")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens: expected integers, got {tokens.dtype}")


def _values(array: Any) -> np.ndarray | None:
    """On the host, which waits for the device; None for tracers, and for arrays of which a part
    lies with other processes."""
    if isinstance(array, Tracer) or (
        isinstance(array, jax.Array) and not array.is_fully_addressable
    ):
        return None
    return np.asarray(array)
