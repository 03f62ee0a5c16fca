"""Gradients that are written out, compared with JAX's of the plain form in float32."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from pallas_kernels import add_rms_norm, gather_rows, rms_norm
from pallas_kernels.gather_rows import api as gather_api
from pallas_kernels.gather_rows import reference as gather_reference
from pallas_kernels.grouped_swiglu.reference import silu_multiply
from pallas_kernels.matmul import matmul, matmuls
from pallas_kernels.residuals import from_saved, named
from pallas_kernels.route.reference import Rule, sort_pairs
from sharding import weighted_sum
from sharding.expert_mixture import gather_sum
from tests.support.jaxprs import equations
from tests.support.oracle import relative_error

BOUNDS = {"float32": 2e-6, "bfloat16": 0.01}
M, K, E, D, F = 24, 3, 8, 32, 20
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(2, M, D))
CHOSEN = jnp.asarray(np.argsort(RNG.random((M, E)), axis=1)[:, :K], jnp.int32)
ORDER, INVERSE, _ = sort_pairs(CHOSEN, None, E)
POSITION = INVERSE.reshape(M, K)
KEEP = jnp.asarray(RNG.random((M, K)) < 0.7)
RULE = Rule(K, 1, 1, "noaux_tc", "sigmoid", normalize=True, scaling_factor=2.5)


def plain_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


def plain_weights(scores: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(scores, CHOSEN, axis=1)
    return 2.5 * chosen / jnp.sum(chosen, axis=1, keepdims=True)


def plain_sum(
    hidden: jax.Array, down: jax.Array, weights: jax.Array, keep: Any = None
) -> jax.Array:
    weights = weights if keep is None else weights * keep
    return jnp.sum((hidden @ down.T)[POSITION] * weights[..., None], axis=1)


def summed(hidden: jax.Array, down: jax.Array, weights: jax.Array, keep: Any = None) -> jax.Array:
    everything = jnp.ones((M, K), bool)

    def forward(rows: jax.Array, position: jax.Array, keep: Any, weights: jax.Array) -> jax.Array:
        return gather_sum(rows, position, everything if keep is None else keep, weights)

    matmul_down = Partial(lambda down, x: matmul(x, down, x.dtype), down)
    return weighted_sum(forward, matmul_down, hidden, weights, ORDER, POSITION, keep)


WEIGHTS, SCORES = RNG.random((M, K)), RNG.uniform(0.1, 0.9, (M, E))
ROWS, NORM = RNG.normal(size=(M * K, F)), RNG.uniform(0.5, 1.5, D)
DOWN = RNG.normal(size=(D, F))
# By name: the function, its plain form, its arguments, and how many of them are always float32.
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], int]] = {
    "matmul": (
        lambda x, w: matmul(x, w, x.dtype),
        lambda x, w: x @ w.T,
        (X.reshape(4, 6, D), RNG.normal(size=(F, D))),
        0,
    ),
    "matmul with a float32 result": (
        lambda x, w: matmul(x, w, jnp.float32),
        lambda x, w: x @ w.T,
        (X, RNG.normal(size=(F, D))),
        0,
    ),
    "matmuls of the same rows": (
        lambda x, v, w: matmuls(x, (v, w)),
        lambda x, v, w: (x @ v.T, x @ w.T),
        (X.reshape(4, 6, D), RNG.normal(size=(F, D)), RNG.normal(size=(2 * F, D))),
        0,
    ),
    "swiglu": (silu_multiply, lambda g, u: jax.nn.silu(g) * u, (X, Y), 0),
    "norm": (functools.partial(rms_norm, eps=1e-6), plain_norm, (X, NORM), 1),
    "norm of a sum": (
        functools.partial(add_rms_norm, eps=1e-6),
        lambda x, y, w: (x + y, plain_norm(x + y, w)),
        (X, Y, NORM),
        1,
    ),
    "routing weights": (lambda s: RULE.weights(s, CHOSEN), plain_weights, (SCORES,), 1),
    "copies of tokens": (
        lambda x: gather_rows(x, ORDER // K, POSITION),
        lambda x: x[ORDER // K],
        (X,),
        0,
    ),
    "weighted sum": (summed, plain_sum, (ROWS, DOWN, WEIGHTS), 1),
    "weighted sum of some": (
        functools.partial(summed, keep=KEEP),
        functools.partial(plain_sum, keep=KEEP),
        (ROWS, DOWN, WEIGHTS),
        1,
    ),
}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, dtype):
    ours, plain, values, float32 = CASES[case]
    narrow = len(values) - float32
    arguments = [jnp.asarray(x, dtype if i < narrow else "float32") for i, x in enumerate(values)]
    exact = [x.astype(jnp.float32) for x in arguments]

    def loss(function: Callable[..., Any], *arrays: jax.Array) -> jax.Array:
        results = jax.tree.leaves(function(*arrays))
        return sum(
            jnp.sum(jnp.sin(3.0 * jnp.arange(y.size)).reshape(y.shape) * y.astype(jnp.float32))
            for y in results
        )

    where = tuple(range(1, len(values) + 1))
    with jax.default_matmul_precision("highest"):
        got = jax.jit(jax.grad(loss, where), static_argnums=0)(ours, *arguments)
        want = jax.jit(jax.grad(loss, where), static_argnums=0)(plain, *exact)
        results, wanted = ours(*arguments), plain(*exact)
    for one, other in zip(jax.tree.leaves(results), jax.tree.leaves(wanted), strict=True):
        assert relative_error(one, other) < BOUNDS[dtype]
    for one, other, argument in zip(got, want, arguments, strict=True):
        assert one.dtype == argument.dtype
        assert relative_error(one, other) < BOUNDS[dtype]


def test_rows_that_are_not_kept_may_be_anything():
    rows, down = jnp.asarray(ROWS, jnp.float32), jnp.asarray(DOWN, jnp.float32)
    dropped = jnp.where(KEEP.reshape(-1)[ORDER][:, None], rows, jnp.nan)
    weights = jnp.asarray(WEIGHTS, jnp.float32)
    gradients = jax.grad(lambda r, w: jnp.sum(jnp.sin(summed(r, down, w, KEEP))), (0, 1))
    for one, other in zip(gradients(dropped, weights), gradients(rows, weights), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_gradient_of_copies_stores_no_copies(monkeypatch):
    """XLA gathers in the sum. A kernel that gathers would write every token's copies first."""
    calls = []

    def counted(x: jax.Array, rows: jax.Array) -> jax.Array:
        calls.append(rows.shape)
        return gather_reference.gather_rows(x, rows)

    monkeypatch.setitem(gather_api.BACKENDS, "reference", counted)
    copies, x = CASES["copies of tokens"][0], jnp.asarray(X, jnp.float32)
    jax.grad(lambda x: jnp.sum(jnp.sin(copies(x))))(x)
    assert calls == [(M * K,)]


