"""Tests of losses in chunks: values and gradients are those of all logits at once, in float32."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.linear import Linear
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training import cross_entropy
from dsv3_jax.training.cross_entropy import LossHead, chunk_size, divergence, next_token
from dsv3_jax.training.trainer import Trainer
from sharding import DEFAULT_RULES, Layout, Rules, make_layout, make_mesh
from tests.support.jaxprs import equations
from tests.support.oracle import relative_error
from tests.training.tiny import CONFIG, RUN, TOKENS, gradients, step

B, T, D, W = 4, 12, 16, 40
RNG = np.random.default_rng(0)
HIDDEN, MAIN = (jnp.asarray(RNG.normal(size=(B, T, D)), jnp.float32) for _ in range(2))
WEIGHT = jnp.asarray(RNG.normal(size=(W, D)), jnp.float32)
TARGETS = jnp.asarray(RNG.integers(0, W, (B, T)), jnp.int32)
MASK = jnp.asarray(RNG.random((B, T)) < 0.8)
TERMS = {"next token": (next_token, TARGETS), "draft": (divergence, MAIN)}
# Relative error, from the rounding of the logits and of their gradient.
BOUNDS = {"float32": 2e-6, "bfloat16": 0.01}


def head_with(weight: jax.Array) -> Linear:
    head = Linear(D, W, std=1.0, rngs=nnx.Rngs(0), dtype=weight.dtype)
    head.weight.set_value(weight)
    return head


def plain(term: str, hidden: jax.Array, weight: jax.Array, main: jax.Array) -> jax.Array:
    """The loss of all logits at once."""
    log_q = jax.nn.log_softmax(hidden @ weight.T)
    if term == "next token":
        nats = -jnp.take_along_axis(log_q, TARGETS[..., None], axis=-1)[..., 0]
    else:
        log_p = jax.nn.log_softmax(jax.lax.stop_gradient(main @ weight.T))
        nats = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    return 3 * jnp.sum(nats * MASK)


def chunked(term: str, hidden: jax.Array, weight: jax.Array, layout: Layout | None = None):
    term_of, other = TERMS[term]
    other = other.astype(hidden.dtype) if term == "draft" else other
    head = LossHead(head_with(weight), layout)
    return 3 * head.sum(term_of, hidden, other, MASK)[0]


def assert_same(term: str, dtype: str, positions: int, monkeypatch, layout: Layout | None = None):
    """Compares values and gradients. Chunks have this number of positions, or fewer."""
    shards = 1 if layout is None else layout.num_shards("batch") * layout.num_shards("vocab")
    size = B * W * jnp.dtype(dtype).itemsize // shards
    monkeypatch.setattr(cross_entropy, "LOGITS_BYTES", positions * size)
    arrays = [x.astype(dtype) for x in (HIDDEN, WEIGHT)]
    run = jax.jit(lambda h, w: chunked(term, h, w, layout))
    got, got_gradients = jax.jit(jax.value_and_grad(run, argnums=(0, 1)))(*arrays)
    exact = [x.astype(jnp.float32) for x in arrays]
    main = MAIN.astype(dtype).astype(jnp.float32)
    want, want_gradients = jax.value_and_grad(plain, argnums=(1, 2))(term, *exact, main)
    assert relative_error(got, want) < BOUNDS[dtype]
    assert relative_error(run(*arrays), want) < 2e-6  # without a gradient, logits are float32
    for one, other in zip(got_gradients, want_gradients, strict=True):
        assert one.dtype == dtype
        assert relative_error(one, other) < BOUNDS[dtype]


@pytest.mark.parametrize("positions", [T, 3, 5])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("term", TERMS)
def test_values_and_gradients(term, dtype, positions, monkeypatch):
    assert_same(term, dtype, positions, monkeypatch)


LAYOUTS = {
    "data 4, tensor 2": lambda: Layout(make_mesh(data=4, tensor=2)),
    "data 2, expert 2, tensor 2 with FSDP": lambda: Layout(
        make_mesh(data=2, expert=2, tensor=2),
        Rules({**DEFAULT_RULES.table, "vocab": None}),
        fsdp_axes=("data", "expert"),
    ),
    "train": lambda: make_layout("train", devices=jax.devices()[:4], expert_devices=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_on_a_mesh(name, monkeypatch):
    assert_same("next token", "float32", 3, monkeypatch, LAYOUTS[name]())


def test_most_probable_tokens(monkeypatch):
    for limit in (1, 1 << 30):
        monkeypatch.setattr(cross_entropy, "LOGITS_BYTES", limit)
        _, best = LossHead(head_with(WEIGHT)).sum(next_token, HIDDEN, TARGETS, MASK)
        np.testing.assert_array_equal(best, jnp.argmax(HIDDEN @ WEIGHT.T, axis=-1))


def test_a_replaced_head_has_the_plain_loss():
    """It may be any module, as docs/change_the_model.md says."""

    class Scaled(nnx.Module):
        def __init__(self, inner: Linear):
            self.inner = inner

        def __call__(self, x: jax.Array) -> jax.Array:
            return 0.5 * self.inner(x)

    def loss(weight):
        return 3 * LossHead(Scaled(head_with(weight))).sum(next_token, HIDDEN, TARGETS, MASK)[0]

    def want(weight):
        return plain("next token", HIDDEN, weight / 2, MAIN)

    got, want = (jax.value_and_grad(f)(2 * WEIGHT) for f in (loss, want))
    for one, other in zip(got, want, strict=True):
        assert relative_error(one, other) < 2e-6


def test_chunks_divide_a_long_sequence():
    assert chunk_size(4096, 4 * 163840 * 2, cross_entropy.LOGITS_BYTES) == 2048
    assert chunk_size(1024, 8 * 32768 * 4, cross_entropy.LOGITS_BYTES) == 1024
    assert [chunk_size(12, 10, limit) for limit in (120, 119, 59, 0)] == [12, 6, 3, 1]


def test_the_sum_of_gradients_does_not_begin_with_zeros(monkeypatch):
    """They would be written and read once more: 1.3 GB each time for Moonlight."""
    monkeypatch.setattr(cross_entropy, "LOGITS_BYTES", 3 * 4 * B * W)
    loss = functools.partial(chunked, "next token")
    traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(HIDDEN, WEIGHT)
    made = [e.primitive.name for e in equations(traced.jaxpr) if e.outvars[0].aval.shape == (W, D)]
    assert made.count("dot_general") == 2  # the first chunk, and in a loop the others
    assert "broadcast_in_dim" not in made


@pytest.mark.parametrize("limit", [1, 1 << 30])
def test_a_step_never_has_all_logits(limit, monkeypatch):
    """Neither the main model's nor those of the MTP layer."""
    monkeypatch.setattr(cross_entropy, "LOGITS_BYTES", limit)
    config = ModelConfig.from_hf(CONFIG | {"vocab_size": 37})
    trainer = Trainer(DeepSeekV3(config, rngs=nnx.Rngs(0)), RUN)
    traced = trainer.programs.step.trace(trainer.abstract_state, None, jnp.asarray(TOKENS))
    all_logits = re.findall(r"f32\[6,1[12],37\]", str(traced.jaxpr))
    assert bool(all_logits) == (limit > 1)


def test_a_training_step_in_chunks_is_the_same(model, trainer, monkeypatch):
    """Losses and every gradient, with two microbatches."""
    monkeypatch.setattr(cross_entropy, "LOGITS_BYTES", 1)
    chunked = Trainer(model, dataclasses.replace(RUN, accumulate=2))
    for one, other in zip(
        *(jax.tree.leaves(gradients(each, each.init())) for each in (chunked, trainer)), strict=True
    ):
        assert relative_error(one, other) < 1e-5
    (_, got), (_, want) = (step(each, each.init()) for each in (chunked, trainer))
    assert relative_error(got.losses, want.losses) < 1e-6
