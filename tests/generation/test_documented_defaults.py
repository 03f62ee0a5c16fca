"""The defaults in docs/generation.md and docs/speculation.md equal those of the code."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from dsv3_jax.generation.depth import AUTO_DEPTHS
from dsv3_jax.generation.settings import MAX_DEPTH
from dsv3_jax.offline.generator import BATCH_SIZES, Generator
from dsv3_jax.offline.pace import DISPATCH_SECONDS

DOCS = Path(__file__).parents[2] / "docs"
WORDS = {"none": None, "no": False, "": ()}


def default(function: Any, name: str) -> Any:
    return inspect.signature(function).parameters[name].default


def documented() -> dict[str, Any]:
    """Returns the defaults in the table of settings, by name."""
    text = (DOCS / "generation.md").read_text("utf-8")
    table = text[text.index("| setting | default |") :].split("\n\n")[0].splitlines()[2:]
    by_name = {}
    for line in table:
        names, defaults = line.split("|")[1:3]
        names = re.findall(r"`(\w+)`", names)
        values = [v.strip() for v in defaults.split(",")]
        by_name |= {
            name: WORDS[value] if value in WORDS else int(value)
            for name, value in zip(names, values, strict=True)
        }
    return by_name


def test_settings():
    signature = inspect.signature(Generator.generate).parameters
    want = {n: p.default for n, p in signature.items() if n not in ("self", "prompts")}
    assert documented() == want


@pytest.mark.parametrize(
    ("page", "words", "value"),
    [
        ("generation.md", r"every `stride` tokens \((\d+)\)", default(Generator, "stride")),
        ("generation.md", r"next of `batch_sizes` \(1, 2, 4, \.\.\. (\d+)\)", BATCH_SIZES[-1]),
        (
            "generation.md",
            r"are fewer than (\d+), and",
            default(Generator.generate, "max_new_tokens"),
        ),
        ("speculation.md", r"drafts up to (\w+) tokens", {4: "four"}[MAX_DEPTH]),
    ],
)
def test_numbers_in_the_text(page, words, value):
    text = " ".join((DOCS / page).read_text("utf-8").split())
    match = re.search(words, text)
    assert match, f"{words} is not in {page}"
    assert match[1] == str(value)


def test_other_words():
    assert DISPATCH_SECONDS == 0.5, "docs/generation.md says half a second"
    assert max(AUTO_DEPTHS) == MAX_DEPTH
