"""Versions of the driver and of CUDA's compilers, and the GPU's name."""

from __future__ import annotations

import re
import subprocess


def short_name(gpu: str) -> str:
    """Returns the model of a GPU name, such as h200 for "NVIDIA H200"."""
    result = re.search(r"[A-Za-z]+\d+", gpu)
    return result[0].lower() if result else "none"


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
