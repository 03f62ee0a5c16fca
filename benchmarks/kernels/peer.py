"""A kernel to compare with, its inputs as torch tensors, and what its op's checks share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
Inputs = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Peer:
    """A kernel to compare with."""

    name: str
    prepare: Callable[[Inputs], Any]
    """Converts a case's inputs to the peer's arguments. Not timed."""
    call: Callable[[Any], Tensor]
    """Runs the kernel on the prepared arguments."""
    rows: Callable[[Any, Tensor], Tensor] = lambda prepared, out: out
    """Converts the output to the layout of this repository's op."""


class Random:
    """Random inputs, generated on the GPU."""

    def __init__(self, seed: int):
        self.generator = torch.Generator("cuda").manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        return x.normal_(generator=self.generator).to(dtype)

    def scale(self, *shape: int) -> Tensor:
        """Returns scales of quantized blocks."""
        return self.uniform(*shape, low=0.5, high=2.0) / 64

    def uniform(self, *shape: int, low: float, high: float) -> Tensor:
        x = torch.empty(shape, device="cuda")
        return x.uniform_(low, high, generator=self.generator)


def softmax_of(scores: Tensor, last: Tensor) -> Tensor:
    """Softmax of scores [..., T, H, S] over the keys up to position ``last`` of each query."""
    s = torch.arange(scores.shape[-1], device="cuda")
    return scores.masked_fill(s > last[..., None, None], -torch.inf).softmax(-1)
