"""The small model of these tests, and comparisons of its weights with what was written."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

import dsv3_jax
from dsv3_jax.checkpoint.parameters import published_tensors
from tests.support.checkpoints import BIAS, tiny_config


def small_config(**overrides: Any) -> dict[str, Any]:
    """Returns a config with one layer of each kind: dense, MoE, and MTP (`model.layers.2`)."""
    return tiny_config(
        **{
            "n_group": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "topk_group": 1,
            **overrides,
        }
    )


def loaded(path: Path, **options: Any) -> dict[str, np.ndarray]:
    """Returns the weights of a loaded model under their published names."""
    model, _ = dsv3_jax.load(path, **options)
    return published_tensors(model)


def assert_holds(
    got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], dtype: str = "float32"
) -> None:
    """Expects every tensor in its dtype, with each value rounded once from the exact one.

    `expected` has exact values in float64, or the values of files.
    """
    assert set(got) == set(expected)
    for name, value in expected.items():
        rounded = rounded_once(value, "float32" if name.endswith(BIAS) else dtype)
        assert got[name].dtype == rounded.dtype, name
        assert got[name].tobytes() == rounded.tobytes(), name


def rounded_once(value: np.ndarray, dtype: str) -> np.ndarray:
    """Rounds float64 to the nearest number of `dtype`, and to even in between.

    NumPy does so itself, except for bfloat16, which ml_dtypes rounds by way of float32. For normal
    bfloat16 numbers, the mantissa of the float64 is rounded to seven bits.
    """
    if dtype != "bfloat16":
        return value.astype(dtype)
    bits = value.astype(np.float64).view(np.uint64)
    odd = (bits >> np.uint64(45)) & np.uint64(1)
    bits = (bits + np.uint64(2**44 - 1) + odd) & ~np.uint64(2**45 - 1)
    near = bits.view(np.float64)
    assert (np.abs(near[near != 0]) >= 2.0**-126).all(), "subnormals are rounded elsewhere"
    return near.astype(ml_dtypes.bfloat16)


def same_bytes(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> bool:
    """Returns dtype, shape and bytes of each tensor."""
    return _bytes(a) == _bytes(b)


def _bytes(tensors: Mapping[str, np.ndarray]) -> dict[str, tuple[Any, ...]]:
    return {name: (str(t.dtype), t.shape, t.tobytes()) for name, t in tensors.items()}


@contextlib.contextmanager
def no_array_made() -> Iterator[None]:
    """Fails if JAX made an array meanwhile that is still in use.

    Around `pytest.raises` this includes any local array of the calls that failed, because the
    traceback of the exception keeps their variables.
    """
    before = jax.live_arrays()  # kept alive, so that no id is reused
    known = set(map(id, before))
    yield
    made = [array.shape for array in jax.live_arrays() if id(array) not in known]
    assert not made, f"{len(made)} arrays, the first of shape {made[0]}"
