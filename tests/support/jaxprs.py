"""Equations of traced programs."""

from collections.abc import Iterator
from typing import Any

import jax


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields every equation, those of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
