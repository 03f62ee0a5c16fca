"""Back-ends of sparse_index, top_k, sparse_mla_decode and sparse_mla_prefill."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    dequantize_latent,
    quantize_latent,
    sparse_index,
    sparse_mla_decode,
    sparse_mla_prefill,
    top_k,
)
from pallas_kernels.sparse_index import reference as index_reference
from pallas_kernels.sparse_mla_decode import reference as sparse_reference
from pallas_kernels.top_k import threshold
from tests.pallas_kernels.numerics import (
    central_difference,
    check,
    check_slope,
    device,
    largest_intermediate,
    rounded,
    tolerance,
)
from tests.pallas_kernels.sparse_index_cases import SparseIndexCases
from tests.pallas_kernels.sparse_mla_cases import (
    Inputs,
    SparseMlaDecodeCases,
    SparseMlaPrefillCases,
)
from tests.pallas_kernels.top_k_cases import TopKCases, expected


@pytest.fixture(scope="module", autouse=True)
def _short_blocks():
    """Sets blocks to three pages, so that tables span several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_reference, "_BLOCK_TOKENS", 24)
        yield


class TestIndexReference(SparseIndexCases):
    implementation = "reference"

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_gradients(self, dtype):
        """Compared with autodiff of the formula in float32."""
        (B, T, J, D), rng = (2, 5, 3, 12), np.random.default_rng(0)
        values = [rounded(rng.standard_normal(shape), dtype) for shape in ((B, T, J, D), (B, T, D))]
        weights = device(rng.standard_normal((B, T, J)), "float32")
        out_weights = np.tril(rng.standard_normal((B, T, T)))

        def gradients(scores_of, as_dtype):
            def loss(q, keys, weights):
                scores = scores_of(q, weights, keys)
                return jnp.sum(jnp.where(out_weights == 0, 0, scores) * out_weights)

            inputs = *(device(each, as_dtype) for each in values), weights
            return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*inputs)

        def by_op(q, weights, keys):
            tables = jnp.arange(B, dtype=jnp.int32)[:, None]
            lengths = jnp.full(B, T, jnp.int32)
            return sparse_index(q, weights, keys, tables, lengths, implementation="reference")

        def by_formula(q, weights, keys):
            products = jnp.einsum("btjd,bsd->btjs", q, keys)
            return jnp.sum(weights[..., None] * jnp.maximum(products, 0), axis=2)

        got, want = gradients(by_op, dtype), gradients(by_formula, "float32")
        for a, b, of in zip(got, want, (dtype, dtype, "float32"), strict=True):
            assert a.dtype == of
            check(np.ravel(a), np.ravel(b), tolerance(dtype))


class TestIndexBlocked(SparseIndexCases):
    implementation = "blocked"


class TestTopKReference(TopKCases):
    implementation = "reference"


class TestTopKThreshold(TopKCases):
    """The one for TPUs, on the CPU."""

    implementation = staticmethod(threshold.select)

    def test_rows_in_chunks(self, monkeypatch):
        """The last three of seven rows overlap those before."""
        scores = jax.random.normal(jax.random.key(4), (7, 300))
        whole = np.asarray(threshold.select(scores, 50))
        monkeypatch.setattr(threshold, "CHUNK_BYTES", 3 * threshold._row_bytes(384, 50))
        np.testing.assert_array_equal(threshold.select(scores, 50), whole)
        np.testing.assert_array_equal(whole, expected(np.asarray(scores), 50))

    def test_long_rows_of_equal_scores(self):
        """Counts that bfloat16 would round."""
        scores = np.zeros((1, 3001), np.float32)
        scores[0, -3:] = 1
        self.check(scores, 2500)


def test_top_k_on_tpus_only():
    with pytest.raises(NotImplementedError, match="runs on TPUs, this is cpu"):
        top_k(jnp.zeros((1, 4)), 2, implementation="threshold")


def test_top_k_of_nothing_is_refused():
    with pytest.raises(ValueError, match="k: expected 1 or more, got 0"):
        top_k(jnp.zeros((1, 4)), 0)


class TestDecodeReference(SparseMlaDecodeCases):
    implementation = "reference"


