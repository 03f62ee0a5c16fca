"""The Hopper kernel of sparse_index: run on a GPU, or interpreted with race detection."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import sparse_index
from pallas_kernels.sparse_index import mosaic_gpu, units
from pallas_kernels.sparse_index.mosaic_gpu import Config, plan
from pallas_kernels.sparse_index.units import ROW_COST, Lanes, Unit, Work
from tests.pallas_kernels.machine import INTERPRET, ON_GPU, kernel_runs, off_gpu
from tests.pallas_kernels.numerics import TOLERANCES
from tests.pallas_kernels.sparse_index_cases import SparseIndexCases, tensor_core_products


def with_config(config: Config, monkeypatch):
    """Returns the kernel with other parameters than those that it chooses."""
    monkeypatch.setattr(mosaic_gpu, "plan", lambda *sizes: config)
    return functools.partial(mosaic_gpu.sparse_index, interpret=INTERPRET)


@kernel_runs
class TestMosaicGpu(SparseIndexCases):
    implementation = staticmethod(functools.partial(mosaic_gpu.sparse_index, interpret=INTERPRET))
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
        """Several CTAs per sequence; the last one has fewer pages than the others."""
        self.check(self.random((40, 130), J=16, max_pages=19))

    @pytest.mark.parametrize(
        ("T", "config", "dtype"),
        [
            (5, Config(queries=2, pages=4, groups=2, stages=4), "float8_e4m3fn"),
            (1, Config(queries=1, pages=3, groups=1, stages=4), "float8_e4m3fn"),
            (5, Config(queries=1, pages=None, groups=2, stages=2), "float8_e4m3fn"),
            pytest.param(
                11,
                Config(queries=4, pages=5, groups=2, stages=2),
                "float8_e4m3fn",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                4,
                Config(queries=4, pages=3, groups=1, stages=2),
                "bfloat16",
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_persistent_ctas(self, T, config, dtype, monkeypatch):
        """Several units per CTA. Some have no visible page."""
        x = self.random((75, 36, 0), T=T, J=64, max_pages=9, dtype=dtype)
        self.check_result(x, x.run(with_config(config, monkeypatch)))

    @pytest.mark.slow
    def test_shares_of_more_sequences_than_lanes_of_a_warp(self, monkeypatch):
        lengths = tuple(1 + 37 * i % 150 for i in range(70))
        x = self.random(lengths, max_pages=3, dtype="float8_e4m3fn")
        config = Config(queries=1, pages=None, groups=1, stages=4)
        self.check_result(x, x.run(with_config(config, monkeypatch)))


def lanes_of(count):
    """Returns the lanes of a warp: instances of a function that is mapped over ``lane``."""
    index = lax.axis_index("lane")
    sum_, max_ = (functools.partial(f, axis_name="lane") for f in (lax.psum, lax.pmax))
    return Lanes(count, index, sum_, max_, lambda x: jnp.cumsum(lax.all_gather(x, "lane"))[index])


def in_turn(work, pages):
    return lambda *of_cta: units.in_turn(work, pages, *of_cta)


def shares(work, lanes):
    return lambda *of_cta: units.equal_shares(work, *of_cta, lanes_of(lanes))


def loads(work, divide, lengths, ctas, lanes=1):
    """Checks that units score each page of each row once and hide each other page once. Returns the
    pages of each CTA, with the cost of its units."""
    most = work.sequences * work.sets * work.max_pages // ctas + work.sets * work.sequences

    @jax.jit
    def units_of_all(lengths):
        def of_lane(cta, lane):
            del lane
            count, unit_of = divide(cta, ctas, lengths)
            return count, jax.vmap(unit_of)(jnp.arange(most))

        over_lanes = jax.vmap(of_lane, (None, 0), axis_name="lane")
        return jax.vmap(over_lanes, (0, None))(jnp.arange(ctas), jnp.arange(lanes))

    of_ctas = [np.asarray(x) for x in jax.tree.leaves(units_of_all(jnp.int32(lengths)))]
    assert all((x == x[:, :1]).all() for x in of_ctas)  # all lanes have the same units
    counts, *of_ctas = (x[:, 0] for x in of_ctas)
    scored = np.zeros((work.sequences, work.sets, work.max_pages), int)
    hidden, pages = scored.copy(), []
    for cta, count in enumerate(counts):
        assert count <= most
        cost = 0
        for i in range(count):
            unit = Unit(*(each[cta, i] for each in of_ctas))
            row = unit.sequence, unit.group // work.groups
            scored[*row, unit.first : unit.first + unit.seen] += 1
            hidden[*row, unit.first + unit.seen : unit.first + unit.in_table] += 1
            cost += int(unit.seen + ROW_COST if unit.seen > 0 else 0)
        pages.append(cost)
    assert (scored + hidden == 1).all()
    for b, length in enumerate(lengths):
        for s in range(work.sets):
            later = work.queries - min((s + 1) * work.groups * work.group_queries, work.queries)
            seen = min(max(-(-(length - later) // 64), 0), work.max_pages)
            assert (scored[b, s, :seen] == 1).all()
            assert not scored[b, s, seen:].any()
    return pages


@pytest.mark.parametrize(
    ("work", "lengths", "ctas", "lanes"),
    [
        (Work(1, 64, 2, 4, 512, 64), [4096], 12, 1),
        (Work(3, 9, 2, 3, 53, 9), [0, 577, 60], 7, 2),
        (Work(2, 1, 1, 2, 2, 40), [2560, 5000], 13, 4),  # a length past the table's end
        (Work(2, 2, 2, 1, 3, 1), [1, 2], 9, 1),  # more CTAs than pages
        (Work(9, 1, 1, 1, 1, 30), [640, 7, 0, 1920, 64, 65, 1, 500, 1900], 5, 4),
    ],
)
def test_divisions_score_every_page_once(work, lengths, ctas, lanes):
    """Shares are equal to about a page per row; units in turn need not be."""
    of_turns = loads(work, in_turn(work, 5), lengths, ctas)
    of_shares = loads(work, shares(work, lanes), lengths, ctas, lanes)
    assert sum(of_shares) >= sum(of_turns) - len(of_turns) * work.sequences * work.sets
    assert max(of_shares) <= np.mean(of_shares) * 1.1 + 4


def test_shares_balance_queries_that_see_different_numbers_of_pages():
    """4,096 queries of 8,192 tokens, on 132 multiprocessors: the first chunks of a row are always
    the same CTAs' turn."""
    work, lengths = Work(1, 512, 2, 4, 4096, 128), [8192]
    assert max(loads(work, in_turn(work, 32), lengths, 132)) == 16 * 33
    assert max(loads(work, shares(work, 1), lengths, 132)) <= 382


def test_plan_fills_the_device():
    """Groups of at most 256 rows, and as many units as keep all multiprocessors busy."""
    assert plan(64, 1, 64, 512, 1) == Config(1, pages=32, groups=1, stages=12)
    assert plan(64, 5, 64, 512, 1).queries == 3
    many = Config(4, pages=None, groups=2, stages=8)
    assert plan(1, 4096, 64, 512, 1) == many
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


def test_equal_shares_of_too_many_tokens(monkeypatch):
    """Positions are 32-bit integers."""
    with_config(Config(1, None, 1, 4), monkeypatch)
    kernel = functools.partial(mosaic_gpu.sparse_index, interpret=object())
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays(T=1)]
    shapes[3] = jax.ShapeDtypeStruct((2, 2**23), jnp.int32)
    with pytest.raises(
        NotImplementedError, match=r"fewer than 2\^30 tokens in all, got 1073741952"
    ):
        jax.eval_shape(kernel, *shapes)


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