def test_the_gradient_of_several_matmuls_is_two():
    several, _, values, _ = CASES["matmuls of the same rows"]

    def loss(*arrays: jax.Array) -> jax.Array:
        first, second = several(*arrays)
        return jnp.sum(jnp.sin(first)) + jnp.sum(jnp.sin(second))

    traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*(jnp.float32(x) for x in values))
    dots = [e for e in equations(traced.jaxpr) if e.primitive.name == "dot_general"]
    assert len(dots) == 2 + 2


def test_no_gradient_scatters():
    for name in ("routing weights", "copies of tokens", "weighted sum of some"):
        ours, _, values, _ = CASES[name]
        arguments = [jnp.asarray(x, jnp.float32) for x in values]
        program = jax.make_jaxpr(jax.grad(lambda *a, f=ours: jnp.sum(jnp.sin(f(*a)))))(*arguments)
        assert "scatter" not in str(program), name


@jax.custom_vjp
def both_layers(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sin(x @ w)


def _forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    saved = named("matmul", x @ w)
    return from_saved(jnp.sin(x @ w), jnp.sin, saved), (x, w, saved)


both_layers.defvjp(
    _forward, lambda r, d: ((d * jnp.cos(r[2])) @ r[1].T, r[0].T @ (d * jnp.cos(r[2])))
)


@pytest.mark.parametrize("names", [(), ("matmul",)])
def test_what_is_computed_from_saved_arrays(names):
    """In a scan inside shard_map, as layers may be: the values and gradients are the same."""
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    mesh, spec = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,)), jax.P("x")
    x, w = jnp.asarray(RNG.normal(size=(M, D)), jnp.float32), jnp.eye(D) + 0.1

    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec)
    def layers(x: jax.Array, w: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x: both_layers(x, w) ** 2, policy=policy)
        return jax.lax.scan(lambda x, _: (layer(x), None), x, length=2)[0]

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(jnp.sin(x @ w) ** 2 @ w) ** 2

    got, want = (
        jax.jit(jax.value_and_grad(lambda *a, f=f: jnp.sum(f(*a)), (0, 1)))(x, w)
        for f in (layers, plain)
    )
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(one, other) < BOUNDS["float32"]
