"""ARCHITECTURE.md names files that exist, and its picture is what its script draws."""

import re
from pathlib import Path

from scripts import draw_architecture

ROOT = Path(__file__).parents[1]


def test_the_picture_is_current():
    assert (ROOT / "docs" / "architecture.svg").read_text("utf-8") == draw_architecture.draw()


def test_named_files_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    names = re.findall(r"`([\w./]+(?:\.py|/))`", text)
    assert len(names) > 20
    for name in names:
        folders = (ROOT, ROOT / "dsv3_jax", ROOT / "dsv3_jax" / "cli", ROOT / "pallas_kernels")
        kernels = list((ROOT / "pallas_kernels").glob(f"*/{name}"))
        assert kernels or any((folder / name).exists() for folder in folders), name
