"""Every exchange computes the same mixture of experts on simulated devices as one device."""

import functools
import inspect
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from pallas_kernels import block_dequant, block_quant, grouped_matmul, token_exchange
from sharding import expert_mixture, expert_parallel
from sharding.dispatch_table import ragged_slices
from sharding.expert_parallel import (
    check_exchange,
    default_capacity,
    default_pairs_per_call,
    mix_experts,
)
from tests.support.covering import slow_except

M, D, F, E, K = 48, 128, 16, 32, 3

# Sizes of the mesh axes, exchange_axes, and reduce_axes.
MESHES = {
    "8": ({"x": 8}, ("x",), ()),
    "4x2": ({"x": 4, "y": 2}, ("x", "y"), ()),
    "2": ({"x": 2}, ("x",), ()),
    "1": ({"x": 1}, ("x",), ()),
    "4x2 reduced": ({"x": 4, "y": 2}, ("x",), ("y",)),
    "2x4 both reduced": ({"x": 2, "y": 4}, (), ("x", "y")),
}
EXCHANGES = {
    "all_gather": {"exchange": "all_gather"},
    "all_gather in several calls": {"exchange": "all_gather", "pairs_per_call": 5},
    "all_to_all": {"exchange": "all_to_all", "capacity": M},
    "all_to_all in rounds": {"exchange": "all_to_all", "capacity": 2},
    "all_to_all in several calls": {"exchange": "all_to_all", "capacity": 4, "pairs_per_call": 7},
    "ragged_all_to_all": {"exchange": "ragged_all_to_all"},
    "ragged_all_to_all in several calls": {"exchange": "ragged_all_to_all", "pairs_per_call": 7},
    "one_sided": {"exchange": "one_sided"},
}


def ragged_emulated(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """Emulates jax.lax.ragged_all_to_all with all-gathers. Returns garbage if sizes contradict."""
    me = lax.axis_index(axis_name)
    operands = lax.all_gather(operand, axis_name)
    slices = lax.all_gather(jnp.stack([input_offsets, send_sizes, output_offsets]), axis_name)
    starts, sizes, targets = slices[:, :, me].T
    inward = jnp.arange(len(output)) - targets[:, None]
    written = (inward >= 0) & (inward < sizes[:, None])
    source = jnp.argmax(written, axis=0)
    row = starts[source] + jnp.arange(len(output)) - targets[source]
    garbage = jnp.nan if jnp.issubdtype(output.dtype, jnp.floating) else -1
    garbage = jnp.asarray(garbage).astype(output.dtype)
    output = jnp.where(jnp.any(written, axis=0)[:, None], operands[source, row], output)
    return jnp.where(jnp.all(recv_sizes == sizes), output, garbage)


def one_sided_emulated(rows, counts, *, axes):
    """Emulates pallas_kernels.token_exchange, with garbage in rows past the counts.

    For packed tokens, garbage is a token of zeros with valid experts, which experts_mlp detects.
    For partial sums it is NaN.
    """
    received, counts = token_exchange(rows, counts, axes=axes, implementation="reference")
    garbage = jnp.broadcast_to(received[:, :1].at[..., :D].set(0), received.shape)
    if jnp.issubdtype(rows.dtype, jnp.floating):
        garbage = jnp.full_like(received, jnp.nan)
    is_received = jnp.arange(rows.shape[1]) < counts[:, None]
    return jnp.where(is_received[..., None], received, garbage), counts


def make_mesh(sizes):
    devices = np.array(jax.devices()[: int(np.prod([*sizes.values()]))])
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


def experts_mlp(gate, up, down):
    """Returns an MLP for mix_experts with NaN in all rows that may be undefined.

    It returns NaN in all rows if its input is invalid: more rows than there are, or a row of zeros
    (the padding of messages).
    """
    matmul = functools.partial(grouped_matmul, implementation="reference")

    def mlp(tokens, rows, group_sizes, copies):
        del copies
        x = tokens[rows]
        hidden = jax.nn.silu(matmul(x, gate, group_sizes)) * matmul(x, up, group_sizes)
        pairs = jnp.sum(group_sizes)
        defined = jnp.arange(len(rows)) < pairs
        is_valid = (pairs <= len(rows)) & jnp.all(jnp.any(x, axis=1) | ~defined)
        hidden = jnp.where(defined[:, None] & is_valid, hidden, jnp.nan)
        return hidden, Partial(lambda down, sizes, x: matmul(x, down, sizes), down, group_sizes)

    return mlp


def sharded(mesh, axes, reduce_axes=(), check_vma=True, **options):
    """Returns a function (tokens, experts, weights, *matrices) -> y over all devices."""

    def body(tokens, experts, weights, *matrices):
        return mix_experts(
            tokens,
            experts,
            weights,
            experts_mlp(*matrices),
            num_experts=E,
            exchange_axes=axes,
            reduce_axes=reduce_axes,
            **options,
        )

    split = P(axes or None)
    specs = (split,) * 3 + (P((*axes, *reduce_axes)),) * 3
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=split, check_vma=check_vma)


