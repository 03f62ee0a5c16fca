"""The properties of a model on which compiled programs depend."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from dsv3_jax.attn_impl import AttnImpl
from dsv3_jax.config import ModelConfig
from dsv3_jax.model import DeepSeekV3
from sharding import Layout


@dataclasses.dataclass(frozen=True)
class ModelSignature:
    """Everything about a model except the values of its arrays. Models with equal signatures run in
    the same compiled programs."""

    config: ModelConfig
    dtype: DTypeLike
    layout: Layout | None
    attn_impl: AttnImpl | None

    graph: nnx.GraphDef[DeepSeekV3]
    """The model's modules and their options, without arrays."""

    arrays: list[tuple[Any, ...]]
    """Shape, dtype and sharding of each array, in flattening order."""

    @classmethod
    def of(cls, model: DeepSeekV3) -> ModelSignature:
        graph, state = nnx.split(model)
        return cls(
            config=model.config,
            dtype=model.dtype,
            layout=model.layout,
            attn_impl=model.attn_impl,
            graph=graph,
            arrays=[(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(state)],
        )

    def check(self, model: Any) -> None:
        """Raises ValueError, naming the difference, unless ``model`` has this signature."""
        if not isinstance(model, DeepSeekV3):
            raise ValueError(f"model: expected a DeepSeekV3, got {type(model).__name__}")
        other = ModelSignature.of(model)
        # The graph contains these too. They are compared first, because they have names.
        self._check_config(other.config)
        if other.layout != self.layout:
            raise ValueError("model: expected the layout of the model in use, got another")
        for name in ("attn_impl", "dtype"):
            expected, got = getattr(self, name), getattr(other, name)
            if got != expected:
                raise ValueError(
                    f"model: expected the {name} of the model in use, {expected}, got {got}"
                )
        if other.graph != self.graph:
            raise ValueError(
                "model: expected the modules and options of the model in use (quantization, float8 "
                "activations, whether experts are placed), got others"
            )
        if other.arrays != self.arrays:
            raise ValueError("model: expected arrays like those of the model in use, got others")

    def _check_config(self, config: ModelConfig) -> None:
        different = [
            f"{field.name} {got!r} instead of {expected!r}"
            for field in dataclasses.fields(config)
            if (got := getattr(config, field.name))
            != (expected := getattr(self.config, field.name))
        ]
        if different:
            raise ValueError(
                f"model: expected the config of the model in use, got {', '.join(different)}"
            )
