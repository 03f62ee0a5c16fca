"""Draws text that the demo model generates with speculation, with accepted drafts shaded.

python -m scripts.draw_generation docs/generation.svg
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape

import dsv3_jax
from dsv3_jax.files import atomic_write

_WIDTH, _LINE, _MARGIN = 7.8, 21, 14  # pixels: character width, line height, margin


_SETTINGS = {"temperature": 0.6, "top_p": 0.95, "seed": 4}  # the same as in `make demo`


def steps(prompt: str, tokens: int, depth: int) -> tuple[list[list[str]], float]:
    """Generates text. Returns the texts of each step's tokens, and the tokens per step.

    The last token of a step is the model's own, the others are accepted drafts.
    """
    model, tokenizer = dsv3_jax.load("demo", dtype="float32")
    assert tokenizer is not None
    generator = dsv3_jax.Generator(model, tokenizer, max_len=256, stride=1)
    settings = _SETTINGS | {"draft": "mtp", "draft_depth": depth}
    pieces = generator.stream(prompt, max_new_tokens=tokens, **settings)
    texts = [[tokenizer.decode([token]) for token in piece.tokens] for piece in pieces]
    texts = [step for step in texts if step]
    return texts, sum(map(len, texts)) / len(texts)


def _boxes(prompt: str, texts: list[list[str]]) -> Iterator[tuple[int, int, str, bool]]:
    """Yields (line, column, text, whether it was a draft) of pieces without line breaks."""
    line = column = 0
    spans = [(prompt, False)]
    spans += [(text, i < len(step) - 1) for step in texts for i, text in enumerate(step)]
    for text, drafted in spans:
        for i, part in enumerate(text.split("\n")):
            if i:
                line, column = line + 1, 0
            if part:
                yield line, column, part, drafted
            column += len(part)


def draw(prompt: str, texts: list[list[str]], caption: str) -> str:
    """Returns the picture as SVG."""
    boxes = list(_boxes(prompt, texts))
    long = (column + len(text) for _, column, text, _ in boxes)
    columns = max(len(caption), *long)
    lines = boxes[-1][0] + 1
    width = round(columns * _WIDTH + 2 * _MARGIN)
    height = (lines + 2) * _LINE + 2 * _MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="monospace" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for line, column, text, drafted in boxes:
        x, y = _MARGIN + column * _WIDTH, _MARGIN + line * _LINE
        wide = len(text) * _WIDTH
        if drafted:
            out.append(
                f'<rect x="{x + 0.5:.1f}" y="{y}" width="{wide - 1:.1f}" height="18" rx="3"'
                ' fill="#b7e0c0"/>'
            )
        out.append(
            f'<text x="{x:.1f}" y="{y + 14}" textLength="{wide:.1f}" xml:space="preserve"'
            f' fill="#1c1c1c">{escape(text)}</text>'
        )
    y = _MARGIN + (lines + 1) * _LINE + 14
    out.append(
        f'<text x="{_MARGIN}" y="{y}" textLength="{len(caption) * _WIDTH:.1f}" fill="#555555">'
        + f"{escape(caption)}</text>"
    )
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    (name,) = sys.argv[1:]
    prompt, depth = "def read_config(path):", 2
    texts, rate = steps(prompt, 96, depth)
    tokens = sum(map(len, texts))
    caption = (
        f"shaded: accepted drafts of the MTP layer. {tokens} tokens in {len(texts)} steps,"
        f" {rate:.2f} a step, temperature 0.6, depth {depth}"
    )
    atomic_write(name, draw(prompt, texts, caption))


if __name__ == "__main__":
    main()