@functools.cache
def compiled(name, exchange, dtype=jnp.float32, **options):
    """Compiles one function per mesh, exchange and dtype, for all inputs."""
    sizes, axes, reduce_axes = MESHES[name]
    function = sharded(make_mesh(sizes), axes, reduce_axes, **EXCHANGES[exchange], **options)
    shapes = [((M, D), dtype), ((M, K), jnp.int32), ((M, K), jnp.float32)]
    shapes += [((E, F, D), dtype), ((E, F, D), dtype), ((E, D, F), dtype)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sharding.token_exchange.token_exchange", one_sided_emulated)
        if exchange.startswith("ragged_all_to_all"):
            patch.setattr(jax.lax, "ragged_all_to_all", ragged_emulated)
            patch.setattr(expert_parallel, "mesh_platform", lambda mesh: None)
        lowered = jax.jit(function).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    # Compilation takes most of the time, because the programs are small.
    return lowered.compile({"xla_backend_optimization_level": 0})


@functools.cache
def arrays(dtype=jnp.float32):
    """Returns tokens and the experts' matrices."""
    draw = np.random.default_rng(0).standard_normal
    shapes = ((M, D), (E, F, D), (E, F, D), (E, D, F))
    return tuple(jnp.asarray(draw(s) / np.sqrt(s[-1]) ** (len(s) - 2), dtype) for s in shapes)


def reference(tokens, experts, weights, gate, up, down):
    """Computes all experts for every token and selects; uses neither sorting nor a mesh."""
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    dtype = tokens.dtype
    hidden = jax.nn.silu(einsum("md,efd->mef", tokens, gate).astype(dtype))
    hidden *= einsum("md,efd->mef", tokens, up).astype(dtype)
    out = einsum("mef,edf->med", hidden, down).astype(dtype).astype(jnp.float32)
    mixture = jnp.sum(jax.nn.one_hot(experts, E) * weights[..., None], axis=1)
    return jnp.einsum("me,med->md", mixture, out, precision="highest")


def choices():
    rng = np.random.default_rng(1)
    free = np.stack([rng.permutation(E)[:K] for _ in range(M)])
    yield "free", free
    yield "one expert", np.tile([5, E, E + 9], (M, 1))
    yield "one device", np.tile([E - 1, E - 3, E - 2], (M, 1))
    yield "one device and others", np.where(np.arange(M)[:, None] < M // 8, [13, 12, 14], free)
    # Whole tokens, all tokens of one device, and single choices, each with its own "no expert".
    padded = np.where(np.arange(M)[:, None] % 3 == 0, E, free)
    padded[: M // 8], padded[-5:, 1], padded[-9:, 2] = E + 1, -1, np.iinfo(np.int32).max
    yield "padding", padded
    yield "nothing", np.full((M, K), E)
    yield "twice", np.stack([free[:, 0], free[:, 1], free[:, 0]], axis=1)


CHOICES = dict(choices())


def inputs(choice, dtype=jnp.float32):
    tokens, *matrices = arrays(dtype)
    weights = np.random.default_rng(2).random((M, K), np.float32)
    weights[4:7] = 0
    # Weights of padding must not be read.
    nowhere = (CHOICES[choice] < 0) | (CHOICES[choice] >= E)
    experts = jnp.asarray(CHOICES[choice], jnp.int32)
    return (tokens, experts, jnp.where(nowhere, jnp.nan, weights), *matrices)


@functools.cache
def expected(choice, dtype=jnp.float32, float8=False):
    tokens, experts, weights, *matrices = inputs(choice, dtype)
    if float8:
        tokens = block_dequant(*block_quant(tokens, (1, 128)), (1, 128), dtype)
    return jax.jit(reference)(tokens, experts, jnp.nan_to_num(weights), *matrices)


def agree(got, want, atol):
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


COMBINATIONS = [
    (name, exchange)
    for name in MESHES
    for exchange in EXCHANGES
    # Without exchange axes all exchanges are the same.
    if MESHES[name][1] or exchange == "all_gather"
    if name == "8" or "several calls" not in exchange
    if name not in ("1", "2", "4x2") or exchange in ("all_gather", "all_to_all")
]


# Every exchange over one axis, and each kind of mesh with programs that other tests compile too.
QUICK = [
    *(("8", exchange) for exchange in EXCHANGES),
    *(
        (name, exchange)
        for name in ("4x2", "4x2 reduced")
        for exchange in ("all_gather", "all_to_all")
    ),
    ("2x4 both reduced", "all_gather"),
]


def slow_unless(quick, cases):
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("name", "exchange"), slow_unless(QUICK, COMBINATIONS))
def test_sums_are_those_of_one_device(name, exchange, choice):
    agree(compiled(name, exchange)(*inputs(choice)), expected(choice), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "exchange", "dtype"),
    [
        ("8", "all_gather", jnp.float32),
        ("8", "all_to_all in rounds", jnp.float32),
        pytest.param("8", "ragged_all_to_all", jnp.float32, marks=pytest.mark.slow),
        ("8", "one_sided", jnp.float32),
        pytest.param("4x2 reduced", "all_gather", jnp.bfloat16, marks=pytest.mark.slow),
        ("4x2 reduced", "all_to_all", jnp.bfloat16),
    ],
)
def test_float8_is_rounding_the_tokens_first(name, exchange, dtype):
    function = compiled(name, exchange, dtype, float8=True)
    for choice in ("free", "padding"):
        want = expected(choice, dtype, float8=True)
        agree(function(*inputs(choice, dtype)), want, bound(dtype))
    assert not np.allclose(want, expected("padding", dtype), atol=bound(dtype))


def test_float8_rounds_without_an_exchange():
    function = compiled("2x4 both reduced", "all_gather", float8=True)
    agree(function(*inputs("free")), expected("free", float8=True), 1e-5)


def bound(dtype):
    """Returns the tolerance. In bfloat16 a value near the middle may round either way."""
    return 1e-5 if dtype == jnp.float32 else 2e-2


@pytest.mark.parametrize(
    ("exchange", "combine_dtype", "atol"),
    [
        pytest.param("all_gather", jnp.float32, 2e-2, marks=pytest.mark.slow),
        ("all_to_all in rounds", jnp.float32, 2e-2),
        pytest.param("all_to_all in rounds", jnp.bfloat16, 5e-2, marks=pytest.mark.slow),
        pytest.param("ragged_all_to_all", jnp.bfloat16, 5e-2, marks=pytest.mark.slow),
        ("one_sided", jnp.bfloat16, 5e-2),
    ],
)
def test_bfloat16(exchange, combine_dtype, atol):
    function = compiled("8", exchange, jnp.bfloat16, combine_dtype=combine_dtype)
    for choice in ("free", "one device and others"):
        got = function(*inputs(choice, jnp.bfloat16))
        agree(got, expected(choice, jnp.bfloat16), atol)


def test_devices_that_exchange_nothing_need_not_agree():
    """Two groups of four, one with every token on one device, the other with an even load."""
    mesh = make_mesh({"data": 2, "x": 4})
    tokens, experts, weights, *matrices = inputs("free")
    experts = experts.at[: M // 2].set(jnp.array([E - 1, E - 2, E - 3]))

    def body(*arguments):
        options = {
            "num_experts": E,
            "exchange_axes": ("x",),
            "exchange": "all_to_all",
            "capacity": 2,
        }
        return mix_experts(*arguments[:3], experts_mlp(*arguments[3:]), **options)

    split = P(("data", "x"))
    specs = (split,) * 3 + (P("x"),) * 3
    function = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=split))
    want = jax.jit(reference)(tokens, experts, weights, *matrices)
    agree(function(tokens, experts, weights, *matrices), want, 1e-5)


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "check_vma"),
    slow_except(
        [("8", True), ("8", False), ("4x2 reduced", True), ("2x4 both reduced", True)], quick=(2,)
    ),
)
def test_gradients_through_all_gather(name, check_vma):
    sizes, axes, reduce_axes = MESHES[name]
    function = sharded(make_mesh(sizes), axes, reduce_axes, check_vma, exchange="all_gather")
    tokens, experts, weights, *matrices = inputs("padding")
    weights = jnp.nan_to_num(weights)
    aim = jnp.asarray(np.random.default_rng(3).standard_normal((M, D)), jnp.float32)

    def loss(layer, tokens, weights, matrices):
        return jnp.vdot(layer(tokens, experts, weights, *matrices), aim)

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3)), static_argnums=0)
    want = gradient(reference, tokens, weights, matrices)
    executable = gradient.lower(function, tokens, weights, matrices).compile()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
    jax.tree.map(close, executable(tokens, weights, matrices), want)
    if not reduce_axes:
        # One of each for dispatch and combine, in both directions, and the sum of the loss.
        count = {"all-gather": 2, "reduce-scatter": 2, "all-reduce": 1}
        assert collectives(executable) == count


