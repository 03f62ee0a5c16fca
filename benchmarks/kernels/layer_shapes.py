"""The shapes of feed_forward that the kernel benchmark times: MoE layers of published models.

No GPU has checked its kernel as it is, so it is no core case: ``--ops feed_forward --all`` selects
it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

BLOCK = 128
SMALL = 512, 256, 64  # hidden size, width of an expert, experts


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a model's MoE layer."""

    width: int
    """Hidden size."""
    expert_ffn: int
    experts: int
    chosen: int
    """Experts per token."""
    shared: int
    """Shared experts."""
    groups: int
    topk_groups: int
    scaling: float


MODELS = {
    "moonlight": Sizes(2048, 1408, 64, 6, 2, 1, 1, 2.446),
    "v3": Sizes(7168, 2048, 256, 8, 1, 8, 4, 2.5),
}


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """A case of feed_forward: ``tokens`` tokens in an MoE layer of a model."""

    model: str
    tokens: int
    dtype: Literal["bf16", "fp8"]
    """Format of the experts; the router is bfloat16."""
    small: bool = False
    """Whether widths and experts are few, for checks."""
    core: bool = False
    op: str = "feed_forward"

    @property
    def shape(self) -> str:
        return f"{self.model}{' small' * self.small} {self.tokens} tokens"

    @property
    def sizes(self) -> Sizes:
        sizes = MODELS[self.model]
        if not self.small:
            return sizes
        width, expert_ffn, experts = SMALL
        return dataclasses.replace(sizes, width=width, expert_ffn=expert_ffn, experts=experts)

    @property
    def flops(self) -> float:
        return 2.0 * self.tokens * (self._expert * self._read_experts(1) + self._router)

    @property
    def bytes(self) -> float:
        """Bytes of the weights: a routed expert counts once for each token that chose it."""
        itemsize = 1 + 4 / BLOCK**2 if self.dtype == "fp8" else 2
        return self._expert * itemsize * self._read_experts(self.tokens) + 2 * self._router

    @property
    def _expert(self) -> int:
        return 3 * self.sizes.width * self.sizes.expert_ffn

    @property
    def _router(self) -> int:
        return self.sizes.width * self.sizes.experts

    def _read_experts(self, tokens: int) -> int:
        return self.sizes.shared + tokens * self.sizes.chosen


def layer_cases() -> list[FeedForward]:
    kinds: list[tuple[str, Literal["bf16", "fp8"]]] = [
        ("moonlight", "bf16"), ("moonlight", "fp8"), ("v3", "fp8"),
    ]  # fmt: skip
    # The kernel takes up to four tokens in float8.
    return [
        FeedForward(model, n, dtype)
        for n in (1, 2, 4, 8)
        for model, dtype in kinds
        if n <= 4 or dtype == "bf16"
    ]


def check_key(case: FeedForward) -> str:
    """Returns a key. Cases with equal keys share the check on small inputs."""
    return f"{case.op} {case.dtype} {case.model} {case.tokens}"
