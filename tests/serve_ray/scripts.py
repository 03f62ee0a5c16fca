"""Scripts that start Ray, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def result_of(code: str, **environment: str) -> Any:
    """Returns what a script prints as one line of JSON, an object. Its argument is a directory with
    a short path, as Ray's sockets need it."""
    pytest.importorskip("ray.serve", reason="needs the extra ray: pip install '.[ray]'")
    from tests.serve_ray.ray_cluster import ENVIRONMENT

    with tempfile.TemporaryDirectory(prefix="ray") as directory:
        run = subprocess.run(
            [sys.executable, "-c", code, directory],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert run.returncode == 0, run.stderr[-4000:]
    # Ray's own lines are around it.
    (line,) = [line for line in run.stdout.splitlines() if line.startswith('{"')]
    return json.loads(line)
