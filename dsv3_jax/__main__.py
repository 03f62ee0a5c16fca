"""The ``dsv3`` command, from its first import on; ``python -m dsv3_jax`` is the same."""

from __future__ import annotations

import sys

from dsv3_jax.cli.interrupts import Interrupts


def main() -> int:
    """Runs the command in a process of its own; returns the exit status."""
    interrupts = Interrupts()
    from dsv3_jax.cli.main import main as run

    return run(interrupts=interrupts)


if __name__ == "__main__":
    sys.exit(main())