@pytest.mark.parametrize("wanted", [0, 2], ids=["tokens", "weights"])
def test_all_to_all_refuses_a_gradient(wanted):
    function = sharded(make_mesh({"x": 8}), ("x",), exchange="all_to_all")
    with pytest.raises(NotImplementedError, match="all_to_all has no gradient; all_gather has one"):
        jax.grad(lambda *arguments: jnp.sum(function(*arguments)), wanted)(*inputs("free"))


# ---- collectives ---------------------------------------------------------------------------------


def collectives(executable):
    names = re.findall(
        r" (all-gather|all-to-all|reduce-scatter|all-reduce|collective-permute)(?:-start)?\(",
        executable.as_text(),
    )
    return dict(Counter(names))


@pytest.mark.parametrize(
    ("name", "exchange", "counted"),
    [
        ("8", "all_gather", {"all-gather": 1, "reduce-scatter": 1}),
        ("4x2", "all_gather", {"all-gather": 1, "reduce-scatter": 1}),
        ("4x2", "all_to_all", {"all-to-all": 2}),
        ("8", "all_to_all in rounds", {"all-to-all": 2, "all-reduce": 1}),
        ("4x2 reduced", "all_gather", {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 1}),
        ("4x2 reduced", "all_to_all", {"all-to-all": 2, "all-reduce": 1}),
        ("2x4 both reduced", "all_gather", {"all-reduce": 1}),
    ],
)
def test_collectives_of_a_layer(name, exchange, counted):
    assert collectives(compiled(name, exchange)) == counted


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all in rounds"])
def test_float8_needs_no_more_collectives(exchange):
    float8 = compiled("8", exchange, jnp.float32, float8=True)
    assert collectives(float8) == collectives(compiled("8", exchange))


