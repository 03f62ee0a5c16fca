"""Results that a backward pass keeps: their names, and their dtype.

Names tell which results are kept where the others are computed again. They have no effect except
under ``jax.checkpoint`` with a policy that asks for a name. A function with its own gradient names
what that gradient keeps in its forward function: a name given outside is that of a copy.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

ResidualName = Literal["matmul", "attention", "routes"]
"""Results of matmuls, dense and grouped; of attention; of the router."""

_Tree = TypeVar("_Tree")


def named(name: ResidualName, results: _Tree) -> _Tree:
    """Returns the arrays under this name. The values do not change."""
    return jax.tree.map(lambda x: checkpoint_name(x, name), results)


@jax.custom_vjp
def rounded(x: _Tree) -> _Tree:
    """Returns ``x``. All that read it, the backward pass included, read it in its own dtype: XLA
    may otherwise write the float32 values that it was rounded from, and compute with them."""
    return jax.lax.optimization_barrier(x)


rounded.defvjp(lambda x: (rounded(x), None), lambda _, cotangent: (cotangent,))
