"""Converts a published checkpoint to a store, like ``dsv3 convert``.

    python scripts/convert_hf_checkpoint.py SRC DST --to fp8 [--resume] [--dry-run] [--workers N]

It is an alias of that command. ``dsv3 convert --help`` describes the options.
"""

import sys

from dsv3_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
