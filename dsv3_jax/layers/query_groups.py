"""Absorbed attention of many new tokens per sequence, such as those of a prefill chunk.

The tokens are attended to in groups, each like a sequence of its own in a decode step: it ends with
its own last token, so that it reads no more of the cache than it sees. Groups of all chunks and
lengths are spread evenly over the device, whatever the length of their context.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

GROUP_TOKENS = 8
"""Tokens of a group. With 16 heads they fill two tiles of the Hopper kernels. It is more than a
decode step has, drafts included."""


def num_groups(tokens: int) -> int:
    """Returns the number of groups of a sequence with ``tokens`` new tokens."""
    return -(-tokens // GROUP_TOKENS) if tokens > GROUP_TOKENS else 1


def split(x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "groups t *rest"]:
    """Returns the groups of all sequences, padded at the end of each sequence."""
    B, T = x.shape[:2]
    if (groups := num_groups(T)) == 1:
        return x
    padding = ((0, 0), (0, groups * GROUP_TOKENS - T), *((0, 0),) * (x.ndim - 2))
    return jnp.pad(x, padding).reshape(B * groups, GROUP_TOKENS, *x.shape[2:])


def join(x: Shaped[Array, "groups t *rest"], tokens: int) -> Shaped[Array, "B T *rest"]:
    """Returns the sequences whose groups are ``x``."""
    if (groups := num_groups(tokens)) == 1:
        return x
    whole = x.reshape(-1, groups * x.shape[1], *x.shape[2:])
    return whole[:, :tokens]


def tables_and_lengths(
    block_tables: Int[Array, "B max_pages"],
    starts: Int[Array, " B"],
    valid: Bool[Array, "B T"],
) -> tuple[Int[Array, "groups max_pages"], Int[Array, " groups"]]:
    """Returns the pages of each group, and its length with its own tokens, padding included.

    A group of padding alone has length 0.
    """
    T = valid.shape[1]
    if (groups := num_groups(T)) == 1:
        # Padded queries count too, so that query t sees exactly the t tokens before it.
        return block_tables, starts + T
    first = GROUP_TOKENS * jnp.arange(groups)
    # The tokens of a sequence come before its padding.
    lengths = jnp.where(valid[:, ::GROUP_TOKENS], starts[:, None] + first + GROUP_TOKENS, 0)
    return jnp.repeat(block_tables, groups, axis=0), lengths.reshape(-1)
