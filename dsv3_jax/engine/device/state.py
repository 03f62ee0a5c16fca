"""The engine's state on the device: the page pool, and one row for every request slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from dsv3_jax.engine.device.step_input import StepInput
from dsv3_jax.generation.completion import RUNNING, STOPPED
from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.generation.settings import MAX_STOP_TOKENS
from dsv3_jax.kv_cache import PagePool
from dsv3_jax.layers.paged_cache import PAGE_AXES
from sharding import Layout, LogicalAxes

_Tree = TypeVar("_Tree")

REWIND_SEED = 0x9E3779B9
"""Added to a request's seed, modulo 2**32, whenever tokens are removed. A position that is sampled
again must not depend on the random numbers that led to the removed token."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
    """State of R request slots with S tokens each. Every step takes and returns it, donated.

    The device owns the newest tokens: a step reads the token that the step before it wrote here, so
    that the host can dispatch it without knowing that token. A request keeps its slot while it
    runs. The cache holds all its tokens except the last.
    """

    pool: PagePool
    """Cache pages of all requests."""
    tokens: Int[Array, "R S"]
    """Prompt and generated tokens; undefined past ``lengths``."""
    lengths: Int[Array, " R"]
    """Number of tokens."""
    limits: Int[Array, " R"]
    """Length at which the request ends."""
    finished: Int[Array, " R"]
    """RUNNING, STOPPED, FULL or NON_FINITE, see :mod:`dsv3_jax.generation.completion`."""
    sampling: Sampling
    """Sampling settings of each request."""
    mtp_inputs: Float[Array, "R F D"]
    """Hidden states of the newest cached tokens, which the MTP layer has not processed yet. F is
    the largest number of drafts plus 1 if the MTP layer drafts, else 0."""
    num_mtp_inputs: Int[Array, " R"]
    """Number of valid ``mtp_inputs``."""
    routing_counts: Int[Array, "L_moe E"] | None = None
    """Tokens that chose each expert so far; None if routing is not counted."""

    @classmethod
    def empty(
        cls,
        pool: PagePool,
        num_slots: int,
        max_len: int,
        *,
        mtp_inputs: tuple[int, int] = (0, 0),
        dtype: DTypeLike,
        routing_counts: Int[Array, "L_moe E"] | None = None,
    ) -> SlotState:
        """Returns slots without requests. ``mtp_inputs`` are F and D."""
        R = num_slots

        def zeros(*shape: int) -> jax.Array:
            return jnp.zeros((R, *shape), jnp.int32)

        return cls(
            pool=pool,
            tokens=zeros(max_len),
            lengths=zeros(),
            limits=zeros(),
            finished=jnp.full((R,), STOPPED, jnp.int32),
            sampling=Sampling(
                temperature=jnp.zeros((R,), jnp.float32),
                top_k=zeros(),
                top_p=jnp.ones((R,), jnp.float32),
                min_p=jnp.zeros((R,), jnp.float32),
                seed=jnp.zeros((R,), jnp.uint32),
                stop_tokens=jnp.full((R, MAX_STOP_TOKENS), -1, jnp.int32),
            ),
            mtp_inputs=jnp.zeros((R, *mtp_inputs), dtype),
            num_mtp_inputs=zeros(),
            routing_counts=routing_counts,
        )

    @property
    def num_slots(self) -> int:
        """R."""
        return self.tokens.shape[0]

    @property
    def slots(self) -> dict[str, Any]:
        """The arrays, or trees of arrays, with one row for each slot."""
        shared = ("pool", "routing_counts")
        names = [field.name for field in dataclasses.fields(self) if field.name not in shared]
        return {name: getattr(self, name) for name in names}

    def admit(self, inputs: StepInput, rows: SlotRows) -> SlotState:
        """Returns the state in which the step's new requests have their slots."""

        def put(array: Array, values: Array | int) -> Array:
            return rows.set(array, values, inputs.admitted_slots)

        return dataclasses.replace(
            self,
            tokens=put(self.tokens, inputs.prompts),
            lengths=put(self.lengths, inputs.lengths),
            limits=put(self.limits, inputs.limits),
            finished=put(self.finished, RUNNING),
            sampling=jax.tree.map(put, self.sampling, inputs.sampling),
            num_mtp_inputs=put(self.num_mtp_inputs, 0),
        )

    def rewind(self, inputs: StepInput, rows: SlotRows) -> SlotState:
        """Returns the state without the newest tokens of some requests, all from their last step.

        These requests go on even if they had ended with those tokens, and with another seed. Their
        cache entries and hidden states of removed tokens are ignored, like those of rejected
        drafts.
        """
        if inputs.rewinds is None:
            return self
        counts = inputs.rewinds
        slots = rows.only(counts > 0, inputs.decode_slots, self.num_slots)

        def less(array: Array) -> Array:
            return rows.set(array, rows.get(array, slots) - counts, slots)

        seeds = rows.get(self.sampling.seed, slots) + np.uint32(REWIND_SEED)
        return dataclasses.replace(
            self,
            lengths=less(self.lengths),
            finished=rows.set(self.finished, RUNNING, slots),
            sampling=dataclasses.replace(
                self.sampling, seed=rows.set(self.sampling.seed, seeds, slots)
            ),
            num_mtp_inputs=less(self.num_mtp_inputs),
        )


