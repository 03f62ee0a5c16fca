"""Parameters of YaRN context extension."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsv3_jax.field_checks import check_fields


@dataclass(frozen=True)
class YarnScaling:
    """YaRN context extension (arXiv 2309.00071) as DeepSeek parametrises it.

    ``mscale`` and ``mscale_all_dim`` follow DeepSeek's code: cos and sin are multiplied by
    ``m(mscale) / m(mscale_all_dim)`` and the softmax scale by ``m(mscale_all_dim)**2``, where
    ``m(a) = 0.1 a ln(factor) + 1``. transformers multiplies cos and sin by the same number only if
    both are given and neither is 0, and otherwise by ``m(1)``.

    Raises:
      ValueError: a field has another type, is not finite, or is out of range.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "rope_scaling.", may_be_zero=("mscale", "mscale_all_dim"))

    def magnitude(self, mscale: float) -> float:
        """Returns ``m(mscale)``; 1 if the context is not extended."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def rotary_magnitude(self) -> float:
        """Factor of cos and sin, ``m(mscale) / m(mscale_all_dim)``."""
        return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
