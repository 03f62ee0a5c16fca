"""The question that the planner answers: a model, its devices, their layout and the requests."""

from __future__ import annotations

import dataclasses
from typing import get_args

import jax.numpy as jnp

from dsv3_jax.config import ModelConfig
from dsv3_jax.field_checks import check_choice
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE, CacheSpec
from dsv3_jax.layers.paged_cache import Form
from dsv3_jax.plan.target import Target
from dsv3_jax.quantization import QUANTIZATIONS, CacheDtype
from sharding import PRESETS, Exchange, Layout, abstract_layout


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Settings of an :class:`~dsv3_jax.engine.Engine` that its memory use depends on.

    Raises:
      ValueError: a setting is out of range.
    """

    cache_tokens: int | None = None
    """Size of the cache in tokens, on all devices together. None takes what fits, as the Engine
    does."""
    chunks: int = 8
    """Most prefill chunks of a step, for each data-parallel shard."""
    chunk_form: Form = "expanded"
    """Form of the chunks' attention."""

    def __post_init__(self) -> None:
        if self.cache_tokens is not None and self.cache_tokens < DEFAULT_PAGE_SIZE:
            raise ValueError(
                f"cache_tokens: expected at least a page, {DEFAULT_PAGE_SIZE}, got"
                f" {self.cache_tokens}"
            )
        if self.chunks < 1:
            raise ValueError(f"chunks: expected 1 or more, got {self.chunks}")


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model on devices, with every setting that the planner's results depend on.

    Raises:
      ValueError: a setting is unknown, out of range, or does not go with another.
    """

    config: ModelConfig
    target: Target
    layout_name: str
    """Name of a serving layout in ``sharding.PRESETS``."""
    batch: int
    """Number of sequences on all devices together: of an Engine, the most that run at a time."""
    context: int
    """Cached tokens of each sequence: of an Engine, the most tokens that one can have."""
    quantization: str = "bf16"
    """Form of the weights, a key of ``QUANTIZATIONS``."""
    activations: str | None = None
    """``"float8"`` if activations are rounded to float8, as in :func:`dsv3_jax.load`; else None."""
    cache_dtype: CacheDtype | None = None
    """Format of the cache, as in :func:`dsv3_jax.load`; None for bfloat16."""
    exchange: Exchange = "all_gather"
    float8_dispatch: bool = False
    """Whether tokens travel to experts on other devices in float8."""
    mtp: bool = False
    """Whether the MTP layer drafts one token per step."""
    redundant_experts: int = 0
    """Number of expert replicas per layer, in addition to one of each expert."""
    prefill_chunk: int = 512
    """Prompt tokens of each sequence that one pass of prefill processes: of an Engine, tokens of a
    chunk."""
    engine: EngineSettings | None = None
    """The engine that runs the sequences; None for a Generator."""

    def __post_init__(self) -> None:
        check_choice("quantization", self.quantization, tuple(QUANTIZATIONS))
        if self.layout_name in PRESETS and PRESETS[self.layout_name].fsdp_axes:
            raise ValueError(
                f"layout: expected one for serving, got {self.layout_name}, which is for training"
            )
        if self.activations is not None and self.quantization not in ("fp8", "int4"):
            raise ValueError(
                f"activations: expected quantization fp8 or int4 with {self.activations}"
                f" activations, got {self.quantization}"
            )
        if self.cache_dtype is not None:
            check_choice("cache_dtype", self.cache_dtype, get_args(CacheDtype))
            _ = self.cache_spec  # refuses what the model does not allow
        for name, least in (
            *(("batch", 1), ("context", 1), ("prefill_chunk", 1)),
            ("redundant_experts", 0),
        ):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name}: expected {least} or more, got {value}")
        if self.context > self.most_context:
            raise ValueError(
                f"context: expected {'at most' if self.engine else 'fewer than'} the model's"
                f" {self.config.max_position_embeddings} positions, got {self.context}"
            )
        if self.mtp and not self.config.num_nextn_predict_layers:
            raise ValueError("mtp: expected a model with an MTP layer, got one without")

    @property
    def layout(self) -> Layout:
        """The layout on abstract devices. Raises ValueError as :func:`sharding.abstract_layout`."""
        return abstract_layout(
            self.layout_name,
            self.target.devices,
            exchange=self.exchange,
            float8_dispatch=self.float8_dispatch,
        )

    @property
    def cache_spec(self) -> CacheSpec:
        """The page arrays of the layers."""
        return CacheSpec.of_config(
            self.config,
            jnp.bfloat16,
            mtp=self.mtp,
            cache_dtype=self.cache_dtype,
            float8_activations=self.activations is not None,
        )

    @property
    def most_context(self) -> int:
        """Largest context for which the model has positions."""
        return self.config.max_position_embeddings - (0 if self.engine else 1)

    @property
    def max_len(self) -> int:
        """Most tokens of a sequence. A Generator's has the cached ones and the newest, rounded up
        to whole pages."""
        if self.engine is not None:
            return self.context
        return -(-(self.context + 1) // DEFAULT_PAGE_SIZE) * DEFAULT_PAGE_SIZE

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a prefill chunk, padding included."""
        if self.engine is not None:
            return self.prefill_chunk
        return min(self.prefill_chunk, self.context)

    @property
    def draft_depth(self) -> int:
        """Drafts per sequence and step: 1 with MTP, else 0."""
        return int(self.mtp)
