"""pytest's option ``--share K/N``: runs a part of the test files, so that CI has time for it.

The parts take about as long as each other, according to the record (``cost_record.py``). A file
stays whole, because its tests share what they compile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from tests.support.cost_record import recorded_costs

# CPU seconds of each test in a file without a record: about the mean of the others.
UNKNOWN = 2.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        type=_share,
        help="K/N: run the Kth of N parts of the test files, which take about as long",
    )


def _share(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--share: expected K/N with 1 <= K <= N, got {text}")
    return int(number), int(count)


def divide(costs: Mapping[str, float], count: int) -> list[set[str]]:
    """Divides files into ``count`` shares of about equal cost.

    The most expensive file comes first. Each goes to the share that has cost the least so far.
    """
    shares: list[set[str]] = [set() for _ in range(count)]
    sums = [0.0] * count
    for file in sorted(costs, key=lambda file: (-costs[file], file)):
        least = sums.index(min(sums))
        shares[least].add(file)
        sums[least] += costs[file]
    return shares


# After the selection by -m and -k, so that only files with a selected test are divided.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (share := config.getoption("--share")) is None:
        return
    number, count = share
    recorded = recorded_costs()
    tests = Counter(_file(item) for item in items)
    costs = {file: recorded.get(file, UNKNOWN * tests[file]) for file in tests}
    own = divide(costs, count)[number - 1]
    config.hook.pytest_deselected(items=[item for item in items if _file(item) not in own])
    items[:] = [item for item in items if _file(item) in own]


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
