"""Tests that remat and scan change the program, but not its results."""

import dataclasses
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.layers.block import LayerRunner, run_in_order
from dsv3_jax.layers.rope import rotation_at
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training.config import Remat
from dsv3_jax.training.layer_runners import layer_runner
from dsv3_jax.training.trainer import Trainer
from tests.support.jaxprs import equations
from tests.support.oracle import relative_error
from tests.training.tiny import RUN, TOKENS, arrays

HIDDEN = jnp.asarray(np.random.default_rng(4).normal(size=(2, 6, 16)), jnp.float32)


@pytest.fixture(scope="module")
def deep(model) -> DeepSeekV3:
    """A model with one dense layer and two MoE layers, each with different weights."""
    config = dataclasses.replace(
        model.config,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        initializer_range=0.3,
    )
    return DeepSeekV3(config, rngs=nnx.Rngs(0))


def loss_of(model: DeepSeekV3, run: LayerRunner):
    """Returns a function of the layers' weights that depends on everything a runner returns."""
    graph, params, rest = nnx.split(model.layers, nnx.Param, ...)
    positions = jnp.tile(jnp.arange(HIDDEN.shape[1]), (HIDDEN.shape[0], 1))
    angles = rotation_at(model.config, positions)

    def loss(params):
        x, stats = run(nnx.merge(graph, params, rest), HIDDEN, angles)
        scores = [jnp.sum(jnp.cos(one.scores * (i + 1))) for i, one in enumerate(stats)]
        return jnp.sum(jnp.sin(x)) + sum(scores), (x, stats)

    return loss, params


@pytest.fixture(scope="module")
def plain(deep):
    loss, params = loss_of(deep, run_in_order)
    return jax.jit(jax.grad(loss, has_aux=True))(params)


@pytest.mark.slow
@pytest.mark.parametrize("remat", typing.get_args(Remat))
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
def test_same_values_and_gradients(remat, scan, deep, plain):
    loss, params = loss_of(deep, layer_runner(remat=remat, scan=scan))
    grads, (x, stats) = jax.jit(jax.grad(loss, has_aux=True))(params)
    want_grads, (want_x, want_stats) = plain
    assert relative_error(x, want_x) < 1e-6
    assert len(stats) == len(want_stats) == 2
    for got, want in zip(stats, want_stats, strict=True):
        np.testing.assert_array_equal(got.counts, want.counts)
        np.testing.assert_array_equal(got.experts, want.experts)
        assert relative_error(got.scores, want.scores) < 1e-6
    got, want = arrays(grads), arrays(want_grads)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert np.linalg.norm(gradient) > 0, name
        assert relative_error(got[name], gradient) < 1e-5, name


@pytest.mark.parametrize(("remat", "scan"), [("none", False), ("full", False), ("none", True)])
def test_the_program_is_as_asked(remat, scan, deep):
    """The traced step of the trainer has three checkpoints, or a scan over two layers."""
    trainer = Trainer(deep, dataclasses.replace(RUN, remat=remat, scan_layers=scan))
    traced = jax.jit(trainer.step).trace(trainer.init(), jnp.asarray(TOKENS))
    program = list(equations(traced.jaxpr))
    checkpoints = [each for each in program if each.primitive.name in ("checkpoint", "remat2")]
    assert len(checkpoints) == (3 if remat == "full" else 0)
    # Forward and backward.
    assert sum(each.params.get("length") == 2 for each in program) == (2 if scan else 0)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_equal_layers_are_lowered_once(remat, deep):
    """The dense layer and the MoE layers have a function each for the forward and for the backward
    pass, which each layer calls."""
    trainer = Trainer(deep, dataclasses.replace(RUN, remat=remat))
    lowered = trainer.programs.step.lower(*trainer.step_shapes(*TOKENS.shape)).as_text()
    assert len(re.findall(r"func private @_apply", lowered)) == 2 * 2
    assert len(re.findall(r"call @_apply", lowered)) == 2 * 3


def test_attributes_without_a_hash(deep):
    """A replaced module may have lists. Layers that differ in them are no equal layers."""
    model = nnx.clone(deep)
    for number, layer in enumerate(model.layers):
        layer.mlp.sizes = [max(number, 1)]
    trainer = Trainer(model, RUN)
    lowered = trainer.programs.step.lower(*trainer.step_shapes(*TOKENS.shape)).as_text()
    assert len(re.findall(r"func private @_apply", lowered)) == 2 * 3
