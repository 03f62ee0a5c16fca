"""Published speeds of DeepSeek-V3 deployments, and the planner's roofline bounds for them.

A bound below a published figure is a bug in the planner.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from dsv3_jax import presets
from dsv3_jax.plan import roofline
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.roofline import Roofline
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.weights import ModelShapes

BEGIN, END = "<!-- published: begin -->", "<!-- published: end -->"


@dataclasses.dataclass(frozen=True)
class Published:
    """A published speed and the deployment that reached it."""

    who: str
    phase: Literal["decode", "prefill"]
    target: str
    layout: str
    batch: int
    """Batch size over all devices. For prefill, the number of prompts processed together."""
    context: int
    tokens_per_s: float
    """Published speed per device."""
    source: str
    quantization: str = "fp8"
    redundant_experts: int = 0

    @property
    def kind(self) -> tuple[str, int]:
        """The settings that determine the model's shapes."""
        return self.quantization, self.redundant_experts

    def bound(self, shapes: ModelShapes) -> Roofline:
        """Returns the roofline bound of the deployment.

        As in DeepEP, a token is sent once to each device that has one of its experts, in float8,
        and the results return in bfloat16. Matmuls are float8 if the weights are.
        """
        float8 = self.quantization == "fp8"
        deployment = Deployment(
            config=presets.DEEPSEEK_V3,
            target=Target.parse(self.target),
            layout_name=self.layout,
            batch=self.batch,
            context=self.context,
            quantization=self.quantization,
            activations="float8" if float8 else None,
            exchange="ragged_all_to_all",
            float8_dispatch=float8,
            redundant_experts=self.redundant_experts,
            prefill_chunk=self.context,
        )
        of_phase = roofline.decode if self.phase == "decode" else roofline.prefill
        return of_phase(shapes.shard(deployment.layout), deployment, result_dtype=jnp.bfloat16)


_OVERVIEW = "DeepSeek, V3/R1 inference system overview, 2025-03-01"
_SGLANG = "SGLang, large-scale expert parallelism on 96 H100s, 2025-05-05"
_TRT = "NVIDIA, TensorRT-LLM's DeepSeek-R1 figures, 2025"
_EXAMPLES = "jax-ml/jax-llm-examples, deepseek_r1_jax/README.md"

PUBLISHED = (
    # 14.8k tokens/s per node of 8; 88 requests per GPU follow from 20 to 22 tokens/s for each.
    Published(
        "DeepSeek, decode", "decode", "gpu:h800x144", "deepseek_decode_ep144", 144 * 88, 4989, 1850,
        _OVERVIEW, redundant_experts=32,
    ),
    # 73.7k tokens/s per node, 56.3 % of them cache hits: 32.2k were computed.
    Published(
        "DeepSeek, prefill", "prefill", "gpu:h800x32", "deepseek_prefill_ep32", 32 * 4, 4096, 4030,
        _OVERVIEW, redundant_experts=32,
    ),
    Published(
        "SGLang, decode", "decode", "gpu:h100x72", "dp_attention_ep", 72 * 256, 2000, 2787,
        _SGLANG, redundant_experts=32,
    ),
    # 52.3k tokens/s per node end to end; 57,674 per node for prompts of 1,024 tokens.
    Published(
        "SGLang, prefill", "prefill", "gpu:h100x32", "deepseek_prefill_ep32", 32 * 4, 4096, 6500,
        _SGLANG, redundant_experts=32,
    ),
    Published(
        "SGLang, prefill", "prefill", "gpu:h100x32", "deepseek_prefill_ep32", 32 * 16, 1024, 7209,
        _SGLANG, redundant_experts=32,
    ),
    # 11,489 tokens/s with 1,024 requests of 1k input and 2k output tokens: mean context 2,048.
    Published(
        "TensorRT-LLM, 8 H200", "decode", "gpu:h200x8", "dp_attention_ep", 1024, 2048, 1436, _TRT
    ),
    Published(
        "jax-llm-examples, batch 1", "decode", "tpu:v5e:8x8", "tensor_parallel", 1, 512, 75.9 / 64,
        _EXAMPLES, "int8",
    ),
    Published(
        "jax-llm-examples, batch 8", "decode", "tpu:v5e:8x8", "tensor_parallel", 8, 512,
        8 * 48.0 / 64, _EXAMPLES, "int8",
    ),
    Published(
        "jax-llm-examples, batch 128", "decode", "tpu:v5e:8x8", "tensor_parallel", 128, 512,
        128 * 17.4 / 64, _EXAMPLES, "int8",
    ),
)  # fmt: skip


def bounds() -> list[Roofline]:
    """Returns the bounds of all published deployments."""
    shapes = {
        kind: ModelShapes.of(presets.DEEPSEEK_V3, kind[0], mtp=False, redundant_experts=kind[1])
        for kind in {each.kind for each in PUBLISHED}
    }
    return [each.bound(shapes[each.kind]) for each in PUBLISHED]


def table(rooflines: list[Roofline]) -> str:
    """Formats a Markdown table of tokens per second and device."""
    lines = [
        "| deployment | devices | batch x tokens | published | bound | bound by | reached |",
        "|---|---|---:|---:|---:|---|---:|",
    ]
    for each, bound in zip(PUBLISHED, rooflines, strict=True):
        most = bound.tokens_per_s_per_device
        workload = f"{each.batch:,} x {each.context:,}"
        cells: list[Any] = [each.who, each.target, workload, f"{each.tokens_per_s:,.4g}"]
        cells += [f"{most:,.0f}", bound.binding, f"{each.tokens_per_s / most:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
