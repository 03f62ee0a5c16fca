"""The code of single threads of feed_forward, run on NumPy for all threads of the consumers."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.block_quant.reference import block_dequant, integer_quant
from pallas_kernels.decoder_layer import activations, registers
from pallas_kernels.decoder_layer.activations import _powers
from pallas_kernels.decoder_layer.registers import Half, Operand, Rows
from pallas_kernels.hopper import registers as hopper_registers
from tests.pallas_kernels.one_block import LANES, THREADS, Buffer, Values, emulate, run

BFLOAT16, FLOAT8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
INT8, INT4 = np.dtype(np.int8), np.dtype(np.uint8)
# Columns of a row, whether its halves are one row's, and the most bytes of a step.
CASES = {
    "every warp has a block": (FLOAT8, 1024, False, 512),
    "every warp has two blocks": (BFLOAT16, 1024, True, 1024),
    "eleven blocks": (BFLOAT16, 1408, True, 1024),
    "eleven blocks, halves share a scale": (FLOAT8, 1408, True, 1024),
    "one block": (BFLOAT16, 128, True, 1024),
    "more scales than lanes": (FLOAT8, 7168, False, 1024),
}


def scale_registers(scales, first, columns):
    """Returns registers as load_scales does: block i's scale in lane i % 32 of array i // 32."""
    low, high = first // 128, (first + columns - 1) // 128
    own = scales[low : high + 1]
    lane = np.arange(THREADS) % LANES
    return [Values(own[np.minimum(lane + c, len(own) - 1)]) for c in range(0, len(own), LANES)]


