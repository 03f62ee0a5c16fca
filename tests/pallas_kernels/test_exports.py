"""pallas_kernels.hopper.lowered_once with functions that a CPU can run."""

import functools
import re
import threading
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec

from pallas_kernels.hopper.lowered_once import Exports, lowered_once


class Pair(NamedTuple):
    x: jax.Array
    y: jax.Array


class Counted:
    """A function that counts how often it is traced, and its exports."""

    def __init__(self, monkeypatch):
        self.traces = self.exports = 0
        real = export.export

        def counted(*args, **kwargs):
            self.exports += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(export, "export", counted)

        @lowered_once("factor", "interpret", platform="cpu")
        def kernel(pair, weight=None, *, factor, interpret=None):
            self.traces += 1
            product = pair.x @ pair.y * factor
            return product if weight is None else {"out": product + weight, "weight": weight}

        self.kernel = kernel

    def plain(self, pair, weight=None, *, factor):
        product = pair.x @ pair.y * factor
        return product if weight is None else {"out": product + weight, "weight": weight}


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


def pair(size=4, dtype=jnp.float32, seed=0):
    values = np.random.default_rng(seed).standard_normal((2, size, size))
    return Pair(*jnp.asarray(values, dtype))


def program(kernel, layers=2, **settings):
    """A new function with several calls of the kernel."""

    def run(given):
        for _ in range(layers):
            given = given._replace(x=kernel(given, **settings))
        return given.x

    return run


def test_programs_share_a_module(counted):
    given = pair()
    for layers in (1, 2, 3):
        ours = jax.jit(program(counted.kernel, layers, factor=0.5))(given)
        plain = jax.jit(program(counted.plain, layers, factor=0.5))(given)
        np.testing.assert_array_equal(ours, plain)
    assert (counted.traces, counted.exports) == (1, 1)


