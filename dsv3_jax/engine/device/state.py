"""The engine's state on the device: the page pool, and one row for every request slot."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dsv3_jax.engine.device.slot_rows import SlotRows
from dsv3_jax.engine.device.step_input import StepInput
from dsv3_jax.generation.finished import RUNNING, STOPPED
from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.generation.settings import MAX_STOP_TOKENS
from dsv3_jax.kv_cache import PagePool

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
    """RUNNING, STOPPED, FULL or NON_FINITE, see :mod:`dsv3_jax.generation.finished`."""

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
        """Returns slots without requests.

        Args:
          mtp_inputs: F and D.
          dtype: of the model's activations.
        """
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
