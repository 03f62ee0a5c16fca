"""YaRN context extension: its parameters, and the object of config.json that has them."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

from dsv3_jax.field_checks import (
    agreed,
    as_float,
    as_json,
    check_accepted,
    check_fields,
    refuse_unknown,
)

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
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


def read_yarn(name: str, nested: dict[str, Any]) -> YarnScaling | None:
    """Returns the scaling that a nested object under key ``name`` describes."""
    kind = agreed({f"{name}.{key}": nested.pop(key, None) for key in ("type", "rope_type")})
    if kind not in ("yarn", "default", None):
        raise ValueError(f"{name}.type: expected yarn or default, got {as_json(kind)}")
    for key, accepted in (("truncate", True), ("partial_rotary_factor", 1.0)):
        check_accepted(f"{name}.{key}", nested.pop(key, None), (accepted, None))
    fields = dataclasses.fields(YarnScaling) if kind == "yarn" else ()
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    given: dict[str, Any] = {
        key: each for key, each in nested.items() if each is not None or key in required
    }
    factor = given.pop("attention_factor", None) if kind == "yarn" else None
    refuse_unknown(name, sorted(set(given) - {field.name for field in fields}))
    if kind != "yarn":
        return None
    for key in sorted(required - set(given)):
        raise ValueError(f"{name} lacks the key {key!r}")
    floats = {field.name for field in fields if field.type == "float"}
    values: dict[str, Any] = {
        key: as_float(each) if key in floats else each for key, each in given.items()
    }
    scaling = YarnScaling(**values)
    # Without the key, transformers would multiply cos and sin by another number.
    in_transformers = _magnitude_in_transformers(scaling, given)
    needs_key = not math.isclose(scaling.rotary_magnitude, in_transformers)
    if factor is not None and not needs_key:
        refuse_unknown(name, ["attention_factor"])
    is_number = isinstance(factor, (int, float))
    if factor is not None and not (is_number and math.isclose(factor, scaling.rotary_magnitude)):
        raise ValueError(
            f"{name}.attention_factor: expected {scaling.rotary_magnitude} of mscale and"
            f" mscale_all_dim, got {as_json(factor)}"
        )
    if needs_key and factor is None:
        logger.warning(
            "%s: mscale=%s, mscale_all_dim=%s: cos and sin are multiplied by %.4f, as in DeepSeek's"
            " code, and by %.4f in transformers",
            *(name, scaling.mscale, scaling.mscale_all_dim),
            *(scaling.rotary_magnitude, in_transformers),
        )
    return scaling


def _magnitude_in_transformers(scaling: YarnScaling, keys: Mapping[str, Any]) -> float:
    """Returns transformers' factor of cos and sin for a file with ``keys``."""
    if keys.get("mscale") and keys.get("mscale_all_dim"):
        return scaling.rotary_magnitude
    return scaling.magnitude(1.0)


def write_yarn(scaling: YarnScaling) -> dict[str, Any]:
    out = {"type": "yarn", **dataclasses.asdict(scaling)}
    if not math.isclose(scaling.rotary_magnitude, _magnitude_in_transformers(scaling, out)):
        out["attention_factor"] = scaling.rotary_magnitude
    return out
