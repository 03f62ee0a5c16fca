"""The Hopper kernel of top_k: run on a GPU, or interpreted with race detection."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import top_k
from pallas_kernels.top_k import mosaic_gpu
from tests.pallas_kernels.machine import INTERPRET, ON_GPU, kernel_runs, off_gpu, on_gpu
from tests.pallas_kernels.top_k_cases import TopKCases, expected


def set_ctas(number, monkeypatch):
    """Makes a cluster of ``number`` CTAs select from each row."""
    monkeypatch.setattr(mosaic_gpu, "plan", lambda rows, S: number)


@kernel_runs
class TestMosaicGpu(TopKCases):
    """Most rows are shorter than the chunks of 512 scores that a CTA's warpgroups have."""

    implementation = staticmethod(functools.partial(mosaic_gpu.top_k, interpret=INTERPRET))

    @pytest.fixture(autouse=True)
    def _one_cta(self, monkeypatch):
        if not ON_GPU:  # the interpreter may not have threads for more
            set_ctas(1, monkeypatch)

    def test_ties_in_several_parts(self):
        """Every warpgroup has scores above the threshold, and ties that are and are not chosen."""
        scores = np.random.default_rng(1).integers(-2, 3, (1, 2300)).astype(float)
        scores[:, ::7] = -np.inf
        for k in (900, 1300):
            self.check(scores, k)

    @pytest.mark.slow
    def test_hidden_parts(self):
        """A warpgroup whose part has no finite score, and fewer finite scores than k."""
        scores = np.random.default_rng(4).standard_normal((2, 2048))
        scores[0, 700:] = scores[1, :1500] = -np.inf
        self.check(scores, 600)


@on_gpu
class TestTwoCtas(TestMosaicGpu):
    # An object of its own, so that its compilations are not those of one CTA.
    implementation = staticmethod(functools.partial(mosaic_gpu.top_k))

    @pytest.fixture(autouse=True)
    def _two_ctas(self, monkeypatch):
        set_ctas(2, monkeypatch)

    @pytest.mark.parametrize("S", [20_000, 40_000])
    def test_long_rows(self, S):
        """A part stays in registers, or is loaded anew in each pass."""
        self.check(np.random.default_rng(6).integers(-300, 300, (3, S)), 2048)


@kernel_runs
@pytest.mark.parametrize("ctas", [2, pytest.param(4, marks=on_gpu), pytest.param(8, marks=on_gpu)])
def test_clusters(ctas, monkeypatch):
    """Ties across CTAs, parts without a finite score, and fewer finite scores than k."""
    scores = np.random.default_rng(5).integers(-2, 3, (2, 2300)).astype(np.float32)
    scores[0, :700] = scores[1, 90:] = -np.inf
    set_ctas(ctas, monkeypatch)
    run = functools.partial(mosaic_gpu.top_k, k=300, interpret=INTERPRET)
    np.testing.assert_array_equal(jax.jit(run)(scores), expected(scores, 300))
    lengths = np.array([2300, 90])
    np.testing.assert_array_equal(jax.jit(run)(scores, lengths=lengths), expected(scores, 300))


def test_plan_fills_the_device():
    """As many CTAs as there are multiprocessors, each with enough scores."""
    assert [mosaic_gpu.plan(*shape) for shape in ((1, 131072), (1, 4096), (64, 32768))] == [8, 2, 2]
    assert [mosaic_gpu.plan(*shape) for shape in ((67, 32768), (1, 512))] == [1, 1]


def test_more_than_the_result_fits_is_refused():
    with pytest.raises(NotImplementedError, match="4096 at most, got 4097"):
        mosaic_gpu.top_k(jnp.zeros((1, 8192)), 4097, interpret=object())


@off_gpu
def test_no_gpu():
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs, this is cpu"):
        top_k(jnp.zeros((1, 64)), 4, implementation="mosaic_gpu")


def test_lowers_for_cuda(monkeypatch):
    """Lowering checks shared memory size and register layouts without a GPU."""
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)
    f = jax.jit(functools.partial(mosaic_gpu.top_k, k=2048))
    text = f.trace(jnp.zeros((2, 4096))).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@kernel_runs
def test_scores_after_the_lengths_are_not_read(monkeypatch):
    """Their chunks would be chosen: a row's first chunk has the smallest scores."""
    scores = np.arange(1536, dtype=np.float32)[None]
    set_ctas(1, monkeypatch)
    run = functools.partial(mosaic_gpu.top_k, k=100, interpret=INTERPRET)
    got = jax.jit(run)(scores, lengths=jnp.array([512]))
    np.testing.assert_array_equal(got, expected(scores[:, :512], 100))
