"""Results that a backward pass keeps: their names, and their dtype.

Names tell which results are kept where the others are computed again. They have no effect except
under ``jax.checkpoint`` with a policy that asks for a name. A function with its own gradient names
what that gradient keeps in its forward function: a name given outside is that of a copy. What is
cheap to compute from saved results is computed from them: see :func:`from_saved`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import mlir, partial_eval

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


def from_saved(
    value: jax.Array, function: Callable[..., jax.Array], *saved: jax.Array
) -> jax.Array:
    """Returns ``value``, which is ``function(*saved)`` up to rounding. A backward pass that has
    ``saved``, and would compute ``value`` again as it was computed, calls ``function`` instead. It
    is for the forward function of a gradient: it has no gradient itself."""
    return _from_saved.bind(value, *saved, function=function, again=False)


def _run(*arrays: jax.Array, function: Callable[..., jax.Array], again: bool) -> jax.Array:
    return function(*arrays) if again else arrays[0]


def _split(
    policy: Callable[..., Any], unknown: Sequence[bool], computed: Sequence[bool], equation: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Divides the operation between the forward and the backward pass, as JAX's partial evaluation
    for ``jax.checkpoint`` asks it of a primitive: returns the operation in either pass, whether
    its result is unknown in the forward and available in the backward pass, and what the backward
    pass takes from the forward pass.

    Args:
      unknown: of each argument, whether it is unknown in the forward pass.
      computed: of each argument, whether the backward pass computes it.
    """
    parameters = equation.params
    types = [x.aval for x in equation.invars]
    if not any(unknown) and policy(equation.primitive, *types, **parameters) is True:
        return equation, None, [False], [False], []
    again, first = equation, 0
    if not (any(unknown) or all(computed[1:]) or parameters["again"]):
        again = equation.replace(invars=equation.invars[1:], params=parameters | {"again": True})
        first = 1
    arguments = zip(equation.invars[first:], computed[first:], strict=True)
    taken = [x for x, is_computed in arguments if not is_computed]
    return (None if any(unknown) else equation), again, [any(unknown)], [True], taken


_from_saved = Primitive("from_saved")
_from_saved.def_impl(_run)
_from_saved.def_abstract_eval(lambda value, *_, **__: value)
mlir.register_lowering(_from_saved, mlir.lower_fun(_run, multiple_results=False))
partial_eval.partial_eval_jaxpr_custom_rules[_from_saved] = _split
