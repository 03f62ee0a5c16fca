"""Parts of a checkpoint's tensors, in the dtype the model holds them in."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from dsv3_jax.checkpoint.arrays import Arrays, LazyArray
from dsv3_jax.checkpoint.formats import dequantize
from dsv3_jax.checkpoint.values import check_scale
from dsv3_jax.config import ModelConfig
from dsv3_jax.quantization import BlockQuantization

Index = tuple[slice, ...]

_FLOATS = tuple(map(np.dtype, (np.float64, np.float32, np.float16, jnp.bfloat16)))
_SCALES = (*_FLOATS, np.dtype(jnp.float8_e8m0fnu))
_QUANTIZED = {
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}


class ParameterReader:
    """The published tensors of a checkpoint, checked and read by parts."""

    def __init__(self, config: ModelConfig, tensors: Arrays):
        self.tensors = tensors
        # Some conversions leave float8 tensors behind a config that does not speak of them.
        self.quantization = config.quantization or BlockQuantization()
        self.suffix = self.quantization.scale_suffix
        self.dtype = _QUANTIZED[self.quantization.stored(2, 2)[1]]

    def check(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Refuses what :meth:`read` would misread; reads no values.

        Args:
          shape, dtype: of the parameter; a quantised one takes the tensor as it is stored.
        """
        tensor = self.tensors[name]
        dense = len(shape) == 2 and self._is_dequantized(tensor, dtype)
        stored = self.quantization.stored(*shape)[0] if dense else shape
        if tensor.shape != stored:
            raise ValueError(f"{name}: expected shape {stored}, got {tensor.shape}")
        scale_name = name + self.suffix
        if dtype in _QUANTIZED.values():
            _check_dtype(name, tensor, (np.dtype(dtype),))
        elif not dense:
            _check_dtype(name, tensor, _SCALES if name.endswith(self.suffix) else _FLOATS)
            if scale_name in self.tensors:
                raise ValueError(f"{scale_name}: a scale of {name}, which is {tensor.dtype}")
        elif scale_name not in self.tensors:
            raise ValueError(f"{name}: {_words(tensor)} weight without its scale {scale_name}")
        else:
            scale = self.tensors[scale_name]
            _check_dtype(scale_name, scale, _SCALES)
            N, K = self.quantization.block_shape(shape[1])
            expected = (-(-shape[0] // N), -(-shape[1] // K))
            if scale.shape != expected:
                raise ValueError(f"{scale_name}: expected shape {expected}, got {scale.shape}")

    def read(self, name: str, index: Index, out: np.ndarray) -> None:
        """Fills ``out`` with the part of a tensor at ``index``, in ``out``'s dtype.

        What is stored quantised and held otherwise is the exact product of value and scale, rounded
        once.

        Raises:
          ValueError: a scale is not finite, is negative, or is 0 over weights that are not.
        """
        tensor = self.tensors[name]
        if name.endswith(self.suffix):
            out[...] = self._scale(name.removesuffix(self.suffix), index)
        elif self._is_dequantized(tensor, out.dtype):
            out[...] = self._dequantized(name, index, out.dtype)
        else:
            out[...] = tensor[index]

    def _is_dequantized(self, tensor: LazyArray, dtype: np.dtype) -> bool:
        return tensor.dtype == self.dtype and dtype != tensor.dtype

    def _dequantized(self, name: str, index: Index, dtype: np.dtype) -> np.ndarray:
        tensor = self.tensors[name]
        packed = 2 if tensor.dtype == np.uint8 else 1  # columns an element
        N, K = self.quantization.block_shape(tensor.shape[1] * packed)
        rows, columns = index
        stored = slice(columns.start // packed, -(-columns.stop // packed))
        first, last = stored.start * packed, stored.stop * packed
        blocks = (
            slice(rows.start // N, -(-rows.stop // N)),
            slice(first // K, -(-last // K)),
        )
        scale = self._scale(name, blocks)
        offset = (rows.start % N, first % K)
        dense = dequantize(tensor[rows, stored], scale, (N, K), dtype, offset)
        return dense[:, columns.start - first : columns.stop - first]

    def _scale(self, weight: str, blocks: Index) -> np.ndarray:
        """The scales of these blocks of ``weight``, as they are stored."""
        name = weight + self.suffix
        scale = self.tensors[name][blocks]
        tensor = self.tensors[weight]
        packed = 2 if tensor.dtype == np.uint8 else 1
        block = self.quantization.block_shape(tensor.shape[1] * packed)
        check_scale(name, scale, tensor, block, (blocks[0].start, blocks[1].start))
        return scale


def _check_dtype(name: str, tensor: LazyArray, expected: tuple[np.dtype, ...]) -> None:
    if tensor.dtype not in expected:
        raise ValueError(f"{name}: expected {' or '.join(map(str, expected))}, got {tensor.dtype}")


def _words(tensor: LazyArray) -> str:
    return {"int8": "int8", "uint8": "int4"}.get(tensor.dtype.name, "float8")
