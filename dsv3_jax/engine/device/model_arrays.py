"""A model as a flat list of arrays, the argument of the engine's programs, and the properties of a
model on which these programs depend."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from dsv3_jax.attn_impl import AttnImpl
from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.on_mesh import stored_shardings
from dsv3_jax.model import DeepSeekV3
from sharding import Layout


@dataclasses.dataclass(frozen=True)
class ModelArrays:
    """The arrays of a model, those that decode precomputes included, and the model's structure.

    A flat list of arrays is the cheapest argument to a jitted call.
    """

    leaves: list[Any]
    """The arrays, or their shapes."""
    graph: nnx.GraphDef[DeepSeekV3]
    treedef: Any

    @classmethod
    def of(cls, model: DeepSeekV3, *, whole_sequences: bool = False) -> ModelArrays:
        """Returns the arrays of a model. A model of shapes, ``jax.ShapeDtypeStruct``, gives shapes
        with the shardings of its layout. ``whole_sequences``: see
        :meth:`DeepSeekV3.attend_to_whole_sequences`."""
        graph, state = nnx.split(model)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
            return cls._shapes(graph, state, whole_sequences)
        graph, state = nnx.split(_prepared(model, whole_sequences))
        return cls(jax.tree.leaves(state), graph, jax.tree.structure(state))

    @classmethod
    def _shapes(
        cls, graph: nnx.GraphDef[DeepSeekV3], state: nnx.State, whole_sequences: bool
    ) -> ModelArrays:
        structure: Any = None
        shardings: list[Any] = []

        # The model is split inside, because outside it would take shapes for static attributes.
        def leaves(state: nnx.State) -> list[jax.Array]:
            nonlocal structure, shardings
            model = _prepared(nnx.merge(graph, state), whole_sequences)
            split_graph, split_state = nnx.split(model)
            leaves, treedef = jax.tree.flatten(split_state)
            structure, shardings = (split_graph, treedef), [None] * len(leaves)
            if model.layout is not None:
                of_path = stored_shardings(model, model.layout)
                shardings = [of_path[path] for path, _ in nnx.to_flat_state(split_state)]
            return leaves

        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            for x, sharding in zip(jax.eval_shape(leaves, state), shardings, strict=True)
        ]
        return cls(shapes, *structure)

    def model(self, leaves: list[jax.Array]) -> DeepSeekV3:
        """Returns the model with these arrays."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))


def _prepared(model: DeepSeekV3, whole_sequences: bool) -> DeepSeekV3:
    """Returns a copy of the model for decode steps."""
    model = model.precompute_for_decode()
    if whole_sequences:
        model.attend_to_whole_sequences()
        # By default an engine for one request would compute other bits than one for several.
        model.feed_forward = model.feed_forward or "separate"
    return model


@dataclasses.dataclass(frozen=True)
class ModelSignature:
    """A model without the values of its arrays. Equal signatures run in the same programs."""

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
        different = [
            f"{field.name} {got!r} instead of {expected!r}"
            for field in dataclasses.fields(self.config)
            if (got := getattr(other.config, field.name))
            != (expected := getattr(self.config, field.name))
        ]
        if different:
            raise ValueError(
                f"model: expected the config of the model in use, got {', '.join(different)}"
            )
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
