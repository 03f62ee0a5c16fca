"""Tests of the selection of a back-end, with back-ends that return their names."""

import logging

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels.attention_inputs.reference import AttentionWeights
from pallas_kernels.decoder_layer.reference import Matrices, Projection
from pallas_kernels.dispatch import dispatch


def refusing(reason):
    def backend(*args, **kwargs):
        raise NotImplementedError(reason)

    return backend


class Recorder:
    """A back-end that returns its name and records its arguments."""

    def __init__(self, name):
        self.name, self.calls = name, []

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self.name


def test_none_takes_the_first_that_accepts():
    first, second = Recorder("first"), Recorder("second")
    assert dispatch("op", {"first": first, "second": second}, None, 1, k=2) == "first"
    assert first.calls == [((1,), {"k": 2})]
    assert second.calls == []


def test_none_skips_refusals():
    last = Recorder("last")
    backends = {"a": refusing("no a"), "b": refusing("no b"), "last": last}
    assert dispatch("op", backends, None, 1, k=2) == "last"
    assert last.calls == [((1,), {"k": 2})]


def test_a_name_takes_that_back_end():
    backends = {name: Recorder(name) for name in "abc"}
    assert dispatch("op", backends, "c") == "c"
    assert not backends["a"].calls
    assert not backends["b"].calls


@pytest.mark.parametrize("implementation", ["a", ["a"], ("a",)])
def test_a_named_back_end_is_never_replaced(implementation):
    other = Recorder("b")
    with pytest.raises(NotImplementedError, match=r"^op: .*\(a: needs a Hopper\)$"):
        dispatch("op", {"a": refusing("needs a Hopper"), "b": other}, implementation)
    assert other.calls == []


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_sequence_goes_in_its_own_order(kind):
    backends = {"a": Recorder("a"), "b": Recorder("b"), "c": refusing("no c")}
    assert dispatch("op", backends, kind("ba")) == "b"
    assert dispatch("op", backends, kind("cba")) == "b"
    assert backends["a"].calls == []


@pytest.mark.parametrize("implementation", [None, "ab", ("a", "b")])
def test_all_refusals_are_reported(implementation):
    backends = {"a": refusing("no rows"), "b": refusing("no columns")}
    if implementation == "ab":  # one name, not a sequence of letters
        with pytest.raises(ValueError, match="got 'ab'"):
            dispatch("op", backends, implementation)
        return
    with pytest.raises(NotImplementedError, match=r"^op: .*\(a: no rows; b: no columns\)$"):
        dispatch("op", backends, implementation)


@pytest.mark.parametrize(
    ("implementation", "got"),
    [
        ("cuda", "'cuda'"),
        ("", "''"),
        (["a", "cuda"], "'cuda'"),
        (["x", "b", "y"], "'x', 'y'"),
        ([], "an empty sequence"),
        ((), "an empty sequence"),
    ],
)
def test_unknown_names_list_the_known(implementation, got):
    backends = {"a": Recorder("a"), "b": Recorder("b")}
    with pytest.raises(ValueError, match=rf"^op: expected .* among a, b; got {got}$"):
        dispatch("op", backends, implementation)
    assert not backends["a"].calls
    assert not backends["b"].calls


@pytest.mark.parametrize("implementation", [None, "a", ["a", "b"]])
@pytest.mark.parametrize("error", [ValueError, TypeError, RuntimeError])
def test_other_errors_pass_through(implementation, error):
    def broken():
        raise error("as it was")

    other = Recorder("b")
    with pytest.raises(error, match=r"^as it was$"):
        dispatch("op", {"a": broken, "b": other}, implementation)
    assert other.calls == []


def test_a_replacement_is_logged_once(caplog):
    backends = {"a": refusing("not here"), "b": Recorder("b")}
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        for _ in range(3):
            dispatch("op of this test", backends, None)
    assert caplog.messages == ["op of this test runs on b (a: not here)"]
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        dispatch("another op of this test", backends, None)
    assert caplog.messages[1:] == ["another op of this test runs on b (a: not here)"]


def test_kernels_are_skipped_if_arrays_may_be_sharded(caplog):
    """Without shard_map, XLA may shard arrays over the eight devices, and cannot split a kernel."""
    assert jax.device_count() == 8
    kernel = Recorder("mosaic_gpu")
    backends = {"mosaic_gpu": kernel, "plain": Recorder("plain")}
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        assert dispatch("an op with a kernel", backends, None) == "plain"
    assert kernel.calls == []
    assert "over 8 devices" in caplog.text
    assert dispatch("an op with a kernel", backends, "mosaic_gpu") == "mosaic_gpu"
    with pytest.raises(NotImplementedError, match="kernels: XLA may shard"):
        dispatch("an op with a kernel", {"mosaic_gpu": kernel}, None)


@pytest.mark.parametrize(
    ("axes", "chosen"), [({"a", "b"}, "mosaic_gpu"), ({"a"}, "plain")], ids=["all", "one of two"]
)
def test_kernels_run_if_shard_map_has_every_axis(axes, chosen):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    backends = {"mosaic_gpu": Recorder("mosaic_gpu"), "plain": Recorder("plain")}

    def body(x):
        assert dispatch("op in shard_map", backends, None) == chosen
        return x

    spec = jax.sharding.PartitionSpec("a")
    jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=axes)(jnp.ones(8))