def in_memory(sums):
    """Returns the sums as both warpgroups store them: [warpgroup, half, warp and token, row]."""
    memory = np.zeros((2, 2, 32, 8), np.float32)
    thread = np.arange(THREADS)
    warpgroup, warp, lane = thread // 128, thread // 32 % 4, thread % 32
    for half, values in enumerate(sums):
        for e in range(2):
            memory[warpgroup, half, warp * 8 + lane // 4, lane % 4 * 2 + e] = values[e]
    return memory


# Rows for float8 are in float16: at most four if the halves are one row's.
FORMATS = [
    pytest.param(*case, tokens, id=f"{name}-{tokens}")
    for name, case in CASES.items()
    for tokens in (1, 3, 4 if case[0] == FLOAT8 and case[2] else 8)
]


@pytest.mark.parametrize(("dtype", "K", "is_split", "most_bytes", "tokens"), FORMATS)
def test_a_unit(dtype, K, is_split, most_bytes, tokens, monkeypatch, untyped):
    emulate(monkeypatch, registers, activations, hopper_registers)
    rng = np.random.default_rng(0)
    operand = Operand.of(dtype, K, is_split, most_bytes)
    columns, step = operand.columns, operand.step
    weights = rng.standard_normal((2, 8, columns)).astype(dtype)
    x = rng.standard_normal((tokens, K)).astype(BFLOAT16)
    scales = rng.uniform(0.5, 2, (2, -(-K // 128))).astype(np.float32)
    if is_split:
        scales[1] = scales[0]  # halves of one row
    firsts = (0, columns if is_split else 0)

    start, stride = 24, K + 40
    memory = np.full(start + tokens * stride, np.nan, BFLOAT16)
    for t in range(tokens):
        number = x[t]
        if dtype == FLOAT8:  # multiplied by powers of two, exactly
            number = (number.astype(np.float32) * 2.0 ** (t + 4)).astype(np.float16).view(BFLOAT16)
        memory[start + t * stride :][:K] = number
    rows = Rows(Buffer(memory), start, stride, tokens)
    of_rows = ()
    if dtype == FLOAT8:
        factors = Buffer(np.float32(2.0) ** -np.arange(2, 4 + tokens, dtype=np.float32))
        rows = dataclasses.replace(rows, factors=factors, first_factor=2)
        of_rows = factors, np.int32(2)
    chunks = []
    if dtype == FLOAT8:
        chunks = [scale_registers(scales[n], first, columns) for n, first in enumerate(firsts)]
    sums = (Values(0.0, 0.0), Values(0.0, 0.0))
    for i in range(operand.steps):
        stage = np.zeros((2, 8, operand.step_bytes + 64), np.uint8)  # rows with padding
        for n in range(2):
            part = np.ascontiguousarray(weights[n, :, i * step : (i + 1) * step])
            stage[n, :, : operand.step_bytes] = part.view(np.uint8)
        halves = [Buffer(half) for half in stage]
        sums = registers.multiply(operand, halves, rows, i, chunks, sums, None)
    totals = registers.load_totals(operand, Buffer(in_memory(sums)), tokens, None, *of_rows)

    for n, total in enumerate(totals):
        w = weights[n].astype(np.float64)
        if dtype == FLOAT8:
            w = w * np.float64(scales[n])[(firsts[n] + np.arange(columns)) // 128]
        want = x[:, firsts[n] : firsts[n] + columns].astype(np.float64) @ w.T
        got = total[0][:64].reshape(8, 8)
        np.testing.assert_allclose(got[:tokens], want, rtol=1e-4, atol=1e-3)
        np.testing.assert_array_equal(total[0][:128], np.tile(total[0][:64], 2))
        if tokens == 1:  # every token's threads have the only one's totals
            np.testing.assert_array_equal(got, np.broadcast_to(got[0], (8, 8)))


@pytest.mark.parametrize("largest", [0.0, 1e-42, 1e-30, 0.7, 1.0, 448.0, 65505.0, 3.3e38])
def test_a_rows_power_of_two(largest):
    """The row's largest number does not overflow float16, and a power times its inverse is 1."""
    power, inverse = _powers(jnp.float32(largest), True)
    assert power * inverse == 1
    assert np.frexp(np.float32(inverse))[0] == 0.5
    packed = np.float16(np.float32(largest) * np.float32(power))
    assert packed < 2**15
    assert packed >= 2**14 or largest < 2.0**-112


def test_a_row_that_is_not_a_number_remains_so():
    power, inverse = _powers(jnp.float32(jnp.nan), True)
    assert jnp.isfinite(power)
    assert np.isnan(np.float16(np.float32(jnp.nan) * power) * inverse)


# Columns of a row, and the most bytes of a step.
INTEGERS = {
    "int4, two blocks per warp": (INT4, 2048, 1024),
    "int4, eleven blocks": (INT4, 1408, 1024),
    "int4, two stages": (INT4, 2816, 1024),
    "int4, one block": (INT4, 128, 1024),
    "int8, two stages": (INT8, 1408, 1024),
    "int8, one block": (INT8, 64, 1024),
}


@pytest.mark.parametrize("tokens", [1, 5, 8])
@pytest.mark.parametrize(("dtype", "K", "most_bytes"), INTEGERS.values(), ids=list(INTEGERS))
def test_a_unit_of_integers(dtype, K, most_bytes, tokens, monkeypatch, untyped):
    rng = np.random.default_rng(0)
    operand = Operand.of(dtype, K, False, most_bytes)
    bits, group = (4, 128) if dtype == INT4 else (8, None)
    made = [
        integer_quant(jnp.asarray(n * rng.standard_normal((8, K)), jnp.float32), bits, group)
        for n in (1, 3)
    ]
    block = (1, group or K)
    weights = [np.asarray(block_dequant(*half, block), np.float64) for half in made]
    x = rng.standard_normal((tokens, K)).astype(BFLOAT16)

    start, stride = 24, K + 40
    memory = np.full(start + tokens * stride, np.nan, BFLOAT16)
    for t in range(tokens):
        packed = (x[t].astype(np.float32) * 2.0 ** (t + 4)).astype(np.float16)
        packed = np.asarray(activations.permute(jnp.asarray(packed), dtype))
        memory[start + t * stride :][:K] = packed.view(BFLOAT16)
    # The scales of other rows come first.
    before = (3, 8)
    scaled = [
        Half(None, 0, 0, (), Buffer(np.append(np.full(n, np.nan, np.float32), scale)), n)
        for n, (_, scale) in zip(before, made, strict=True)
    ]
    emulate(monkeypatch, registers, activations, hopper_registers)
    factors = Buffer(np.float32(2.0) ** -np.arange(2, 4 + tokens, dtype=np.float32))
    rows = Rows(Buffer(memory), start, stride, tokens, factors, 2)
    scales = registers.load_scales(operand, tuple(scaled), None)
    assert len(scales) == (operand.steps if dtype == INT4 else 1)
    sums = (Values(0.0, 0.0), Values(0.0, 0.0))
    size = operand.step_bytes
    for i in range(operand.steps):
        stage = np.zeros((2, 8, size + 64), np.uint8)  # rows with padding
        for n, (stored, _) in enumerate(made):
            stage[n, :, :size] = np.asarray(stored).view(np.uint8)[:, i * size : (i + 1) * size]
        halves = [Buffer(half) for half in stage]
        sums = registers.multiply(operand, halves, rows, i, scales, sums, None)
    memory = Buffer(in_memory(sums))
    totals = registers.load_totals(operand, memory, tokens, None, factors, np.int32(2))
    for total, w in zip(totals, weights, strict=True):
        got = total[0][:64].reshape(8, 8)
        np.testing.assert_allclose(got[:tokens], x.astype(np.float64) @ w.T, rtol=1e-4, atol=1e-3)
        if tokens == 1:
            np.testing.assert_array_equal(got, np.broadcast_to(got[0], (8, 8)))


@pytest.mark.parametrize("dtype", [INT4, INT8])
def test_positions_of_activations(dtype, monkeypatch, untyped):
    """Threads store numbers where ``permute`` has them, also those that store a piece at once."""
    permuted = np.asarray(activations.permute(jnp.arange(512), dtype))
    order = activations.order_of_piece(dtype)
    emulate(monkeypatch, activations)
    position = activations.position(np.arange(512), dtype)
    np.testing.assert_array_equal(permuted[position], np.arange(512))
    first = position[::8]
    for n, column in enumerate(order):
        np.testing.assert_array_equal(permuted[first + n], np.arange(0, 512, 8) + column)


@pytest.mark.parametrize(
    ("text", "bits", "order"),
    [
        (registers.UNPACK_INT4, 4, [0, 4, 1, 5, 2, 6, 3, 7]),
        (registers.UNPACK_INT8, 8, [0, 1, 2, 3]),
    ],
)
def test_every_integer_is_exact(text, bits, order):
    """In every position of a word."""
    numbers = np.arange(THREADS)
    count = 32 // bits
    for place in range(count):
        word = np.uint32(0x12345678) & ~np.uint32((2**bits - 1) << bits * place)
        word = word | (numbers % 2**bits).astype(np.uint32) << np.uint32(bits * place)
        pairs = np.stack(run(text, (word,)), axis=-1).view(np.float16)
        stored = [(word >> np.uint32(bits * n)) % 2**bits for n in order]
        want = [(each.astype(np.int64) ^ 2 ** (bits - 1)) - 2 ** (bits - 1) for each in stored]
        np.testing.assert_array_equal(pairs, np.stack(want, axis=-1))


@pytest.mark.parametrize("dtype", [INT4, INT8])
@pytest.mark.parametrize("length", [128, 256, 512, 1408, 2048])
def test_rows_for_integers_are_stored_as_permuted(length, dtype, monkeypatch, untyped):
    """Threads have one, two, four or eight neighbouring numbers in a register."""
    row = np.arange(length).astype(np.float16)
    want = np.asarray(activations.permute(jnp.asarray(row), dtype))
    count = np.gcd(length // 128, 8)
    own = (np.arange(THREADS) % 128)[:, None] * count + np.arange(count)
    registers_ = [Values(*row[first + own].T) for first in range(0, length, 128 * count)]
    emulate(monkeypatch, activations)
    memory = Buffer(np.full(length, -1, np.float16))
    array = SimpleNamespace(shape=(length,), registers=SimpleNamespace(flat=registers_))
    on = SimpleNamespace(on=lambda *arguments: lambda function: function(*arguments))
    monkeypatch.setattr(activations, "inline", lambda *_: on)
    activations._store_permuted(memory, array, dtype, None)
    np.testing.assert_array_equal(memory.bytes.view(np.float16), want)
