"""The Hopper kernel of sparse_index: run on a GPU, or interpreted with race detection."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import sparse_index
from pallas_kernels.sparse_index import mosaic_gpu
from pallas_kernels.sparse_index.mosaic_gpu_kernel import Config, plan
from tests.pallas_kernels.machine import INTERPRET, ON_GPU, kernel_runs, off_gpu
from tests.pallas_kernels.numerics import TOLERANCES
from tests.pallas_kernels.sparse_index_cases import SparseIndexCases, tensor_core_products


@functools.cache
def kernel(config: Config | None = None):
    return functools.partial(mosaic_gpu.sparse_index, config=config, interpret=INTERPRET)


@kernel_runs
class TestMosaicGpu(SparseIndexCases):
    implementation = staticmethod(kernel())
    dtype = "bfloat16"
    page = 64
    heads = 8
    width = 128
    unused = 64  # a whole tile
    float8_bound = 2.0**-10 if ON_GPU else TOLERANCES["float32"]
    # The same as test_queries_and_ragged_lengths.
    test_bfloat16 = None  # pyright: ignore[reportAssignmentType]

    def float8_products(self, q, key):
        return tensor_core_products(q, key) if ON_GPU else q @ key

    def test_heads_and_long_table(self):
        """Several programs per sequence; the last one has fewer pages than the others."""
        self.check(self.random((40, 130), J=16, max_pages=19))

    @pytest.mark.parametrize(
        ("T", "config", "dtype"),
        [
            (5, Config(queries=2, pages=4, groups=2, stages=4, unroll=2), "float8_e4m3fn"),
            (1, Config(queries=1, pages=3, groups=1, stages=4, unroll=2), "float8_e4m3fn"),
            pytest.param(
                11,
                Config(queries=4, pages=5, groups=2, stages=2, unroll=2),
                "float8_e4m3fn",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                4,
                Config(queries=4, pages=3, groups=1, stages=2, unroll=2),
                "bfloat16",
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_persistent_programs(self, T, config, dtype):
        """Several units per program. Some have no visible page."""
        x = self.random((75, 36, 0), T=T, J=64, max_pages=9, dtype=dtype)
        self.check_result(x, x.run(kernel(config)))


def test_plan_fills_the_device():
    """Groups of at most 256 rows, and as many units as keep all multiprocessors busy."""
    assert plan(64, 1, 64, 512, 1) == Config(1, pages=32, groups=1, stages=22, unroll=2)
    assert plan(64, 5, 64, 512, 1).queries == 3
    assert plan(1, 4096, 64, 512, 1).queries == 4
    assert plan(1, 4096, 64, 512, 1).stages == 8
    assert plan(1, 1, 64, 512, 1).pages == 4


def arrays(T=1, J=64, D=128, page=64, dtype="bfloat16", stored=None, B=2, width=None):
    """Returns arguments. ``page`` is the number of rows of a page."""
    return (
        jnp.ones((B, T, J, D), dtype),
        jnp.ones((B, T, J), jnp.float32),
        jnp.ones((8, page, width or D), stored or dtype),
        jnp.zeros((B, 4), jnp.int32),
        jnp.ones(B, jnp.int32),
    )


@pytest.mark.parametrize(
    ("changes", "page_size", "message"),
    [
        ({"dtype": "float32"}, None, "got float32"),
        ({"page": 32}, None, r"got \(32, 128\)"),
        ({"D": 64}, None, r"got \(64, 64\)"),
        ({"J": 12}, None, "got 12"),
        ({"width": 160}, None, "a multiple of 128 bytes, got 320"),
        ({"dtype": "float8_e4m3fn"}, None, "got float8_e4m3fn and float8_e4m3fn"),
        ({"stored": "uint8"}, 64, "got bfloat16 and uint8"),
        ({"dtype": "float8_e4m3fn", "stored": "uint8"}, 32, r"got \(32, 128\)"),
        ({"dtype": "float8_e4m3fn", "stored": "uint8"}, 64, "takes 66 rows .* got 64"),
    ],
)
def test_refusals(changes, page_size, message):
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu.sparse_index(*arrays(**changes), page_size=page_size, interpret=object())


@off_gpu
def test_no_gpu():
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs, this is cpu"):
        sparse_index(*arrays(), implementation="mosaic_gpu")


def test_lowers_for_cuda(monkeypatch):
    """Lowering checks shared memory size and register layouts without a GPU."""
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)
    given = arrays(T=2, dtype="float8_e4m3fn", stored="uint8", page=66)
    f = functools.partial(mosaic_gpu.sparse_index, page_size=64)
    traced = jax.jit(f).trace(*given)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
