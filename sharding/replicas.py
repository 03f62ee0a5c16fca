"""Physical experts at run time: where replicas stand, which one a token takes, whose weights.

The arrays are arguments of the compiled step and their shapes follow from the number of experts
and of replicas alone, so a step is compiled once for all placements.
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
    """P physical experts of each of L layers; max_rep is P - E + 1, the most that one can have."""

    phy2log: Int32[Array, "L P"]
    """The logical expert at each place. GPU g of D holds the places from ``g * P // D``."""

    log2phy: Int32[Array, "L E max_rep"]
    """The places of each logical expert, ascending, then -1."""

    logcnt: Int32[Array, "L E"]
    """Number of replicas of each logical expert, at least 1."""

    @classmethod
    def of(cls, phy2log: Integer[np.ndarray, "L P"], num_experts: int) -> Placement:
        """The placement that ``phy2log`` states.

        Raises:
          ValueError: an array that is not of integers [L, P], an expert that is none of the
            ``num_experts``, or one that stands nowhere.
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
        """Place p holds expert p; places past the last expert count up from expert 0 again.

        For use before any load is known. Its shapes are those of every placement of as many
        replicas; without ``num_replicas`` there is one of each expert.

        Raises:
          ValueError: a number below 1, or fewer replicas than experts.
        """
        for name, number in (("num_layers", num_layers), ("num_experts", num_experts)):
            if number < 1:
                raise ValueError(f"{name}: expected 1 or more, got {number}")
        P = num_experts if num_replicas is None else num_replicas
        if num_experts > P:
            raise ValueError(f"num_replicas: expected {num_experts} experts or more, got {P}")
        return cls.of(np.tile(np.arange(P) % num_experts, (num_layers, 1)), num_experts)

    @classmethod
    def balanced(
        cls,
        weight: npt.ArrayLike,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_gpus: int,
    ) -> Placement:
        """The placement of :func:`~sharding.eplb.rebalance_experts`, in shapes that do not depend
        on the loads; takes and refuses what that does."""
        phy2log, _, logcnt = rebalance_experts(
            weight, num_replicas, num_groups, num_nodes, num_gpus
        )
        return cls.of(phy2log, logcnt.shape[1])

    def check(self) -> None:
        """Compares the tables with those that :meth:`of` derives from ``phy2log``. Of arrays whose
        values are not at hand, tracers or shapes, only the shapes are compared.

        Raises:
          ValueError: they contradict each other.
        """
        (L, P), shapes = self.phy2log.shape, (self.log2phy.shape, self.logcnt.shape)
        E = shapes[1][-1]
        if shapes != (want := ((L, E, max(P - E + 1, 1)), (L, E))):
            raise ValueError(
                f"placement: expected log2phy of shape {want[0]} and logcnt of shape {want[1]}"
                f" beside phy2log of shape {(L, P)}, got {shapes[0]} and {shapes[1]}"
            )
        tables = self.phy2log, self.log2phy, self.logcnt
        if any(isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in tables):
            return
        with jax.ensure_compile_time_eval():  # or a surrounding trace makes tracers of the tables
            derived = jax.tree.leaves(Placement.of(np.asarray(self.phy2log), E))
        if not all(np.array_equal(x, y) for x, y in zip(tables, derived, strict=True)):
            raise ValueError(
                "placement: expected log2phy and logcnt to be those of phy2log, got others;"
                " Placement.of derives them"
            )


def choose_replicas(
    experts: Int32[Array, "M K"],
    log2phy: Int32[Array, "E max_rep"],
    logcnt: Int32[Array, " E"],
) -> Int32[Array, "M K"]:
    """The physical experts of each token: of n replicas, token m takes the (m mod n)th.

    The choice depends on m and the expert alone, so a token's result does not depend on what other
    tokens chose, and n replicas take M tokens of one expert evenly. ``experts`` are 0 to E - 1, of
    one layer as the tables are.
    """
    token = jnp.arange(experts.shape[0], dtype=jnp.int32)[:, None]
    return log2phy[experts, token % logcnt[experts]]


def physical_experts(
    stack: Shaped[Array, "E ..."], phy2log: Int32[Array, " P"]
) -> Shaped[Array, "P ..."]:
    """Weights or scales of one layer's logical experts, repeated and in the order of places."""
    return stack[phy2log]