# ---- lengths and refusals ------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["random", "empty", "one sender", "one receiver"])
def test_ragged_slices(load):
    """Rows arrive where the receiver expects them, without gaps, and return to their positions."""
    n = 5
    counts = np.random.default_rng(4).integers(0, 4, (n, n))
    keep = {"empty": 0, "one sender": np.arange(n)[:, None] == 2, "one receiver": np.arange(n) == 3}
    counts = counts * keep.get(load, 1)
    dispatch, combine = zip(
        *(ragged_slices(jnp.asarray(counts), me) for me in range(n)), strict=True
    )
    senders = [[(s, r, i) for r in range(n) for i in range(counts[s, r])] for s in range(n)]
    receivers = [[(s, r, i) for s in range(n) for i in range(counts[s, r])] for r in range(n)]
    assert emulate(senders, dispatch) == receivers
    assert emulate(receivers, combine) == senders


def emulate(rows, slices):
    """Emulates a ragged all-to-all on lists; positions that are not written stay None."""
    n = len(rows)
    out = [[None] * int(sum(slices[device].recv_sizes)) for device in range(n)]
    for source, (starts, sizes, targets, _) in enumerate(slices):
        for sink in range(n):
            start, size, target = int(starts[sink]), int(sizes[sink]), int(targets[sink])
            assert size == slices[sink].recv_sizes[source]
            assert target + size <= len(out[sink])
            out[sink][target : target + size] = rows[source][start : start + size]
    return out


def test_default_capacity():
    assert default_capacity(1, 8, 64) == 1
    assert default_capacity(16, 8, 8) == 16  # few tokens: all in one round, which needs no loop
    assert default_capacity(4096, 8, 8) == 3361  # 1.25 times the 2688.6 expected
    assert default_capacity(256, 8, 64) == 51  # four deviations of 5.2 above the 30.3 expected
    assert default_capacity(4096, 8, 1) == 4096


