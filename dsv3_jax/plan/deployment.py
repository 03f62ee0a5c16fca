"""What is to run where: everything a plan depends on."""

from __future__ import annotations

import dataclasses

from dsv3_jax.config import QUANTIZATIONS, ModelConfig, check_choice
from dsv3_jax.plan.target import Target
from sharding import PRESETS, Exchange, Layout, abstract_layout


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model, devices, how it lies on them, and the requests that they serve together.

    Raises:
      ValueError: a setting that there is not, or that does not go with another.
    """

    config: ModelConfig
    target: Target
    layout_name: str
    batch: int
    """Rows of all devices."""
    context: int
    """Tokens of a row in the cache."""
    quantization: str = "bf16"
    activations: str | None = None
    """``float8``: as ``dsv3_jax.load`` takes it."""
    exchange: Exchange = "all_gather"
    float8_dispatch: bool = False
    mtp: bool = False
    """The MTP layer drafts a token a step."""
    redundant_experts: int = 0
    prefill_chunk: int = 512
    """Prompt tokens a row that go through the model at a time."""

    def __post_init__(self) -> None:
        check_choice("quantization", self.quantization, tuple(QUANTIZATIONS))
        if self.layout_name in PRESETS and PRESETS[self.layout_name].fsdp_axes:
            raise ValueError(
                f"layout: expected one for serving, got {self.layout_name}, which is for training"
            )
        if self.activations is not None and self.quantization != "fp8":
            raise ValueError(
                f"activations: expected them with quantization fp8, got {self.quantization}"
            )
        for name, least in (
            *(("batch", 1), ("context", 1), ("prefill_chunk", 1)),
            ("redundant_experts", 0),
        ):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name}: expected {least} or more, got {value}")
        if self.context >= self.config.max_position_embeddings:
            raise ValueError(
                f"context: expected fewer tokens than the {self.config.max_position_embeddings}"
                f" that the model reaches, got {self.context}"
            )
        if self.mtp and not self.config.num_nextn_predict_layers:
            raise ValueError("mtp: expected a model with an MTP layer, got one without")

    @property
    def layout(self) -> Layout:
        """Raises ValueError, as :func:`sharding.abstract_layout`."""
        return abstract_layout(
            self.layout_name,
            self.target.devices,
            exchange=self.exchange,
            float8_dispatch=self.float8_dispatch,
        )

    @property
    def depth(self) -> int:
        """Drafts a step."""
        return int(self.mtp)
