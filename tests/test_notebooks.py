"""Every notebook runs from top to bottom in its own kernel, and is stored without outputs."""

import ast
import importlib.util
import subprocess
import time
from pathlib import Path

import nbformat
import pytest

from tests.support.xla_flags import fast_compilation

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_SECONDS = 180  # per cell
# Without LLVM's optimizations they take a quarter less time. The others take as long or longer.
COMPILE_MORE_THAN_THEY_RUN = {
    "01_quickstart",
    "04_mtp_speculation",
    "05_sharding",
    "09_sparse_attention",
}

ids = [path.stem for path in NOTEBOOKS]


def test_the_nine():
    assert ids == [
        "01_quickstart",
        "02_mla_two_ways",
        "03_routing_and_balance",
        "04_mtp_speculation",
        "05_sharding",
        "06_capacity_and_cost",
        "07_convert_finetune_export",
        "08_serving",
        "09_sparse_attention",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_a_notebook_is_kept_as_it_opens(path):
    """It is valid, has no outputs, and has the cell that installs the package."""
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    first, install, *rest = notebook.cells
    assert first.source.startswith("# ")
    assert "Runtime" in first.source or "GPUs" in first.source
    assert install.source == nbformat.read(NOTEBOOKS[0], as_version=4).cells[1].source
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert any(cell.cell_type == "markdown" for cell in rest)


def test_the_cell_that_installs_the_package(monkeypatch):
    """Without an address it gives one clear error, and with one it installs from there."""
    cell = nbformat.read(NOTEBOOKS[0], as_version=4).cells[1].source
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    exec(cell, {})  # the package is installed here
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="set REPOSITORY in this cell, or run pip install"):
        exec(cell, {})
    assert not commands
    exec(cell.replace('REPOSITORY = ""', 'REPOSITORY = "https://example.org/x.git"'), {})
    assert commands[0][-1] == "dsv3-jax[plot] @ git+https://example.org/x.git"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_what_a_notebook_imports_exists(path):
    """Its imports succeed, and what it takes from an imported module or class is there."""
    cells = nbformat.read(path, as_version=4).cells
    nodes = list(ast.walk(ast.parse("\n".join(c.source for c in cells if c.cell_type == "code"))))
    imported: dict[str, object] = {}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            exec(ast.unparse(node), imported)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = node.value.id
            assert name not in imported or hasattr(imported[name], node.attr), ast.unparse(node)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_a_notebook_runs(path, monkeypatch):
    from nbclient import NotebookClient  # quick tests run without it

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    # One device, as in Colab.
    fast = path.stem in COMPILE_MORE_THAN_THEY_RUN
    monkeypatch.setenv("XLA_FLAGS", fast_compilation() if fast else "")
    notebook = nbformat.read(path, as_version=4)
    began = time.perf_counter()
    client = NotebookClient(notebook, timeout=MOST_SECONDS, resources={"metadata": {"path": "/"}})
    client.execute(cwd=str(ROOT / "notebooks"))
    took = time.perf_counter() - began
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    pictures = sum("image/png" in out.get("data", {}) for out in outputs)
    print(f"{path.stem}: {took:.0f} s, {pictures} pictures")
    assert pictures or path.stem.startswith("01")
