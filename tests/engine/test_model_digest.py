"""The digest of a model: another one for other weights. test_tiers.py compares layouts."""

import jax
import jax.numpy as jnp
from flax import nnx

from dsv3_jax.pages.weights import model_digest


def test_one_bit_of_one_weight_changes_it(tiny_mtp):
    before = model_digest(tiny_mtp)
    other = nnx.clone(tiny_mtp)
    assert model_digest(other) == before
    weight = other.layers[1].self_attn.o_proj.weight
    bits = jax.lax.bitcast_convert_type(weight[...], jnp.uint32).at[3, 2].add(1)
    weight[...] = jax.lax.bitcast_convert_type(bits, jnp.float32)
    assert model_digest(other) != before


def test_the_order_of_weights_counts(tiny_mtp):
    other = nnx.clone(tiny_mtp)
    weight = other.embed_tokens.weight
    weight[...] = weight[...][::-1]
    assert model_digest(other) != model_digest(tiny_mtp)


def test_options_count(tiny_mtp):
    other, third = nnx.clone(tiny_mtp), nnx.clone(tiny_mtp)
    other.lm_head.float8_activations = True
    third.layers[0].self_attn.float8_latents = True  # of a cache in float8
    assert len({model_digest(each) for each in (tiny_mtp, other, third)}) == 3
