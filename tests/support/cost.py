"""Measures the cost of each test: ``pytest -p tests.support.cost --cost-out F``.

F gets one line of JSON per test, fixtures included: CPU seconds of this process and of child
processes that it has waited for, wall-clock seconds, seconds in XLA's compiler and the number of
compiled programs. ``python -m tests.support.cost F`` sums them by file. An existing file is
extended, so that the workers of pytest-xdist can share it.

``python -m tests.support.cost F --record`` also writes the sums to ``costs.json``, by which
``shares.py`` divides the files. F must be of all tests that CI runs of its files with that Python.
"""

import argparse
import collections
import json
import os
import resource
import time
from pathlib import Path

import jax
import pytest

from tests.support.cost_record import record

_COMPILED = "/jax/core/compile/backend_compile_duration"
_compilations: list[float] = []


def pytest_addoption(parser):
    parser.addoption("--cost-out", type=Path, required=True, help="file of JSON lines")


def pytest_configure(config):
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: _compilations.append(seconds) if event == _COMPILED else None
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    _compilations.clear()
    cpu, wall = _cpu_seconds(), time.perf_counter()
    result = yield
    cost = {
        "test": item.nodeid,
        "cpu": round(_cpu_seconds() - cpu, 3),
        "wall": round(time.perf_counter() - wall, 3),
        "compiler": round(sum(_compilations), 3),
        "programs": len(_compilations),
    }
    with open(item.config.getoption("--cost-out"), "a") as file:
        os.write(file.fileno(), (json.dumps(cost) + "\n").encode())
    return result


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    """Prints the costs of each file, the most expensive first, and may record them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path, help="file of JSON lines")
    parser.add_argument("--record", action="store_true", help="write CPU seconds to costs.json")
    arguments = parser.parse_args()
    files: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for line in arguments.path.read_text().splitlines():
        cost = json.loads(line)
        files[cost.pop("test").split("::")[0]].update(cost | {"tests": 1})
    print(f"{'CPU s':>8} {'wall s':>8} {'compiler s':>10} {'programs':>8} {'tests':>6}")
    total = sum(files.values(), collections.Counter())
    ranked = sorted(files.items(), key=lambda item: -item[1]["cpu"])
    for name, c in [*ranked, ("total", total)]:
        numbers = f"{c['cpu']:8.1f} {c['wall']:8.1f} {c['compiler']:10.1f}"
        print(f"{numbers} {c['programs']:8} {c['tests']:6}  {name}")
    if arguments.record:
        record({name: round(c["cpu"], 1) for name, c in sorted(files.items())})


if __name__ == "__main__":
    main()
