"""Interface between a decoder layer and its attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv3_jax.layers.paged_cache import LayerCache, LayerCacheSpec, LayerPages
from dsv3_jax.layers.rope import Rotation

Form = Literal["expanded", "absorbed"]
"""Order of the sums of latent attention, see :mod:`dsv3_jax.layers.attention`."""


class Attention(Protocol):
    """The methods that a decoder layer calls."""

    def __call__(
        self, x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T D"], Array]:
        """Returns causal self-attention of whole sequences, and what a cache would store."""
        ...

    def extend(
        self, x: Float[Array, "B T D"], rotation: Rotation, cache: LayerCache, form: Form
    ) -> tuple[Float[Array, "B T D"], LayerPages]:
        """Returns attention of T new tokens per sequence to the cached ones and themselves.

        The second result is the page arrays with the new tokens.
        """
        ...

    def extend_batches(
        self,
        x: Float[Array, "_ _ D"],
        rotation: Rotation,
        caches: Sequence[LayerCache],
        forms: Sequence[Form],
    ) -> tuple[Float[Array, "_ _ D"], LayerPages]:
        """Like ``extend`` for the joined tokens of several batches."""
        ...

    def cache_spec(self, dtype: DTypeLike) -> LayerCacheSpec:
        """Returns the page arrays that the layer caches, for activations of ``dtype``."""
        ...

    def precompute_for_decode(self, dtype: DTypeLike) -> None:
        """Computes once what every decode step needs from the weights."""
        ...


class AbsorbedQueries(NamedTuple):
    """The queries of attention in absorbed form, when the new tokens are in the cache."""

    q_latent: Float[Array, "B T H C"]
    q_rope: Float[Array, "B T H R"]
    pages: LayerPages