def test_default_pairs():
    assert default_pairs_per_call(64 * 32, 8, 32) == 16384  # the lower limit
    assert default_pairs_per_call(4096 * 8, 8, 8) == 65536  # twice the expected number
    assert default_pairs_per_call(4096 * 2, 8, 2) == 65536  # all pairs


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 300, 4096, 5000])
def test_order_of_pairs_is_a_stable_sort(count):
    """Many pairs are counted in blocks."""
    keys = np.random.default_rng(count).integers(0, 7, count, np.int32)
    order, position = expert_mixture._sort_positions(jnp.asarray(keys), 7)
    np.testing.assert_array_equal(order, np.argsort(keys, kind="stable"))
    np.testing.assert_array_equal(position, np.argsort(order))


FITTING = {"exchange": "all_to_all", "num_experts": 32, "exchange_axes": ("x",)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exchange": "nccl"}, "exchange: expected one of all_gather, all_to_all, .*got 'nccl'"),
        ({"exchange_axes": ("z",)}, "axes: expected mesh axes among x, y; got 'z'"),
        ({"reduce_axes": ("x",)}, "axes: expected each mesh axis once, got 'x' twice"),
        (
            {"num_experts": 36, "reduce_axes": ("y",)},
            "num_experts: expected a multiple of the 8 devices along x x y, got 36",
        ),
        ({"num_experts": 0}, "num_experts: expected a multiple of the 4 devices .*, got 0"),
        ({"float8": True, "hidden_size": 576}, "float8: expected rows in whole blocks .*, got 576"),
        ({"capacity": 0}, "capacity: expected None, or 1 or more .*; got 0 for all_to_all"),
        ({"capacity": 4, "exchange": "all_gather"}, "capacity: .*; got 4 for all_gather"),
        ({"combine_dtype": jnp.float16}, "combine_dtype: expected .*, got float16"),
    ],
)
def test_refusals(options, message):
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    assert check_exchange(mesh, **FITTING) == 8
    with pytest.raises(ValueError, match=rf"\A{message}\Z"):
        check_exchange(mesh, **{**FITTING, **options})


def test_no_ragged_exchange_on_a_cpu():
    mesh = make_mesh({"x": 8})
    message = "ragged_all_to_all: XLA does not implement it on CPUs"
    with pytest.raises(NotImplementedError, match=message):
        check_exchange(mesh, "ragged_all_to_all", num_experts=E, exchange_axes=("x",))
    function = sharded(mesh, ("x",), exchange="ragged_all_to_all")
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(function, *inputs("free"))


def test_one_sided_needs_one_process(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(NotImplementedError, match="one_sided: expected devices of one process"):
        check_exchange(make_mesh({"x": 8}), "one_sided", num_experts=E, exchange_axes=("x",))


@pytest.mark.parametrize(("some", "got"), [([1, 0], "1, 0"), ([2, 3], "2, 3")])
def test_one_sided_needs_devices_in_order(some, got):
    mesh = Mesh(np.array(jax.devices())[some], ("x",))
    options = {"num_experts": E, "exchange_axes": ("x",)}
    assert check_exchange(mesh, "all_to_all", **options) == E // 2
    with pytest.raises(ValueError, match=rf"^one_sided: expected devices 0 to 1 .* got \[{got}\]$"):
        check_exchange(mesh, "one_sided", **options)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (1, {}, r"experts, weights: expected both \[6, K\], got \(6, 3\), \(6, 1\)"),
        (K, {"pairs_per_call": 0}, "pairs_per_call: expected None, or 1 or more; got 0"),
        (K, {"float8": True}, "float8: expected rows in whole blocks of 128, got 64"),
    ],
)
def test_refusals_while_tracing(monkeypatch, columns, options, message):
    monkeypatch.setitem(globals(), "mix_experts", inspect.unwrap(mix_experts))
    function = sharded(make_mesh({"x": 8}), ("x",), exchange="all_to_all", **options)
    tokens, experts, weights, *matrices = inputs("free")
    with pytest.raises(ValueError, match=rf"\A{message}\n-"):
        jax.eval_shape(function, tokens[:, : D // 2], experts, weights[:, :columns], *matrices)
