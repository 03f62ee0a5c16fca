"""ARCHITECTURE.md names files that exist, and its picture is what its script draws."""

import ast
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


def files_in_its_table(package: Path) -> set[str] | None:
    """Returns the files that the table in a package's docstring lists, or None without a table."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8"))) or ""
    if "====" not in docstring:
        return None
    return set(re.findall(r"^(\w+\.py) ", docstring, re.MULTILINE))


def test_tables_of_files_are_complete():
    """A package whose docstring has a table of its files lists all of them, and no others."""
    checked = 0
    for package in sorted(path.parent for path in (ROOT / "dsv3_jax").rglob("__init__.py")):
        listed = files_in_its_table(package)
        if listed is None or not listed:
            continue
        checked += 1
        assert listed == {path.name for path in package.glob("*.py")} - {"__init__.py"}, package
    assert checked >= 6
