"""Every notebook runs from top to bottom, and is kept without outputs."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    cells = [c for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
    assert cells
    assert not any(cell["outputs"] for cell in cells)
    names: dict[str, object] = {}
    for i, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{path.name} cell {i}", "exec"), names)
    if path.stem == "quickstart":
        assert names["out"][0].text.startswith("\n    ")
        assert names["aux"].routing_counts.sum() == 4 * 4 * names["tokens"].size


def test_there_is_a_quickstart():
    assert "quickstart" in {path.stem for path in NOTEBOOKS}
