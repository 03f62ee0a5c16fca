"""mla_prefill's Hopper kernels: run on a GPU, or interpreted on a CPU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mla_prefill
from pallas_kernels.mla_prefill import blocked, gradient_kernels, mosaic_gpu, mosaic_gpu_gradient
from pallas_kernels.mla_prefill.tiles import Cells, heads_together
from pallas_kernels.softmax import with_gradients
from tests.pallas_kernels.machine import INTERPRET, ON_GPU, kernel_runs, off_gpu
from tests.pallas_kernels.mla_prefill_cases import (
    Inputs,
    MlaPrefillCases,
    MlaPrefillGradientCases,
    check_gradients,
    run,
)

# One object for all tests, so that they share its compilations.
KERNEL = functools.partial(mosaic_gpu.mla_prefill, interpret=INTERPRET)


def with_ctas(number, monkeypatch):
    """Returns the kernel on a GPU of as many multiprocessors."""
    monkeypatch.setattr(mosaic_gpu, "multiprocessors", lambda: number)
    return functools.partial(mosaic_gpu.mla_prefill, interpret=INTERPRET)


@kernel_runs
class TestMosaicGpu(MlaPrefillCases, MlaPrefillGradientCases):
    implementation = "mosaic_gpu" if ON_GPU else KERNEL
    dtype = "bfloat16"
    widths = (192, 128)
    # The interpreter takes half a second per tile.
    more_widths = ((64, 64), (128, 128), (192, 64))[: 3 if ON_GPU else 2]
    heads = (1, 16 if ON_GPU else 3)

    def test_several_blocks_and_tiles(self):
        """Prompts, chunks after cached tokens, prefixes, and queries that precede the keys."""
        starts, lengths = (0, 270, -60, 400), (130, 400, 333, 301)
        self.check(self.random(starts, lengths, T=130, S=400, H=1, scale=0.07))

    @pytest.mark.parametrize("ctas", [3, pytest.param(1, marks=pytest.mark.slow)])
    def test_several_tiles_per_cta(self, ctas, monkeypatch):
        """Rings longer and shorter than a tile's blocks, one head at a time."""
        monkeypatch.setattr(mosaic_gpu, "L2_BYTES", 1)
        x = self.random((200, -3), (330, 113), T=132, S=330, H=ctas, scale=0.07)
        out, lse = run(x, with_ctas(ctas, monkeypatch))
        want = run(x, "reference")
        np.testing.assert_allclose(
            np.asarray(out, np.float32), np.asarray(want[0], np.float32), rtol=0, atol=0.02
        )
        np.testing.assert_allclose(lse, want[1], rtol=1e-5)

    def test_result_does_not_depend_on_tile_assignment(self, monkeypatch):
        x = self.random((5, 0, 20), (14, 9, 29), T=9, S=29)
        several = run(x, self.implementation)
        for a, b in zip(several, run(x, with_ctas(1, monkeypatch)), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    def test_keys_and_values_past_the_end_are_ignored(self):
        """Numbers there give the same bits as NaN, which the other tests have."""
        x = self.random((3, 0), (12, 8), T=9, S=12)
        q, k, v, *rest = x.arrays()
        again = jax.jit(functools.partial(self.function, scale=x.scale))(
            q, jnp.nan_to_num(k), jnp.nan_to_num(v), *rest
        )
        for a, b in zip(run(x, self.implementation), again, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    function = staticmethod(KERNEL)


def attend(q, k, v, starts=None, lengths=None, *, scale):
    """Attention in plain JAX, with the gradient of the kernels."""
    forward = functools.partial(blocked.attend, scale=scale)
    backward = functools.partial(mosaic_gpu_gradient.gradients, scale=scale, interpret=INTERPRET)
    return with_gradients(forward, backward)(q, k, v, starts, lengths)


def whole(q, k, v, starts, lengths, *, scale):
    return attend(q, k, v, scale=scale)


def gradient_inputs(starts, lengths, T, S, H=1, widths=(192, 128)):
    return Inputs.random(
        starts, lengths, T=T, S=S, H=H, widths=widths, scale=0.07, dtype="bfloat16"
    )


@pytest.fixture
def two_ctas(monkeypatch):
    """The interpreter starts a thread of the host for each warpgroup."""
    if not ON_GPU:
        monkeypatch.setattr(gradient_kernels, "multiprocessors", lambda: 2)


slow = pytest.mark.slow


@kernel_runs
@pytest.mark.usefixtures("two_ctas")
class TestGradient:
    @pytest.mark.parametrize(
        ("starts", "lengths", "shape"),
        [
            ((0,), (1,), {"T": 1, "S": 1}),
            # Several heads, sequences, tiles and blocks, none of them whole. CTAs have four tiles.
            pytest.param((0, 0), (130, 130), {"T": 130, "S": 130, "H": 2}, marks=slow),
            # More keys than queries, fewer, an empty sequence, queries that precede all keys.
            pytest.param(
                (0, 270, -60, 400), (130, 400, 333, 301), {"T": 130, "S": 400}, marks=slow
            ),
            pytest.param((0, 3, 0), (0, 29, 1), {"T": 300, "S": 29}, marks=slow),
            pytest.param((0,), (9,), {"T": 9, "S": 9, "widths": (64, 64)}, marks=slow),
            pytest.param((0,), (200,), {"T": 200, "S": 200, "widths": (128, 128)}, marks=slow),
        ],
        ids=["one token", "ragged", "starts", "blind", "64 wide", "128 wide"],
    )
    @pytest.mark.parametrize("of_lse", [False, pytest.param(True, marks=slow)])
    def test_gradients(self, starts, lengths, shape, of_lse):
        """They are those of the reference in float32, up to roundings to bfloat16."""
        check_gradients(attend, gradient_inputs(starts, lengths, **shape), of_lse=of_lse)

    @pytest.mark.slow
    def test_without_starts_and_lengths(self):
        """Queries past the last one, and keys, are not read."""
        check_gradients(whole, gradient_inputs((0,), (257,), T=257, S=257), of_lse=False)

    @pytest.mark.slow
    def test_equal_calls_give_equal_bits(self, monkeypatch):
        """Whatever CTA takes a tile."""
        x = gradient_inputs((0, 40), (140, 180), T=140, S=180)
        q, k, v, starts, lengths = x.arrays()
        k, v = jnp.nan_to_num(k), jnp.nan_to_num(v)
        out, lse = blocked.attend(q, k, v, starts, lengths, scale=x.scale)
        arrays = q, k, v, starts, lengths, out, lse, out, lse
        gradients = functools.partial(
            mosaic_gpu_gradient.gradients, scale=x.scale, interpret=INTERPRET
        )
        results = []
        for ctas in (2, 1, 1000 if ON_GPU else 1):
            monkeypatch.setattr(gradient_kernels, "multiprocessors", lambda n=ctas: n)
            results.append(jax.jit(functools.partial(gradients))(*arrays))
        for again in results[1:]:
            for a, b in zip(results[0], again, strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    @pytest.mark.slow
    @pytest.mark.parametrize("parts", [(0, True), (1, True), (2, True), (1, False)], ids=str)
    def test_several_parts(self, parts, monkeypatch):
        """A small buffer has the cells of some keys of a head (0), of a head, or of a sequence with
        two heads; and the kernels run for one after another. Only d_q of some keys is a sum."""
        heads, causal = parts
        x = gradient_inputs((0, 0), (130, 130), T=130, S=130, H=2)
        q, k, v, *bounds = x.arrays()
        bounds = [None, None] if causal else bounds
        k, v = jnp.nan_to_num(k), jnp.nan_to_num(v)
        out, lse = blocked.attend(q, k, v, *bounds, scale=x.scale)
        arrays = q, k, v, *bounds, out, lse, out, lse
        options = {"scale": x.scale, "interpret": INTERPRET}
        gradients = functools.partial(mosaic_gpu_gradient.gradients, **options)
        want = jax.jit(functools.partial(gradients))(*arrays)
        cells = Cells(3, 4, causal).count * heads
        monkeypatch.setattr(mosaic_gpu_gradient, "BUFFER_BYTES", max(1, cells) * 64 * 64 * 2)
        got = jax.jit(functools.partial(gradients))(*arrays)
        for a, b in zip(got[0 if heads else 1 :], want[0 if heads else 1 :], strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        a, b = (np.asarray(d_q, np.float32) for d_q, *_ in (got, want))
        np.testing.assert_allclose(a, b, rtol=0.01, atol=0.01 * np.max(np.abs(b)))


@pytest.mark.parametrize("causal", [True, False])
def test_order_of_cells(causal):
    """Each cell has a place of its own. A tile reads four neighbours, which are inside the array:
    three places follow."""
    for queries, keys in itertools.product(range(1, 12), range(2, 12, 2)):
        cells = Cells(queries, keys, causal)
        visible = [(i, j) for i in range(queries) for j in range(keys) if j <= i or not causal]
        places = [int(cells.first(j)) + i for i, j in visible]
        assert sorted(places) == list(range(cells.count))
        read = [int(cells.first(j)) + i // 4 * 4 for i, j in visible]
        assert min(read) >= 0
        assert max(read) + 4 <= cells.count + 3


@pytest.mark.parametrize(
    ("causal", "cells", "keys", "heads"),
    [
        (True, 8 * 27, 6, (4, 2)),
        (True, 8 * 27 - 1, 6, (2, 2)),
        (True, 2 * 27 - 1, 6, (1, 1)),
        (True, 27 - 1, 2, (1, 1)),
        (False, 42, 6, (1, 1)),
        (False, 42 - 1, 4, (1, 1)),
        (False, 1, 2, (1, 1)),
    ],
)
def test_cells_at_once(causal, cells, keys, heads):
    """A head has 27 or 42 cells. There are four sequences with two heads, and tiles of two blocks
    of keys."""
    order = Cells(7, 6, causal)
    assert order.count == (27 if causal else 42)
    assert order.keys_in(cells, 2) == keys
    assert order.heads_in(cells, 4, 2) == heads


def arrays(T=8, S=8, widths=(192, 128), dtype="bfloat16"):
    K, V = widths
    q, k, v = (jnp.ones((1, n, 1, width), dtype) for n, width in ((T, K), (S, K), (S, V)))
    return q, k, v, jnp.zeros(1, jnp.int32), jnp.full(1, S, jnp.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "takes bfloat16"),
        ({"widths": (192, 96)}, "got 192 and 96"),
        ({"widths": (256, 128)}, "got 256 and 128"),
        ({"widths": (64, 128)}, "no wider than the keys, got 64 and 128"),
        ({"T": 0}, "empty"),
        ({"S": 0}, "empty"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu.mla_prefill(*arrays(**changes), scale=0.1, interpret=object())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "takes bfloat16"),
        ({"widths": (256, 256)}, "got 256 and 256"),
        ({"widths": (96, 64)}, "got 96 and 64"),
        ({"widths": (64, 128)}, "no wider than the keys, got 64 and 128"),
        ({"T": 0}, "empty"),
    ],
)
def test_gradient_refusals(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu_gradient.gradients(*gradient_arrays(**changes), scale=0.1, interpret=object())


def gradient_arrays(**shape):
    """The arrays of mla_prefill, its results, and their cotangents."""
    q, k, v, starts, lengths = arrays(**shape)
    out = jnp.ones((*q.shape[:-1], v.shape[-1]), q.dtype)
    lse = jnp.ones(q.shape[:-1], jnp.float32)
    return q, k, v, starts, lengths, out, lse, out, lse


def test_negative_scale():
    with pytest.raises(NotImplementedError, match="positive scale"):
        mosaic_gpu.mla_prefill(*arrays(), scale=-0.1, interpret=object())


@off_gpu
def test_no_gpu():
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs, this is cpu"):
        mla_prefill(*arrays(), scale=0.1, implementation="mosaic_gpu")


@pytest.mark.parametrize(("T", "S"), [(8, 8), (1000, 1208)])
def test_lowers_for_cuda(T, S, monkeypatch):
    """Lowering checks shared memory size and register layouts without a GPU."""
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)
    f = jax.jit(functools.partial(mosaic_gpu.mla_prefill, scale=0.1))
    text = f.trace(*arrays(T, S)).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(("T", "S"), [(8, 8), (1000, 1208), (60000, 60000)])
def test_gradient_lowers_for_cuda(T, S, monkeypatch):
    """The last one takes the keys in two parts."""
    monkeypatch.setattr(mosaic_gpu_gradient, "require_hopper", lambda interpret: None)
    f = jax.jit(functools.partial(mosaic_gpu_gradient.gradients, scale=0.1))
    types = jax.eval_shape(functools.partial(gradient_arrays, T=T, S=S))
    text = f.trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    assert "mla_prefill_gradient_of_keys" in text
    assert "mla_prefill_gradient_of_queries" in text


@pytest.mark.parametrize(
    ("heads", "bytes_per_head", "expected"), [(16, 10, 4), (14, 9, 2), (7, 1, 7), (7, 10, 1)]
)
def test_heads_together(heads, bytes_per_head, expected):
    assert heads_together(heads, bytes_per_head, budget=45) == expected
