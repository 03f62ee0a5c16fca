"""The small model of these tests, and the comparison of what it holds with what was written."""

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
    """One layer of each kind: dense, MoE, MTP (which is `model.layers.2`)."""
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
    """The weights of a loaded model, under their published names."""
    model, _ = dsv3_jax.load(path, **options)
    return published_tensors(model)


def assert_holds(
    got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], dtype: str = "float32"
) -> None:
    """Every tensor is there in its dtype, and each of its values is the wanted one, rounded.

    As published code does, through float32: a value is rounded to float32 and that to `dtype`.
    """
    assert set(got) == set(want)
    for name, value in want.items():
        single = value.astype(np.float32)
        rounded = single if name.endswith(BIAS) else single.astype(numpy_dtype(dtype))
        assert got[name].dtype == rounded.dtype, name
        assert got[name].tobytes() == rounded.tobytes(), name


def numpy_dtype(name: str) -> np.dtype:
    """NumPy knows bfloat16 by ml_dtypes alone."""
    return np.dtype(getattr(ml_dtypes, name, name))


def same_bytes(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> bool:
    """Equal names, dtypes, shapes and bytes."""
    return _bytes(a) == _bytes(b)


def _bytes(tensors: Mapping[str, np.ndarray]) -> dict[str, tuple[Any, ...]]:
    return {name: (str(t.dtype), t.shape, t.tobytes()) for name, t in tensors.items()}


@contextlib.contextmanager
def no_array_made() -> Iterator[None]:
    """Fails if JAX made an array meanwhile that is still in use.

    Around `pytest.raises`, that is any array which the calls had in hand when they were left: the
    exception's traceback keeps their variables.
    """
    before = jax.live_arrays()  # the arrays themselves: an id may come again once its array is gone
    known = set(map(id, before))
    yield
    made = [array.shape for array in jax.live_arrays() if id(array) not in known]
    assert not made, f"{len(made)} arrays, the first of shape {made[0]}"
