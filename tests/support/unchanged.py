"""Check that a model is unchanged: the same graph, the same arrays, the same values."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from dsv3_jax.model import DeepSeekV3


class Snapshot:
    """Graph and arrays of a model, and arrays of other values, for a later comparison."""

    def __init__(self, model: DeepSeekV3, *others: Any):
        self._objects = model, *others
        self._graph, self._arrays = self._current()
        self._values = [np.array(x) for x in self._arrays]

    def _current(self) -> tuple[nnx.GraphDef, list[Any]]:
        model, *others = self._objects
        graph, state = nnx.split(model)
        return graph, jax.tree.leaves((state, others))

    def check(self) -> None:
        """Fails if anything has changed since the snapshot was taken."""
        graph, arrays = self._current()
        assert graph == self._graph
        assert all(x is y for x, y in zip(arrays, self._arrays, strict=True))
        for x, value in zip(arrays, self._values, strict=True):
            np.testing.assert_array_equal(np.asarray(x).view(np.uint8), value.view(np.uint8))
