"""Parts of a checkpoint's tensors, in the dtypes of the model's parameters."""

from __future__ import annotations

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

from dsv3_jax.checkpoint.arrays import Arrays, LazyArray, columns_per_element
from dsv3_jax.checkpoint.formats import dequantize
from dsv3_jax.checkpoint.reader import NUMPY
from dsv3_jax.checkpoint.tensor_table import is_selecting
from dsv3_jax.config import ModelConfig
from dsv3_jax.quantization import BlockQuantization

# dtype -> unsigned integer of the same width, and the bits that are all set in NaN and infinity.
# float8_e4m3fn has no infinity, and only its NaN has all seven bits set.
_EXPONENTS: dict[np.dtype, tuple[type, int]] = {
    np.dtype(float8_e4m3fn): (np.uint8, 0x7F),
    np.dtype(bfloat16): (np.uint16, 0x7F80),
    np.dtype(np.float16): (np.uint16, 0x7C00),
    np.dtype(np.float32): (np.uint32, 0x7F800000),
}
_CACHED_ELEMENTS = 2**17  # tested at once, so that they stay in the CPU's cache


def check_finite(name: str, values: np.ndarray) -> None:
    """Refuses NaN and infinity in a tensor called ``name``. Integers pass."""
    if values.dtype not in _EXPONENTS:
        return
    integer, mask = _EXPONENTS[values.dtype]
    bits = np.ascontiguousarray(values).reshape(-1).view(integer)
    for first in range(0, bits.size, _CACHED_ELEMENTS):
        if ((bits[first : first + _CACHED_ELEMENTS] & integer(mask)) == mask).any():
            flat = values.reshape(-1)[first : first + _CACHED_ELEMENTS].astype(np.float32)
            bad = flat[~np.isfinite(flat)][0]
            raise ValueError(f"{name}: expected finite values, got {bad}")


def check_scale(
    name: str,
    scale: np.ndarray,
    weight: LazyArray,
    block: tuple[int, int],
    first: tuple[int, int] = (0, 0),
) -> None:
    """Refuses scales that are NaN, infinite or negative, or zero for a block that is not zero.

    Args:
      scale: scales of consecutive blocks of ``weight``, beginning at block ``first``.
      weight: read only where a scale is zero.
      block: rows and columns per scale.
      first: row and column of ``scale[0, 0]`` among all blocks of ``weight``.
    """
    values = scale.astype(np.float32)
    valid = np.isfinite(values) & (values >= 0)
    if not valid.all():
        raise ValueError(
            f"{name}: expected scales that are finite and not negative, got {values[~valid][0]}"
        )
    width = -(-block[1] // columns_per_element(weight.dtype))
    for i, j in np.argwhere(values == 0):
        row, column = first[0] + int(i), first[1] + int(j)
        rows = slice(row * block[0], (row + 1) * block[0])
        scaled = weight[rows, column * width : (column + 1) * width]
        if scaled.astype(np.float32).any():
            raise ValueError(
                f"{name}: expected scales above 0 over weights that are not 0, "
                f"got 0 for block {row}, {column}"
            )


Index = tuple[slice, ...]

_LARGEST = np.float32(448)  # of float8


class ParameterReader:
    """Reads parts of published tensors, and dequantizes them if the model is not quantized.

    The tensors must have passed :func:`~dsv3_jax.checkpoint.check.check_tensors`.
    """

    def __init__(self, config: ModelConfig, tensors: Arrays):
        self.tensors = tensors
        # The default has no effect. Without quantization in the config, no tensor is a scale and
        # none is quantized.
        self.quantization = config.quantization or BlockQuantization()
        self.suffix = self.quantization.scale_suffix
        self.dtype = NUMPY[self.quantization.stored(2, 2)[1]]

    def read(self, name: str, index: Index, out: np.ndarray) -> None:
        """Fills ``out`` with the part of a tensor at ``index``, in the dtype of ``out``.

        A quantized weight that is read as another dtype is the exact product of value and scale,
        rounded once.

        Raises:
          ValueError: a scale is not finite, is negative, or is 0 for a block that is not zero; or a
            tensor that selects experts or keys has NaN or infinity.
        """
        tensor = self.tensors[name]
        with np.errstate(over="ignore"):  # a product with a scale, which the check refuses
            if name.endswith(self.suffix):
                out[...] = self._scale(name.removesuffix(self.suffix), index)
            elif self._is_dequantized(tensor, out.dtype):
                out[...] = self._dequantized(name, index, out.dtype)
            else:
                out[...] = tensor[index]
            if is_selecting(name):
                is_scale = name.endswith(self.suffix)
                check_finite(name, out.astype(np.float32) * _LARGEST if is_scale else out)

    def _is_dequantized(self, tensor: LazyArray, dtype: np.dtype) -> bool:
        """Returns whether a tensor is quantized and ``dtype`` is not."""
        return tensor.dtype == self.dtype and dtype != tensor.dtype

    def _dequantized(self, name: str, index: Index, dtype: np.dtype) -> np.ndarray:
        tensor = self.tensors[name]
        per_element = columns_per_element(tensor.dtype)
        N, K = self._block_shape(tensor)
        rows, columns = index
        stored = slice(columns.start // per_element, -(-columns.stop // per_element))
        first, last = stored.start * per_element, stored.stop * per_element
        blocks = (
            slice(rows.start // N, -(-rows.stop // N)),
            slice(first // K, -(-last // K)),
        )
        scale = self._scale(name, blocks)
        offset = (rows.start % N, first % K)
        dense = dequantize(tensor[rows, stored], scale, (N, K), dtype, offset)
        return dense[:, columns.start - first : columns.stop - first]

    def _scale(self, weight: str, blocks: Index) -> np.ndarray:
        """Reads and checks the stored scales of these blocks of ``weight``."""
        name = weight + self.suffix
        scale = self.tensors[name][blocks]
        tensor = self.tensors[weight]
        first_block = (blocks[0].start, blocks[1].start)
        check_scale(name, scale, tensor, self._block_shape(tensor), first_block)
        return scale

    def _block_shape(self, tensor: LazyArray) -> tuple[int, int]:
        """Returns the rows and columns per scale of a stored matrix."""
        columns = tensor.shape[1] * columns_per_element(tensor.dtype)
        return self.quantization.block_shape(columns)
