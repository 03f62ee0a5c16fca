"""mla_prefill's TPU kernel, interpreted on a CPU."""

import functools

import jax.numpy as jnp
import pytest

from pallas_kernels import mla_prefill
from pallas_kernels.mla_prefill import mosaic_tpu
from pallas_kernels.mla_prefill.mosaic_tpu import Config
from tests.pallas_kernels.mla_prefill_cases import MlaPrefillCases, MlaPrefillFloat32GradientCases


@functools.cache
def kernel(**config):
    config = Config(**config) if config else None
    return functools.partial(mosaic_tpu.mla_prefill, config=config, interpret=True)


# Several blocks of queries, several segments of several chunks of keys; none divides evenly.
SMALL = {"rows": 16, "chunk": 16, "segment": 32}


class Cases(MlaPrefillCases):
    implementation = staticmethod(kernel(**SMALL))
    heads = (1, 3)


@pytest.mark.slow
class TestMosaicTpu(Cases, MlaPrefillFloat32GradientCases):
    pass


@pytest.mark.parametrize("config", [SMALL, {}], ids=["small", "default"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_kinds_of_sequences(dtype, config):
    """A prompt, a chunk after cached tokens, a prefix, queries before the keys, no keys."""
    cases = Cases()
    cases.implementation = kernel(**config)
    starts, lengths = (0, 60, 100, -9, 0), (50, 100, 70, 33, 0)
    cases.check(cases.random(starts, lengths, T=50, S=100, H=1, dtype=dtype))


def arrays(T=8, S=8, **dtypes):
    q, k, v = (
        jnp.ones((1, n, 1, width), dtypes.get(name, "bfloat16"))
        for name, n, width in (("q", T, 192), ("k", S, 192), ("v", S, 128))
    )
    return q, k, v, jnp.zeros(1, jnp.int32), jnp.full(1, S, jnp.int32)


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"v": "float32"}, {}, "takes bfloat16 or float32, got bfloat16, float32"),
        ({"T": 0}, {}, "empty"),
        ({"S": 0}, {}, "empty"),
        (
            {"T": 8192, "S": 8192},
            {"rows": 8192, "chunk": 8192},
            r"at most on a v5p, got 1\d\d\d.\d \(queries 8.0, keys and values 12.0, results 4",
        ),
    ],
)
def test_refusals(changes, config, message):
    with pytest.raises(NotImplementedError, match=message):
        kernel(**config)(*arrays(**changes), scale=0.1)


def test_no_tpu():
    with pytest.raises(NotImplementedError, match="mosaic_tpu: runs on TPUs, this is cpu"):
        mla_prefill(*arrays(), scale=0.1, implementation="mosaic_tpu")
