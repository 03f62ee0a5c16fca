"""Names of results that a backward pass may keep where it computes the others again.

They have no effect except under ``jax.checkpoint`` with a policy that asks for a name. A function
with its own gradient names what that gradient keeps in its forward function: a name given outside
is that of a copy.
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
