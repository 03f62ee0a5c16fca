"""Tests of the traced training step: dtypes of matmuls, scatters, and what it recomputes."""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import abstract_model
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
