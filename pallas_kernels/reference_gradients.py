"""Gradients of kernels that have no backward kernel: those of the operation's specification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def with_gradients_of(specification: Callable[..., Any], compute: Callable[..., Any]) -> Any:
    """Returns ``compute`` with the gradients of ``specification``.

    Both take the same arrays as positional arguments, or None. Integers have no gradient.
    """

    @jax.custom_vjp
    def call(*inputs: Any) -> Any:
        return compute(*inputs)

    def forward(*inputs: Any) -> tuple[Any, tuple[Any, ...]]:
        return compute(*inputs), inputs

    def backward(inputs: tuple[Any, ...], cotangents: Any) -> tuple[Any, ...]:
        return jax.vjp(specification, *inputs)[1](cotangents)

    call.defvjp(forward, backward)
    return call
