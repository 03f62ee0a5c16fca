"""Conditional execution in Hopper kernels.

``pl.when`` and ``lax.cond`` convert the condition from a bit to an integer. For such a conversion
Mosaic GPU starts a process that asks ptxas for its version. That takes 15 milliseconds, and a step
of the serving engine has up to 200. Here the integer is selected instead, and the machine code is
the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def when(condition: jax.Array | bool) -> Callable[[Callable[[], None]], None]:
    """Runs the decorated function if the condition holds, as ``pl.when`` does."""

    def run(function: Callable[[], None]) -> None:
        if not isinstance(condition, bool):
            lax.switch(jnp.where(condition, 1, 0), [lambda: None, function])
        elif condition:
            function()

    return run


def cond(
    condition: jax.Array, if_true: Callable[..., Any], if_false: Callable[..., Any], *operands: Any
) -> Any:
    """Returns the result of one of two functions of the operands, as ``lax.cond`` does."""
    return lax.switch(jnp.where(condition, 1, 0), [if_false, if_true], *operands)
