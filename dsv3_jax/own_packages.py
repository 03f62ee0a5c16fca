"""Check that ``dsv3_jax`` imports its own top-level packages, which have generic names.

Another distribution, or a folder on sys.path, may have a package of the same name. Python could
import it in place of ours.
"""

from __future__ import annotations

import importlib.util
import os

NAMES = ("pallas_kernels", "sharding")
"""Top-level packages that are installed with ``dsv3_jax``."""


def check() -> None:
    """Locates the packages without importing them. Raises ImportError if Python finds none of a
    name, or one in another directory."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in NAMES:
        own = os.path.join(root, name)
        spec = importlib.util.find_spec(name)
        directory = os.path.dirname(spec.origin) if spec and spec.origin else None
        if directory is None or os.path.realpath(directory) != os.path.realpath(own):
            raise ImportError(
                f"dsv3_jax: expected its own package {name!r} in {own}, found"
                f" {directory or 'none'}; uninstall or rename the other package, or put dsv3_jax"
                " first on sys.path"
            )
