"""``--share``: the parts of the suite that CI runs, and the record of costs that divides it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import cost, cost_record, shares
from tests.support.cost_record import COSTS
from tests.support.shares import UNKNOWN, _share, divide, pytest_collection_modifyitems

THIS = "tests/test_shares.py"
FILES = {f"tests/test_{name}.py": seconds for name, seconds in zip("cabfed", range(6), strict=True)}


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_every_file_is_in_one_share(count):
    parts = divide(FILES, count)
    assert len(parts) == count
    assert sorted(file for part in parts for file in part) == sorted(FILES)


def test_the_most_expensive_files_are_apart():
    assert divide({"a": 9, "b": 5, "c": 5, "d": 1}, 2) == [{"a", "d"}, {"b", "c"}]


def test_files_of_equal_cost_are_divided_by_name():
    """Every run of a commit divides alike, in whichever order files were collected."""
    assert divide({"b": 10, "d": 10, "a": 10, "c": 10}, 2) == [{"a", "c"}, {"b", "d"}]


@pytest.mark.parametrize("version", sorted(json.loads(COSTS.read_text())))
def test_recorded_files_exist(version):
    """A renamed file would count as one of unknown cost."""
    recorded = json.loads(COSTS.read_text())[version]
    root = Path(__file__).parents[1]
    assert [file for file in recorded if not (root / file).exists()] == []


@pytest.mark.parametrize(("version", "count"), [("3.11", 5), ("3.12", 3)])  # as in .ci/run
def test_shares_cost_about_the_same(version, count):
    recorded = json.loads(COSTS.read_text())[version]
    sums = [sum(recorded[file] for file in part) for part in divide(recorded, count)]
    assert max(sums) < 1.15 * min(sums)


def test_shares_of_a_session(monkeypatch):
    """All shares together run each test once, and a file's tests are in the same one."""
    monkeypatch.setattr(shares, "recorded_costs", lambda: {"tests/test_a.py": 2.4 * UNKNOWN})
    names = [f"tests/test_{file}.py::{test}" for file in "abcd" for test in ("test_x", "T::test_y")]
    parts = [run_and_deselected(names, (number, 2)) for number in (1, 2)]
    # The recorded file costs more than two tests of unknown cost, and less than four.
    assert {name.split("::")[0] for name in parts[0][0]} == {"tests/test_a.py", "tests/test_d.py"}
    assert parts[0] == parts[1][::-1]
    assert sorted(parts[0][0] + parts[1][0]) == sorted(names)
    assert run_and_deselected(names, None) == (names, [])


def run_and_deselected(
    names: list[str], share: tuple[int, int] | None
) -> tuple[list[str], list[str]]:
    deselected: list[SimpleNamespace] = []
    items = [SimpleNamespace(nodeid=name) for name in names]
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    config = SimpleNamespace(getoption=lambda name: share, hook=hook)
    pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    return [item.nodeid for item in items], [item.nodeid for item in deselected]


def test_costs_are_recorded(tmp_path, monkeypatch):
    """Other files and other versions stay, and a file that is gone does not."""
    version, other = cost_record.python_version(), "tests/test_files.py"
    measured, record = tmp_path / "measured", tmp_path / "costs.json"
    before = {THIS: 7.0, other: 2.0, "tests/test_gone.py": 1.0}
    record.write_text(json.dumps({"3.0": before, version: before}))
    rows = [(f"{THIS}::test_1", 1.25), (f"{THIS}::T::test_2[x]", 2.5)]
    measured.write_text(
        "".join(
            json.dumps({"test": test, "cpu": cpu, "wall": cpu, "compiler": 0, "programs": 0}) + "\n"
            for test, cpu in rows
        )
    )
    monkeypatch.setattr(cost_record, "COSTS", record)
    monkeypatch.setattr("sys.argv", ["cost", str(measured), "--record"])
    cost.main()
    assert json.loads(record.read_text()) == {"3.0": before, version: {THIS: 3.8, other: 2.0}}


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/2", "1/", "-1/2"])
def test_a_share_that_does_not_exist(text):
    with pytest.raises(pytest.UsageError, match=f"expected K/N with 1 <= K <= N, got {text}"):
        _share(text)
