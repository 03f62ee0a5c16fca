"""Formats of quantized weights, and of caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsv3_jax.field_checks import check_choice, check_fields, is_size

CacheDtype = Literal["fp8", "fp8_index"]
"""Format of a cache in float8: of latents and indexer keys, or of indexer keys alone."""


@dataclass(frozen=True)
class BlockQuantization:
    """Float8 weights with one scale per block: ``weight = float8 * scale``.

    Blocks at the right and bottom edges may be partial: the number of scales is rounded up.

    Raises:
      ValueError: ``weight_block_size`` is not two sizes, or ``scale_fmt`` is unknown.
    """

    weight_block_size: tuple[int, int] = (128, 128)
    """Rows and columns of a block."""
    scale_fmt: str = "float32"
    """``float32``, or ``ue8m0`` if scales are powers of two. Both are stored as float32."""
    scale_suffix: str = "_scale_inv"
    """Suffix that turns a weight's name into its scale's. Weights are multiplied by the scale,
    although the published name suggests a division."""
    modules_to_not_convert: tuple[str, ...] = ()
    """Modules that may have plain weights without scales, as config.json lists them: beginnings or
    ends of published names. In the config of an open checkpoint, exactly the modules that do."""

    def __post_init__(self) -> None:
        block = self.weight_block_size
        if not (isinstance(block, tuple) and len(block) == 2 and all(map(is_size, block))):
            raise ValueError(
                f"quantization_config.weight_block_size: expected two sizes, got {block!r}"
            )
        modules = self.modules_to_not_convert
        if not (isinstance(modules, tuple) and all(isinstance(name, str) for name in modules)):
            raise ValueError(
                "quantization_config.modules_to_not_convert: expected names of modules, got"
                f" {modules!r:.80}"
            )
        check_fields(self, "quantization_config.")
        check_choice("quantization_config.scale_fmt", self.scale_fmt, ("float32", "ue8m0"))

    def block_shape(self, columns: int) -> tuple[int, int]:
        """Returns the rows and columns under one scale, for a matrix with that many columns."""
        del columns
        return self.weight_block_size

    def stored(self, rows: int, columns: int) -> tuple[tuple[int, int], str]:
        """Returns the stored shape and safetensors dtype of a [rows, columns] matrix."""
        return (rows, columns), "F8_E4M3"


@dataclass(frozen=True)
class IntegerQuantization:
    """Symmetric integer weights: ``weight = integer * scale``, with float32 scales.

    ``dsv3 convert`` writes them; no published checkpoint has them. int8 uses one byte per weight.
    int4 packs two neighbours of a row into one byte, the even column in the low half: a [N, K]
    matrix is stored as uint8 [N, K/2].

    Raises:
      ValueError: ``bits`` is neither 8 nor 4, or ``group_size`` is not a size.
    """

    bits: int
    """8 or 4."""
    group_size: int | None
    """Number of columns of a row under one scale; None for the whole row."""
    scale_suffix: str = "_scale"
    """Suffix that turns a weight's name into its scale's."""

    def __post_init__(self) -> None:
        check_fields(self, "quantization.")
        if self.bits not in (8, 4):
            raise ValueError(f"quantization.bits: expected 8 or 4, got {self.bits}")

    def block_shape(self, columns: int) -> tuple[int, int]:
        """Returns the rows and columns under one scale, for a matrix with that many columns."""
        return (1, columns if self.group_size is None else self.group_size)

    def stored(self, rows: int, columns: int) -> tuple[tuple[int, int], str]:
        """Returns the stored shape and safetensors dtype of a [rows, columns] matrix.

        Raises:
          ValueError: an odd number of int4 columns cannot be packed.
        """
        if self.bits == 8:
            return (rows, columns), "I8"
        if columns % 2:
            raise ValueError(f"int4 packs columns in pairs: expected an even number, got {columns}")
        return (rows, columns // 2), "U8"


Quantization = BlockQuantization | IntegerQuantization

INT8 = IntegerQuantization(bits=8, group_size=None)
"""The int8 format that ``dsv3 convert`` writes."""

INT4 = IntegerQuantization(bits=4, group_size=128)
"""The int4 format that ``dsv3 convert`` writes."""

QUANTIZATIONS: dict[str, Quantization | None] = {
    "bf16": None,
    "fp8": BlockQuantization(),
    "int8": INT8,
    "int4": INT4,
}
"""Weight formats by the names that commands use."""