class SlotRows:
    """Reads and writes rows of a :class:`SlotState` by slot number.

    Rows are sharded like the batch, so that no token, hidden state or setting of a request leaves
    the devices that run it: with V3 on 144 devices, copies of all rows would take hundreds of
    megabytes of every device, and each step would broadcast its hidden states. Slots are numbered
    from 0 on every shard. An array [B, ...] of requests has B / shards entries of each shard, in
    order.

    Without a layout that shards the batch, these are plain indexing operations.
    """

    def __init__(self, layout: Layout | None):
        self._layout = layout
        self.shards = 1 if layout is None else layout.num_shards("batch")

    def is_slot(self, slots: Int[Array, " B"], num_slots: int) -> Bool[Array, " B"]:
        """Returns False for entries that are unused. All shards have ``num_slots`` together."""
        return slots < num_slots // self.shards

    def only(
        self, mask: Bool[Array, " B"], slots: Int[Array, " B"], num_slots: int
    ) -> Int[Array, " B"]:
        """Returns the slots where ``mask`` is set. The other entries become unused."""
        return jnp.where(mask, slots, num_slots // self.shards)

    def get(self, rows: _Tree, slots: Int[Array, " B *_"], *columns: Int[Array, " B *_"]) -> _Tree:
        """Returns ``rows[slots, *columns]`` of each array of a tree. Unused indices are clipped."""

        def local(rows: _Tree, *indices: jax.Array) -> _Tree:
            return jax.tree.map(lambda array: array.at[indices].get(mode="clip"), rows)

        return self._on_each_shard(local)(rows, slots, *columns)

    def set(
        self,
        rows: Shaped[Array, " R *_"],
        values: Shaped[Array, " B *_"] | int,
        slots: Int[Array, " B *_"],
        *columns: Int[Array, " B *_"],
    ) -> Shaped[Array, " R *_"]:
        """Returns rows in which ``rows[slots, *columns]`` are ``values``. Indices of unused entries
        and columns out of bounds are dropped."""

        def local(rows: jax.Array, values: jax.Array | int, *indices: jax.Array) -> jax.Array:
            return rows.at[indices].set(values, mode="drop")

        if isinstance(values, int):  # the same on every shard
            fill = self._on_each_shard(lambda rows, *indices: local(rows, values, *indices))
            return fill(rows, slots, *columns)
        return self._on_each_shard(local)(rows, values, slots, *columns)

    def concatenate(self, *arrays: Shaped[Array, " _ *rest"]) -> Shaped[Array, " _ *rest"]:
        """Concatenates arrays of requests, shard by shard."""
        if self.shards == 1:
            return jnp.concatenate(arrays)
        by_shard = [x.reshape(self.shards, len(x) // self.shards, *x.shape[1:]) for x in arrays]
        joined = jnp.concatenate(by_shard, axis=1)
        return joined.reshape(joined.shape[0] * joined.shape[1], *joined.shape[2:])

    def _on_each_shard(self, body: Callable[..., Any]) -> Callable[..., Any]:
        layout = self._layout
        if layout is None or self.shards == 1:
            return body
        batch = layout.partition_spec(("batch",))
        return lambda *args: layout.shard_map(body, (batch,) * len(args), batch)(*args)


def shard_state(state: _Tree, layout: Layout | None) -> _Tree:
    """Constrains every array of a state to its sharding, inside or outside of ``jax.jit``.

    A program compiles once per sharding of its arguments. With this function it gets the same
    shardings from the code that creates a state and from its own previous dispatch.
    """
    if layout is None:
        return state
    leaves, structure = jax.tree.flatten(state)
    shardings = state_shardings(state, layout)
    return jax.tree.unflatten(structure, map(jax.lax.with_sharding_constraint, leaves, shardings))


def state_shardings(state: Any, layout: Layout) -> list[NamedSharding]:
    """Returns the sharding of each array of the state, in flattening order.

    A state is a dataclass whose arrays have a row for each sequence, except the page arrays of its
    ``pool`` and ``routing_counts``.
    """

    def axes(path: tuple[Any, ...]) -> LogicalAxes:
        names = {key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)}
        if "routing_counts" in names:  # summed over all sequences
            return ()
        return PAGE_AXES if "pool" in names else ("batch",)

    paths_and_leaves, _ = jax.tree.flatten_with_path(state)
    return [layout.sharding(axes(path)[: leaf.ndim]) for path, leaf in paths_and_leaves]
