"""A model's arrays as a device of a layout holds them, and what a pass over tokens does with them.

All of it is read off the model itself, made of shapes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv3_jax.accounting import distinct_experts
from dsv3_jax.config import QUANTIZATIONS, ModelConfig
from dsv3_jax.layers.on_mesh import shardings
from dsv3_jax.logical_axes import check_layout
from dsv3_jax.model import DeepSeekV3, abstract
from dsv3_jax.parameter_path import ParameterPath
from sharding import Layout, Placement


class Part(NamedTuple):
    """What of one of a model's arrays a device holds."""

    path: ParameterPath
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_matrix(self) -> bool:
        """Rows are multiplied by it: no norm, bias or scale, nor looked up."""
        return self.path[-1] == "weight" and len(self.shape) > 1 and self.path[0] != "embed_tokens"

    @property
    def elements(self) -> int:
        """A byte holds two int4."""
        return math.prod(self.shape) * (2 if self.dtype == np.uint8 else 1)


def parts(model: DeepSeekV3, layout: Layout | None) -> list[Part]:
    """Of all parameters; ``model`` may be of shapes.

    Raises:
      ValueError: as :func:`dsv3_jax.logical_axes.parameter_shardings`.
    """
    lies = {} if layout is None else shardings(model, layout)
    return [
        Part(
            path,
            leaf.shape if layout is None else lies[path].shard_shape(leaf.shape),
            jnp.dtype(leaf.dtype),
        )
        for path, leaf in nnx.to_flat_state(nnx.state(model))
        if isinstance(leaf, nnx.Variable)
    ]


def read_bytes(
    held: Iterable[Part], *, rows: int, own_rows: int, chosen: int, places: int
) -> float:
    """Of these, what a pass over ``rows`` tokens reads: all but the experts that none of them
    chose, if all are chosen alike, and of the embedding a row for each of the device's own.

    Args:
      rows: of all devices that share the experts.
      chosen: experts of a token, of ``places``.
    """
    visited = distinct_experts(places, chosen, rows) / places
    total = 0.0
    for part in held:
        if part.path[0] == "embed_tokens":
            total += own_rows * part.shape[-1] * part.dtype.itemsize
        else:
            total += part.nbytes * (visited if "experts" in part.path else 1)
    return total


@dataclasses.dataclass(frozen=True)
class Shapes:
    """A model that could be loaded, and what it would hold."""

    model: DeepSeekV3
    up_projections: tuple[tuple[int, ...], ...]
    """[H, N, C] and [H, V, C] of every layer, which decoding holds beside kv_b_proj."""
    places: int
    """For experts of a layer."""
    tables: int
    """Bytes that say where replicas stand."""

    @classmethod
    def of(
        cls, config: ModelConfig, quantization: str, *, mtp: bool, redundant_experts: int
    ) -> Shapes:
        """In bfloat16, or as ``quantization`` of QUANTIZATIONS says."""
        if not mtp:
            config = dataclasses.replace(config, num_nextn_predict_layers=0)
        model = abstract(config, dtype=jnp.bfloat16, quantization=QUANTIZATIONS[quantization])
        tables, places = 0, config.n_routed_experts
        if redundant_experts:
            places += redundant_experts
            layers = len(model.moe_layers())
            placed = Placement.identity(layers, config.n_routed_experts, places)
            tables = placed.log2phy.nbytes + placed.logcnt.nbytes
            model = nnx.eval_shape(lambda model: model.place_experts(placed), model)

        def up_projections(model: DeepSeekV3) -> list[jax.Array]:
            layers = (*model.layers, *model.mtp)
            return [w for each in layers for w in each.self_attn.up_projections(jnp.bfloat16)]

        wide = nnx.eval_shape(up_projections, model)
        return cls(model, tuple(w.shape for w in wide), places, tables)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def on(self, layout: Layout) -> Share:
        """What a device of ``layout`` holds.

        Raises:
          ValueError: parameters cannot lie, or layers not run, as ``layout`` says.
        """
        check_layout(self.config, layout, self.places)
        lies = layout.sharding(("heads", "head_dim", "latent"))
        wide = sum(2 * math.prod(lies.shard_shape(shape)) for shape in self.up_projections)
        return Share(self, layout, tuple(parts(self.model, layout)), wide)


@dataclasses.dataclass(frozen=True)
class Share:
    """One device's part of a model."""

    shapes: Shapes
    layout: Layout
    parts: tuple[Part, ...]
    up_projections: int
    """Bytes."""

    @property
    def weights(self) -> int:
        """Bytes."""
        return sum(part.nbytes for part in self.parts) + self.shapes.tables

    def own_rows(self, rows: int) -> int:
        return rows // self.layout.num_shards("batch")

    def rows_together(self, rows: int) -> int:
        """Of all devices whose tokens visit the same experts' weights."""
        exchanged = self.layout.exchange_axes
        return self.own_rows(rows) * math.prod(self.layout.mesh.shape[a] for a in exchanged)

    def read_bytes(self, rows: int, own_rows: int, *, decoding: bool) -> float:
        """Of the weights, in one pass over tokens of all devices that share experts, and of this
        one. While decoding, up-projections stand in for kv_b_proj."""
        held = [p for p in self.parts if not (decoding and "kv_b_proj" in p.path)]
        if not decoding:  # a prompt needs no logits
            held = [p for p in held if p.path[0] != "lm_head"]
        chosen = self.shapes.config.num_experts_per_tok
        places = self.shapes.places
        total = read_bytes(held, rows=rows, own_rows=own_rows, chosen=chosen, places=places)
        return total + (self.up_projections if decoding else 0)

    def operations(
        self, rows: int, own_rows: int, *, decoding: bool, float8: bool
    ) -> tuple[float, float]:
        """Of products with weights, a multiply-add being two: in bfloat16, and in float8.

        Args:
          float8: rows are rounded to float8 where weights are.
        """
        wide = narrow = 0.0
        config = self.shapes.config
        for part in self.parts:
            if not part.is_matrix or (part.path[0] == "lm_head" and not decoding):
                continue
            times = own_rows
            if "experts" in part.path:  # of ``places`` matrices those that are here
                times = rows * config.num_experts_per_tok / self.shapes.places
            count = 2 * part.elements * times
            # Folded into queries and outputs, kv_b_proj costs what it costs to apply it once.
            folded = decoding and "kv_b_proj" in part.path
            if float8 and part.dtype == jnp.float8_e4m3fn and not folded:
                narrow += count
            else:
                wide += count
        return wide, narrow
