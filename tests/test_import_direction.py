"""The packages form four storeys, and imports only go down."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Each package, and the packages of this repository that it may import.
STOREYS = {
    "pallas_kernels": {"pallas_kernels"},
    "sharding": {"pallas_kernels", "sharding"},
    "dsv3_jax": {"pallas_kernels", "sharding", "dsv3_jax"},
}

# Siblings inside dsv3_jax: each may import the model, none another sibling.
SIBLINGS = ("checkpoint", "generation", "training")


def imports(source: str) -> Iterator[str]:
    """Yields the full dotted names that a module imports, `from a import b` as a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"no modules below {folder}"
    return found


@pytest.mark.parametrize("package", STOREYS)
def test_imports_only_go_down(package):
    house = {*STOREYS, "scripts", "tests", "notebooks"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(package)
        for name in imports(path.read_text("utf-8"))
        if (top := name.split(".")[0]) in house and top not in STOREYS[package]
    ]
    assert not wrong


@pytest.mark.parametrize("sibling", SIBLINGS)
def test_siblings_do_not_know_each_other(sibling):
    others = tuple(f"dsv3_jax.{other}" for other in (*SIBLINGS, "cli") if other != sibling)
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(f"dsv3_jax/{sibling}")
        for name in imports(path.read_text("utf-8"))
        if f"{name}.".startswith(tuple(f"{other}." for other in others))
    ]
    assert not wrong


def test_the_check_sees_every_kind_of_import():
    source = "import a.b\nfrom c import d\ndef f():\n    from e.f import g as h\n"
    assert list(imports(source)) == ["a.b", "c.d", "e.f.g"]
