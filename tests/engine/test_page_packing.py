"""Pages come out of a pool as records and go into another one, bit for bit, in any layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.engine.device import page_packing
from dsv3_jax.engine.device.page_packing import PagePacker, arrays_by_name, payload_of
from dsv3_jax.kv_cache import CacheSpec, PagePool
from dsv3_jax.layers.paged_cache import CachedArray
from dsv3_jax.pages import PageFormat
from sharding import make_layout
from tests.pages.conftest import arrays_of

SPEC = CacheSpec(
    (
        {"latent": CachedArray(6, jnp.bfloat16), "scale": CachedArray(1, jnp.float32)},
        {
            "latent": CachedArray(6, jnp.bfloat16),
            "key": CachedArray(3, jnp.float8_e4m3fn),
            # Four keys of five bytes, and four rows with the scales and four bytes of padding.
            "scaled": CachedArray(5, jnp.uint8, is_scaled=True),
        },
    ),
    ({"latent": CachedArray(7, jnp.uint8)},),
)
PAGE_SIZE = 4
FORMAT = PageFormat.of(SPEC, PAGE_SIZE)
COUNT = 11  # more than one copy, and no multiple of it


def random_pool(layout: str | None, platform: str) -> tuple[PagePool, PagePacker]:
    """Returns a pool of random bits, NaNs and negative zeros among them."""
    on_mesh = None if layout is None else make_layout(layout)
    pool = PagePool.empty(SPEC, 48, page_size=PAGE_SIZE, layout=on_mesh, platform=platform)
    rng = np.random.default_rng(0)

    def fill(array: jax.Array) -> jax.Array:
        bits = rng.integers(0, 256, (*array.shape, array.dtype.itemsize), dtype=np.uint8)
        return jax.device_put(bits.view(array.dtype)[..., 0], array.sharding)

    pool = jax.tree.map(fill, pool)
    return pool, PagePacker(pool, FORMAT, on_mesh)


ONE_SIZE = CacheSpec(({"latent": CachedArray(6, jnp.bfloat16)},) * 2, ())


@pytest.mark.parametrize("layout", [None, pytest.param("dp_attention_ep", marks=pytest.mark.slow)])
def test_pinned_memory_is_copied_by_the_device_alone(layout):
    on_mesh = None if layout is None else make_layout(layout)
    format = PageFormat.of(ONE_SIZE, PAGE_SIZE)
    pool = PagePool.empty(ONE_SIZE, 48, page_size=PAGE_SIZE, layout=on_mesh, platform="cpu")
    pool = jax.tree.map(
        lambda x: jax.device_put(jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), x.sharding),
        pool,
    )
    packer = PagePacker(pool, format, on_mesh, pinned=True)
    ordinary = PagePacker(pool, format, on_mesh).gather(pool, range(COUNT))
    pages = packer.gather(pool, range(COUNT))
    for page, other in zip(pages, ordinary, strict=True):
        (part,) = page
        assert part.sharding.memory_kind == "pinned_host"
        payload = payload_of(page)
        assert payload.ctypes.data == part.unsafe_buffer_pointer(), "it was copied"
        np.testing.assert_array_equal(payload, payload_of(other))
    before = bits(pool)
    staged = [packer.stage(payload_of(page), page) for page in pages]
    assert {each.sharding.memory_kind for parts in staged for each in parts} == {"device"}
    empty = PagePool.empty(ONE_SIZE, 48, page_size=PAGE_SIZE, layout=on_mesh, platform="cpu")
    after = bits(packer.scatter(empty, range(COUNT), staged))
    for name, array in after.items():
        np.testing.assert_array_equal(array[:COUNT], before[name][:COUNT])


def test_what_cannot_be_pinned(monkeypatch):
    pool, _ = random_pool(None, "cpu")
    with pytest.raises(ValueError, match="pinned: expected a cache whose values all have the same"):
        PagePacker(pool, FORMAT, None, pinned=True)
    monkeypatch.setattr(page_packing, "_PINNED", "none")
    message = "^pinned: expected devices with the memory none, got cpu with device, pinned_host,"
    with pytest.raises(ValueError, match=message):
        PagePacker(pool, FORMAT, None, pinned=True)


def bits(pool: PagePool) -> dict[str, np.ndarray]:
    arrays = arrays_by_name(pool)
    return {name: np.asarray(x).view(f"u{x.dtype.itemsize}") for name, x in arrays.items()}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((None, "cpu"), ("dp_attention_ep", "tpu")),
        (("dp_attention_ep", "tpu"), ("context_parallel", "cpu")),
        (("context_parallel", "cpu"), (None, "tpu")),
    ],
)
def test_they_are_the_same_in_another_layout_and_width(source, target):
    pool, packer = random_pool(*source)
    other, other_packer = random_pool(*target)
    pages, other_pages = range(3, 3 + 4 * COUNT, 4), range(40, 40 - 3 * COUNT, -3)
    payloads = [payload_of(page) for page in packer.gather(pool, pages)]
    staged = [other_packer.stage(payload) for payload in payloads]
    given, before = bits(pool), bits(other)
    after = bits(other_packer.scatter(other, other_pages, staged))
    untouched = np.setdiff1d(np.arange(48), other_pages)
    assert given.keys() == {array.name for array in FORMAT.arrays}
    for array in FORMAT.arrays:
        expected, got = given[array.name][pages, :, : array.width], after[array.name]
        records = [
            arrays_of(FORMAT, payload)[array.name].view(expected.dtype) for payload in payloads
        ]
        np.testing.assert_array_equal(records, expected)
        np.testing.assert_array_equal(got[other_pages, :, : array.width], expected)
        assert not got[other_pages, :, array.width :].any(), "the padding is not zero"
        np.testing.assert_array_equal(got[untouched], before[array.name][untouched])
