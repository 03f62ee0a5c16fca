"""pytest's option ``--share K/N``: runs a part of the test files, so that CI has time for it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", type=_share, help="K/N: run only every Nth test file, from the Kth one on"
    )


def _share(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--share: expected K/N with 1 <= K <= N, got {text}")
    return int(number), int(count)


def files_of_share(files: Iterable[str], number: int, count: int) -> set[str]:
    """Returns every ``count``-th of the sorted files, from number ``number`` on."""
    return set(sorted(set(files))[number - 1 :: count])


# After the selection by -m and -k: each share has as many of the files that are left.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (share := config.getoption("--share")) is None:
        return
    own = files_of_share((str(item.path) for item in items), *share)
    config.hook.pytest_deselected(items=[item for item in items if str(item.path) not in own])
    items[:] = [item for item in items if str(item.path) in own]
