"""The recorded costs of test files, by which CI's sessions are divided into shares.

``costs.json`` has the CPU seconds of each file by Python version: of the slow tests with 3.11, and
of the tests that CI runs with 3.12, whose JAX also interprets Hopper kernels. Zero means that all
are skipped. The first record, of 2026-11-27 on two busy cores, is an estimate from a part of the
cases of long parametrizations, and lacks most of the files with few slow tests.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path

COSTS = Path(__file__).with_name("costs.json")
_ROOT = Path(__file__).parents[2]


def python_version() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def recorded_costs() -> dict[str, float]:
    """Returns the recorded CPU seconds of files with this Python; none if it has no record."""
    return json.loads(COSTS.read_text()).get(python_version(), {})


def record(costs: Mapping[str, float]) -> None:
    """Replaces the costs of these files with this Python, and forgets files that are gone."""
    others = {file: c for file, c in recorded_costs().items() if (_ROOT / file).exists()}
    recorded = json.loads(COSTS.read_text()) | {python_version(): {**others, **costs}}
    COSTS.write_text(json.dumps(recorded, indent=2, sort_keys=True) + "\n")
