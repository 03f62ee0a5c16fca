"""Prompt look-up with a given acceptance, to time models with random weights."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from dsv3_jax.generation.drafters import DraftContext, Drafts, NgramDrafter, SyntheticDrafter
from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.model import DeepSeekV3


@dataclasses.dataclass(frozen=True)
class SyntheticNgramDrafter:
    """Looks n-grams up as :class:`NgramDrafter` does, and accepts the drafts at a given rate.

    A sequence always has ``depth`` drafts: random tokens where no n-gram is found. So a step costs
    as much as one in which every sequence drafts, but the generated text is NOT the model's.

    Attributes:
      acceptance: probability that a draft is accepted, given that all before it were.
    """

    acceptance: float
    mtp_hidden = None

    def __post_init__(self) -> None:
        SyntheticDrafter(self.acceptance)  # raises ValueError for a bad rate

    @property
    def name(self) -> str:
        return f"synthetic n-gram:{self.acceptance:g}"

    def draft(
        self,
        model: DeepSeekV3,
        context: DraftContext,
        sampling: Sampling,
        depth: int,
        vocab_size: int,
    ) -> tuple[Drafts, LatentKVCache]:
        drafts, cache = NgramDrafter().draft(model, context, sampling, depth, vocab_size)
        return drafts._replace(counts=jnp.full_like(drafts.counts, depth)), cache