@pytest.mark.parametrize(
    "other",
    [
        {"factor": 3.0},
        {"size": 5},
        {"dtype": jnp.float16},
        {"weight": jnp.float32(1)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_module_belongs_to_one_signature(counted, other):
    for options in ({}, other, {}):
        options = {"factor": 0.5} | options
        given = pair(options.pop("size", 4), options.pop("dtype", jnp.float32))
        ours, plain = counted.kernel(given, **options), counted.plain(given, **options)
        assert jax.tree.structure(ours) == jax.tree.structure(plain)
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x, y, rtol=1e-3)
    assert counted.exports == 2


def test_a_weak_type_has_its_own_module(counted):
    for weight in (1.0, jnp.float32(1)):
        made = counted.kernel(pair(), weight, factor=1.0)
        assert made["weight"].weak_type == isinstance(weight, float)
    assert counted.exports == 2


def test_an_option_of_jax_has_its_own_module(counted):
    def text():
        return jax.jit(program(counted.kernel, factor=0.5)).lower(pair()).as_text()

    before = text()
    with jax.default_matmul_precision("highest"):
        highest = text()
    assert "HIGHEST" in highest
    assert "HIGHEST" not in before
    assert text() == before
    assert counted.exports == 2


def test_threads_wait_for_one_module(monkeypatch):
    real, made, modules = export.export, [], []

    def slow(*args, **kwargs):
        time.sleep(0.1)
        made.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(export, "export", slow)
    exports, barrier = Exports(lambda x: x + 1, "cpu"), threading.Barrier(8)

    def work():
        barrier.wait()
        modules.append(exports.module({}, {"x": jnp.zeros(3)}))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(modules) == 8
    assert len({id(module) for module in modules}) == 1
    assert len(made) == 1


def test_an_error_is_not_kept():
    fails = [True]

    @lowered_once(platform="cpu")
    def kernel(x):
        if fails.pop():
            raise NotImplementedError("refused")
        return x + 1

    with pytest.raises(NotImplementedError, match="refused"):
        kernel(jnp.zeros(3))
    fails.append(False)
    assert kernel(jnp.zeros(3)).sum() == 3


def test_the_interpreter_needs_no_module(counted):
    given = pair()
    ours = counted.kernel(given, factor=0.5, interpret="parameters")
    np.testing.assert_allclose(ours, counted.plain(given, factor=0.5), rtol=1e-6)
    assert counted.exports == 0


def test_no_other_platform():
    """An error that dispatch does not take for a refusal."""

    @lowered_once()
    def kernel(x):
        return x + 1

    with pytest.raises(ValueError, match=r"exported for platforms .*cuda"):
        kernel(jnp.zeros(3))


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_vmap(counted, axes):
    given = Pair(
        *(jnp.stack([a, a + 1]) if axis == 0 else a for a, axis in zip(pair(), axes, strict=True))
    )
    in_axes = (Pair(*axes),)
    ours, plain = (
        jax.vmap(functools.partial(kernel, factor=0.5), in_axes)(given)
        for kernel in (counted.kernel, counted.plain)
    )
    np.testing.assert_allclose(ours, plain, rtol=1e-6)


def test_gradients_are_those_of_the_function(counted):
    def loss(kernel, given):
        return kernel(given, factor=0.5).sum()

    ours, plain = (
        jax.grad(functools.partial(loss, k))(pair()) for k in (counted.kernel, counted.plain)
    )
    for x, y in zip(ours, plain, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_a_function_without_gradient_refuses():
    """As a kernel does: dispatch then takes another back-end."""

    @jax.custom_jvp
    def refuse(x):
        return x

    @refuse.defjvp
    def _(primals, tangents):
        raise NotImplementedError("no gradient")

    kernel = lowered_once(platform="cpu")(lambda x: refuse(x))
    assert jax.jit(kernel)(jnp.ones(3)).sum() == 3
    with pytest.raises(NotImplementedError, match="no gradient"):
        jax.grad(lambda x: kernel(x).sum())(jnp.ones(3))


def test_shards(counted):
    """Inside shard_map, the module has the shapes of one device and knows no mesh."""
    mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (4, 2)), ("a", "b"))
    given = Pair(jnp.arange(64.0).reshape(16, 4), pair().y)
    specs = Pair(PartitionSpec(("a", "b")), PartitionSpec())
    for layers in (1, 2):
        sharded = jax.shard_map(
            program(counted.kernel, layers, factor=0.5),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=specs.x,
            check_vma=False,
        )
        plain = program(counted.plain, layers, factor=0.5)(given)
        np.testing.assert_allclose(jax.jit(sharded)(given), plain, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(sharded(given), plain, rtol=1e-5, atol=1e-5)
    assert counted.exports == 1


def test_a_donated_array_is_overwritten():
    """XLA sees through the call of the module: the update needs no copy."""

    def update(x, row):
        return x.at[3].set(row)

    once = lowered_once(platform="cpu")(update)
    compiled = [
        jax.jit(lambda x, row, f=f: f(x, row), donate_argnums=0)
        .lower(jnp.zeros((1024, 64)), jnp.ones(64))
        .compile()
        for f in (update, once)
    ]
    plain, ours = (program.memory_analysis() for program in compiled)
    assert plain.alias_size_in_bytes == ours.alias_size_in_bytes == 1024 * 64 * 4
    assert plain.temp_size_in_bytes == ours.temp_size_in_bytes
    # The opcode, not the word, which may be in the path of a source file.
    assert not re.search(r" copy(-start)?\(", compiled[1].as_text())


def test_refs_are_changed_around_it(counted):
    """A program whose kernels share a counter, a ref, calls others through their modules."""

    def run(given):
        ref = jax.new_ref(jnp.zeros((), jnp.int32))
        ref[...] += 1
        product = counted.kernel(given, factor=0.5)
        return product, ref[...]

    product, count = jax.jit(run)(pair())
    np.testing.assert_allclose(product, counted.plain(pair(), factor=0.5), rtol=1e-6)
    assert count == 1
