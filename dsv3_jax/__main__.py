"""Entry point of the ``dsv3`` command and of ``python -m dsv3_jax``."""

from __future__ import annotations

import sys

from dsv3_jax.interrupts import Interrupts


def main() -> int:
    """Runs the command as the only task of this process and returns the exit status."""
    interrupts = Interrupts()  # before the slow imports, so that Ctrl-C is handled during them
    from dsv3_jax.cli.main import main as run

    return run(interrupts=interrupts)


if __name__ == "__main__":
    sys.exit(main())