class TestPrefillReference(SparseMlaPrefillCases):
    implementation = "reference"

    @pytest.mark.slow
    def test_gradient_of_queries_and_latents(self):
        """Compares with central differences of the float64 computation."""
        x = Inputs.random((20,), K=7, T=20, page=20, max_pages=1, widths=(24, 8))
        latents = x.dense.pages[x.dense.block_tables[0, :1]]
        rng = np.random.default_rng(2)
        indices = jax.device_put(x.indices)
        weights, direction = rng.standard_normal((2, *x.dense.q_latent.shape))

        def loss(q_latent, latents):
            out, _ = sparse_mla_prefill(
                q_latent, device(x.dense.q_rope, "float32"), latents, indices, scale=0.3
            )
            return jnp.sum(out * weights)

        def expected_loss_of(dense):
            return np.sum(Inputs(dense, x.indices).expected()[0] * weights)

        def expected_loss(moved):
            return expected_loss_of(dataclasses.replace(x.dense, q_latent=moved))

        def expected_loss_of_latents(moved):
            pages = x.dense.pages.copy()
            pages[x.dense.block_tables[0, 0]] = moved[0]
            return expected_loss_of(dataclasses.replace(x.dense, pages=pages))

        gradients = jax.jit(jax.grad(loss, (0, 1)))(
            device(x.dense.q_latent, "float32"), device(latents, "float32")
        )
        slope = central_difference(expected_loss, x.dense.q_latent, direction)
        check_slope(gradients[0], direction, slope)
        moved = rng.standard_normal(latents.shape)
        slope = central_difference(expected_loss_of_latents, latents, moved)
        check_slope(gradients[1], moved, slope)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_gradients_are_those_of_autodiff(self, dtype):
        """Compared with autodiff of the reference in float32, for out and lse, with blocks of
        queries that do not divide evenly, and queries without tokens."""
        x, latents = self.inputs()
        indices = jax.device_put(x.indices).at[0, 3].set(-1)
        rng = np.random.default_rng(4)
        out_weights, lse_weights = rng.standard_normal((2, *x.dense.q_latent.shape))
        values = x.dense.q_latent, x.dense.q_rope, np.nan_to_num(latents)

        def gradients(operation, as_dtype):
            def loss(*arrays):
                out, lse = operation(*arrays, indices, scale=0.3)
                lse = jnp.where(lse == -jnp.inf, 0, lse)
                return jnp.sum(out * out_weights) + jnp.sum(lse * lse_weights[..., 0])

            inputs = [device(rounded(each, dtype), as_dtype) for each in values]
            return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*inputs)

        want = gradients(sparse_reference.sparse_mla_prefill, "float32")
        for a, b in zip(gradients(sparse_mla_prefill, dtype), want, strict=True):
            assert a.dtype == dtype
            check(np.ravel(a), np.ravel(b), tolerance(dtype))

    def test_gradients_of_very_negative_scores(self):
        """An absent token next to them has no gradient, although exp(0 - lse) overflows."""
        latents = jnp.full((1, 2, 12), 4.0).at[..., 8:].set(1.0)
        q_latent, q_rope = jnp.full((1, 1, 1, 8), -4.0), jnp.ones((1, 1, 1, 4))
        indices = jnp.array([[[0, 1, -1]]], jnp.int32)

        def loss(*arrays):
            out, lse = sparse_mla_prefill(*arrays, indices, scale=1.0)
            return jnp.sum(out) + jnp.sum(lse)

        lse = sparse_mla_prefill(q_latent, q_rope, latents, indices, scale=1.0)[1]
        assert lse.item() < -100
        gradients = jax.grad(loss, (0, 1, 2))(q_latent, q_rope, latents)
        bound = 1e-5  # of exp(score - lse), where lse is -123 and rounded to 4e-6
        # The softmax of two equal scores is 1/2 each, and moves no output.
        np.testing.assert_allclose(gradients[0], np.full((1, 1, 1, 8), 4.0), rtol=bound)
        np.testing.assert_allclose(gradients[1], np.ones((1, 1, 1, 4)), rtol=bound)
        of_latents = np.concatenate([np.full((1, 2, 8), 0.5 - 2.0), np.full((1, 2, 4), 0.5)], -1)
        np.testing.assert_allclose(gradients[2], of_latents, rtol=bound)

    def test_memory_of_gradients_is_linear(self):
        """No intermediate result has more values than all tokens, or those of a block."""
        T, H, (C, R), K = 2048, 16, (512, 64), 256
        shapes = (1, T, H, C), (1, T, H, R), (1, T, C + R)
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        indices = jax.ShapeDtypeStruct((1, T, K), jnp.int32)

        def loss(q_latent, q_rope, latents, indices):
            return sparse_mla_prefill(q_latent, q_rope, latents, indices, scale=0.3)[0].sum()

        program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*arrays, indices)
        assert largest_intermediate(program.jaxpr) <= T * H * (C + R)

    def test_gradient_of_a_token_that_all_queries_select(self):
        """Thousands of terms are summed in float32, whatever the dtype of the latents."""
        T, K, (H, C, R) = 8192, 2, (1, 4, 2)
        rng = np.random.default_rng(3)
        indices = rng.integers(1, T, (1, T, K)).astype(np.int32)
        indices[..., 0] = 0
        indices = jnp.asarray(indices)
        q_latent, q_rope, latents = (
            jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
            for shape in ((1, T, H, C), (1, T, H, R), (1, T, C + R))
        )

        @jax.jit
        @jax.grad
        def gradient(latents, q_latent, q_rope):
            out, _ = sparse_mla_prefill(q_latent, q_rope, latents, indices, scale=0.3)
            return jnp.sum(out.astype(jnp.float32) * (1 + jnp.arange(C)))

        f32 = jnp.float32
        got = np.asarray(gradient(latents, q_latent, q_rope), np.float64)
        want = np.asarray(gradient(latents.astype(f32), q_latent.astype(f32), q_rope.astype(f32)))
        error = np.linalg.norm(got[0, 0] - want[0, 0]) / np.linalg.norm(want[0, 0])
        assert error < 0.01


@pytest.mark.slow
def test_float8_cache():
    """Tokens of 656 bytes are read as dequantize_latent returns them."""
    rng = np.random.default_rng(0)
    f32 = functools.partial(jnp.asarray, dtype=jnp.float32)
    tokens = quantize_latent(f32(rng.normal(size=(2, 8, 512))), f32(rng.normal(size=(2, 8, 64))))
    q_latent, q_rope = f32(rng.normal(size=(1, 2, 4, 512))), f32(rng.normal(size=(1, 2, 4, 64)))
    tables = jnp.array([[1, 0]], jnp.int32)
    indices = jnp.array([[[0, 9, 3, -1], [15, 2, -1, -1]]], jnp.int32)
    plain = jnp.concatenate(dequantize_latent(tokens), axis=-1)
    attend = jax.jit(functools.partial(sparse_mla_decode, scale=0.05))
    got, want = (attend(q_latent, q_rope, pages, tables, indices) for pages in (tokens, plain))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(NotImplementedError, match="for 8 latent and 64 rope columns, got 656"):
        sparse_mla_decode(q_latent[..., :8], q_rope, tokens, tables, indices, scale=0.05)
