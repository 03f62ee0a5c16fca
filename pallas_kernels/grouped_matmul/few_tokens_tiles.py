"""Tiles of the few-token matmul kernel, and choices among what is compiled for them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.few_tokens_plan import Plan
from pallas_kernels.grouped_matmul.tile_scheduler import GroupTiles
from pallas_kernels.hopper.branch import when


class Tile(NamedTuple):
    """A number of output features by the tokens of a group. All fields are int32."""

    group: Any

    token: Any
    """First token."""

    tokens: Any
    """Number of tokens."""

    matrix: Any
    """Index of the matrix in its group."""

    k_slice: Any
    """Index of the slice of K, with split-K."""

    feature: Any
    """First feature. The last tile is moved back to end at N, so that it overlaps the one before
    it."""

    own_feature: Any
    """First feature that no other tile writes."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of one thread block, which takes them round-robin."""

    plan: Plan
    groups: GroupTiles
    block: Any
    """Index of the thread block."""

    def count(self) -> Any:
        """Returns the number of the block's tiles.

        Each role computes it for itself, so that it takes no register meanwhile.
        """
        plan = self.plan
        total = self.groups.count() * (plan.matrices * plan.feature_tiles * plan.config.split_k)
        return lax.div(total - self.block + (plan.thread_blocks - 1), jnp.int32(plan.thread_blocks))

    def locate(self, i: Any) -> Tile:
        """Returns the block's i-th tile."""
        plan, N, features = self.plan, self.plan.weights.N, self.plan.config.features
        t, indices = self.block + i * plan.thread_blocks, []
        for choices in (plan.config.split_k, plan.feature_tiles, plan.matrices):
            indices.append(jnp.int32(0) if choices == 1 else lax.rem(t, jnp.int32(choices)))
            t = t if choices == 1 else lax.div(t, jnp.int32(choices))
        k_slice, feature_tile, matrix = indices
        own_feature = feature_tile * features
        feature = jnp.minimum(own_feature, N - features) if N % features else own_feature
        return Tile(*self.groups.locate(t), matrix, k_slice, feature, own_feature)


def for_matrix(plan: Plan, matrix: Any, body: Callable[[int], None]) -> None:
    """Runs ``body(n)`` for the static index n that equals ``matrix``."""
    for n in range(plan.matrices):
        if plan.matrices == 1:
            body(n)
        else:
            when(matrix == n)(functools.partial(body, n))


def for_width(plan: Plan, tokens: Any, body: Callable[[int, int], None]) -> None:
    """Runs ``body(n, width)`` for the narrowest of the token widths that holds a tile."""
    widths, max_tokens, low = plan.config.token_widths, plan.config.max_tokens, 0
    for n, width in enumerate(widths):
        if len(widths) == 1:
            body(n, width)
        else:
            high = width if width != max_tokens else max_tokens + 1
            when((tokens > low) & (tokens <= high))(lambda n=n, width=width: body(n, width))
        low = width
