"""Parameters that are stored sharded and gathered for use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsv3_jax import presets
from dsv3_jax.initialization import abstract_model
from dsv3_jax.layers.logical_axes import parameter_shardings
from dsv3_jax.quantization import BlockQuantization
from sharding import DEFAULT_RULES, Layout, Rules, make_layout, make_mesh
from sharding.fsdp import fsdp_sharding, gather_parameter

MESH = make_mesh(data=2, expert=4)
BOTH = ("data", "expert")


@pytest.mark.parametrize(
    ("shape", "compute", "fsdp_axes", "want"),
    [
        ((16, 3), P(), BOTH, P(BOTH, None)),
        ((12, 16), P(), BOTH, P(None, BOTH)),  # the first dimension that divides
        ((16, 3), P(), ("data",), P("data", None)),
        ((8, 6, 10), P("expert"), BOTH, P(("expert", "data"), None, None)),
        ((4, 6, 10), P("expert"), BOTH, P("expert", "data", None)),
        ((16, 3), P(), ("tensor",), P()),  # an axis of one device
        ((4, 7), P(BOTH), BOTH, P(BOTH)),  # nothing is replicated
        ((16,), P(), BOTH, P()),
    ],
)
def test_fsdp_sharding(shape, compute, fsdp_axes, want):
    assert fsdp_sharding("w", shape, NamedSharding(MESH, compute), fsdp_axes).spec == want


def test_refusals():
    with pytest.raises(
        ValueError, match=r"^w: expected .* divides over 8 .* data x expert.*\(12, 9"
    ):
        fsdp_sharding("w", (12, 9), NamedSharding(MESH, P()), BOTH)
    with pytest.raises(
        ValueError, match=r"^fsdp_axes: expected mesh axes among data, .* got 'fsdp'"
    ):
        Layout(MESH, fsdp_axes=("fsdp",))
    with pytest.raises(ValueError, match=r"^fsdp_axes: expected axis 'vocab' unsharded"):
        Layout(make_mesh(data=4, tensor=2), fsdp_axes=("data",))
    model = abstract_model(presets.DEEPSEEK_V3, quantization=BlockQuantization())
    with pytest.raises(ValueError, match=r"^fsdp_axes: expected weights without quantization, "):
        parameter_shardings(model, MESH, DEFAULT_RULES, BlockQuantization(), fsdp_axes=BOTH)


def test_every_matrix_of_deepseek_v3_is_stored_sharded():
    layout = make_layout("train", expert_devices=4)
    model = abstract_model(presets.DEEPSEEK_V3)
    shardings = parameter_shardings(model, layout.mesh, layout.rules, fsdp_axes=layout.fsdp_axes)
    whole = {path for path, sharding in shardings.items() if sharding.is_fully_replicated}
    assert {path[-1] for path in whole} == {"weight", "e_score_correction_bias"}
    assert {path[-2] for path in whole if path[-1] == "weight"} == {
        *("norm", "input_layernorm", "post_attention_layernorm", "q_a_layernorm"),
        *("kv_a_layernorm", "enorm", "hnorm"),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gather_and_its_gradient(dtype):
    """The gradient sums those of eight devices and is rounded once."""
    layout = Layout(MESH, Rules({"batch": BOTH, "expert": "expert"}), fsdp_axes=BOTH)
    weight = jax.random.normal(jax.random.key(0), (8, 4, 2)).astype(dtype)
    factors = jax.random.normal(jax.random.key(1), (8, 8, 4, 2)).astype(dtype)
    compute, storage = P("expert"), P(("expert", "data"))

    def body(shard, factor):
        gathered = gather_parameter(shard, compute, storage)
        assert gathered.shape == (2, 4, 2)
        e = jax.lax.axis_index("expert") * 2
        return jnp.sum(gathered * jax.lax.dynamic_slice_in_dim(factor[0], e, 2)).reshape(1)

    sharded = layout.shard_map(body, (storage, P(BOTH)), P(BOTH))
    got = jax.jit(jax.grad(lambda w: jnp.sum(sharded(w, factors))))(weight)
    # Device (d, e) multiplies its own experts by its own factors.
    own = np.asarray(factors, np.float32).reshape(2, 4, 4, 2, 4, 2)
    want = np.stack([own[:, e, e].sum(axis=0) for e in range(4)]).reshape(8, 4, 2)
    np.testing.assert_allclose(got.astype(np.float32), want.astype(dtype), rtol=1e-6)
    gather = layout.shard_map(lambda p: gather_parameter(p, compute, storage), (storage,), compute)
    np.testing.assert_array_equal(jax.jit(gather)(weight), weight)
