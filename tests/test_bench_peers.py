"""The inputs that torch prepares for the peer kernels."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels import checks
from benchmarks.kernels.shapes import PAGE, Decode

torch = pytest.importorskip("torch", reason="torch comes with the parity extra")
pytestmark = [pytest.mark.parity, pytest.mark.slow]

from benchmarks.kernels import grouped_peers, peer  # noqa: E402 (they import torch)


def test_marlins_matrices():
    """Every number occurs once, in its tile of 16 x 64."""
    for bits in (4, 8):
        values = torch.arange(128 * 64).reshape(128, 64).remainder(2**bits) - 2 ** (bits - 1)
        words = grouped_peers.pack_matrix(values.to(torch.int8), bits)
        assert words.shape == (4, 128 * bits // 2)
        shifts = torch.arange(0, 32, bits)
        stored = ((words.long() % 2**32)[..., None] >> shifts) % 2**bits - 2 ** (bits - 1)
        tiles = values.T.reshape(4, 16, 2, 64).permute(0, 2, 1, 3).reshape(8, -1)
        assert torch.equal(stored.reshape(8, -1).sort().values, tiles.sort().values)
    # Thread 0 holds rows 0, 1, 8 and 9 of columns 0 and 8; its first word interleaves them.
    order = grouped_peers._order(4)[:8].tolist()
    assert order == [16 * row + column for column, row in
                     [(0, 0), (0, 8), (8, 0), (8, 8), (0, 1), (0, 9), (8, 1), (8, 9)]]  # fmt: skip


def test_marlins_rows():
    assert grouped_peers.sorted_rows((1, 0, 3), 2) == ([0, 4, 1, 2, 3, 4], [0, 2, 2])
    assert [grouped_peers.block_sizes(rows, 8) for rows in (20, 128, 9999)] == [
        (8,),
        (16, 32),
        (48, 64),
    ]


def test_float8_cache_has_the_same_format_in_torch_and_jax():
    x = torch.randn(2, PAGE, 576, generator=torch.manual_seed(0)).bfloat16()
    stored = peer.float8_tokens(x)
    assert stored.shape == (2, PAGE, 656)
    dense = checks.dense_pages(Decode(3, 100, 2, 4, dtype="fp8"), jnp.asarray(stored.numpy()))
    dense = np.asarray(dense.astype(jnp.float32))
    np.testing.assert_allclose(peer.latent_of(stored).numpy(), dense, rtol=2.0**-8)
    np.testing.assert_allclose(dense, x.float().numpy(), rtol=2.0**-4, atol=2.0**-8)


def test_deep_gemm_compiler():
    assert peer.jit_compiler({}) == "nvcc"
    assert peer.jit_compiler({"DG_JIT_USE_NVRTC": "1"}) == "nvrtc"
    assert peer.jit_compiler({"DG_JIT_NVCC_COMPILER": "/x/nvcc"}) == "/x/nvcc"
