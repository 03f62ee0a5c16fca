"""Draws the packages and the path of a generated token through them, for ARCHITECTURE.md.

python -m scripts.draw_architecture docs/architecture.svg
"""

from __future__ import annotations

import sys
from html import escape

from dsv3_jax.files import atomic_write

_WIDTH, _HEIGHT = 960, 560
_INK, _FAINT = "#1f2933", "#66727f"


def _text(x: float, y: float, text: str, size: int, color: str, anchor: str, bold: bool) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}"'
        f"{weight}>{escape(text)}</text>"
    )


def _band(y: int, height: int, name: str, lines: tuple[str, ...], color: str) -> list[str]:
    """A package: a coloured band with its name and what it knows at the left."""
    out = [
        f'<rect x="10" y="{y}" width="{_WIDTH - 20}" height="{height}" rx="8" fill="{color}"/>',
        _text(24, y + 24, name, 15, _INK, "start", True),
    ]
    for i, line in enumerate(lines):
        out.append(_text(24, y + 44 + 16 * i, line, 12, _FAINT, "start", False))
    return out


def _box(x: int, y: int, width: int, title: str, note: str, height: int = 46) -> list[str]:
    """A white box with a title and one line below it."""
    middle = x + width / 2
    return [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="#ffffff"'
        f' stroke="{_INK}"/>',
        _text(middle, y + 20, title, 13, _INK, "middle", True),
        _text(middle, y + 37, note, 11, _FAINT, "middle", False),
    ]


def _arrow(*points: tuple[int, int], dashed: bool = False) -> str:
    """An arrow along straight lines."""
    path = " ".join(f"{x},{y}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{_INK}" stroke-width="1.4"'
        f' marker-end="url(#head)"{dash}/>'
    )


def draw() -> str:
    """Returns the picture as SVG. It depends on nothing, so that every run gives the same file."""
    x, wide = 200, 130  # of the first box, and of every box
    columns = [x + i * 148 for i in range(5)]
    parts = [
        *_band(10, 74, "scripts, notebooks, tests", ("what people run",), "#f3e6d3"),
        *_box(columns[1], 24, wide, "prompt", "text or token ids"),
        *_box(columns[4], 24, wide, "completion", "text, tokens, statistics"),
        *_band(94, 278, "dsv3_jax", ("the model; everything", "specific to DeepSeek"), "#dfeadf"),
        *_box(columns[1], 112, wide, "Generator", "cli, tokenizer, batch"),
        *_box(columns[2], 112, wide, "decode loop", "many steps a dispatch"),
        *_box(columns[4], 112, wide, "text", "stop strings, streaming"),
        f'<rect x="{x - 14}" y="180" width="{5 * 148 - 2}" height="180" rx="8" fill="none"'
        f' stroke="{_FAINT}" stroke-dasharray="3 3"/>',
        _text(x - 4, 350, "one decode step, on the device", 11, _FAINT, "start", False),
        *_box(columns[0], 216, wide, "embedding", "last token and drafts"),
        *_box(columns[1], 216, wide, "attention", "reads the latent cache"),
        *_box(columns[2], 216, wide, "router, experts", "no token is dropped"),
        *_box(columns[3], 216, wide, "norm, LM head", "float32 logits"),
        *_box(columns[4], 216, wide, "sample, verify", "accept drafts, add one"),
        *_box(columns[3], 300, wide, "MTP layer", "drafts 1 to 4 tokens"),
        *_band(382, 74, "sharding", ("meshes and what they", "split; knows no model"), "#dde6f0"),
        *_box(columns[1] + 74, 396, wide, "layout", "who holds which part"),
        *_box(columns[2] + 74, 396, wide, "exchange", "tokens to experts"),
        *_box(columns[3] + 74, 396, wide, "placement", "replicas of experts"),
        *_band(466, 84, "pallas_kernels", ("operations on arrays;", "knows no mesh"), "#e9e0ee"),
        *_box(columns[0], 485, wide, "rms_norm", "quantized_matmul"),
        *_box(columns[1], 485, wide, "mla_decode", "mla_prefill"),
        *_box(columns[2], 485, wide, "route", "grouped_swiglu"),
        *_box(columns[3], 485, wide, "grouped_matmul", "token_exchange"),
    ]

    def middle(column: int) -> int:
        return columns[column] + wide // 2

    parts.append(_arrow((middle(1), 70), (middle(1), 111)))
    parts.append(_arrow((columns[1] + wide, 135), (columns[2] - 1, 135)))
    parts.append(_arrow((middle(2), 158), (middle(2), 170), (middle(0), 170), (middle(0), 215)))
    for i in range(4):
        parts.append(_arrow((columns[i] + wide, 239), (columns[i + 1] - 1, 239)))
    # Layers repeat.
    parts.append(_arrow((middle(2), 216), (middle(2), 204), (middle(1), 204), (middle(1), 215)))
    parts.append(_text((middle(1) + middle(2)) / 2, 199, "L layers", 11, _FAINT, "middle", False))
    parts.append(_arrow((middle(4), 216), (middle(4), 159)))
    parts.append(_arrow((middle(4), 112), (middle(4), 71)))
    parts.append(_arrow((middle(4), 262), (middle(4), 323), (columns[3] + wide + 1, 323)))
    parts.append(_text(middle(4) + 6, 290, "hidden", 11, _FAINT, "start", False))
    parts.append(_text(middle(4) + 6, 304, "state", 11, _FAINT, "start", False))
    parts.append(_arrow((columns[3], 323), (middle(0), 323), (middle(0), 263)))
    parts.append(_text(columns[0] + 76, 317, "next token, drafts", 11, _FAINT, "start", False))
    # Dashed: calls into the packages below.
    for column in (1, 2):
        parts.append(_arrow((middle(column), 262), (middle(column), 484), dashed=True))
        parts.append(_arrow((middle(column) + 40, 262), (middle(column) + 40, 395), dashed=True))

    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}"'
            f' viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="Helvetica, Arial, sans-serif">',
            '<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4"'
            f' orient="auto"><path d="M0,0 L9,4 L0,8 z" fill="{_INK}"/></marker></defs>',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def main() -> None:
    (name,) = sys.argv[1:]
    atomic_write(name, draw())


if __name__ == "__main__":
    main()
