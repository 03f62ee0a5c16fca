"""Tests that the deliberate defects can be applied: the text to replace occurs exactly once."""

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
