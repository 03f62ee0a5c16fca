"""Tests of sharded sequences: who computes which queries, and the gathered tokens' gradient."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding import Layout, gather_tokens, make_layout, map_balanced


def layout_over(devices: int) -> Layout:
    return make_layout("train", devices=jax.devices()[:devices], context_devices=devices)


def on_devices(layout: Layout, body: Any, x: jax.Array) -> np.ndarray:
    spec = layout.sequences_spec(x.shape[1])
    return np.asarray(jax.jit(layout.shard_map(body, (spec,), spec))(x))


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_positions_and_balance(devices):
    """Each position is computed once, at its own place, and every device sees as many keys."""
    layout, tokens = layout_over(devices), 4 * devices
    positions = jnp.arange(tokens)[None, :, None]

    def body(x: jax.Array) -> jax.Array:
        def function(queries: jax.Array, start: jax.Array) -> jax.Array:
            device = jnp.full_like(queries, layout.shard_index("tokens"))
            expected = start + jnp.arange(queries.shape[1])[None, :, None]
            return jnp.concatenate([queries, expected, device], axis=-1)

        return map_balanced(layout, function, x)

    result = on_devices(layout, body, positions)[0]
    np.testing.assert_array_equal(result[:, :2], np.repeat(np.arange(tokens)[:, None], 2, axis=1))
    keys = np.bincount(result[:, 2], weights=result[:, 0] + 1)
    np.testing.assert_array_equal(keys, [keys.sum() / devices] * devices)


def test_gathered_tokens_and_their_gradient():
    """Every device has all tokens in order. The gradient of a token is summed over devices, in
    float32: a CPU would also sum bfloat16 so, but a GPU would not."""
    layout = layout_over(4)
    x = jnp.arange(8, dtype=jnp.bfloat16)[None, :, None]

    def body(x: jax.Array) -> jax.Array:
        weight = 1 + layout.shard_index("tokens")

        def loss(x: jax.Array) -> jax.Array:
            whole = gather_tokens(layout, x)
            return jnp.sum(whole * whole * weight.astype(x.dtype))

        return jax.grad(loss)(x)

    gradient = on_devices(layout, body, x).astype(np.float32)[0, :, 0]
    np.testing.assert_array_equal(gradient, 2 * np.arange(8) * (1 + 2 + 3 + 4))
    spec = layout.sequences_spec(8)
    program = str(jax.make_jaxpr(layout.shard_map(body, (spec,), spec))(x))
    assert re.findall(r"(\w+)\[[^\]]*\] = reduce_scatter", program) == ["f32"]


def test_an_odd_number_of_tokens_is_refused():
    layout = layout_over(2)
    with pytest.raises(ValueError, match="queries: expected an even number per device, got 3"):
        on_devices(layout, lambda x: map_balanced(layout, lambda q, _: q, x), jnp.ones((1, 6)))


def test_which_lengths_are_sharded():
    layout = layout_over(4)
    assert layout.sequences_spec(8) == layout.partition_spec(("batch", "tokens"))
    assert layout.sequences_spec(9) == layout.partition_spec(("batch",))
    layout.check_length(16)
    with pytest.raises(ValueError, match=r"length: expected a multiple of 8 tokens .* got 12"):
        layout.check_length(12)
    make_layout("train", devices=jax.devices()[:4]).check_length(9)


def test_sizes_of_the_mesh():
    sizes = dict(make_layout("train", expert_devices=2, context_devices=2).mesh.shape)
    assert sizes == {"data": 2, "expert": 2, "tensor": 2}
    layout = make_layout("train", context_devices=2)
    assert dict(layout.mesh.shape) == {"data": 1, "expert": 4, "tensor": 2}
    shards = {axis: layout.num_shards(axis) for axis in ("batch", "tokens", "expert")}
    assert shards == {"batch": 4, "tokens": 2, "expert": 4}
    for sizes, message in (
        ({"context_devices": 3}, "context_devices: expected a divisor of 8 devices, got 3"),
        ({"context_devices": 0}, "context_devices: expected a divisor of 8 devices, got 0"),
        (
            {"expert_devices": 4, "context_devices": 4},
            r"expert_devices: expected a divisor of 8 devices / 4 \(context_devices\), got 4",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            make_layout("train", **sizes)
    with pytest.raises(ValueError, match=r"^context_devices: expected None for dp_attention_ep"):
        make_layout("dp_attention_ep", context_devices=2)
