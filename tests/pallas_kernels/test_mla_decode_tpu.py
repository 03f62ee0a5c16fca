"""mla_decode's TPU kernel, interpreted on a CPU with detection of copies not waited for."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mla_decode
from pallas_kernels.mla_decode import mosaic_tpu
from pallas_kernels.mla_decode.mosaic_tpu import Config
from tests.pallas_kernels.mla_decode_cases import Inputs, MlaDecodeCases

RACES = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")


@functools.cache
def kernel(**config):
    """The kernel with small blocks, so that short sequences have several."""
    config = Config(**{"chunk": 32, "block": 64, **config})
    return functools.partial(mosaic_tpu.mla_decode, config=config, interpret=RACES)


class Cases(MlaDecodeCases):
    implementation = staticmethod(kernel())
    widths = (128, 64)
    page_borders = ((8, (1, 8, 9)), (64, (320, 63, 256)), (320, (10, 330)))


@pytest.mark.slow
class TestMosaicTpu(Cases):
    # Even and odd numbers of sequences: the interpreted chip, a v5p, has two cores.
    more_heads = ((1, 1), (3, 2), (16, 1))

    @pytest.mark.parametrize("rows", [8, 16, 24])
    def test_query_rows_in_several_steps(self, rows):
        """Each grid step reads the cache anew; a step may begin inside a query's heads."""
        self.check(self.random((37, 5, 0), T=4, H=6), kernel(rows=rows))

    @pytest.mark.parametrize("block", [32, 4096])
    def test_blocks(self, block):
        """A block of one chunk, and a block longer than the table."""
        self.check(self.random((64, 33, 0, 32), T=2), kernel(block=block))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ragged_lengths(dtype):
    """Several blocks, part of a block, no token, fewer tokens than queries; wide pages."""
    cases = Cases()
    cases.check(cases.random((64, 37, 0, 48, 1), T=3, dtype=dtype).wider())


@pytest.mark.slow
def test_missing_wait_is_a_race(monkeypatch, capsys):
    def copy_without_wait(*args):
        return types.SimpleNamespace(start=pltpu.make_async_copy(*args).start, wait=lambda: None)

    fake = types.SimpleNamespace(**{**vars(pltpu), "make_async_copy": copy_without_wait})
    monkeypatch.setattr(mosaic_tpu, "pltpu", fake)
    x, message = Inputs.random((40,), widths=(128, 64)), ""
    try:  # a scale of its own, so that no other test reuses the broken kernel
        jax.block_until_ready(kernel()(*x.arrays(), scale=0.123))
    except RuntimeError as error:  # since jax 0.12
        message = str(error)
        pltpu.reset_tpu_interpret_mode_state()
    assert "RACE" in capsys.readouterr().out + message.upper()


def arrays(H=8, page=16, max_pages=4, widths=(128, 64), B=2, **dtypes):
    C, R = widths
    shapes = {"q_latent": (B, 1, H, C), "q_rope": (B, 1, H, R), "pages": (3, page, C + R)}
    shapes |= {"block_tables": (B, max_pages), "lengths": (B,)}
    dtypes = {"block_tables": "int32", "lengths": "int32", **dtypes}
    return {name: jnp.zeros(shape, dtypes.get(name, "bfloat16")) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pages": "uint8"}, "takes bfloat16 or float32, got bfloat16, uint8"),
        ({"q_rope": "float32"}, "takes bfloat16 or float32, got bfloat16, float32"),
        ({"H": 0}, r"empty arrays, got \(2, 1, 0, 128\), \(3, 16, 192\), \(2, 4\)"),
        ({"widths": (192, 64)}, "got 192 and 16"),
        ({"page": 8}, "pages of a multiple of 16 tokens, got 128 and 8"),
        ({"max_pages": 2**17}, "block tables of 229,376 pages, got 262,144"),
        (
            {"page": 16384, "widths": (1024, 64)},
            r"takes blocks of 56 MiB of VMEM at most on a v5p, got 2\d\d.\d \(queries 0.1, ",
        ),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        mosaic_tpu.mla_decode(**arrays(**changes), scale=0.1, interpret=RACES)


def test_no_tpu():
    with pytest.raises(NotImplementedError, match="mosaic_tpu: runs on TPUs, this is cpu"):
        mla_decode(**arrays(), scale=0.1, implementation="mosaic_tpu")
