"""Versions of the driver and of CUDA's compilers."""

from __future__ import annotations

import re
import subprocess


def tools() -> dict[str, str]:
    """Returns the versions of the driver and of CUDA's compilers, if they are installed."""
    versions = {}
    for name, command, pattern in (
        ("driver", ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], r"\S+"),
        ("ptxas", ["ptxas", "--version"], r"release \S+, V(\S+)"),
        ("nvcc", ["nvcc", "--version"], r"release \S+, V(\S+)"),
    ):
        try:
            output = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        if result := re.search(pattern, output):
            versions[name] = result[result.re.groups]
    return versions
