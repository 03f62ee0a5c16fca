"""Placement of expert replicas as arrays, and the choice of a replica for each token.

The tables are arguments of the compiled step. Their shapes depend only on the number of experts and
of expert slots, so that one compiled step serves all placements.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.core import Tracer
from jaxtyping import Array, Int32, Integer, Shaped

from sharding.eplb import rebalance_experts, replica_tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placement:
    """Assignment of E experts to P expert slots, in each of L layers.

    An expert slot holds one replica of one expert; every expert has at least one. ``max_rep`` is
    P - E + 1, the largest possible number of replicas. Of D devices, device d holds the slots
    from ``d * P // D``.
    """

    phy2log: Int32[Array, "L P"]
    """Expert in each slot."""

    log2phy: Int32[Array, "L E max_rep"]
    """Slots of each expert in ascending order, padded with -1."""

    logcnt: Int32[Array, "L E"]
    """Number of replicas of each expert, at least 1."""

    @classmethod
    def from_phy2log(cls, phy2log: Integer[np.ndarray, "L P"], num_experts: int) -> Placement:
        """Builds a placement from the expert in each slot.

        Raises:
          ValueError: ``phy2log`` is not an integer array [L, P], contains a number that is not one
            of the ``num_experts``, or leaves an expert out.
        """
        phy2log = np.asarray(phy2log)
        if phy2log.ndim != 2 or not np.issubdtype(phy2log.dtype, np.integer):
            raise ValueError(
                f"phy2log: expected integers of shape [L, P], got {phy2log.dtype} of shape"
                f" {phy2log.shape}"
            )
        max_rep = max(phy2log.shape[1] - num_experts + 1, 1)
        log2phy, logcnt = replica_tables(phy2log, num_experts, max_rep)
        return cls(jnp.asarray(phy2log, jnp.int32), jnp.asarray(log2phy), jnp.asarray(logcnt))

    @classmethod
    def identity(
        cls, num_layers: int, num_experts: int, num_replicas: int | None = None
    ) -> Placement:
        """Assigns expert p to slot p. Slots past the last expert start from expert 0 again.

        It is meant for the time before any load is known. Its shapes are those of every placement
        with as many slots.

        Args:
          num_replicas: number of slots; None for one slot per expert.

        Raises:
          ValueError: a number is below 1, or there are fewer slots than experts.
        """
        for name, number in (("num_layers", num_layers), ("num_experts", num_experts)):
            if number < 1:
                raise ValueError(f"{name}: expected 1 or more, got {number}")
        P = num_experts if num_replicas is None else num_replicas
        if num_experts > P:
            raise ValueError(f"num_replicas: expected {num_experts} experts or more, got {P}")
        phy2log = np.tile(np.arange(P) % num_experts, (num_layers, 1))
        return cls.from_phy2log(phy2log, num_experts)

    @classmethod
    def balanced(
        cls,
        weight: npt.ArrayLike,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_gpus: int,
    ) -> Placement:
        """Builds the placement of :func:`~sharding.eplb.rebalance_experts`, which documents
        arguments and errors. Unlike there, shapes do not depend on the loads."""
        phy2log, _, logcnt = rebalance_experts(
            weight, num_replicas, num_groups, num_nodes, num_gpus
        )
        return cls.from_phy2log(phy2log, logcnt.shape[1])

    def check(self) -> None:
        """Checks that ``log2phy`` and ``logcnt`` are the tables of ``phy2log``.

        If an array has no known values (a tracer or a ShapeDtypeStruct), only shapes are checked.

        Raises:
          ValueError: the arrays contradict each other.
        """
        (L, P), shapes = self.phy2log.shape, (self.log2phy.shape, self.logcnt.shape)
        E = shapes[1][-1]
        if shapes != (expected := ((L, E, max(P - E + 1, 1)), (L, E))):
            raise ValueError(
                f"placement: expected log2phy of shape {expected[0]} and logcnt of shape"
                f" {expected[1]} for phy2log of shape {(L, P)}, got {shapes[0]} and {shapes[1]}"
            )
        tables = self.phy2log, self.log2phy, self.logcnt
        if any(isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in tables):
            return
        with jax.ensure_compile_time_eval():  # an enclosing trace would turn the tables to tracers
            derived = jax.tree.leaves(Placement.from_phy2log(np.asarray(self.phy2log), E))
        if not all(np.array_equal(x, y) for x, y in zip(tables, derived, strict=True)):
            raise ValueError(
                "placement: expected log2phy and logcnt to be those of phy2log, got others;"
                " Placement.from_phy2log derives them"
            )


def choose_replicas(
    experts: Int32[Array, "M K"],
    log2phy: Int32[Array, "E max_rep"],
    logcnt: Int32[Array, " E"],
    shard: Int32[Array, ""] | int = 0,
) -> Int32[Array, "M K"]:
    """Returns the expert slot for each (token, expert) pair, with replicas used round-robin.

    With n replicas, token m of shard s takes replica (m + s) mod n. The choice depends only on m, s
    and the expert. Other tokens therefore do not influence a token's result, and M tokens of one
    expert are distributed evenly, and so are the first tokens of all shards.

    Args:
      experts: expert numbers 0 .. E - 1.
      log2phy: one layer of a :class:`Placement`'s table of replicas.
      logcnt: the same layer of its table of counts.
      shard: number of the shard of the batch that these tokens are. Devices with the same tokens
        have the same number.
    """
    token = jnp.arange(experts.shape[0], dtype=jnp.int32)[:, None] + shard
    return log2phy[experts, token % logcnt[experts]]


def physical_experts(
    stack: Shaped[Array, "E ..."], phy2log: Int32[Array, " P"]
) -> Shaped[Array, "P ..."]:
    """Returns one layer's expert weights or scales in slot order, with replicas repeated."""
    return stack[phy2log]