def test_kernels_are_the_first_choice_with_one_device(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    backends = {"mosaic_gpu": Recorder("mosaic_gpu"), "plain": Recorder("plain")}
    assert dispatch("op", backends, None) == "mosaic_gpu"


def test_the_first_choice_is_not_logged(caplog):
    with caplog.at_level(logging.DEBUG, logger="pallas_kernels"):
        dispatch("quiet op", {"a": Recorder("a")}, None)
        dispatch("quiet op", {"a": Recorder("a"), "b": Recorder("b")}, "b")
    assert caplog.messages == []


TABLE, COUNT = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
HEAD = jnp.ones((1, 1, 1, 4))
INDICES = jnp.zeros((1, 1, 1), jnp.int32)
ARGUMENTS = {
    "mla_decode": ((HEAD, HEAD, jnp.ones((1, 2, 8)), TABLE, COUNT), {"scale": 1.0}),
    "mla_decode_parts": ((HEAD, HEAD, jnp.ones((1, 2, 8)), TABLE, COUNT), {"scale": 1.0}),
    "mla_prefill": ((HEAD, HEAD, HEAD, COUNT, COUNT), {"scale": 1.0}),
    "grouped_matmul": ((jnp.ones((1, 2)), jnp.ones((1, 2, 2)), COUNT), {}),
    "grouped_swiglu": ((jnp.ones((1, 2)), jnp.ones((1, 2, 2)), jnp.ones((1, 2, 2)), COUNT), {}),
    "token_exchange": ((jnp.ones((1, 2, 2)), COUNT), {"axes": ()}),
    "quantized_matmul": (
        (jnp.ones((1, 2)), jnp.ones((2, 2), jnp.int8), jnp.ones((2, 1))),
        {"block_shape": (1, 2)},
    ),
    "swiglu": (
        (jnp.ones((1, 2)), *[jnp.ones((2, 2), jnp.int8)] * 2, *[jnp.ones((2, 1))] * 2),
        {"block_shape": (1, 2)},
    ),
    "feed_forward": (
        (jnp.ones((1, 2)), jnp.ones(2), None, Matrices(*[jnp.ones((2, 2))] * 3), None),
        {"rule": None, "eps": 1e-6},
    ),
    "attention_inputs": (
        (
            jnp.ones((1, 2)),
            AttentionWeights(
                norm=jnp.ones(2),
                q_proj=Projection(jnp.ones((4, 2))),
                kv_a_proj=Projection(jnp.ones((4, 2))),
                kv_a_norm=jnp.ones(2),
                w_uk=jnp.ones((1, 2, 2)),
            ),
            *[jnp.ones((1, 1))] * 2,
            jnp.ones((1, 2, 4)),
            jnp.zeros(1, jnp.int32),
        ),
        {"eps": 1e-6, "latent_eps": 1e-6},
    ),
    "rms_norm": ((jnp.ones((1, 2)), jnp.ones(2)), {"eps": 1e-6}),
    "add_rms_norm": ((jnp.ones((1, 2)), jnp.ones((1, 2)), jnp.ones(2)), {"eps": 1e-6}),
    "route": (
        (jnp.ones((1, 2)), None, None),
        {
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "method": "greedy",
            "scoring": "softmax",
            "normalize": False,
            "scaling_factor": 1.0,
        },
    ),
    "sparse_index": (
        (jnp.ones((1, 1, 1, 2)), jnp.ones((1, 1, 1)), jnp.ones((1, 2, 2)), TABLE, COUNT),
        {},
    ),
    "top_k": ((jnp.ones((1, 2)), 1), {}),
    "cross_entropy": ((jnp.ones((1, 2)), jnp.zeros(1, jnp.int32), jnp.ones(1)), {}),
    "gather_rows": ((jnp.ones((1, 2)), jnp.zeros(1, jnp.int32)), {}),
    "sparse_mla_decode": ((HEAD, HEAD, jnp.ones((1, 2, 8)), TABLE, INDICES), {"scale": 1.0}),
    "sparse_mla_prefill": ((HEAD, HEAD, jnp.ones((1, 2, 8)), INDICES), {"scale": 1.0}),
    "block_quant": ((jnp.ones((2, 2)),), {}),
    "integer_quant": ((jnp.ones((2, 2)), 8), {}),
    "block_dequant": ((jnp.ones((2, 2), jnp.float8_e4m3fn), jnp.ones((1, 1)), (2, 2)), {}),
}


@pytest.mark.parametrize("op", ARGUMENTS)
def test_every_operation_follows_the_rule(op):
    args, kwargs = ARGUMENTS[op]
    with pytest.raises(ValueError, match=rf"^{op}: expected .*reference.*; got 'abacus'$"):
        getattr(pallas_kernels, op)(*args, **kwargs, implementation=["reference", "abacus"])


# These have one implementation for all platforms. mla_decode_schedule computes the schedule that
# all back-ends of mla_decode read, and Routes is the result type of route.
WITHOUT_BACK_ENDS = {
    "Routes",
    "merge_attention",
    "page_width",
    "sort_pairs",
    "mla_decode_schedule",
    "mla_decode_whole_sequences",
    "quantize_latent",
    "dequantize_latent",
    "float8_token_bytes",
}


def test_every_operation_is_listed():
    assert set(ARGUMENTS) == set(pallas_kernels.__all__) - WITHOUT_BACK_ENDS
