"""Tests that the deliberate defects can be applied, and that the report has each of them."""

import json
from pathlib import Path

import pytest

from tests.breaks.breaks import BREAKS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", BREAKS)
def test_the_text_to_replace_occurs_once(name):
    defect = BREAKS[name]
    assert (ROOT / defect.path).read_text("utf-8").count(defect.before) == 1
    assert defect.after not in ("", defect.before)
    for test in defect.tests:
        assert (ROOT / test).is_file()


def test_the_report_has_every_defect():
    """``python -m tests.breaks.run --new --out tests/breaks/noticed.json`` adds those it lacks."""
    report = json.loads((ROOT / "tests/breaks/noticed.json").read_text("utf-8"))
    assert report.keys() == BREAKS.keys()
    assert all((ROOT / noticed["test"].partition("::")[0]).is_file() for noticed in report.values())
