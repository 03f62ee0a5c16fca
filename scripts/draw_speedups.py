"""Draws the speedups over vLLM, PyTorch and CUDA kernels, from benchmarks/results.

    python -m scripts.draw_speedups docs/speedups.svg

A dot is one case: the other's time divided by ours, both from one run on one H200. A line marks the
median of a row.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator
from html import escape

from benchmarks.tables import kernel_rows, read
from dsv3_jax.files import atomic_write

WIDTH, ROW, TOP, LEFT, RIGHT = 860, 22, 34, 330, 24
LOWEST, HIGHEST = 0.8, 4.0
TICKS = (0.8, 1, 1.25, 1.5, 2, 3, 4)
STYLE = """
text { font: 13px Helvetica, Arial, sans-serif; fill: #1f2933 }
.faint { fill: #66727f } .grid { stroke: #66727f; stroke-opacity: 0.25 } .one { stroke: #66727f }
.dot { fill-opacity: 0.5 }
.vllm { fill: #b4530a } .torch { fill: #7048c6 } .cuda { fill: #1d7a4f }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ed } .faint { fill: #a3adb8 } .grid, .one { stroke: #a3adb8 }
  .vllm { fill: #f2994a } .torch { fill: #b39bf5 } .cuda { fill: #57c48f }
}"""
KERNELS = {
    "attention, decode": ("mla_decode",),
    "attention, prefill": ("mla_prefill",),
    "expert matmuls": ("grouped_matmul",),
    "sparse attention": ("sparse_mla_decode", "sparse_mla_prefill"),
    "sparse attention, indexer": ("sparse_index",),
}


def compared() -> Iterator[tuple[str, str, str, list[float]]]:
    """Yields the kind of what we are compared with, its name, what was timed, and the speedups."""
    steps = read("vllm_h200")["rows"]
    for model, name in (("moonlight-16b", "Moonlight"), ("v3-slice", "9 layers of V3, fp8")):
        rows = [row for row in steps if row["model"] == model]
        decode = [row["vllm_ms"] / row["ms"] for row in rows if row["phase"] == "decode"]
        yield "vllm", "vLLM", f"decode step, {name}", decode
        prefill = [row for row in rows if row["phase"] == "prefill"]
        ratios = [row["tokens_per_s"] / row["vllm_tokens_per_s"] for row in prefill]
        yield "vllm", "vLLM", f"prefill, {name}", ratios
    training = read("grouped_matmul_gradients_h200")["rows"]
    for op, name in (("grouped_matmul", "forward"), ("grouped_matmul_gradient", "gradients")):
        ratios = [row["ratio"] for row in training if row["op"] == op]
        yield "torch", "PyTorch", f"expert matmuls in training, {name}", ratios
    rows = [row for row in kernel_rows() if row["ratio"]]
    yield "torch", "PyTorch", "top-k", [row["ratio"] for row in rows if row["op"] == "top_k"]
    for name, ops in KERNELS.items():
        of_ops = [row for row in rows if row["op"] in ops and row["peer"] != "XLA"]
        for dtype in dict.fromkeys(row["dtype"] for row in of_ops):
            some = [row for row in of_ops if row["dtype"] == dtype]
            peers = sorted({row["peer"].replace(",", " ").split()[0] for row in some})
            yield "cuda", ", ".join(peers), f"{name}, {dtype}", [row["ratio"] for row in some]


def position(ratio: float) -> float:
    """Returns the x coordinate of a speedup, on a logarithmic axis."""
    share = math.log(ratio / LOWEST) / math.log(HIGHEST / LOWEST)
    return LEFT + (WIDTH - LEFT - RIGHT) * share


def draw() -> str:
    """Returns the picture as SVG."""
    lines = list(compared())
    bottom = TOP + ROW * len(lines)
    parts = [f'<text x="{LEFT}" y="14" class="faint">speedup: above 1, dsv3_jax is faster</text>']
    for tick in TICKS:
        x, kind = position(tick), "one" if tick == 1 else "grid"
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{bottom}" class="{kind}"/>'
        )
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    for i, (kind, peer, what, ratios) in enumerate(lines):
        y, label = TOP + ROW * i + 6, f"{escape(what)} "
        label += f'<tspan class="{kind}">{escape(peer)}</tspan>'
        parts.append(f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{label}</text>')
        for ratio in ratios:
            x = position(ratio)
            parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="4" class="{kind} dot"/>')
        x = position(statistics.median(ratios)) - 1.5
        parts.append(f'<rect x="{x:.1f}" y="{y - 8}" width="3" height="16" class="{kind}"/>')
    size = f'width="{WIDTH}" height="{bottom + 26}" viewBox="0 0 {WIDTH} {bottom + 26}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}\n</style>'
    return "\n".join([head, *parts, "</svg>", ""])


if __name__ == "__main__":
    atomic_write(sys.argv[1], draw())
