"""The top-level packages that are installed beside ``dsv3_jax`` have generic names: another
distribution, or a folder on the path, may have a package of the same name, and would be imported
in its place."""

from __future__ import annotations

import importlib.util
import os

NAMES = ("pallas_kernels", "sharding")


def check() -> None:
    """Finds the packages, without importing them.

    Raises:
      ImportError: Python would import a package of that name from elsewhere, or finds none.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in NAMES:
        own = os.path.join(root, name)
        spec = importlib.util.find_spec(name)
        found = os.path.dirname(spec.origin) if spec and spec.origin else None
        if found is None or os.path.realpath(found) != os.path.realpath(own):
            raise ImportError(
                f"dsv3_jax: expected its own package {name!r} in {own}, found {found or 'none'};"
                " uninstall or rename what has the same name, or put dsv3_jax first on sys.path"
            )
