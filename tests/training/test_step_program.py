"""Tests of the traced training step: dtypes of matmuls, scatters, and what it recomputes."""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import abstract_model
from dsv3_jax.layers.linear import Embedding
from dsv3_jax.training.trainer import Trainer
from tests.support.checkpoints import tiny_config
from tests.support.jaxprs import equations
from tests.training.tiny import RUN

# Moonlight's structure: a dense layer, MoE layers, and queries that are projected in one matmul.
# No two widths are equal, so that shapes identify matmuls.
CONFIG = ModelConfig.from_hf(
    tiny_config(
        vocab_size=640,
        hidden_size=64,
        intermediate_size=160,
        moe_intermediate_size=48,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        q_lora_rank=None,
    )
)
K = CONFIG.num_experts_per_tok
MOE_LAYERS = 3  # one of them of MTP
POLICIES = "none", "norms", "attention+norms", "full"


@functools.cache
def step_program(remat: str = "none") -> list[Any]:
    """Returns the equations of a step in bfloat16."""
    config = dataclasses.replace(RUN, compute_dtype="bfloat16", remat=remat)
    trainer = Trainer(abstract_model(CONFIG, dtype=jnp.float32), config)
    tokens = jax.ShapeDtypeStruct((2, 32), jnp.int32)
    traced = trainer.programs.step.trace(trainer.abstract_state, None, tokens)
    return list(equations(traced.jaxpr.jaxpr))


def is_attention(equation: Any) -> bool:
    """Returns whether a dot has sequences and heads as its batch dimensions."""
    return len(equation.params["dimension_numbers"][1][0]) == 2


def test_matmuls_are_in_bfloat16():
    """Only the weighted sum of the experts' results multiplies float32. The router's weights are
    float32, but are multiplied in parts."""
    others, float32_flops, all_flops = [], 0, 0
    for equation in step_program():
        if equation.primitive.name != "dot_general" or is_attention(equation):
            continue
        a, b = (operand.aval for operand in equation.invars)
        contracted = equation.params["dimension_numbers"][0][0]
        size = math.prod(a.shape[i] for i in contracted) * equation.outvars[0].aval.size
        all_flops += size
        if jnp.float32 not in (a.dtype, b.dtype):
            continue
        float32_flops += size
        if K not in {*a.shape, *b.shape, *equation.outvars[0].aval.shape}:
            others.append((a, b))
    assert others == []
    tokens, D = 2 * 32, CONFIG.hidden_size
    assert float32_flops == MOE_LAYERS * tokens * D * K
    assert float32_flops < 0.02 * all_flops


def test_queries_and_latents_have_one_gradient():
    """The gradients by the input of their projections, and by the matrices, are a matmul each."""
    width = CONFIG.num_attention_heads * CONFIG.qk_head_dim + CONFIG.latent_dim
    joined = [
        e
        for e in step_program()
        if e.primitive.name == "dot_general"
        and any(width in v.aval.shape for v in (*e.invars, *e.outvars))
    ]
    layers = CONFIG.num_hidden_layers + CONFIG.num_nextn_predict_layers
    assert len(joined) == 2 * layers


def test_matmuls_of_experts_are_in_bfloat16():
    ragged = [e for e in step_program() if e.primitive.name == "ragged_dot_general"]
    assert len(ragged) == MOE_LAYERS * 3 * 2 + MOE_LAYERS * 3
    assert {v.aval.dtype.name for e in ragged for v in e.invars[:2]} == {"bfloat16"}


def test_only_the_embedding_is_scattered():
    """The gradients of permutations are gathers."""
    scattered = [
        e.invars[0].aval.shape for e in step_program() if e.primitive.name.startswith("scatter")
    ]
    assert set(scattered) == {(CONFIG.vocab_size, CONFIG.hidden_size)}


def test_the_gradient_of_the_embedding_is_made_when_it_is_needed():
    """Zeros that depend on nothing would be in memory during the whole backward pass."""
    made_by = {var: e for e in step_program() for var in e.outvars}
    scatters = [e for e in step_program() if e.primitive.name.startswith("scatter")]
    assert scatters
    for scatter in scatters:
        zeros = made_by[scatter.invars[0]]
        assert zeros.primitive.name == "broadcast_in_dim"
        assert made_by[zeros.invars[0]].primitive.name == "optimization_barrier"


def test_the_gradient_of_the_embedding():
    weight = jnp.arange(40.0).reshape(8, 5)
    tokens = jnp.asarray([[3, 0, 3], [7, 3, 0]])
    graph, state = nnx.split(Embedding(8, 5, std=1.0, rngs=nnx.Rngs(0), dtype=jnp.float32))

    def ours(weight: jax.Array) -> jax.Array:
        values = jax.tree.map(lambda _: weight, state)
        return jnp.sum(jnp.sin(nnx.merge(graph, values)(tokens)))

    want = jax.grad(lambda weight: jnp.sum(jnp.sin(weight[tokens])))(weight)
    np.testing.assert_array_equal(jax.grad(ours)(weight), want)


@pytest.mark.parametrize("remat", POLICIES)
def test_what_is_recomputed(remat):
    """Counts operations of the step by policy, compared with a step that recomputes nothing."""

    def counts(remat: str) -> collections.Counter[str]:
        result: collections.Counter[str] = collections.Counter()
        for equation in step_program(remat):
            name = equation.primitive.name
            if name == "dot_general" and is_attention(equation):
                name = "attention"
            result[name] += 1
        return result

    more = counts(remat)
    more.subtract(counts("none"))
    repeats = {name for name, count in more.items() if count > 0}
    assert ("rsqrt" in repeats) == (remat != "none")
    assert ("attention" in repeats) == (remat != "none")  # see below
    assert ("top_k" in repeats) == (remat == "full")
    assert ("dot_general" in repeats) == (remat == "full")
